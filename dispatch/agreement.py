"""One small exchange before anything else: who called what, with what trouble, and how much.

Every collective call begins with a record of fixed length (it depends on the number of ranks and on
nothing else), also on a rank whose arguments are bad. All ranks then judge the same matrix of
records and come to the same end: the same error everywhere, or the same counts everywhere. Nothing
here knows how records travel.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from crossdock.scratch.errors import (
    CapacityError,
    ConfigError,
    CrossdockError,
    DisagreementError,
    HandleError,
    PeerClosed,
    PeerFailed,
    RoutingError,
)

if TYPE_CHECKING:
    from crossdock.dispatch.transports.base import Transport

__all__ = [
    "Agreement",
    "Ledger",
    "Operation",
    "Problem",
    "ProblemKind",
    "Record",
    "Words",
    "agree",
    "record_words",
]

logger = logging.getLogger(__name__)

MAGIC = 0x43524F5353_01  # "CROSS", protocol version 1
NO_DISPATCHER = -1
_VALUES = 24  # words that an operation may use as it likes (construction: one a setting)
_TEXT_BYTES = 256
_HEADER = 9
_TEXT = slice(_HEADER + _VALUES, _HEADER + _VALUES + _TEXT_BYTES // 8)

E = TypeVar("E", bound=Exception)
Words = npt.NDArray[np.int64]


class Operation(IntEnum):
    """What a rank is calling."""

    CONSTRUCT = 1
    DISPATCH = 2
    REDISPATCH = 3
    COMBINE = 4
    GROW = 5
    LOCK = 6
    UNLOCK = 7
    CHECK = 8
    CLOSE = 9
    ABORT = 10
    GATHER_ATTENTION = 11

    @property
    def title(self) -> str:
        """The call in a user's words."""
        return _TITLES.get(self, self.name.lower())


_TITLES = {
    Operation.CONSTRUCT: "Dispatcher()",
    Operation.REDISPATCH: "dispatch(handle=)",
    Operation.GROW: "bucket growth",
    Operation.GATHER_ATTENTION: "Partition.from_ep",
}


class ProblemKind(IntEnum):
    """Which exception a problem becomes, on every rank."""

    ROUTING = 1
    HANDLE = 2
    CAPACITY = 3
    CONFIG = 4
    GRADIENT = 5
    FAILED = 6


_EXCEPTIONS: dict[ProblemKind, type[CrossdockError]] = {
    ProblemKind.ROUTING: RoutingError,
    ProblemKind.HANDLE: HandleError,
    ProblemKind.CAPACITY: CapacityError,
    ProblemKind.CONFIG: ConfigError,
    ProblemKind.FAILED: PeerFailed,
}


class Problem(NamedTuple):
    """What is wrong on one rank; the text travels to all (its first 256 bytes)."""

    kind: ProblemKind
    text: str

    def error(self, rank: int) -> Exception:
        """The exception that it becomes, if it is the problem of ``rank``."""
        text = f"rank {rank}: {self.text}"
        if self.kind == ProblemKind.GRADIENT:
            return NotImplementedError(text)
        return _EXCEPTIONS[self.kind](text, ranks=(rank,))


@dataclass(kw_only=True, slots=True)
class Record:
    """What one rank says at the start of a collective call.

    Attributes:
        operation: The call.
        dispatcher: The dispatcher it was called on; the same number on all ranks.
        problem: What is wrong on this rank, if anything.
        subject: What the call is about; must be equal on all ranks (a combine's step, say).
        row_limit: Rows that this rank's receive bucket may hold; -1 if it may grow.
        pair_limit: Pairs that this rank's experts may hold; -1 if they may grow.
        num_tokens: T of this rank.
        values: Up to 24 whole numbers, as the operation likes.
        rows: [R] rows to each rank, or None for all zero.
        pairs: [R] pairs to each rank, or None for all zero.
    """

    operation: Operation
    dispatcher: int = NO_DISPATCHER
    problem: Problem | None = None
    subject: int = 0
    row_limit: int = -1
    pair_limit: int = -1
    num_tokens: int = 0
    values: tuple[int, ...] = ()
    rows: list[int] | None = None
    pairs: list[int] | None = None


@dataclass(kw_only=True)
class Ledger:
    """What a transport remembers between exchanges, equal on all ranks.

    Attributes:
        sequence: Calls that were agreed on so far.
        begun: Whether the last of them has begun on the device and may go on between hosts.
        num_dispatchers: Dispatchers constructed so far; gives each its number.
        ended: How each ended dispatcher ended: PeerClosed or PeerFailed.
        broken: The error that broke the transport, raised again by every later call.
    """

    sequence: int = 0
    begun: bool = False
    num_dispatchers: int = 0
    ended: dict[int, CrossdockError] = field(default_factory=dict)
    broken: CrossdockError | None = None


@dataclass(kw_only=True, slots=True)
class Agreement:
    """The records of all ranks, after they were found to fit together.

    Attributes:
        sequence: Number of this exchange.
        row_limits: [R] ints, -1 where growth is allowed.
        pair_limits: [R] ints, -1 where growth is allowed.
        num_tokens: [R] ints.
        values: int64 [R, 24].
        rows: int64 [R, R], rows from (row index) to (column index).
        pairs: int64 [R, R], pairs likewise.
    """

    sequence: int
    row_limits: list[int]
    pair_limits: list[int]
    num_tokens: list[int]
    values: Words
    rows: Words
    pairs: Words

    @staticmethod
    def error(exception: E) -> E:
        """Mark an error that all ranks raise alike."""
        return mark_agreed(exception)


def mark_agreed(exception: E) -> E:
    """Say on the exception itself that every rank raises it in the same call."""
    exception.agreed = True  # type: ignore[attr-defined]
    return exception


def record_words(world_size: int) -> int:
    """Length of a record in int64 words."""
    return _TEXT.stop + 2 * world_size


def encode(record: Record, sequence: int, world_size: int) -> Tensor:
    """A record as int64 [record_words(world_size)] on the CPU."""
    kind, text = record.problem if record.problem else (0, "")
    assert len(record.values) <= _VALUES
    words = np.zeros(record_words(world_size), dtype=np.int64)
    words[: _HEADER + len(record.values)] = (
        MAGIC,
        record.dispatcher,
        record.operation,
        sequence,
        kind,
        record.subject,
        record.row_limit,
        record.pair_limit,
        record.num_tokens,
        *record.values,
    )
    if record.rows is not None:
        words[_TEXT.stop : _TEXT.stop + world_size] = record.rows
    if record.pairs is not None:
        words[_TEXT.stop + world_size :] = record.pairs
    if text:
        raw = _fit(text)
        words[_TEXT].view(np.uint8)[: len(raw)] = np.frombuffer(raw, dtype=np.uint8)
    return torch.from_numpy(words)


def _fit(text: str) -> bytearray:
    raw = text.encode(errors="backslashreplace")
    if len(raw) > _TEXT_BYTES:
        raw = raw[: _TEXT_BYTES - 3].decode(errors="ignore").encode() + b"..."
    return bytearray(raw)


def _text(words: Words) -> str:
    raw = words[_TEXT].tobytes()
    return raw.rstrip(b"\0").decode(errors="replace")


def agree(transport: Transport, record: Record) -> Agreement:
    """Exchange records and judge them. Collective.

    Args:
        transport: Of the EP group.
        record: What this rank says.

    Returns:
        The records of all ranks.

    Raises:
        PeerFailed: A rank aborted.
        PeerClosed: A rank closed the dispatcher that this one is calling.
        DisagreementError: Ranks called different operations, dispatchers or subjects.
        RoutingError, HandleError, CapacityError, ConfigError, NotImplementedError: The problem of
            the first rank that has one.
        RankTimeout: A rank did not answer.
    """
    ledger = transport.ledger
    if not ledger.begun:
        ledger.sequence += 1
        transport.announce(ledger.sequence)
    ledger.begun = False
    size = transport.world_size
    # Small arrays, not tensors, which cost more on a processor that has just done something else.
    matrix = transport.exchange(encode(record, ledger.sequence, size)).numpy()
    header = matrix[:, :_HEADER].T.tolist()
    judge(matrix, header, record, ledger)
    return Agreement(
        sequence=ledger.sequence,
        row_limits=header[6],
        pair_limits=header[7],
        num_tokens=header[8],
        values=matrix[:, _HEADER : _TEXT.start],
        rows=matrix[:, _TEXT.stop : _TEXT.stop + size],
        pairs=matrix[:, _TEXT.stop + size :],
    )


def judge(matrix: Words, header: list[list[int]], mine: Record, ledger: Ledger) -> None:
    """Raise what the matrix of records calls for; every rank comes to the same end.

    Args:
        matrix: int64 [R, record_words(R)].
        header: Its first columns.
        mine: This rank's own record.
        ledger: Ended dispatchers are entered here.
    """
    magic, dispatchers, operations, sequences, kinds, subjects = header[:6]
    leaving = mine.operation in (Operation.CLOSE, Operation.ABORT)
    if not leaving and not any(kinds) and all(len(set(words)) == 1 for words in header[:6]):
        return  # all say the same and nobody has trouble, as nearly always
    foreign = [rank for rank, word in enumerate(magic) if word != MAGIC]
    if foreign:
        raise mark_agreed(
            DisagreementError(
                f"rank {foreign[0]} speaks another version of the protocol "
                f"({magic[foreign[0]]:#x}, not {MAGIC:#x}): install one version everywhere",
                ranks=tuple(foreign),
            )
        )
    ending = _judge_endings(matrix, dispatchers, operations, ledger)
    if ending is not None and not leaving:
        raise ending
    if leaving:
        return
    calls = list(zip(operations, dispatchers, sequences, subjects, strict=True))
    first = next((rank for rank, kind in enumerate(kinds) if kind), None)
    if len({call[:3] for call in calls}) > 1 or (first is None and len(set(calls)) > 1):
        raise mark_agreed(_disagreement(calls))
    if first is None:
        return
    raise mark_agreed(Problem(ProblemKind(kinds[first]), _text(matrix[first])).error(first))


def _judge_endings(
    matrix: Words, dispatchers: list[int], operations: list[int], ledger: Ledger
) -> CrossdockError | None:
    """Enter closed and aborted dispatchers; the error for ranks that did not end one."""
    first: CrossdockError | None = None
    for rank, (dispatcher, operation) in enumerate(zip(dispatchers, operations, strict=True)):
        if operation == Operation.ABORT:
            reason = _text(matrix[rank])
            error: CrossdockError = PeerFailed(
                f"rank {rank} failed between two calls: {reason}", ranks=(rank,)
            )
        elif operation == Operation.CLOSE:
            error = PeerClosed(
                f"rank {rank} closed dispatcher {dispatcher}; all ranks must close together",
                ranks=(rank,),
            )
        else:
            continue
        mark_agreed(error)
        # A failure explains more than a closure does.
        if first is None or (isinstance(error, PeerFailed) and isinstance(first, PeerClosed)):
            first = error
        ledger.ended.setdefault(dispatcher, error)
    return first


def _disagreement(calls: list[tuple[int, int, int, int]]) -> DisagreementError:
    by_call: dict[tuple[int, int, int, int], list[int]] = {}
    for rank, call in enumerate(calls):
        by_call.setdefault(call, []).append(rank)
    said = [
        f"{_ranks(ranks)} called {Operation(operation).title} on "
        + (f"dispatcher {dispatcher}" if dispatcher != NO_DISPATCHER else "no dispatcher")
        + f" (exchange {sequence}, subject {subject})"
        for (operation, dispatcher, sequence, subject), ranks in by_call.items()
    ]
    minority = min(by_call.values(), key=len)
    return DisagreementError(
        "ranks must make the same calls in the same order: " + "; ".join(said),
        ranks=tuple(minority),
    )


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
