"""A dispatcher's steps over NVSHMEM, as launches on the current stream.

route       ids and weights checked, counts, every row's place; this rank's record posted, and in
            an eager step everybody's awaited and given to the host
rows        everybody's record judged (on a handle's way: posted here), each row written once where
            it stays, everybody's awaited; launched before an eager step's host knows, and does
            nothing then if that has to go on with the other hosts
combine     this rank's results announced, everybody's read where they lie, summed

Of a staged call, ``rows`` does not wait (``arrive`` does), and ``ready`` announces results early.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from crossdock.dispatch.agreement import Problem, ProblemKind
from crossdock.dispatch.algorithms.allgather import AllGather
from crossdock.dispatch.algorithms.base import Algorithm
from crossdock.dispatch.buckets import BucketMemory
from crossdock.dispatch.config import DispatchConfig
from crossdock.dispatch.handle import Handle
from crossdock.dispatch.mover import Departure, Load, Mover
from crossdock.dispatch.nvshmem.bucket import SymmetricBucket
from crossdock.dispatch.nvshmem.eager import Matrix, Ways, pinned_words
from crossdock.dispatch.nvshmem.launch import Kernels
from crossdock.dispatch.nvshmem.layout import (
    BY_ROUTE,
    MAX_RANKS,
    Kind,
    Report,
    State,
    distant_bits,
    expert_codes,
    experts_by_rank,
    record_words,
    state_words,
    way_words,
)
from crossdock.dispatch.nvshmem.memory import SlotMemory
from crossdock.dispatch.nvshmem.puts import PuttingKernels
from crossdock.dispatch.routing import Counts, find_problem
from crossdock.dispatch.rows import ReceivedRows
from crossdock.dispatch.slots import SlotPlan
from crossdock.dispatch.transports.base import Done, Work
from crossdock.dispatch.transports.nvshmem import NvshmemTransport
from crossdock.dispatch.wire import WireFormat

__all__ = ["NvshmemMover"]

_ALIGN = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class _DeviceRouting(Counts):
    """A step's routing on the device.

    Attributes:
        way: int64, the kernels' ``Way``.
        ways: Where it goes when the step's handle is gone, unless a graph holds its address.
    """

    way: Tensor
    ways: Ways | None = None

    def __del__(self) -> None:
        if self.ways is not None:
            self.ways.give(self.way)


class NvshmemMover(Mover):
    """Over GPUs, by plain stores where there is an address; see ``docs/nvshmem-protocol.md``."""

    connects = True
    symmetric = True
    transport: NvshmemTransport
    _source_words = 2  # of a row: rank and token
    _layout: Literal["row", "expert"] = "row"

    def __init__(
        self,
        algorithm: Algorithm,
        wire: WireFormat,
        num_slots: int,
        transport: NvshmemTransport,
        config: DispatchConfig,
    ) -> None:
        super().__init__(algorithm, wire, num_slots)
        self.transport = transport
        self._num_experts = config.num_experts
        placement, device, ranks = algorithm.placement, transport.device, transport.world_size
        self._num_local = placement.num_local_experts(transport.rank)
        experts = experts_by_rank(placement)
        told = self._told(experts)
        self._has_distant = transport.has_distant
        self._state = torch.zeros(
            state_words(ranks, config.num_experts), dtype=torch.int64, device=device
        )
        self._state[State.WORST] = -1
        self._code = expert_codes(placement).to(device)
        self._expert_at, self._told_at = experts.to(device), told.to(device)
        self._matrix = Matrix(transport, self.plan)
        self._ways = Ways(device, lambda tokens: self._way_words(tokens, config.top_k))
        self._report = pinned_words(Report.LATE + ranks)
        self._owner = transport.watch(self._report, self._matrix.words)
        words = [transport.rank, ranks, wire.top_k, wire.hidden, config.num_experts]
        words += [self._num_local, experts.shape[1], told.shape[1]]
        words += [round(transport.timeout_s * 1e9), self._has_distant]
        tensors = [self._state, self._code, self._expert_at, self._told_at]
        tensors += [self._matrix.words, self._report, transport.calls]
        words += [tensor.data_ptr() for tensor in tensors]
        words += [0] * MAX_RANKS + distant_bits(transport.runtime.reach).tolist()
        self._group = torch.tensor(words, dtype=torch.int64, device=device)
        self._kernels = self._load_kernels(config)
        self._memory = SlotMemory(
            transport, self._group, record_words(ranks, told.shape[1]), self._owner
        )

    # ---- what another layout does otherwise ----------------------------------------------------

    def _load_kernels(self, config: DispatchConfig) -> Kernels:
        shared = (self.wire, self.transport.device, config.num_sms, self._group)
        everywhere, poison = isinstance(self.algorithm, AllGather), config.debug
        if not self._has_distant:
            return Kernels(*shared, everywhere=everywhere, poison=poison)
        return PuttingKernels(
            *shared,
            everywhere=everywhere,
            poison=poison,
            num_ranks=self.transport.world_size,
            runtime=self.transport.runtime,
        )

    def _told(self, experts: Tensor) -> Tensor:
        """int32 [R, n]: experts of which a record tells each rank, from those of each rank."""
        return experts

    def _way_words(self, num_tokens: int, top_k: int) -> int:
        return way_words(num_tokens, self._num_experts, self.transport.world_size, top_k)

    def _new_bucket(self, capacity: int) -> SymmetricBucket:
        return SymmetricBucket(
            capacity,
            self.wire,
            self.transport.device,
            self._num_local,
            source_words=self._source_words,
            has_outbox=self._has_distant,
        )

    # ---- memory --------------------------------------------------------------------------------

    def allocate(self, capacity: int) -> BucketMemory:
        """Describe a bucket and see that there is room; :meth:`connect` takes it."""
        bucket = self._new_bucket(capacity)
        self._memory.require_room(bucket)
        return bucket

    def connect(self, memories: Sequence[tuple[int, BucketMemory]]) -> Callable[[], None]:
        """Take the memory on all ranks; what is replaced is given back when they all have."""
        return self._memory.connect([(slot, _bucket(memory)) for slot, memory in memories])

    def release_captured(self) -> None:
        """Let go of outgrown buckets that graphs held."""
        self._memory.release_captured()

    def release(self) -> None:
        """Let go of everything; memory returns when all ranks have come to that."""
        self._memory.release()
        self.transport.unwatch(self._owner)

    # ---- dispatch ------------------------------------------------------------------------------

    def is_capturing(self) -> bool:
        """Whether the current stream records a graph."""
        return torch.cuda.is_current_stream_capturing()

    def prepare(
        self,
        slot: int,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        *,
        captured: bool,
        staged: bool,
    ) -> Departure:
        """Check and count on the device; unless a graph is recorded, agree there with all ranks.

        Rows leave at once if they agree and the step fits.
        """
        x = self._readable(x)
        if captured:
            _, routing = self.route(topk_idx, topk_weights)
            return Departure(routing=routing, load=Load(x, call=BY_ROUTE))
        way = self._ways.take(topk_idx.shape[0])
        ids, weights = topk_idx.contiguous(), topk_weights.contiguous()
        ledger = self.transport.ledger
        ledger.sequence += 1
        ledger.begun = True  # from here on, what fails on this rank goes on between hosts
        call, bucket = ledger.sequence, self._memory.in_use[slot]
        with self.transport.moving():
            with self.transport.in_order():
                kernels, limit = self._kernels, self.pair_limit
                kernels.route(ids, weights, way, call, slot, limit)
                if not self._has_distant:
                    kernels.rows(bucket.table, x, way, call, limit, staged)
            self._matrix.wait(call)
            is_fine, rows, pairs = self._matrix.mine()
            routing = _DeviceRouting(rows=rows, pairs=pairs, way=way, ways=self._ways)
            agreed = self._matrix.judge(call, slot, bucket.capacity)
            if self._has_distant and agreed:
                outbox = max(self.outbox_rows(agreed.plan))
                agreed = agreed if outbox <= bucket.capacity else None
            ledger.begun = agreed is None
        if agreed is None:
            self._await_rows_that_stay()
            if not is_fine:
                return Departure(find_problem(topk_idx, topk_weights, self._num_experts))
            return Departure(routing=routing, load=Load(x))  # records go round once more
        if self._has_distant:
            return Departure(routing=routing, load=Load(x, call=call), agreed=agreed)
        self._count_bytes(routing)
        work = _Arrival(self, bucket, captured=False) if staged else Done()
        return Departure(routing=routing, agreed=agreed, work=work)

    def _await_rows_that_stay(self) -> None:
        """See the kernel end that was to move rows, before its records are written over."""
        torch.cuda.current_stream(self.transport.device).synchronize()

    def route(self, topk_idx: Tensor, topk_weights: Tensor) -> tuple[Problem | None, Counts | None]:
        """Check and count on the device, and leave it all there."""
        way = self._new_way(topk_idx)
        ids, weights = topk_idx.contiguous(), topk_weights.contiguous()
        with self.transport.in_order(captured=True):
            self._kernels.route(ids, weights, way, BY_ROUTE, pair_limit=self.pair_limit)
        unknown = [-1] * self.transport.world_size
        return None, _DeviceRouting(rows=unknown, pairs=unknown, way=way)

    def _count_bytes(self, routing: Counts) -> None:
        bytes_to, row_bytes = self.transport.bytes_to, self.wire.row_bytes
        for peer, rows in enumerate(routing.rows):
            bytes_to[peer] += rows * row_bytes

    def _new_way(self, topk_idx: Tensor) -> Tensor:
        return self._state.new_empty(self._way_words(*topk_idx.shape))

    def outbox_rows(self, plan: SlotPlan) -> list[int]:
        """Those for ranks that are distant from their source."""
        if not self._has_distant:
            return super().outbox_rows(plan)
        is_distant = ~self.transport.runtime.reach.numpy()
        rows: list[int] = (plan.counts * is_distant).sum(1).tolist()
        return rows

    def load(self, slot: int, x: Tensor, routing: Counts) -> Load:
        """Tokens as the kernel reads them."""
        return Load(self._readable(x))

    @staticmethod
    def _readable(x: Tensor) -> Tensor:
        """Contiguous, at a multiple of 16 bytes."""
        x = x.contiguous()
        return x if x.data_ptr() % _ALIGN == 0 else x.clone()

    def send(self, load: Load, handle: Handle, memory: BucketMemory, *, staged: bool) -> Work:
        """Write rows; needs no answer from the host."""
        bucket, routing = _bucket(memory), _routing(handle)
        if handle.captured:
            bucket.captured = True
        else:
            self._count_bytes(routing)
        with self.transport.in_order(captured=handle.captured):
            way, limit = routing.way, self.pair_limit
            self._kernels.rows(bucket.table, load.rows, way, load.call, limit, staged)
        return _Arrival(self, bucket, captured=handle.captured) if staged else Done()

    def await_rows(self, bucket: SymmetricBucket, *, captured: bool) -> None:
        """Wait for everybody's rows, in stream order."""
        with self.transport.in_order(captured=captured):
            self._kernels.arrive(bucket.table)

    def receive(self, memory: BucketMemory, handle: Handle, *, debug: bool) -> ReceivedRows:
        """Everything lies where it is read; under capture only the device knows how many rows."""
        bucket = _bucket(memory)
        if debug:
            bucket.poison_results()
        rank, captured = self.transport.rank, handle.captured
        return ReceivedRows(
            x=bucket.x,
            scale=bucket.scale,
            topk_idx=bucket.topk_idx,
            topk_weights=bucket.topk_weights,
            num_rows=bucket.num_rows if captured else handle.plan.received[rank],
            rows_per_expert=bucket.rows_per_expert,
            num_pairs=bucket.num_pairs if captured else handle.pairs[rank],
            source=bucket.source,
            dtype=self.wire.dtype,
            take_y=bucket.y,
            layout=self._layout,
            offsets=bucket.offsets if self._layout == "expert" else None,
        )

    # ---- combine -------------------------------------------------------------------------------

    def load_back(self, slot: int, y: Tensor, handle: Handle, memory: BucketMemory) -> Load:
        """Nothing can fail here."""
        return Load(y)

    def send_back(
        self, load: Load, handle: Handle, out: Tensor, *, staged: bool
    ) -> Callable[[], None]:
        """Announce results; the wait for everybody's, and the sum, come with the caller's wait."""
        y = load.rows
        assert handle.slot is not None
        bucket, routing = self._memory.in_use[handle.slot], _routing(handle)  # which owns its way
        target = out if _is_aligned(out) else out.new_empty(out.shape)
        if y.shape[1] * y.dtype.itemsize > bucket.layout.y_bytes:
            return lambda: self._combine_in_parts(y, handle, bucket, target, out)
        captured = handle.captured
        with self.transport.in_order(captured=captured):
            if y is not bucket.results:
                self._bring_in(y, bucket, handle)
            if staged:
                self._kernels.ready()

        def finish() -> None:
            with self.transport.in_order(captured=captured):
                self._kernels.combine(bucket.table, routing.way, y.dtype, target, announced=staged)
                if target is not out:
                    out.copy_(target)

        return finish

    def _bring_in(self, y: Tensor, bucket: SymmetricBucket, handle: Handle) -> None:
        """Copy results to where other ranks read them, unless they lie there."""
        place = bucket.results_as(y.dtype, y.shape[1])
        if y.data_ptr() != place.data_ptr() or not y.is_contiguous():
            num_rows = bucket.capacity
            if not handle.captured:
                num_rows = handle.plan.received[self.transport.rank]
            place[:num_rows].copy_(y[:num_rows])

    def _combine_in_parts(
        self, y: Tensor, handle: Handle, bucket: SymmetricBucket, target: Tensor, out: Tensor
    ) -> None:
        """Results of a wider dtype than the slot has room for: some columns at a time."""
        hidden, way = y.shape[1], _routing(handle).way
        width = bucket.layout.y_bytes // y.dtype.itemsize // 8 * 8
        with self.transport.in_order(captured=handle.captured):
            for first in range(0, hidden, width):
                part = y[:, first : first + width]
                bucket.results_as(y.dtype, part.shape[1]).copy_(part)
                columns = target[:, first : first + width]
                self._kernels.combine(bucket.table, way, y.dtype, columns, announced=False)
                # All have read these columns before the next ones are written.
                self._kernels.ready()
                self._kernels.meet()
            if target is not out:
                out.copy_(target)

    # ---- what a graph could not say ------------------------------------------------------------

    def find_refusal(self) -> Problem | None:
        """Wait for the device; why it refused a step, if this rank is to blame."""
        torch.cuda.synchronize(self.transport.device)
        self.transport.require_working()
        what, rank, first, second, third = self._report[: Report.THIRD + 1].tolist()
        self._report.numpy()[Report.WHAT] = Kind.FINE
        if rank != self.transport.rank or what == Kind.FINE:
            return None
        return _problem_of(Kind(what), first, second, third, self._num_experts)


class _Arrival:
    """Rows that other ranks write to this rank's bucket."""

    def __init__(self, mover: NvshmemMover, bucket: SymmetricBucket, *, captured: bool) -> None:
        self._mover, self._bucket, self._captured = mover, bucket, captured

    def wait(self) -> None:
        self._mover.await_rows(self._bucket, captured=self._captured)


def _bucket(memory: BucketMemory) -> SymmetricBucket:
    assert isinstance(memory, SymmetricBucket)
    return memory


def _routing(handle: Handle) -> _DeviceRouting:
    assert isinstance(handle.routing, _DeviceRouting)
    return handle.routing


def _is_aligned(out: Tensor) -> bool:
    step = out.stride(0) * out.dtype.itemsize
    return out.stride(1) == 1 and step % _ALIGN == 0 and out.data_ptr() % _ALIGN == 0


def _problem_of(what: Kind, first: int, second: int, third: int, num_experts: int) -> Problem:
    place = f"topk_idx[{first}, {second}]"
    if what == Kind.OUTSIDE:
        text = f"{place} = {third}: expert ids are 0 to {num_experts - 1}, or -1 for none"
    elif what == Kind.REPEATED:
        text = f"{place} names expert {third} a second time in its token"
    elif what == Kind.NOT_FINITE:
        value = torch.tensor(third, dtype=torch.int32).view(torch.float32)
        text = f"topk_weights[{first}, {second}] = {float(value)}: weights must be finite"
    else:
        need = f"received {first} rows, its receive bucket holds"
        if what == Kind.TOO_MANY_PAIRS:
            need = f"received {first} pairs, its experts hold"
        elif what == Kind.TOO_MANY_PUTS:
            need = f"put {first} rows, its outbox holds"
        text = (
            f"would have {need} {second}; no row moved in that step, and its "
            "results are NaN. unlock(), run a step of this size eagerly, lock() and capture again"
        )
        return Problem(ProblemKind.CAPACITY, text)
    return Problem(ProblemKind.ROUTING, f"{text} (in a captured step)")
