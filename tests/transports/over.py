"""Running the dispatcher's own tests over another transport."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import tests.dispatch.test_lost_ranks as lost
from crossdock.dispatch import connect
from crossdock.dispatch.transports.base import Transport
from tests.harness.child import Seat
from tests.harness.pool import HANG_S, Pools


class Over:
    """``over(world_size, fn, *args)``: processes of the gloo pool, joined by another transport."""

    is_local = False

    def __init__(self, name: str, pools: Pools) -> None:
        self.kind = name
        self._pools = pools

    def __call__(
        self, world_size: int, fn: Callable[..., Any], *args: Any, hang_s: float = HANG_S
    ) -> list[Any]:
        pool = self._pools.get(world_size, "gloo")
        return pool.run(call_over, self.kind, fn, *args, hang_s=hang_s)


def call_over(pooled: Transport, name: str, fn: Callable[..., Any], *args: Any) -> Any:
    transport = connect(name)
    try:
        return fn(transport, *args)
    finally:
        transport.close()


def leave_out_what_does_not_use(module: dict[str, Any], *fixtures: str) -> None:
    """Remove imported tests that would only repeat themselves, whatever the transport."""
    for name, value in list(module.items()):
        if name.startswith("test_") and inspect.isfunction(value):
            wanted = inspect.signature(inspect.unwrap(value)).parameters
            if not set(fixtures) & set(wanted):
                del module[name]


def live_over(seat: Seat, link: Connection, name: str, *args: Any) -> None:
    """A rank of ``test_lost_ranks`` that works over another transport."""
    lost.open_transport = lambda _: connect(name)
    lost.live(seat, link, *args)
