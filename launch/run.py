"""The main job: a mixture-of-experts layer over configured tokens, each step against the oracle.

attention-side tokens -> Partition.to_ep -> MoELayer -> Partition.from_ep -> compared with the
layer computed in one process, on every rank, for every token that the rank holds
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from crossdock.dispatch import Dispatcher, ReceivedRows
from crossdock.dispatch.buckets import next_power_of_two
from crossdock.dispatch.transports.base import Transport
from crossdock.experts import (
    ExpertWeights,
    MoELayer,
    Worker,
    make_experts,
    reference_and_tolerance,
)
from crossdock.launch.batch import Batch, make_batch
from crossdock.launch.config import Job
from crossdock.launch.hashing import hidden_states
from crossdock.launch.report import RankReport
from crossdock.launch.routing import RoutingSource, make_routing
from crossdock.scratch import PermuteScratch, WorkspaceManager, permute_scratch
from crossdock.scratch.errors import LockedError

__all__ = ["run_layer"]

logger = logging.getLogger(__name__)


class ObservedExperts:
    """Experts that note what they were given and how long they took."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.workspace = worker.workspace
        self.started = self.ended = 0.0
        self.num_rows = self.bucket_capacity = self.num_pairs = 0

    def __call__(self, rows: ReceivedRows) -> Tensor:
        """Run the worker."""
        self.started = _now(rows.x.device)
        self.num_rows, self.num_pairs = int(rows.num_rows), int(rows.num_pairs)
        self.bucket_capacity = rows.capacity
        y = self.worker(rows)
        self.ended = _now(rows.x.device)
        return y

    def pair_capacity(self) -> int:
        """Pairs that fit without growing; -1 while they may grow."""
        return self.worker.pair_capacity()

    @property
    def scratch_capacity(self) -> int:
        """Pairs that the permute scratch holds."""
        return self.scratch().capacity

    def reserve(self, num_pairs: int) -> None:
        """Grow scratch and workspace to at least this many pairs."""
        self.scratch().reserve(num_pairs)
        self.workspace.get_simultaneous(((self.worker.workspace_bytes(num_pairs),), torch.uint8))

    def scratch(self) -> PermuteScratch:
        """The worker's permute scratch."""
        worker = self.worker
        return permute_scratch(
            worker.workspace,
            num_experts=worker.num_experts,
            num_local_experts=worker.num_local_experts,
            device=worker.workspace.device,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Oracle:
    """The layer in one process: weights of all experts."""

    job: Job
    weights: ExpertWeights

    def compare(
        self, out: Tensor, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, report: RankReport
    ) -> None:
        """Compare results in attention layout, and note how they fare in the report."""
        expected, tolerance = reference_and_tolerance(
            x,
            topk_idx,
            topk_weights,
            self.weights,
            dtype=self.job.dtype,
            wire=self.job.config.dispatch.wire,
        )
        if not out.numel():
            return
        error = (out.float() - expected).abs()
        report.ok &= bool((error <= tolerance).all())  # False for NaN too
        report.max_abs_error = max(report.max_abs_error, _finite(float(error.max())))
        report.tolerance = max(report.tolerance, float(tolerance.max()))


def run_layer(
    job: Job,
    transport: Transport,
    *,
    check: bool = True,
    on_step: Callable[[int], None] = lambda step: None,
) -> RankReport:
    """All steps of the main job on one rank. Collective.

    Args:
        job: What to run.
        transport: Of the EP group, as large as the job's.
        check: Compare each step with the oracle.
        on_step: Called after each step with its number, from 1.

    Returns:
        What this rank saw.
    """
    run, rank = job.config.run, transport.rank
    batch = make_batch(job, rank)
    routing = make_routing(job)
    experts = ObservedExperts(
        make_experts(
            job.config.experts.backend,
            _weights(job, job.placement.local_experts(rank).tolist(), transport.device),
            workspace=WorkspaceManager(transport.device),
            num_experts=job.config.moe.num_experts,
        )
    )
    all_experts = list(range(job.config.moe.num_experts))
    oracle = (
        Oracle(job=job, weights=_weights(job, all_experts, transport.device)) if check else None
    )
    report = RankReport.begin(job, rank, num_wraps=routing.num_wraps(batch.total * run.steps))
    with Dispatcher(
        job.dispatch_config, transport, topology=job.topology, placement=job.placement
    ) as dispatcher:
        layer = MoELayer(dispatcher, experts)
        if run.lock_after == 0:
            layer.lock()
        for step in range(run.steps):
            try:
                _run_step(step, job, transport, batch, routing, layer, experts, oracle, report)
            except LockedError as error:
                raise _with_advice(error, step, job) from error
            if step + 1 == run.lock_after:
                # What experts have seen so far is a sample of what they will; buckets have the
                # same headroom.
                experts.reserve(next_power_of_two(experts.scratch_capacity))
                layer.lock()
                logger.info("locked after step %d", step + 1)
            on_step(step + 1)
    return report


def _run_step(
    step: int,
    job: Job,
    transport: Transport,
    batch: Batch,
    routing: RoutingSource,
    layer: MoELayer,
    experts: ObservedExperts,
    oracle: Oracle | None,
    report: RankReport,
) -> None:
    device = transport.device
    tokens = batch.numbers + step * batch.total
    x = hidden_states(
        tokens.to(device), job.config.moe.hidden, seed=job.config.run.seed, dtype=job.dtype
    )
    topk_idx, topk_weights = (part.to(device) for part in routing.at(tokens))
    mine = [batch.to_ep(part) for part in (x, topk_idx, topk_weights)]
    sent_before = list(transport.bytes_to)

    began = _now(device)
    out = layer(*mine)
    done = _now(device)

    sent = [after - before for after, before in zip(transport.bytes_to, sent_before, strict=True)]
    report.add_step(
        tokens_attention=batch.num_attention_tokens,
        tokens_owned=batch.num_owned,
        rows_received=experts.num_rows,
        bucket_capacity=experts.bucket_capacity,
        pairs=experts.num_pairs,
        scratch_capacity=experts.scratch_capacity,
        sent=sent,
        topology=job.topology,
        seconds=(experts.started - began, experts.ended - experts.started, done - experts.ended),
    )
    attention = batch.from_ep(out, transport)
    if oracle is not None:
        oracle.compare(attention, x, topk_idx, topk_weights, report)


def _with_advice(error: LockedError, step: int, job: Job) -> LockedError:
    """The same error, with the settings of the configuration that decide."""
    lock_after, bucket = job.config.run.lock_after, job.config.dispatch.bucket
    settings = (
        f"run.lock_after = {lock_after}" if bucket == "grow" else f"dispatch.bucket = {bucket}"
    )
    advised = LockedError(
        f"step {step + 1} outgrows memory that {settings} fixed: {error}", ranks=error.ranks
    )
    advised.agreed = error.agreed
    return advised


def _weights(job: Job, expert_ids: list[int], device: torch.device) -> ExpertWeights:
    moe = job.config.moe
    return ExpertWeights.random(
        expert_ids,
        hidden=moe.hidden,
        intermediate=moe.intermediate,
        dtype=job.dtype,
        device=device,
        seed=job.config.run.seed,
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _finite(value: float) -> float:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else torch.finfo(torch.float64).max
