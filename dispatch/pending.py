"""A step on its way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Pending"]

T = TypeVar("T")


class Pending(Generic[T]):
    """What a staged call returns; compute may run until :meth:`wait`."""

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._result: T

    def wait(self) -> T:
        """Wait for the rows and return what the unstaged call would have returned.

        Raises:
            RankTimeout: A rank did not answer.
        """
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result
