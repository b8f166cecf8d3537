"""The kernels where some rank has no address for another's memory: NVSHMEM brings rows there.

consult     records exchanged after ``route``, in an eager step
record      or before ``rows``, in any other
rows        rows for distant ranks written to this rank's outbox
put         the outbox brought to where it belongs, then signals
...
fetch       distant ranks' results brought to the outbox
combine     all results read here, as if they lay on their ranks
"""

from __future__ import annotations

import torch
from torch import Tensor

from crossdock.dispatch.nvshmem.launch import PUTS, Kernels, Launch
from crossdock.dispatch.nvshmem.layout import BY_ROUTE, HERE
from crossdock.dispatch.nvshmem.runtime import Runtime
from crossdock.dispatch.wire import WireFormat, num_blocks

__all__ = ["PuttingKernels"]

PUT_THREADS = 512
RECORD_THREADS = 256


class PuttingKernels(Kernels):
    """Kernels of a dispatcher some of whose ranks are distant from each other.

    Args:
        wire: As for :class:`Kernels`.
        device: Likewise.
        num_sms: Likewise.
        group: Likewise.
        everywhere: Likewise.
        poison: Likewise.
        num_ranks: R.
        runtime: Loads kernels that call NVSHMEM.
    """

    def __init__(
        self,
        wire: WireFormat,
        device: torch.device,
        num_sms: int | None,
        group: Tensor,
        *,
        everywhere: bool,
        poison: bool,
        num_ranks: int,
        runtime: Runtime,
    ) -> None:
        super().__init__(wire, device, num_sms, group, everywhere=everywhere, poison=poison)
        self._payload_bytes = wire.hidden * wire.payload_dtype.itemsize
        self._scale_bytes = 4 * num_blocks(wire.hidden) if wire.fp8 else 0
        self._put_blocks = min(num_ranks, num_sms or num_ranks)

        def load(name: str, num_words: int) -> Launch:
            return Launch(PUTS, name, num_words, device=device, defines={}, runtime=runtime)

        self._consult, self._record = load("consult", 6), load("record", 4)
        self._put, self._fetch = load("put", 7), load("fetch", 5)
        self._arrive, self._ready = load("arrive", 2), load("ready", 1)

    def route(
        self,
        ids: Tensor,
        weights: Tensor,
        way: Tensor,
        call: int,
        slot: int = 0,
        pair_limit: int = -1,
    ) -> None:
        """Route, then agree; see the base class."""
        super().route(ids, weights, way, HERE)
        if call > 0:
            self._consult(
                1,
                RECORD_THREADS,
                self._group,
                way.data_ptr(),
                ids.shape[0],
                call,
                slot,
                pair_limit,
            )

    def rows(
        self,
        slot: Tensor,
        x: Tensor,
        way: Tensor,
        call: int,
        pair_limit: int,
        staged: bool,
    ) -> None:
        """Write rows, then put what is for distant ranks; see the base class."""
        if call <= 0:
            self._record(1, RECORD_THREADS, self._group, way.data_ptr(), x.shape[0], pair_limit)
            call = BY_ROUTE
        super().rows(slot, x, way, call, pair_limit, staged)
        self._put(
            self._put_blocks,
            PUT_THREADS,
            self._group,
            slot.data_ptr(),
            way.data_ptr(),
            x.shape[0],
            self._payload_bytes,
            self._scale_bytes,
            staged,
        )

    def combine(
        self, slot: Tensor, way: Tensor, partial: torch.dtype, out: Tensor, *, announced: bool
    ) -> None:
        """Fetch results before they are read; see the base class."""
        if not announced:
            self.ready()
        self._fetch(
            self._put_blocks,
            PUT_THREADS,
            self._group,
            slot.data_ptr(),
            way.data_ptr(),
            out.shape[0],
            out.shape[1] * partial.itemsize,
        )
        super().combine(slot, way, partial, out, announced=True)
