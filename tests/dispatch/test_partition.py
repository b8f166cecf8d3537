"""Partition: attention layout to EP-local tokens and back, under DP, PCP and SP."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from crossdock.dispatch import Partition, Topology, errors, pcp_chunks
from crossdock.dispatch.transports.base import Transport
from tests.dispatch.cases import Attempt, attempt

GRIDS = [
    (dp, pcp, tp)
    for dp in range(1, 9)
    for pcp in range(1, 9)
    for tp in range(1, 9)
    if dp * pcp * tp <= 8
]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Batches of every DP replica on one grid."""

    dp: int
    pcp: int
    tp: int
    sequence_parallel: bool
    prefill: tuple[tuple[int, ...], ...]
    decode: tuple[int, ...]

    @property
    def topology(self) -> Topology:
        return Topology(ranks_per_node=self.world_size, dp=self.dp, pcp=self.pcp, tp=self.tp)

    @property
    def world_size(self) -> int:
        return self.dp * self.pcp * self.tp

    def partition(self, rank: int) -> Partition:
        dp = self.topology.coordinates(rank).dp
        return Partition(
            self.topology,
            rank,
            prefill_lengths=list(self.prefill[dp]),
            num_decode=self.decode[dp],
            sequence_parallel=self.sequence_parallel,
        )

    def attention_tokens(self, rank: int) -> list[tuple[int, int, int]]:
        """(replica, sequence, position) of each token on a rank's attention side; decode is -1."""
        dp, pcp, _ = self.topology.coordinates(rank)
        tokens = []
        for sequence, length in enumerate(self.prefill[dp]):
            chunks = cut(length, 2 * self.pcp)
            for chunk in (pcp, 2 * self.pcp - 1 - pcp):
                tokens += [(dp, sequence, position) for position in chunks[chunk]]
        return tokens + [(dp, -1, token) for token in range(self.decode[dp])]

    def owned_tokens(self, rank: int) -> list[tuple[int, int, int]]:
        _, pcp, tp = self.topology.coordinates(rank)
        owned = [
            token
            for token in self.attention_tokens(rank)
            if token[1] >= 0 or token[2] % self.pcp == pcp
        ]
        if not self.sequence_parallel:
            return owned if tp == 0 else []
        share = -(-len(owned) // self.tp)
        return owned[tp * share : (tp + 1) * share]

    def all_tokens(self) -> Counter[tuple[int, int, int]]:
        return Counter(
            token
            for dp in range(self.dp)
            for token in [
                *((dp, s, p) for s, length in enumerate(self.prefill[dp]) for p in range(length)),
                *((dp, -1, token) for token in range(self.decode[dp])),
            ]
        )


def cut(length: int, pieces: int) -> list[range]:
    base, extra = divmod(length, pieces)
    starts = [0]
    for piece in range(pieces):
        starts.append(starts[-1] + base + (piece < extra))
    return [range(start, end) for start, end in pairwise(starts)]


def as_tensor(tokens: list[tuple[int, int, int]]) -> Tensor:
    return torch.tensor(tokens, dtype=torch.float32).reshape(len(tokens), 3)


def as_tokens(tensor: Tensor) -> list[tuple[int, int, int]]:
    return [tuple(int(value) for value in row) for row in tensor]


def there_and_back(transport: Transport, layout: Layout) -> tuple[int, int, Tensor, Tensor]:
    """What a rank dispatches, and the attention layout after every value was changed."""
    partition = layout.partition(transport.rank)
    x = partition.to_ep(as_tensor(layout.attention_tokens(transport.rank)).to(transport.device))
    out = partition.from_ep(x * 3 + 1, transport)
    return partition.num_attention_tokens, partition.num_owned, x.cpu(), out.cpu()


def check_there_and_back(layout: Layout, results: list) -> None:
    travelled: Counter[tuple[int, int, int]] = Counter()
    for rank, (num_attention, num_owned, x, out) in enumerate(results):
        attention = layout.attention_tokens(rank)
        assert num_attention == len(attention)
        assert num_owned == len(x)
        assert as_tokens(x) == layout.owned_tokens(rank)
        assert torch.equal(out, as_tensor(attention) * 3 + 1)
        travelled.update(as_tokens(x))
    assert travelled == layout.all_tokens()


@st.composite
def layouts(draw) -> Layout:
    dp, pcp, tp = draw(st.sampled_from(GRIDS))
    edges = sorted({0, 1, 2 * pcp - 1, 2 * pcp, 2 * pcp + 1, 17})
    lengths = st.lists(st.sampled_from(edges), max_size=3).map(tuple)
    return Layout(
        dp=dp,
        pcp=pcp,
        tp=tp,
        sequence_parallel=draw(st.booleans()),
        prefill=tuple(draw(lengths) for _ in range(dp)),
        decode=tuple(draw(st.integers(0, 2 * pcp + 1)) for _ in range(dp)),
    )


@given(st.integers(0, 60), st.integers(1, 8))
def test_pcp_chunks_are_chunk_r_and_its_mirror(length, pcp):
    chunks = cut(length, 2 * pcp)
    expected = [[*chunks[r], *chunks[2 * pcp - 1 - r]] for r in range(pcp)]
    assert [list(map(int, positions)) for positions in pcp_chunks(length, pcp)] == expected


@given(st.integers(0, 60), st.integers(1, 8))
def test_pcp_chunks_hold_every_position_once(length, pcp):
    positions = [int(position) for chunk in pcp_chunks(length, pcp) for position in chunk]
    assert sorted(positions) == list(range(length))


@pytest.mark.parametrize("arguments", [(-1, 2), (4, 0), (4, -2)])
def test_pcp_chunks_refuses_sizes_that_make_no_sense(arguments):
    with pytest.raises(errors.ConfigError):
        pcp_chunks(*arguments)


@given(layouts())
@settings(max_examples=80)
def test_each_token_travels_once_and_comes_back_to_all_who_need_it(local, layout):
    check_there_and_back(layout, local(layout.world_size, there_and_back, layout))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("dp", "pcp", "tp"), [(2, 2, 1), (1, 2, 2), (1, 1, 4), (4, 1, 1)])
def test_the_way_there_and_back_over_each_transport(ranks, dp, pcp, tp, sequence_parallel):
    layout = Layout(
        dp=dp,
        pcp=pcp,
        tp=tp,
        sequence_parallel=sequence_parallel,
        prefill=((17, 0, 1, 2 * pcp - 1, 2 * pcp), (), (5,), (0,))[:dp],
        decode=(5, 0, 1, 0)[:dp],
    )
    check_there_and_back(layout, ranks(4, there_and_back, layout))


def test_decode_token_j_belongs_to_pcp_rank_j_modulo_pcp():
    layout = Layout(dp=1, pcp=3, tp=1, sequence_parallel=False, prefill=((),), decode=(7,))
    tokens = as_tensor(layout.attention_tokens(0))
    owned = [layout.partition(rank).to_ep(tokens)[:, 2].tolist() for rank in range(3)]
    assert owned == [[0, 3, 6], [1, 4], [2, 5]]


def test_without_sequence_parallelism_only_tp_rank_zero_dispatches():
    layout = Layout(dp=1, pcp=1, tp=3, sequence_parallel=False, prefill=((4,),), decode=(2,))
    assert [layout.partition(rank).num_owned for rank in range(3)] == [6, 0, 0]


def test_sequence_parallelism_slices_after_ownership_and_pads_nothing():
    layout = Layout(dp=1, pcp=1, tp=4, sequence_parallel=True, prefill=((5,),), decode=(0,))
    assert [layout.partition(rank).num_owned for rank in range(4)] == [2, 2, 1, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32, torch.int64])
def test_to_ep_takes_hidden_states_ids_and_weights(dtype):
    layout = Layout(dp=1, pcp=2, tp=1, sequence_parallel=False, prefill=((4,),), decode=(3,))
    partition = layout.partition(1)
    tokens = torch.arange(partition.num_attention_tokens * 2).reshape(-1, 2).to(dtype)
    owned = partition.to_ep(tokens)
    assert owned.dtype == dtype
    assert owned[:, 0].tolist() == [0, 2, 6]  # two prefill tokens and decode token 1


@pytest.mark.parametrize(
    "arguments", [{"prefill_lengths": [-1]}, {"num_decode": -1}, {"prefill_lengths": [1.5]}]
)
def test_lengths_that_make_no_sense_are_refused(arguments):
    whole = {"prefill_lengths": [], "num_decode": 0} | arguments
    with pytest.raises(errors.ConfigError):
        Partition(Topology(), 0, **whole)


def test_tokens_of_another_layout_are_refused():
    partition = Partition(Topology(), 0, prefill_lengths=[4], num_decode=1)
    with pytest.raises(ValueError, match="5"):
        partition.to_ep(torch.zeros(6, 2))


def results_of_the_wrong_length(transport: Transport) -> Attempt:
    topology = Topology(ranks_per_node=2, pcp=2)
    partition = Partition(topology, transport.rank, prefill_lengths=[8], num_decode=2)
    wrong = 1 if transport.rank == 1 else 0
    return attempt(
        lambda: partition.from_ep(
            torch.zeros(partition.num_owned + wrong, 2, device=transport.device), transport
        )
    )


def test_results_of_the_wrong_length_on_one_rank_raise_on_all(ranks):
    for seen in ranks(2, results_of_the_wrong_length):
        assert seen.error is not None
        assert seen.seconds < 1


def layouts_that_differ(transport: Transport) -> Attempt:
    topology = Topology(ranks_per_node=2, pcp=2)
    num_decode = 2 + 2 * transport.rank
    partition = Partition(topology, transport.rank, prefill_lengths=[8], num_decode=num_decode)
    return attempt(
        lambda: partition.from_ep(
            torch.zeros(partition.num_owned, 2, device=transport.device), transport
        )
    )


def test_ranks_of_a_replica_that_disagree_on_its_batch_raise_on_all(ranks):
    for seen in ranks(2, layouts_that_differ):
        assert isinstance(seen.error, errors.DisagreementError)
        assert seen.seconds < 1


def fail_between_the_agreement_and_the_rows(transport: Transport) -> Attempt:
    topology = Topology(ranks_per_node=2, pcp=2)
    partition = Partition(topology, transport.rank, prefill_lengths=[8], num_decode=2)
    if transport.rank == 1:
        partition._arriving_from = out_of_memory  # type: ignore[method-assign]
    results = torch.zeros(partition.num_owned, 2, device=transport.device)
    return attempt(lambda: partition.from_ep(results, transport))


def out_of_memory(rank: int) -> Tensor:
    raise MemoryError("no room for indices")


def test_a_rank_that_cannot_get_ready_for_the_rows_tells_the_others(local):
    waiting, failing = local(2, fail_between_the_agreement_and_the_rows)
    assert type(failing.error) is MemoryError
    assert type(waiting.error) is errors.PeerFailed
    assert "no room for indices" in str(waiting.error)
    assert waiting.seconds < 1
