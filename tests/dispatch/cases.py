"""Inputs of a few steps, made alike on every rank, and what ranks do with them.

A ``Case`` is small and pickles: each rank makes its tensors from the seed, and so does the test
that checks what came back.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from crossdock.dispatch import (
    DispatchConfig,
    Dispatcher,
    ExpertPlacement,
    Handle,
    ReceivedRows,
    Topology,
)
from crossdock.dispatch.transports.base import Transport

NAN = float("nan")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What one rank dispatches in one step, on the CPU."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor

    def to(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        return self.x.to(device), self.topk_idx.to(device), self.topk_weights.to(device)


@dataclass(frozen=True, kw_only=True)
class Case:
    """``tokens[step][rank]`` tokens, and how they are routed.

    ``routing``: "uniform" distinct experts; "one expert": every token to expert 0 and no other;
    "none": only -1; "not rank N": nothing for that rank's experts. ``unrouted`` of the choices
    become -1. Weights of unrouted choices are NaN: nobody may look at them.
    """

    config: DispatchConfig
    owner: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    routing: str = "uniform"
    unrouted: float = 0.1
    seed: int = 0
    idx_dtype: torch.dtype = torch.int64

    @property
    def world_size(self) -> int:
        return len(self.tokens[0])

    @property
    def num_steps(self) -> int:
        return len(self.tokens)

    def placement(self) -> ExpertPlacement:
        return ExpertPlacement.from_owner(torch.tensor(self.owner), ep_size=self.world_size)

    def dispatcher(self, transport: Transport, **options: Any) -> Dispatcher:
        return Dispatcher(
            self.config,
            transport,
            topology=data_parallel(transport.world_size),
            placement=self.placement(),
            **options,
        )

    def batch(self, step: int, rank: int) -> Batch:
        config = self.config
        generator = self._generator(step, rank)
        num_tokens = self.tokens[step][rank]
        x = spread(num_tokens, config.hidden, config.dtype, generator)
        order = torch.rand(num_tokens, config.num_experts, generator=generator).argsort(dim=1)
        topk_idx = torch.full((num_tokens, config.top_k), -1)
        chosen = order[:, : config.top_k]
        topk_idx[:, : chosen.shape[1]] = chosen
        columns = torch.rand(num_tokens, config.top_k, generator=generator).argsort(dim=1)
        topk_idx = topk_idx.gather(1, columns)
        dropped = torch.rand(num_tokens, config.top_k, generator=generator) < self.unrouted
        topk_idx[dropped] = -1
        if self.routing == "one expert":
            topk_idx[:] = -1
            topk_idx[:, -1] = 0
        elif self.routing == "none":
            topk_idx[:] = -1
        elif self.routing.startswith("not rank "):
            avoided = int(self.routing.removeprefix("not rank "))
            topk_idx[owner_of(self.owner, topk_idx) == avoided] = -1
        weights = torch.rand(num_tokens, config.top_k, generator=generator)
        weights[topk_idx == -1] = NAN
        return Batch(x=x, topk_idx=topk_idx.to(self.idx_dtype), topk_weights=weights)

    def results(self, step: int, rank: int, num_rows: int) -> Tensor:
        """What the experts of ``rank`` are made to say: noise of many magnitudes."""
        generator = self._generator(step, 1000 + rank)
        return spread(num_rows, self.config.hidden, self.config.dtype, generator)

    def _generator(self, step: int, rank: int) -> torch.Generator:
        return torch.Generator().manual_seed((self.seed * 1009 + step) * 10007 + rank)


@dataclass(kw_only=True)
class Step:
    """What one rank saw of one step: copies, so they outlive the slot."""

    x: Tensor
    scale: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor
    source: Tensor
    rows_per_expert: Tensor
    num_rows: int
    num_pairs: int
    capacity: int
    out: Tensor | None = None


@dataclass(kw_only=True)
class Attempt:
    """A call that may fail: its error or value, and how long it took."""

    error: BaseException | None = None
    value: Any = None
    seconds: float = field(default=0.0)


def attempt(call: Callable[[], Any]) -> Attempt:
    started = time.monotonic()
    try:
        value, error = call(), None
    except Exception as failure:
        value, error = None, failure
    return Attempt(error=error, value=value, seconds=time.monotonic() - started)


def data_parallel(world_size: int) -> Topology:
    return Topology(ranks_per_node=world_size, dp=world_size)


def linear_owner(num_experts: int, world_size: int) -> tuple[int, ...]:
    """The first E % R ranks hold one more, in order."""
    base, extra = divmod(num_experts, world_size)
    return tuple(r for r in range(world_size) for _ in range(base + (r < extra)))


def simple_case(
    tokens: Sequence[Sequence[int]],
    *,
    num_experts: int = 8,
    top_k: int = 3,
    hidden: int = 16,
    owner: Sequence[int] | None = None,
    routing: str = "uniform",
    unrouted: float = 0.1,
    seed: int = 0,
    idx_dtype: torch.dtype = torch.int64,
    **settings: Any,
) -> Case:
    """A case with linear placement, debug on, and a short timeout, unless told otherwise."""
    world_size = len(tokens[0])
    settings = {"debug": True, "timeout_s": 20.0} | settings
    return Case(
        config=DispatchConfig(num_experts=num_experts, top_k=top_k, hidden=hidden, **settings),
        owner=tuple(owner) if owner is not None else linear_owner(num_experts, world_size),
        tokens=tuple(map(tuple, tokens)),
        routing=routing,
        unrouted=unrouted,
        seed=seed,
        idx_dtype=idx_dtype,
    )


def ragged(ranks: int, *, steps: int = 3, seed: int = 0, most: int = 300, **settings: Any) -> Case:
    """Tokens that change from step to step and from rank to rank, none at all included."""
    draw = random.Random(f"{ranks} {seed}")
    tokens = [tuple(draw.choice([0, 1, 17, most]) for _ in range(ranks)) for _ in range(steps)]
    settings = {"num_experts": 10, "top_k": 4, "hidden": 136} | settings
    return simple_case(tokens, seed=seed, **settings)


def owner_of(owner: Sequence[int], topk_idx: Tensor) -> Tensor:
    """Owning rank of each choice, -1 for an unrouted one."""
    return torch.tensor([*owner, -1])[topk_idx.long()]


def spread(rows: int, hidden: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Normal noise times 2**-6 .. 2**6: sums depend on their order."""
    noise = torch.randn(rows, hidden, generator=generator)
    exponent = torch.randint(-6, 7, (rows, hidden), generator=generator)
    return (noise * torch.exp2(exponent.float())).to(dtype)


def copy_rows(rows: ReceivedRows) -> Step:
    """The received rows, without the tail."""
    n = rows.num_rows
    return Step(
        x=rows.x[:n].cpu().clone(),
        scale=None if rows.scale is None else rows.scale[:n].cpu().clone(),
        topk_idx=rows.topk_idx[:n].cpu().clone(),
        topk_weights=rows.topk_weights[:n].cpu().clone(),
        source=rows.source[:n].cpu().clone(),
        rows_per_expert=rows.rows_per_expert.cpu().clone(),
        num_rows=rows.num_rows,
        num_pairs=rows.num_pairs,
        capacity=rows.capacity,
    )


def fill_results(case: Case, step: int, rank: int, rows: ReceivedRows) -> None:
    """Write y as experts do: results, 0 for rows without a local expert; the tail is poisoned."""
    n = rows.num_rows
    y = case.results(step, rank, n)
    y[(rows.topk_idx[:n].cpu() < 0).all(dim=1)] = 0
    rows.y[:n] = y.to(rows.y.device)
    rows.y[n:] = NAN


def send(dispatcher: Dispatcher, batch: Batch, device: torch.device) -> tuple[ReceivedRows, Handle]:
    return dispatcher.dispatch(*batch.to(device))


def one_step(dispatcher: Dispatcher, transport: Transport, case: Case, step: int) -> Step:
    """Dispatch, stand-in experts, combine."""
    rows, handle = send(dispatcher, case.batch(step, transport.rank), transport.device)
    return finish_step(dispatcher, case, step, rows, handle)


def finish_step(
    dispatcher: Dispatcher, case: Case, step: int, rows: ReceivedRows, handle: Handle
) -> Step:
    """Stand-in experts and the combine of a dispatched step."""
    seen = copy_rows(rows)
    fill_results(case, step, dispatcher.transport.rank, rows)
    seen.out = dispatcher.combine(rows.y, handle).cpu().clone()
    return seen


def all_steps(transport: Transport, case: Case) -> list[Step]:
    with case.dispatcher(transport) as dispatcher:
        return [one_step(dispatcher, transport, case, step) for step in range(case.num_steps)]
