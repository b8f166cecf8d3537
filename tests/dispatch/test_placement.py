"""ExpertPlacement: who owns which expert, and under which local id."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from crossdock.dispatch import ExpertPlacement, errors


def maps(placement: ExpertPlacement, ep_size: int) -> list[list[int]]:
    return [placement.expert_map(rank).tolist() for rank in range(ep_size)]


def test_linear_gives_the_first_ranks_one_more():
    assert maps(ExpertPlacement.linear(7, 3), 3) == [
        [0, 1, 2, -1, -1, -1, -1],
        [-1, -1, -1, 0, 1, -1, -1],
        [-1, -1, -1, -1, -1, 0, 1],
    ]


def test_linear_with_fewer_experts_than_ranks_leaves_the_last_ranks_with_none():
    assert maps(ExpertPlacement.linear(2, 4), 4) == [[0, -1], [-1, 0], [-1, -1], [-1, -1]]


def test_round_robin_deals_experts_in_turn():
    assert maps(ExpertPlacement.round_robin(5, 2), 2) == [[0, -1, 1, -1, 2], [-1, 0, -1, 1, -1]]


def test_from_owner_numbers_local_experts_in_ascending_order():
    placement = ExpertPlacement.from_owner(torch.tensor([1, 0, 1, 3, 1]), ep_size=5)
    assert maps(placement, 5) == [
        [-1, 0, -1, -1, -1],
        [0, -1, 1, -1, 2],
        [-1, -1, -1, -1, -1],
        [-1, -1, -1, 0, -1],
        [-1, -1, -1, -1, -1],
    ]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_from_owner_takes_any_int(dtype):
    placement = ExpertPlacement.from_owner(torch.tensor([0, 1], dtype=dtype), ep_size=2)
    assert maps(placement, 2) == [[0, -1], [-1, 0]]


def test_expert_map_is_int32_of_all_experts():
    expert_map = ExpertPlacement.linear(6, 2).expert_map(1)
    assert (expert_map.dtype, tuple(expert_map.shape)) == (torch.int32, (6,))


@given(st.integers(1, 40), st.integers(1, 9), st.sampled_from(["linear", "round_robin"]))
def test_every_expert_has_one_owner_and_shares_differ_by_at_most_one(num_experts, ep_size, kind):
    placement = getattr(ExpertPlacement, kind)(num_experts, ep_size)
    by_rank = torch.stack([placement.expert_map(rank) for rank in range(ep_size)])
    assert ((by_rank >= 0).sum(dim=0) == 1).all()
    counts = (by_rank >= 0).sum(dim=1).tolist()
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)
    for row, count in zip(by_rank, counts, strict=True):
        assert row[row >= 0].tolist() == list(range(count))


@pytest.mark.parametrize(
    "owner",
    [
        pytest.param(torch.tensor([0, -1]), id="negative"),
        pytest.param(torch.tensor([0, 2]), id="past the last rank"),
        pytest.param(torch.tensor([0.0, 1.0]), id="float"),
        pytest.param(torch.tensor([[0, 1]]), id="two dimensions"),
        pytest.param(torch.tensor([], dtype=torch.int64), id="no experts"),
    ],
)
def test_owners_that_make_no_sense_are_refused(owner):
    with pytest.raises(errors.ConfigError):
        ExpertPlacement.from_owner(owner, ep_size=2)


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (-1, 2), (2, -1)])
@pytest.mark.parametrize("kind", ["linear", "round_robin"])
def test_sizes_below_one_are_refused(kind, sizes):
    with pytest.raises(errors.ConfigError):
        getattr(ExpertPlacement, kind)(*sizes)
