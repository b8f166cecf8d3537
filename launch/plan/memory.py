"""Bytes that one rank holds for the layer."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from crossdock.dispatch.buckets import BucketMemory
from crossdock.dispatch.wire import WireFormat
from crossdock.experts import ExpertWeights, make_experts
from crossdock.launch.config import Job
from crossdock.scratch import WorkspaceManager
from crossdock.scratch.permute_scratch import MAX_TILES, padded_experts

__all__ = ["Memory", "MemoryModel"]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank, at their largest over a run.

    Attributes:
        bucket: Received rows as they came, with their ids, weights and sources.
        y: Results of the received rows.
        staging: Rows on their way out, then results on their way home.
        relay: With two levels, what passes through between other nodes and the ranks of its own.
        permute_scratch: Index of the pairs.
        workspace: Permuted rows and activations.
        gemm_outputs: What the grouped GEMMs return, where they cannot write to the workspace.
        weights: Experts of the rank.
    """

    bucket: int
    y: int
    staging: int
    relay: int
    permute_scratch: int
    workspace: int
    gemm_outputs: int
    weights: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(asdict(self).values())


class MemoryModel:
    """Bytes as a function of rows and pairs, asked of the classes that will hold them."""

    def __init__(self, job: Job) -> None:
        moe, cpu = job.config.moe, torch.device("cpu")
        self._moe, self._itemsize = moe, job.dtype.itemsize
        self._on_gpu = job.config.cluster.device == "cuda"
        self.wire = WireFormat(
            hidden=moe.hidden,
            top_k=moe.top_k,
            dtype=job.dtype,
            fp8=job.config.dispatch.wire == "fp8",
        )
        row = BucketMemory(1, self.wire, cpu)
        parts = (row.raw, row.topk_idx, row.topk_weights, row.source)
        self._bucket_row = sum(part.nbytes for part in parts)
        self.result_bytes = row.y().nbytes
        no_experts = ExpertWeights(
            w13=torch.empty(0, 2 * moe.intermediate, moe.hidden, dtype=job.dtype),
            w2=torch.empty(0, moe.hidden, moe.intermediate, dtype=job.dtype),
        )
        self._worker = make_experts("torch", no_experts, workspace=WorkspaceManager(cpu))

    def of(
        self,
        *,
        bucket_rows: int,
        packed_rows: int,
        home_rows: int,
        relayed_rows: int,
        pairs: int,
        num_local_experts: int,
    ) -> Memory:
        """Bytes of a rank.

        Args:
            bucket_rows: Capacity of the receive bucket.
            packed_rows: Most rows that it packs in a step.
            home_rows: Most results that come home in a step.
            relayed_rows: Most rows that it needs room for on their way through it.
            pairs: Pairs that its experts hold.
            num_local_experts: Experts that it owns.
        """
        moe = self._moe
        widest_output = max(2 * moe.intermediate, moe.hidden) * self._itemsize
        tile_counts = MAX_TILES * padded_experts(num_local_experts) * 4 if self._on_gpu else 0
        return Memory(
            bucket=bucket_rows * self._bucket_row,
            y=bucket_rows * self.result_bytes,
            staging=max(packed_rows * self.wire.row_bytes, home_rows * self.result_bytes),
            relay=relayed_rows * self.wire.row_bytes,
            permute_scratch=4 * pairs + 8 * (num_local_experts + 1) + tile_counts,
            workspace=self._worker.workspace_bytes(pairs),
            gemm_outputs=0 if self._worker.gemm13.writes_out else pairs * widest_output,
            weights=num_local_experts * 3 * moe.hidden * moe.intermediate * self._itemsize,
        )
