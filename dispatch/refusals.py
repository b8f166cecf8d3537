"""What all ranks refuse alike, once they have everybody's counts and limits."""

from __future__ import annotations

from crossdock.dispatch.agreement import Agreement, mark_agreed
from crossdock.dispatch.config import DTYPES, DispatchConfig
from crossdock.scratch.errors import DisagreementError, LockedError

__all__ = ["refuse_what_does_not_fit", "require_one_dtype", "require_one_slot"]


def refuse_what_does_not_fit(
    agreement: Agreement,
    rows: list[int],
    pairs: list[int],
    outbox: list[int],
    *,
    config: DispatchConfig,
) -> None:
    """Raise before anything moves if a step is too large for what some rank locked.

    Args:
        agreement: Has the limits of every rank.
        rows: [R] rows that each rank would receive.
        pairs: [R] pairs that each rank would receive.
        outbox: [R] rows that each rank's outbox, which is as large as its bucket, would hold.
        config: Says whether buckets are fixed.

    Raises:
        LockedError: Names the first rank, its need, its capacity and the setting.
    """
    fixed = config.bucket != "grow"
    bucket = f"dispatch.bucket = {config.bucket}" + ("" if fixed else ", locked")
    row_limits, pair_limits = agreement.row_limits, agreement.pair_limits
    for verb, what, holder, needs, limits, setting in (
        ("receive", "rows", "its receive bucket holds", rows, row_limits, bucket),
        ("receive", "pairs", "its experts hold", pairs, pair_limits, "lock(pair_capacity=)"),
        (
            "put",
            "rows",
            "its outbox, as large as its receive bucket, holds",
            outbox,
            row_limits,
            bucket,
        ),
    ):
        for rank, (need, limit) in enumerate(zip(needs, limits, strict=True)):
            if 0 <= limit < need:
                advice = (
                    f"a dispatch.bucket of {need} or more"
                    if fixed and what == "rows"
                    else "unlock(), run a step of this size, lock() again"
                )
                error = LockedError(
                    f"rank {rank} would {verb} {need} {what}, but {holder} {limit} and may "
                    f"not grow ({setting}). Nothing has moved. Send less, or: {advice}",
                    ranks=(rank,),
                )
                raise mark_agreed(error)


def require_one_dtype(agreement: Agreement) -> None:
    """Raise if results have another dtype on some rank.

    Raises:
        DisagreementError: Names the first rank that differs from rank 0, and both dtypes.
    """
    codes = agreement.values[:, 0].tolist()
    differ = [rank for rank, code in enumerate(codes) if code != codes[0]]
    if differ:
        raise mark_agreed(
            DisagreementError(
                f"combine: y is {DTYPES[codes[0]]} on rank 0 and {DTYPES[codes[differ[0]]]} on "
                f"rank {differ[0]}: one dtype on all ranks",
                ranks=(differ[0],),
            )
        )


def require_one_slot(slots: list[int]) -> None:
    """Raise if ranks chose different slots where a slot's memory is one over all ranks.

    Args:
        slots: [R] what each rank chose.

    Raises:
        DisagreementError: Names the first rank that differs from rank 0, and both slots.
    """
    differ = [rank for rank, slot in enumerate(slots) if slot != slots[0]]
    if differ:
        raise mark_agreed(
            DisagreementError(
                f"dispatch: slot {slots[0]} is free on rank 0 and slot {slots[differ[0]]} on rank "
                f"{differ[0]}: wait() for staged combines in one order on all ranks, before the "
                "next dispatch",
                ranks=(differ[0],),
            )
        )
