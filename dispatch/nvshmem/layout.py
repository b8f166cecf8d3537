"""Where everything lies, in the words and bytes that ``dispatch/cuda/group.cuh`` describes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from crossdock.dispatch.placement import ExpertPlacement
from crossdock.dispatch.wire import WireFormat, num_blocks

__all__ = [
    "BY_ROUTE",
    "CHUNK",
    "CONTROL_AT",
    "HERE",
    "MAX_RANKS",
    "WARP",
    "BucketLayout",
    "Header",
    "Kind",
    "Report",
    "State",
    "begun_words",
    "control_stand_in",
    "control_words",
    "distant_bits",
    "expert_codes",
    "experts_by_rank",
    "matrix_words",
    "pair_way_words",
    "record_words",
    "records_at",
    "state_words",
    "way_words",
]

CHUNK = 128
WARP = 32
# Instead of a call's number: `rows` is to post the record of a step, or `route` has, in a graph.
HERE, BY_ROUTE = 0, -1
MAX_RANKS = 64
CONTROL_AT = 17  # word of a ``Group`` at which addresses begin
_CODE_BITS = 24
_NUM_SIGNALS = 3
_NUM_PAGES = 4
_SIGNAL_WORDS = 16
_ALIGN = 256


class State(IntEnum):
    """Words of a dispatcher's own device memory."""

    DISPATCHES = 0
    COMBINES = 1
    ROUTE_TICKET = 2
    ROWS_TICKET = 3
    COMBINE_TICKET = 4
    BROKEN = 5
    WORST = 6
    PAIRS = 7


class Header(IntEnum):
    """Words of a record, before its counts."""

    KIND = 0
    CALL = 1
    SLOT = 2
    PAIR_LIMIT = 3
    TOKEN = 4
    COLUMN = 5
    VALUE = 6
    HEADER = 7


class Kind(IntEnum):
    """Why a step was refused."""

    FINE = 0
    OUTSIDE = 1
    REPEATED = 2
    NOT_FINITE = 3
    TOO_MANY_ROWS = 4
    TOO_MANY_PAIRS = 5
    TOO_MANY_PUTS = 6


class Report(IntEnum):
    """Words of pinned memory through which kernels report."""

    WHAT = 0
    RANK = 1
    FIRST = 2
    SECOND = 3
    THIRD = 4
    IN_VAIN = 7
    LATE = 8


@dataclass(frozen=True, kw_only=True)
class BucketLayout:
    """Bytes of a bucket at which its parts begin; the payload comes first.

    Attributes:
        scale: fp32 [C, ceil(H / 128)], nothing unless the wire is fp8.
        ids: int64 [C, K].
        weights: fp32 [C, K].
        source: int64 [C, source_words].
        y: [C, y_bytes].
        y_bytes: Of one row of results.
        num_bytes: Of all.
    """

    scale: int
    ids: int
    weights: int
    source: int
    y: int
    y_bytes: int
    num_bytes: int

    @classmethod
    def of(cls, capacity: int, wire: WireFormat, *, source_words: int = 2) -> BucketLayout:
        """For a capacity in rows, whose origin takes so many words."""
        scale_bytes = 4 * num_blocks(wire.hidden) if wire.fp8 else 0
        # Eight columns of the widest dtype always fit, so that any results can go in parts.
        y_bytes = max(wire.hidden * wire.dtype.itemsize, 32)
        sizes = (
            wire.hidden * wire.payload_dtype.itemsize,
            scale_bytes,
            8 * wire.top_k,
            4 * wire.top_k,
            8 * source_words,
            y_bytes,
        )
        starts = [0]
        for size in sizes:
            starts.append(-(-(starts[-1] + capacity * size) // _ALIGN) * _ALIGN)
        scale, ids, weights, source, y, end = starts[1:]
        return cls(
            scale=scale,
            ids=ids,
            weights=weights,
            source=source,
            y=y,
            y_bytes=y_bytes,
            num_bytes=end,
        )


def way_words(num_tokens: int, num_experts: int, ranks: int, top_k: int) -> int:
    """Words of 8 bytes of a step's routing."""
    chunks = max(1, -(-num_tokens // CHUNK))
    words = Header.HEADER + 2 * ranks + num_experts + 2 * ranks + num_tokens
    return words + -(-(chunks * ranks + num_tokens * (2 * top_k + ranks)) // 2)


def pair_way_words(num_tokens: int, num_experts: int, ranks: int, top_k: int) -> int:
    """As :func:`way_words`, of the expert-major layout."""
    chunks = max(1, -(-num_tokens // CHUNK))
    halves = (1 + chunks) * num_experts + num_tokens * (1 + 5 * top_k)
    return Header.HEADER + 2 * ranks + 2 * num_experts + -(-halves // 2)


def record_words(ranks: int, num_told: int) -> int:
    """Words of a record that tells the pairs of so many experts."""
    return Header.HEADER + 2 * ranks + num_told


def control_words(ranks: int, record_words: int, *, has_distant: bool) -> int:
    """Words of a rank's signals and its pages of records, and as many of those on their way."""
    num_pages = 2 * _NUM_PAGES if has_distant else _NUM_PAGES
    return _NUM_SIGNALS * ranks * _SIGNAL_WORDS + num_pages * ranks * record_words


def control_stand_in(own: int, rank: int, distant: int, ranks: int, record_words: int) -> int:
    """Address that stands for a distant rank's control block when a record is written.

    The kernels write it as number ``rank`` of a page there; from this address that is number
    ``distant`` of a page behind those that are this rank's own.

    Args:
        own: Address of this rank's control block.
        rank: This rank.
        distant: The other.
        ranks: R.
        record_words: Of one record.
    """
    return own + 8 * (_NUM_PAGES * ranks + distant - rank) * record_words


def distant_bits(reach: Tensor) -> Tensor:
    """int64 [MAX_RANKS], for each rank a bit for each whose memory it has no address for.

    Args:
        reach: bool [R, R], whether (row index) has an address for the memory of (column).
    """
    bits = torch.zeros(MAX_RANKS, dtype=torch.int64)
    bits[: len(reach)] = ((~reach).long() << torch.arange(len(reach))).sum(1)
    return bits


def begun_words(ranks: int) -> int:
    """Words of a transport's signals, of which there is one a rank."""
    return ranks * _SIGNAL_WORDS


def matrix_words(ranks: int) -> int:
    """Words that an eager dispatch gives to the host: see ``Matrix``."""
    return records_at(ranks) + ranks * (Header.HEADER + 2 * ranks)


def records_at(ranks: int) -> int:
    """Word of those at which all records begin, without their experts."""
    return 2 + 3 * ranks


def state_words(ranks: int, num_experts: int) -> int:
    """Words of a dispatcher's own device memory."""
    return State.PAIRS + ranks + num_experts


def expert_codes(placement: ExpertPlacement) -> Tensor:
    """int32 [E]: owner above, local id in the low 24 bits."""
    return (placement.owner << _CODE_BITS | placement.local_ids).to(torch.int32)


def experts_by_rank(placement: ExpertPlacement) -> Tensor:
    """int32 [R, most local experts of a rank]: global ids by local id, -1 past them."""
    most = max(placement.num_local_experts(rank) for rank in range(placement.ep_size))
    table = torch.full((placement.ep_size, most), -1, dtype=torch.int32)
    table[placement.owner, placement.local_ids] = torch.arange(
        placement.num_experts, dtype=torch.int32
    )
    return table
