"""Topology: where each rank sits."""

from __future__ import annotations

import pytest

from crossdock.dispatch import Topology, errors


def test_everything_defaults_to_one():
    topology = Topology()
    assert topology.coordinates(0) == (0, 0, 0)
    assert topology.rank_of(dp=0, pcp=0, tp=0) == 0


def test_dp_is_slowest_and_tp_fastest():
    topology = Topology(ranks_per_node=12, dp=2, pcp=3, tp=2)
    expected = [(dp, pcp, tp) for dp in range(2) for pcp in range(3) for tp in range(2)]
    assert [topology.coordinates(rank) for rank in range(12)] == expected


@pytest.mark.parametrize(("dp", "pcp", "tp"), [(1, 1, 1), (8, 1, 1), (2, 2, 2), (1, 3, 2)])
def test_rank_of_undoes_coordinates(dp, pcp, tp):
    topology = Topology(ranks_per_node=dp * pcp * tp, dp=dp, pcp=pcp, tp=tp)
    for rank in range(dp * pcp * tp):
        place = topology.coordinates(rank)
        assert topology.rank_of(dp=place.dp, pcp=place.pcp, tp=place.tp) == rank


@pytest.mark.parametrize("name", ["nodes", "ranks_per_node", "dp", "pcp", "tp"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "2"])
def test_sizes_that_are_no_whole_number_above_zero_are_refused_by_name(name, value):
    with pytest.raises(errors.ConfigError, match=name):
        Topology(**{name: value})


def test_a_grid_that_does_not_fill_the_nodes_is_refused():
    with pytest.raises(errors.ConfigError, match="4"):
        Topology(nodes=2, ranks_per_node=2, dp=3)


@pytest.mark.parametrize("rank", [-1, 4])
def test_ranks_outside_the_world_are_refused(rank):
    with pytest.raises(ValueError, match=str(rank)):
        Topology(ranks_per_node=4, dp=4).coordinates(rank)


@pytest.mark.parametrize("place", [{"dp": 2}, {"pcp": -1}, {"tp": 1}])
def test_coordinates_outside_the_grid_are_refused(place):
    with pytest.raises(ValueError, match=next(iter(place))):
        Topology(ranks_per_node=4, dp=2, pcp=2).rank_of(**{"dp": 0, "pcp": 0, "tp": 0} | place)


def test_topology_is_frozen():
    with pytest.raises(AttributeError):
        Topology().dp = 2
