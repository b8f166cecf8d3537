"""Captured steps, whose experts give back what they got."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from crossdock.dispatch import Dispatcher
from tests.dispatch.cases import Batch, Case


def record(step: Callable[[], None]) -> Callable[[], None]:
    """Capture a step; what replays it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


class Graph:
    """A captured step whose experts give every row back as it came."""

    def __init__(self, dispatcher: Dispatcher, case: Case, num_tokens: int) -> None:
        config, device = case.config, dispatcher.transport.device
        self.dispatcher = dispatcher
        self.x = torch.zeros(num_tokens, config.hidden, dtype=config.dtype, device=device)
        self.ids = torch.full((num_tokens, config.top_k), -1, device=device)
        self.weights = torch.zeros(num_tokens, config.top_k, device=device)
        self.owner = torch.tensor([*case.owner, -1], device=device)
        self.ranks = dispatcher.transport.world_size
        self.replay_graph = record(self.step)

    def step(self) -> None:
        self.rows, handle = self.dispatcher.dispatch(self.x, self.ids, self.weights)
        self.rows.y.copy_(self.rows.x)
        self.out = self.dispatcher.combine(self.rows.y, handle)

    def fill(self, batch: Batch) -> None:
        n = len(batch.x)
        self.x[:n] = batch.x.to(self.x.device)
        self.ids.fill_(-1)
        self.ids[:n] = batch.topk_idx.to(self.x.device)
        self.weights.fill_(float("nan"))
        self.weights[:n] = batch.topk_weights.to(self.x.device)

    def spoil(self, what: str) -> None:
        """Make token 3 wrong: its second id or weight."""
        self.ids[3] = -1
        self.ids[3, :3] = torch.tensor([1, 2, 3])
        self.weights[3] = 1
        if what == "id":
            self.ids[3, 1] = 999
        elif what == "repeat":
            self.ids[3, 1] = 3
        else:
            self.weights[3, 1] = float("nan")

    def replay(self) -> None:
        self.out.fill_(7)
        self.replay_graph()

    def is_right(self) -> bool:
        want = torch.zeros_like(self.x, dtype=torch.float32)
        for times in self.times():
            want += (self.x.float() * times[:, None]).to(self.x.dtype).float()
        return torch.equal(self.out, want.to(self.x.dtype))

    def times(self) -> list[Tensor]:
        """How often each rank's results hold each token's x."""
        owners = self.owner[self.ids]
        return [(owners == rank).any(1) for rank in range(self.ranks)]


class PairGraph(Graph):
    """The same where rows are pairs, all of weight 1."""

    def fill(self, batch: Batch) -> None:
        super().fill(batch)
        self.weights.fill_(1)

    def times(self) -> list[Tensor]:
        owners = self.owner[self.ids]
        return [(owners == rank).sum(1) for rank in range(self.ranks)]
