"""The worker: received rows through the experts of this rank, with any grouped GEMM.

The steps of a call, and the two regions of the workspace that they alternate between:

    ReceivedRows  x [C,H], scale, topk_idx, topk_weights
      | permute (scratch)   -> region A   [P,H], grouped by local expert
      | first GEMM, w13     -> region B   [P,2I]
      | SwiGLU              -> region A   [P,I]
      | second GEMM, w2     -> region B   [P,H]
      | unpermute (scratch) -> y          weighted fp32 sum over the pairs of a row
    ReceivedRows  y [C,H]

Each step reads the region that the next one overwrites, so two are enough, each as large as its
larger use. P is the exact number of pairs: the counts are known before anything is reserved.

Rows that come grouped by expert (``layout="expert"``) are pairs already: the first GEMM reads them
where they lie, unless it wants another dtype or width, and the second one's output is ``y``.

Where the GEMM reads fp8, rows are quantised as they are permuted, and activations by SwiGLU. Rows
of an fp8 wire have one scale for each 128 elements: an ``fp8_block`` GEMM reads them as they are, a
plain one gets them dequantised, and for one with a single scale a row (``fp8_token``) they are
requantised on the way, since such a GEMM has no place for more scales. That is the price of bytes
of one kind and of one pass: another rounding of at most 2^-4, which ``fp8_block`` does not pay.

torch's GEMMs have no ``out=``: their outputs come from torch's allocator instead of region B, the
first freed before the second is made.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from crossdock.dispatch.rows import ReceivedRows
from crossdock.experts.gemm import GroupedGemm, Groups
from crossdock.experts.weights import FP8_BLOCK, ExpertWeights
from crossdock.scratch import (
    PermuteScratch,
    WorkspaceManager,
    convert_rows,
    permute,
    permute_scratch,
    simultaneous_bytes,
    swiglu,
    unpermute,
)
from crossdock.scratch.errors import ConfigError, LockedError

__all__ = ["MakeGemm", "Worker"]

MakeGemm = Callable[[Tensor, Tensor | None], GroupedGemm]
"""From a weight [E_local, N, K], its N and K multiples of the granule, and its scale or None."""

FP8 = torch.float8_e4m3fn
SCALE_BLOCK = 128


class Worker:
    """Runs the experts of one rank on received rows: ``experts(rows)`` fills ``rows.y``.

    A worker owns its weights in the form that its GEMM wants. Everything else belongs to the
    workspace: one built anew after ``workspace.lock()``, by a weight reload, finds the same permute
    scratch and the same bytes.

    Args:
        make_gemm: Called for ``w13`` and for ``w2``.
        granule: What H and I are padded to, with zeros: weights here, activations in the workspace.
        weights: Of this rank's experts.
        workspace: Where its buffers come from.
        num_experts: E, over all ranks.
        reason: Why this backend.

    Attributes:
        name: The backend's name.
        reason: See above.
        workspace: See above.
        num_experts: See above.
        num_local_experts: Experts of this rank.
        hidden: H.
        intermediate: I.
        gemm13: The GEMM of ``w13``.
        gemm2: The GEMM of ``w2``.
    """

    def __init__(
        self,
        make_gemm: MakeGemm,
        *,
        granule: int,
        weights: ExpertWeights,
        workspace: WorkspaceManager,
        num_experts: int,
        reason: str,
    ) -> None:
        if weights.device != workspace.device:
            raise ConfigError(
                f"weights on {weights.device}, workspace on {workspace.device}: make both on the "
                "device of the transport"
            )
        self.reason = reason
        self.workspace = workspace
        self.num_experts = num_experts
        self.num_local_experts = weights.num_local_experts
        self.hidden = weights.hidden
        self.intermediate = weights.intermediate
        self._kind = (weights.format, weights.dtype)
        self._padded_hidden = _round_up(self.hidden, granule)
        self._padded_intermediate = _round_up(self.intermediate, granule)
        (w13, w13_scale), (w2, w2_scale) = self._padded(weights)
        self.gemm13 = make_gemm(w13, w13_scale)
        self.gemm2 = make_gemm(w2, w2_scale)
        self.name = self.gemm13.name
        self._activations = self.gemm13.activations
        self._dtype = self.gemm13.dtype
        self._scratch()

    def __call__(self, rows: ReceivedRows) -> Tensor:
        """Fills ``rows.y`` and returns it; rows without a local expert become zeros.

        Raises:
            ConfigError: The rows do not fit the weights.
            LockedError: The workspace is locked and too small, or a graph is captured before
                ``lock()``.
        """
        self._check(rows)
        num_pairs = self._num_pairs(rows)
        out = rows.y
        if num_pairs == 0:
            known = isinstance(rows.num_rows, int)
            out[: rows.num_rows if known else rows.capacity].zero_()
            return out
        regions = self.workspace.get_simultaneous(*self._requests(num_pairs))
        if rows.offsets is not None:
            self._scratch().reserve(num_pairs)  # unused, but a part of what pair_capacity() says
            x, x_scale = self._input_by_expert(rows, rows.offsets, num_pairs, regions)
            place = out[:num_pairs] if self._writes_to(out) else None
            y = self._multiply(x, x_scale, rows.offsets, regions, out=place)
            if place is None:
                out[:num_pairs].copy_(y[:, : self.hidden])
            return out
        hidden = self._padded_hidden
        x = _view(regions[0], (num_pairs, hidden), self._gemm_dtype)
        x_scale = self._scale_view(regions[1], num_pairs, hidden)
        permuted = permute(
            rows.x,
            rows.scale,
            rows.topk_idx,
            self._scratch(),
            num_pairs=num_pairs,
            num_rows=rows.num_rows,
            out=x[:, : self.hidden],
            out_scale=x_scale,
        )
        if hidden > self.hidden:
            x[:, self.hidden :].zero_()
        expert_out = self._multiply(x, x_scale, permuted.offsets, regions)
        return unpermute(out, expert_out[:, : self.hidden], rows.topk_weights, permuted)

    def _input_by_expert(
        self, rows: ReceivedRows, offsets: Tensor, num_pairs: int, regions: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Rows grouped by expert as the first GEMM reads them: where they lie, if it can."""
        hidden = self._padded_hidden
        x, scale = rows.x[:num_pairs], None if rows.scale is None else rows.scale[:num_pairs]
        width = 0 if scale is None else scale.shape[1]
        fits = x.dtype == self._gemm_dtype and width == self._num_scales(hidden)
        if fits and hidden == self.hidden:
            return x, scale
        place = _view(regions[0], (num_pairs, hidden), self._gemm_dtype)
        place_scale = self._scale_view(regions[1], num_pairs, hidden)
        if fits:
            place[:, : self.hidden].copy_(x)
            if place_scale is not None and scale is not None:
                place_scale.copy_(scale)
        else:
            convert_rows(
                x,
                out=place[:, : self.hidden],
                scale=place_scale,
                values_scale=scale,
                num_rows=offsets[-1:],
            )
        if hidden > self.hidden:
            place[:, self.hidden :].zero_()
        return place, place_scale

    def _writes_to(self, y: Tensor) -> bool:
        """Whether the second GEMM can write its output to ``y`` itself."""
        fits = y.dtype == self._dtype and self._padded_hidden == self.hidden
        return fits and self.gemm2.writes_out

    def _multiply(
        self,
        x: Tensor,
        x_scale: Tensor | None,
        offsets: Tensor,
        regions: Sequence[Tensor],
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Both GEMMs and what is between, for pairs grouped by expert; into ``out``, if given."""
        region_a, scales, region_b = regions
        num_pairs, hidden = x.shape
        intermediate = self._padded_intermediate
        groups = Groups(offsets)
        out13 = self._out_view(region_b, (num_pairs, 2 * intermediate))
        gate_up = self.gemm13(x, x_scale, groups, out=out13)

        activation = _view(region_a, (num_pairs, intermediate), self._gemm_dtype)
        activation_scale = self._scale_view(scales, num_pairs, intermediate)
        swiglu(gate_up, out=activation, scale=activation_scale, num_rows=offsets[-1:])
        del gate_up  # before the second output is made
        if out is None:
            out = self._out_view(region_b, (num_pairs, hidden))
        return self.gemm2(activation, activation_scale, groups, out=out)

    def pair_capacity(self) -> int:
        """Pairs for which neither scratch nor workspace would grow; -1 while both may grow."""
        if not self.workspace.is_locked():
            return -1
        fitting = bisect_right(
            range(self._scratch().capacity + 1),
            self.workspace.capacity_bytes(),
            key=self.workspace_bytes,
        )
        return fitting - 1

    def workspace_bytes(self, num_pairs: int) -> int:
        """Bytes of the workspace that ``num_pairs`` pairs take."""
        return simultaneous_bytes(*self._requests(num_pairs))

    def reload(self, weights: ExpertWeights) -> None:
        """Replaces the weights in place, so that captured graphs compute with the new ones.

        Written is the memory that this worker multiplies by. Where the first weights needed neither
        padding nor conversion, that is the caller's own tensors.

        Raises:
            ConfigError: Shape, dtype, format or device differ from those at construction.
        """
        found = (
            (weights.num_local_experts, weights.hidden, weights.intermediate),
            (weights.format, weights.dtype),
            weights.device,
        )
        wanted = (
            (self.num_local_experts, self.hidden, self.intermediate),
            self._kind,
            self.workspace.device,
        )
        if found != wanted:
            raise ConfigError(
                f"reload with (E_local, H, I), format and device = {found}, built for {wanted}: "
                "make new experts instead"
            )
        for gemm, padded in zip((self.gemm13, self.gemm2), self._padded(weights), strict=True):
            gemm.load(*padded)

    @property
    def _gemm_dtype(self) -> torch.dtype:
        return self._dtype if self._activations == "plain" else FP8

    def _requests(self, num_pairs: int) -> list[tuple[Sequence[int], torch.dtype]]:
        """Region A, its scales, and region B, in bytes."""
        hidden, intermediate = self._padded_hidden, self._padded_intermediate
        region_a = max(hidden, intermediate) * self._gemm_dtype.itemsize
        scales = max(self._num_scales(hidden), self._num_scales(intermediate)) * 4
        region_b = 0
        if self.gemm13.writes_out:
            region_b = max(2 * intermediate, hidden) * self._dtype.itemsize
        return [((num_pairs * size,), torch.uint8) for size in (region_a, scales, region_b)]

    def _num_scales(self, width: int) -> int:
        return {"plain": 0, "fp8_token": 1, "fp8_block": -(-width // SCALE_BLOCK)}[
            self._activations
        ]

    def _scale_view(self, region: Tensor, num_pairs: int, width: int) -> Tensor | None:
        if self._activations == "plain":
            return None
        return _view(region, (num_pairs, self._num_scales(width)), torch.float32)

    def _out_view(self, region: Tensor, shape: tuple[int, int]) -> Tensor | None:
        return _view(region, shape, self._dtype) if self.gemm13.writes_out else None

    def _scratch(self) -> PermuteScratch:
        """Of the current (ubatch, lane): looked up for every call, because lanes never share."""
        return permute_scratch(
            self.workspace,
            num_experts=self.num_experts,
            num_local_experts=self.num_local_experts,
            device=self.workspace.device,
        )

    def _num_pairs(self, rows: ReceivedRows) -> int:
        """P on the host: what was received, or under capture the most that may be replayed."""
        capturing = rows.x.is_cuda and torch.cuda.is_current_stream_capturing()
        # Of grouped rows, those between groups count too.
        known = rows.num_pairs if rows.offsets is None else rows.num_rows
        if isinstance(known, int) and not capturing:
            return known
        if not self.workspace.is_locked():
            raise LockedError(
                "experts are captured into a graph before lock(): the graph would keep addresses "
                "that may move; warm up, lock, then capture"
            )
        if refusal := self.gemm13.why_not_captured():
            raise ConfigError(f"the {self.name} worker cannot be captured: {refusal}")
        most_per_row = min(rows.topk_idx.shape[1], self.num_local_experts)
        return min(self.pair_capacity(), rows.capacity * most_per_row)

    def _check(self, rows: ReceivedRows) -> None:
        if rows.hidden != self.hidden:
            raise ConfigError(f"rows have hidden = {rows.hidden}, the weights {self.hidden}")
        if rows.rows_per_expert.numel() != self.num_local_experts:
            raise ConfigError(
                f"the placement gives this rank {rows.rows_per_expert.numel()} experts, the "
                f"weights hold {self.num_local_experts}"
            )
        if self._activations == "plain" and rows.scale is None and rows.x.dtype != self._dtype:
            raise ConfigError(
                f"rows are {rows.x.dtype}, the weights {self._dtype}: cast the weights, or set "
                "DispatchConfig.dtype"
            )

    def _padded(
        self, weights: ExpertWeights
    ) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
        """(w13, scale), (w2, scale) with H and I padded by zeros, gate and up each on its own."""
        extra_h = self._padded_hidden - self.hidden
        extra_i = self._padded_intermediate - self.intermediate
        w13_scale, w2_scale = weights.w13_scale, weights.w2_scale
        if extra_h == 0 and extra_i == 0:
            return (weights.w13.contiguous(), w13_scale), (weights.w2.contiguous(), w2_scale)
        if w13_scale is not None and w13_scale.dim() == 3:
            raise ConfigError(
                f"weights that come in {FP8_BLOCK} x {FP8_BLOCK} blocks need H and I of whole "
                f"blocks, they are {self.hidden} and {self.intermediate}: give the plain weights"
            )
        experts = self.num_local_experts
        w13 = weights.w13.reshape(experts, 2, self.intermediate, self.hidden)
        w13 = _pad(w13, (0, extra_h, 0, extra_i)).flatten(1, 2)
        w2 = _pad(weights.w2, (0, extra_i, 0, extra_h))
        if w13_scale is not None and w2_scale is not None:
            w13_scale = _pad(w13_scale.view(experts, 2, -1), (0, extra_i)).flatten(1)
            w2_scale = _pad(w2_scale, (0, extra_h))
        return (w13, w13_scale), (w2, w2_scale)


def _pad(values: Tensor, extra: tuple[int, ...]) -> Tensor:
    """``F.pad`` with zeros, for fp8 too: its zero is the byte 0."""
    if values.dtype != FP8:
        return torch.nn.functional.pad(values, extra)
    return torch.nn.functional.pad(values.view(torch.uint8), extra).view(FP8)


def _view(region: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The first bytes of a region as a contiguous matrix."""
    return region[: shape[0] * shape[1] * dtype.itemsize].view(dtype).view(shape)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
