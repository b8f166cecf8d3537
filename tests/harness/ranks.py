"""One way to run a function on N ranks, over each transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch

from crossdock.dispatch import run_local
from tests.harness.pool import HANG_S, Pools

Kind = Literal["local", "gloo", "local-cuda", "nccl"]
CPU_KINDS: tuple[Kind, ...] = ("local", "gloo")
ALL_KINDS = (
    *CPU_KINDS,
    pytest.param("local-cuda", marks=pytest.mark.gpu),
    pytest.param("nccl", marks=pytest.mark.gpu),
)


class Ranks:
    """``ranks(world_size, fn, *args)`` is ``[fn(transport, *args) of every rank]``.

    Threads for ``local``, processes for ``gloo`` and ``nccl``: ``fn`` must be a module's function,
    its arguments and results must pickle, and what it returns must not be a view of a slot.
    """

    def __init__(self, kind: Kind, pools: Pools) -> None:
        self.kind = kind
        self._pools = pools

    @property
    def is_local(self) -> bool:
        return self.kind.startswith("local")

    def __call__(
        self, world_size: int, fn: Callable[..., Any], *args: Any, hang_s: float = HANG_S
    ) -> list[Any]:
        if self.kind == "local":
            return run_local(world_size, lambda transport: fn(transport, *args))
        if self.kind == "local-cuda":
            return run_local(world_size, lambda transport: fn(transport, *args), device="cuda")
        if self.kind == "nccl" and world_size > torch.cuda.device_count():
            pytest.skip(f"{world_size} ranks of NCCL want as many GPUs")
        return self._pools.get(world_size, self.kind).run(fn, *args, hang_s=hang_s)
