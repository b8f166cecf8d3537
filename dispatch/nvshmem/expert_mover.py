"""The expert-major layout over NVSHMEM: a sender writes each pair in the group of its expert.

The steps, their launches and their memory are those of :class:`NvshmemMover`; a row is one pair.

route_pairs    ids and weights checked, every pair's place among its expert's, the record posted
pairs          records judged, places of groups found, each pair written once where it stays
combine_pairs  results read where they lie, weighted and summed
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from crossdock.dispatch.algorithms.base import Algorithm
from crossdock.dispatch.config import DispatchConfig
from crossdock.dispatch.nvshmem.launch import Kernels, PairKernels
from crossdock.dispatch.nvshmem.layout import pair_way_words
from crossdock.dispatch.nvshmem.mover import NvshmemMover
from crossdock.dispatch.slots import CountsOrFinder, SlotPlan
from crossdock.dispatch.transports.nvshmem import NvshmemTransport
from crossdock.dispatch.wire import WireFormat

__all__ = ["ExpertMover", "ExpertPlan"]


class ExpertPlan(SlotPlan):
    """Rows of one step where each is a pair.

    Args:
        counts: See :class:`SlotPlan`.
        sums: See there.
        num_local_experts: [R] experts of each rank.
        alignment: Rows of which each expert's first is a multiple.

    Attributes:
        received: [R] rows that hold each rank's pairs, however they fall on its experts.
    """

    def __init__(
        self,
        counts: CountsOrFinder,
        sums: list[int] | None,
        num_local_experts: tuple[int, ...],
        alignment: int,
    ) -> None:
        super().__init__(counts, sums)
        self.received = [
            pairs + min(pairs, experts) * (alignment - 1)
            for pairs, experts in zip(self.received, num_local_experts, strict=True)
        ]

    def pairs_to_hold(self, pairs: list[int]) -> list[int]:
        """[R] rows as well: experts read them where they lie, those of alignment included."""
        return self.received


class ExpertMover(NvshmemMover):
    """See the module."""

    _source_words = 3  # of a pair: rank, token and column
    _layout: Literal["row", "expert"] = "expert"

    def __init__(
        self,
        algorithm: Algorithm,
        wire: WireFormat,
        num_slots: int,
        transport: NvshmemTransport,
        config: DispatchConfig,
    ) -> None:
        self._alignment = config.expert_alignment
        placement = algorithm.placement
        self._num_local_experts = tuple(
            placement.num_local_experts(rank) for rank in range(placement.ep_size)
        )
        super().__init__(algorithm, wire, num_slots, transport, config)
        self.wire = replace(wire, top_k=1)  # of a row; tokens keep their columns

    def plan(self, rows: CountsOrFinder, sums: list[int] | None = None) -> SlotPlan:
        """Each rank's pairs, with the room that alignment takes."""
        return ExpertPlan(rows, sums, self._num_local_experts, self._alignment)

    def _load_kernels(self, config: DispatchConfig) -> Kernels:
        return PairKernels(
            self.wire,
            self.transport.device,
            config.num_sms,
            self._group,
            poison=config.debug,
            alignment=self._alignment,
        )

    def _told(self, experts: Tensor) -> Tensor:
        """All: places depend on everybody's counts of every expert."""
        everything = torch.arange(self._num_experts, dtype=torch.int32)
        return everything.repeat(len(experts), 1)

    def _way_words(self, num_tokens: int, top_k: int) -> int:
        return pair_way_words(num_tokens, self._num_experts, self.transport.world_size, top_k)
