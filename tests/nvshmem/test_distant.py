"""Ranks that have no address for each other's memory: rows and records go by NVSHMEM's puts."""

from __future__ import annotations

import pytest
import torch

from crossdock.dispatch.nvshmem.layout import MAX_RANKS, control_stand_in, distant_bits
from crossdock.dispatch.nvshmem.runtime import pretended_reach
from crossdock.scratch.errors import ConfigError
from tests.nvshmem import expert_checks
from tests.nvshmem import ranks as checks


def slow(*values):
    return [pytest.param(*value, marks=pytest.mark.slow) for value in values]


@pytest.mark.parametrize(
    "check",
    [
        checks.a_handle_s_way_is_taken_again,
        checks.any_y_and_out_will_do,
        checks.an_outbox_too_small_is_refused_everywhere,
        checks.bad_input_on_one_rank_is_everybody_s_error,
        checks.blocks_of_rows_travel_too,
        checks.eager_dispatches_need_no_exchange_between_hosts,
        checks.ranks_in_different_calls_all_hear_of_it_and_go_on,
        checks.two_dispatchers_and_two_slots_interleave,
        *slow(
            [checks.few_shapes_are_exact],
            [checks.a_graph_refuses_what_does_not_fit],
            [checks.a_rank_that_ends_is_named_by_those_that_dispatch],
            [checks.a_rank_that_misses_an_eager_step_is_named],
            [checks.a_step_too_large_for_a_lock_is_refused_everywhere],
            [checks.fp8_is_the_quantiser_s_bits],
            [checks.graphs_and_eager_steps_interleave],
            [checks.growth_that_fails_on_one_rank_leaves_all_as_they_were],
        ),
    ],
    ids=lambda check: check.__name__,
)
@pytest.mark.parametrize(
    ("world_size", "puts"), [(2, "all"), (4, "2"), *slow((3, "all"), (3, "2"), (4, "all"))]
)
def test_distant_ranks(monkeypatch, emulated, world_size, puts, check):
    monkeypatch.setenv("CROSSDOCK_NVSHMEM_PUTS", puts)
    emulated(world_size, check)


def test_pairs_grouped_by_expert_are_refused(monkeypatch, emulated):
    monkeypatch.setenv("CROSSDOCK_NVSHMEM_PUTS", "2")

    def construct(transport):
        with pytest.raises(ConfigError, match=r"layout = 'expert'.*addresses"):
            expert_checks.ragged(4).dispatcher(transport)

    emulated(4, construct)


@pytest.mark.parametrize(
    ("puts", "want"),
    [
        (None, ["1111", "1111", "1111", "1111"]),
        ("all", ["1000", "0100", "0010", "0001"]),
        ("3", ["1110", "1110", "1110", "0001"]),
    ],
)
def test_reach_is_as_the_variable_says(monkeypatch, puts, want):
    monkeypatch.delenv("CROSSDOCK_NVSHMEM_PUTS", raising=False)
    if puts is not None:
        monkeypatch.setenv("CROSSDOCK_NVSHMEM_PUTS", puts)
    assert ["".join(map(str, row)) for row in pretended_reach(4).long().tolist()] == want


@pytest.mark.parametrize("puts", ["", "0", "-1", "some", "1.5"])
def test_a_variable_that_says_nothing_is_refused(monkeypatch, puts):
    monkeypatch.setenv("CROSSDOCK_NVSHMEM_PUTS", puts)
    with pytest.raises(ConfigError, match="CROSSDOCK_NVSHMEM_PUTS"):
        pretended_reach(2)


def test_distant_ranks_have_a_bit_each():
    reach = torch.ones(MAX_RANKS, MAX_RANKS, dtype=torch.bool)
    reach[0, 3] = reach[0, 63] = reach[5, 0] = False
    bits = [word & (2**64 - 1) for word in distant_bits(reach).tolist()]
    assert bits[0] == 1 << 3 | 1 << 63
    assert bits[5] == 1
    assert sum(map(bool, bits)) == 2


def test_records_for_distant_ranks_wait_apart_from_each_other_and_from_those_that_came():
    ranks, words, own, pages = 5, 40, 1 << 20, 4

    def place(control, page, source):  # as `record_on`, with no signals before the pages
        return control + 8 * (page * ranks + source) * words

    for rank in range(ranks):
        came = {place(own, page, source) for page in range(pages) for source in range(ranks)}
        waiting = {
            place(control_stand_in(own, rank, distant, ranks, words), page, rank)
            for page in range(pages)
            for distant in range(ranks)
        }
        assert len(waiting) == pages * ranks
        assert min(waiting) == max(came) + 8 * words
        assert max(waiting) == own + 8 * (2 * pages * ranks - 1) * words
