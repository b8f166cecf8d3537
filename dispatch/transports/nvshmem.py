"""GPUs that write each other's memory through NVSHMEM.

Records travel between hosts, over a transport that is there already, so bad arguments and lost
ranks are found as everywhere; but dispatches that nothing speaks against are agreed on by kernels.
Those, and the rows, are the matter of ``crossdock.dispatch.nvshmem.mover``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import mul
from types import TracebackType

import torch
from torch import Tensor

from crossdock.dispatch.nvshmem.launch import Ring, current_device, raw_stream
from crossdock.dispatch.nvshmem.layout import (
    CONTROL_AT,
    MAX_RANKS,
    Report,
    begun_words,
    distant_bits,
)
from crossdock.dispatch.nvshmem.runtime import Runtime, Symmetric
from crossdock.dispatch.transports.base import Done, Transport, Work
from crossdock.dispatch.transports.watch import gather_processes
from crossdock.scratch.errors import (
    CapacityError,
    CrossdockError,
    RankTimeout,
    TransportUnavailable,
)

__all__ = ["NvshmemTransport"]

logger = logging.getLogger(__name__)

_IN_VAIN = int(Report.IN_VAIN)  # members of an enumeration are slow to look up
_KEYS = 16  # discards that ranks tell each other of at a time


class NvshmemTransport(Transport):
    """Ranks whose GPUs write and read each other's memory: by address, or over the network.

    Args:
        host: A transport over the same ranks, for records; closed with this one.
        device: This rank's GPU.
        symmetric_heap: Bytes of NVSHMEM's heap, taken at once; None for one that grows.

    Attributes:
        has_distant: Whether some rank has no address for the memory of another.

    Raises:
        TransportUnavailable: No NVSHMEM, or too many ranks.
        DisagreementError: Ranks ask for different heaps.
        CapacityError: Some GPU has no room for the heap.
    """

    name = "nvshmem"
    hidden_multiple = 8
    layouts: tuple[str, ...] = ("row", "expert")

    def __init__(
        self, host: Transport, device: torch.device, symmetric_heap: int | None = None
    ) -> None:
        super().__init__(host.rank, host.world_size, device, host.timeout_s)
        if self.world_size > MAX_RANKS:
            raise TransportUnavailable(
                f"nvshmem joins at most {MAX_RANKS} ranks, not {self.world_size}: use nccl, or "
                "hierarchical across nodes"
            )
        self._host = host
        self.ledger = host.ledger
        torch.cuda.set_device(self.device)
        torch.cuda.synchronize(self.device)  # NVSHMEM joins the context that torch has made
        self.runtime = Runtime(host, self.device, symmetric_heap)
        self.has_distant = not bool(self.runtime.reach.all())
        if self.has_distant:
            self.layouts = ("row",)
        self._processes = gather_processes(host)
        self._reports: dict[int, memoryview] = {}
        self._pinned: dict[int, tuple[Tensor, ...]] = {}
        self._num_owners = 0
        self._discarded: dict[int, Sequence[Symmetric]] = {}
        self._order = _Order(self.device)
        self._outbox: Symmetric | None = None
        self._begun = self.runtime.allocate(8 * begun_words(self.world_size))
        self._begun.buffer.zero_()
        words = [self.rank, self.world_size] + [0] * (CONTROL_AT - 2) + self._begun.addresses
        words += [0] * (MAX_RANKS - self.world_size) + distant_bits(self.runtime.reach).tolist()
        self.calls = torch.tensor(words, dtype=torch.int64, device=self.device)
        self._ring = Ring(self.device, self.calls, self.runtime if self.has_distant else None)
        torch.cuda.synchronize(self.device)
        host.exchange(torch.zeros(1, dtype=torch.int64))  # zeros are there before anybody rings

    # ---- what every transport does -------------------------------------------------------------

    def _exchange(self, record: Tensor) -> Tensor:
        return self._host.exchange(record)

    def _all_to_all(
        self, send: Tensor, send_rows: list[int], recv: Tensor, recv_rows: list[int]
    ) -> Work:
        starts = [0]
        for rows in send_rows[:-1]:
            starts.append(starts[-1] + rows)
        self._swap(send, starts, recv, recv_rows)
        return Done()

    def _all_gather(self, send: Tensor, recv: Tensor, rows: list[int]) -> Work:
        self._swap(send, [0] * self.world_size, recv, rows)
        return Done()

    def announce(self, call: int) -> None:
        """Tell ranks whose kernels wait for this one's record that none will come."""
        with self.in_order():
            self._ring(call)

    def set_timeout(self, timeout_s: float) -> None:
        """Change the limit of the host's exchanges too."""
        super().set_timeout(timeout_s)
        self._host.set_timeout(timeout_s)

    def require_working(self) -> None:
        """Raise what broke the transport, waits on the device that ended in vain included."""
        if self.ledger.broken is not None:
            super().require_working()
        for report in self._reports.values():
            if report[_IN_VAIN]:
                late = [rank for rank, word in enumerate(report[Report.LATE :]) if word]
                raise self._lost(late, "a kernel")

    def look_for_dead(self, during: str) -> None:
        """Raise if a rank, its process or this rank's GPU has failed: a kernel would wait in vain.

        Raises:
            PeerFailed: A rank has said that it failed.
            RankTimeout: Names the ranks whose processes are dead.
            RuntimeError: What an earlier kernel of this process did wrong, as CUDA says it.
        """
        torch.cuda.current_stream(self.device).query()
        said = self.heard()
        if said:
            raise self.break_with(said, during)
        dead = [
            rank
            for rank, process in enumerate(self._processes)
            if (process.trouble() or "").startswith("is dead")
        ]
        if dead:
            raise self._lost(dead, during)

    def _lost(self, ranks: list[int], during: str) -> CrossdockError:
        found = {rank: self._processes[rank].trouble() or "did not arrive" for rank in ranks}
        return self.break_with(self.heard() or found, during)

    def tell_failure(self, said: str) -> None:
        """Between hosts, where all ranks look."""
        self._host.tell_failure(said)

    def heard(self) -> dict[int, str] | None:
        """Between hosts."""
        return self._host.heard()

    def close(self) -> None:
        """Give back all memory and stop NVSHMEM, all ranks together; only leave if one is lost."""
        if self.ledger.broken is None:
            try:
                torch.cuda.synchronize(self.device)
                self.exchange(torch.zeros(1, dtype=torch.int64))
                self.runtime.stop()
            except RankTimeout:
                # NVSHMEM's own end would wait for the lost rank.
                logger.warning("closed without stopping NVSHMEM", exc_info=True)
        self._host.close()

    # ---- what movers ask -----------------------------------------------------------------------

    def watch(self, report: Tensor, *others: Tensor) -> int:
        """Look in every call at what kernels report.

        Args:
            report: Pinned int64, ``Report``.
            others: Pinned memory that the same kernels write to.

        Returns:
            A number for whose they are, equal on all ranks.
        """
        self._num_owners += 1
        self._reports[self._num_owners] = memoryview(report.numpy())  # type: ignore[arg-type]
        self._pinned[self._num_owners] = (report, *others)
        return self._num_owners

    def unwatch(self, owner: int) -> None:
        """Look no more. The memory stays if a kernel may still be waiting in vain for a rank."""
        self._reports.pop(owner, None)
        if self.ledger.broken is None:
            self._pinned.pop(owner, None)

    def in_order(self, *, captured: bool = False) -> AbstractContextManager[None]:
        """Launches of one transport follow each other, whatever streams they are on.

        Args:
            captured: They are recorded in a graph, where the caller's own forks and joins decide.
        """
        return nullcontext() if captured else self._order

    def discard(self, key: int, memories: Sequence[Symmetric]) -> None:
        """Free memory later, when all ranks have discarded theirs under the same key.

        Ranks may come to it at different times: one may leave a dispatcher by an exception.
        """
        self._discarded[key] = memories

    def collect_garbage(self) -> None:
        """Free what all ranks have discarded. Collective."""
        keys = sorted(self._discarded)[:_KEYS]
        discarded = self.exchange(torch.tensor(keys + [-1] * (_KEYS - len(keys)))).tolist()
        everywhere = set(discarded[0]).intersection(*discarded[1:]) - {-1}
        for key in sorted(everywhere):
            for memory in self._discarded.pop(key):
                self.runtime.free(memory)

    # ---- blocks of rows ------------------------------------------------------------------------

    def _swap(self, send: Tensor, starts: list[int], recv: Tensor, recv_rows: list[int]) -> None:
        """Put rows in this rank's outbox, and take from everybody's what is for this rank.

        The host waits for the device at both ends: this is for what is not in a layer's way.

        Args:
            send: uint8 [n, row_bytes].
            starts: [R] row of ``send`` at which the rows for each rank begin.
            recv: uint8 [sum(recv_rows), row_bytes].
            recv_rows: [R] rows from each rank.
        """
        row_bytes = send.shape[1]
        is_distant = (~self.runtime.reach[self.rank]).tolist()
        # What a distant rank sends can only arrive in symmetric memory.
        inbox_bytes = row_bytes * max(map(mul, recv_rows, is_distant))
        said = self.exchange(torch.tensor([send.numel(), inbox_bytes, *starts])).tolist()
        most, most_in = (max(offer[i] for offer in said) for i in (0, 1))
        if most == 0:
            return
        outbox = self._outbox_for(most + most_in)
        outbox.buffer[: send.numel()].copy_(send.view(-1))
        inbox = outbox.buffer[most:]
        self._meet()
        for rank, part in enumerate(torch.split(recv, recv_rows)):
            if not len(part):
                continue
            flat = part.view(-1)
            to = inbox[: flat.numel()] if is_distant[rank] else flat
            self.runtime.read(to, outbox, said[rank][2 + self.rank] * row_bytes, rank)
            if is_distant[rank]:
                flat.copy_(to)
        self._meet()

    def _meet(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()
        self.exchange(torch.zeros(1, dtype=torch.int64))

    def _outbox_for(self, num_bytes: int) -> Symmetric:
        """An outbox of at least that size on every rank. Collective."""
        if self._outbox is not None and self._outbox.buffer.numel() >= num_bytes:
            return self._outbox
        size, trouble = 1 << (num_bytes - 1).bit_length(), ""
        try:
            self.runtime.require_room(size)
        except MemoryError as error:
            trouble = str(error)
        poor = self.exchange(torch.tensor([int(bool(trouble))])).flatten().nonzero().flatten()
        if len(poor):
            raise CapacityError(
                f"rank {int(poor[0])} has no symmetric memory for {size} bytes of rows to send"
                + (f": {trouble}" if trouble else ""),
                ranks=tuple(poor.tolist()),
            )
        if self._outbox is not None:
            self.runtime.free(self._outbox)
        # Memory taken in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            self._outbox = self.runtime.allocate(size)
        return self._outbox


class _Order(AbstractContextManager[None]):
    """Inside of it the device is the current one, and its stream comes after the last one inside.

    As long as there is one stream, its own order is enough, and no event is recorded. When a second
    one comes, it waits once for all that is on the first. From then on the end of every use is
    recorded, so that a stream waits for no more than what was launched inside.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._other = torch.cuda.device(device)  # costs a good deal more than to look first
        self._switches = False
        self._stream: torch.cuda.Stream | None = None
        self._raw_stream = -1
        self._last: torch.cuda.Event | None = None

    def __enter__(self) -> None:
        self._switches = current_device() != self._device.index
        if self._switches:
            self._other.__enter__()  # type: ignore[no-untyped-call]
        raw = raw_stream(self._device.index)
        if raw != self._raw_stream:
            self._follow(raw)

    def _follow(self, raw: int) -> None:
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None:
            if self._last is None:
                self._last = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._last.record(self._stream)
            stream.wait_event(self._last)
        self._stream, self._raw_stream = stream, raw

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._last is not None:
            self._last.record(self._stream)
        if self._switches:
            self._other.__exit__(kind, error, traceback)
