"""Memory that all ranks take together, or none does: first take, then agree, then swap."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from crossdock.dispatch.agreement import Agreement, Operation, Problem
from crossdock.dispatch.buckets import Bucket
from crossdock.dispatch.checks import Attempt
from crossdock.dispatch.handle import Handle
from crossdock.dispatch.mover import Mover

__all__ = ["Growth"]


class Growth:
    """Growth of a dispatcher's slots. All its calls are collective.

    Args:
        buckets: Of each slot.
        mover: Takes what a way needs beside them, and knows how large rows are.
        agree: Exchanges a record of the dispatcher: operation, and what is wrong on this rank.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        mover: Mover,
        agree: Callable[[Operation, Problem | None], Agreement],
    ) -> None:
        self._buckets, self._mover, self._agree = buckets, mover, agree

    def grow(self, slots: Sequence[int], rows: int, *, with_y: bool = False) -> None:
        """Take memory for that many rows in each of the slots.

        Raises:
            CapacityError: Some rank has not as much; all are as they were.
        """
        buckets = [self._buckets[slot] for slot in slots]
        with Attempt(f"memory for a receive bucket of {self._size_of(rows)}") as attempt:
            for bucket in buckets:
                bucket.prepare(rows, with_y=with_y)
        try:
            self._agree(Operation.GROW, attempt.problem)
            self.connect(slots)
        except BaseException:
            for bucket in buckets:
                bucket.cancel()
            raise
        for bucket in buckets:
            bucket.commit()

    def reserve(self, slot: int, handle: Handle, agreement: Agreement) -> None:
        """Take what the way of a step needs beside its bucket, if some rank has less.

        Raises:
            CapacityError: Some rank cannot.
        """
        transport = self._mover.transport
        needs = self._mover.needs(handle, agreement.num_tokens)
        held = agreement.values[:, 2].tolist()
        if all(need <= room for need, room in zip(needs, held, strict=True)):
            return
        rows = needs[transport.rank]
        with Attempt(f"memory for rows that pass through: {self._size_of(rows)}") as attempt:
            self._mover.reserve(slot, rows)
        self._agree(Operation.GROW, attempt.problem)

    def connect(self, slots: Sequence[int]) -> None:
        """Let every rank reach the newest memory of slots, if it has to.

        Raises:
            CapacityError: Some rank cannot.
        """
        if not self._mover.connects:
            return
        commit = None
        with Attempt("way to the other ranks' receive buckets") as attempt:
            commit = self._mover.connect([(slot, self._buckets[slot].newest) for slot in slots])
        self._agree(Operation.GROW, attempt.problem)
        assert commit is not None
        commit()

    def _size_of(self, rows: int) -> str:
        row_bytes = self._mover.wire.row_bytes
        return f"{rows} rows x {row_bytes} bytes = {rows * row_bytes} bytes"
