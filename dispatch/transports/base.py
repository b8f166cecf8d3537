"""What a dispatcher asks of a transport: records from all, and rows to their places."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from crossdock.dispatch.agreement import Ledger
from crossdock.scratch.errors import CrossdockError, PeerFailed, RankTimeout

__all__ = ["FAILED", "Done", "Transport", "Work", "in_words"]

DEFAULT_TIMEOUT_S = 100.0
FAILED = "failed"  # what is said of a rank that told the others that it failed begins with this
_SAID_CHARS = 240  # fits wherever ranks tell each other


def in_words(error: BaseException) -> str:
    """Type and text of an exception, or the type alone where its ``__str__`` fails too."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception:
        return name


class Work(Protocol):
    """Rows on their way."""

    def wait(self) -> None:
        """Return when they have arrived (on CUDA: in stream order); RankTimeout if they do not."""


class Done:
    """Rows that arrived already."""

    def wait(self) -> None:
        """Return at once."""


class Transport(ABC):
    """R ranks that can exchange records and rows.

    Rows are uint8 [n, row_bytes], contiguous, grouped by peer in ascending rank order. Every call
    is collective. Counts have been agreed before rows move, so what a rank sends to another is what
    the other expects.

    Attributes:
        name: As ``connect`` knows it.
        hidden_multiple: What H has to be a multiple of.
        layouts: Of ``DispatchConfig.layout``, those that it moves.
        rank: This EP rank.
        world_size: R.
        device: Where rows live.
        timeout_s: Seconds after which a rank that does not answer is a RankTimeout.
        bytes_to: [R] bytes of rows handed to each rank so far, this rank's own included; records
            are not counted.
        ledger: What agreement remembers between exchanges.
    """

    name: str
    hidden_multiple = 1
    layouts: tuple[str, ...] = ("row",)

    def __init__(
        self, rank: int, world_size: int, device: torch.device, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.timeout_s = timeout_s
        self.bytes_to = [0] * world_size
        self.ledger = Ledger()
        self._moving = _Moving(self)

    def exchange(self, record: Tensor) -> Tensor:
        """Give a record to every rank and get everyone's.

        Args:
            record: int64 [W] on the CPU, W equal on all ranks.

        Returns:
            int64 [R, W] on the CPU.

        Raises:
            RankTimeout: A rank did not answer; the transport is broken from then on.
        """
        self.require_working()
        return self._exchange(record)

    def all_to_all(
        self, send: Tensor, send_rows: list[int], recv: Tensor, recv_rows: list[int]
    ) -> Work:
        """Rows to each rank, rows from each rank.

        Args:
            send: uint8 [sum(send_rows), row_bytes], by destination.
            send_rows: [R] rows to each rank.
            recv: uint8 [sum(recv_rows), row_bytes], written by source.
            recv_rows: [R] rows from each rank.
        """
        self.require_working()
        for peer, rows in enumerate(send_rows):
            self.bytes_to[peer] += rows * send.shape[1]
        return self._all_to_all(send, send_rows, recv, recv_rows)

    def all_gather(self, send: Tensor, recv: Tensor, rows: list[int]) -> Work:
        """Everyone's rows to everyone.

        Args:
            send: uint8 [rows[rank], row_bytes].
            recv: uint8 [sum(rows), row_bytes], written by source.
            rows: [R] rows of each rank.
        """
        self.require_working()
        for peer in range(self.world_size):
            self.bytes_to[peer] += rows[self.rank] * send.shape[1]
        return self._all_gather(send, recv, rows)

    def reserve(self, num_bytes: int) -> None:  # noqa: B027 - most need nothing
        """Take what moving that many bytes of this rank takes here; local.

        Raises:
            MemoryError: There is not as much.
        """

    @abstractmethod
    def _exchange(self, record: Tensor) -> Tensor: ...

    @abstractmethod
    def _all_to_all(
        self, send: Tensor, send_rows: list[int], recv: Tensor, recv_rows: list[int]
    ) -> Work: ...

    @abstractmethod
    def _all_gather(self, send: Tensor, recv: Tensor, rows: list[int]) -> Work: ...

    @abstractmethod
    def close(self) -> None:
        """Let go of what the transport holds. Never waits for a lost rank."""

    def announce(self, call: int) -> None:  # noqa: B027 - most agree in one way only
        """Tell ranks that may wait elsewhere that this one takes a call to :meth:`exchange`.

        Args:
            call: Its number, from the ledger.
        """

    def set_timeout(self, timeout_s: float) -> None:
        """Change the limit for every later call; each dispatcher sets its own when it is made."""
        self.timeout_s = timeout_s

    def require_working(self) -> None:
        """Raise at once what broke the transport, if something did."""
        if self.ledger.broken is not None:
            raise self.ledger.broken.with_traceback(None)

    def break_with(self, missing: dict[int, str], during: str) -> CrossdockError:
        """Mark the transport as broken by ranks that did not answer, or said that they failed.

        Args:
            missing: Rank -> what is known of it.
            during: What this rank was waiting in.

        Returns:
            The error to raise, now and in every later call.
        """
        ranks = tuple(sorted(missing))
        failed = any(state.startswith(FAILED) for state in missing.values())
        said = "; ".join(f"rank {rank} {missing[rank]}" for rank in ranks)
        error = (PeerFailed if failed else RankTimeout)(
            f"{said or 'a rank did not answer'}, while rank {self.rank} was in {during} "
            f"(exchange {self.ledger.sequence}, timeout_s {self.timeout_s:g}). The transport is "
            "broken: end this process and start the job again",
            ranks=ranks,
        )
        self.ledger.broken = error
        return error

    def moving(self) -> AbstractContextManager[None]:
        """What this rank does while others count on its rows: if it fails, they hear of it at once.

        There is no next exchange then in which to say so. An error that all ranks raise, or that
        broke the transport already, is nothing to tell.
        """
        return self._moving

    @abstractmethod
    def tell_failure(self, said: str) -> None:
        """End the other ranks' wait for this one, which failed. Never waits for them.

        Args:
            said: What they raise ``PeerFailed`` with.
        """

    @abstractmethod
    def heard(self) -> dict[int, str] | None:
        """Ranks that failed, or are lost as far as ranks have found out, or None.

        Looks at what was told, and waits for no rank.
        """


class _Moving(AbstractContextManager[None]):
    """See :meth:`Transport.moving`; a class, since a generator costs several times as much."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        transport = self._transport
        if error is None or transport.ledger.broken is not None or getattr(error, "agreed", False):
            return
        said = f"{FAILED}: {in_words(error)}"[:_SAID_CHARS]
        transport.break_with({transport.rank: said}, "the middle of a step")
        transport.tell_failure(said)
