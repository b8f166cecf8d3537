"""The layer through real dispatchers, four ranks in one process, against the oracle."""

import pytest
import torch

from crossdock.dispatch import DispatchConfig, Dispatcher, ExpertPlacement, run_local
from crossdock.experts import ExpertWeights, MoELayer, make_experts, reference_and_tolerance
from crossdock.scratch import WorkspaceManager
from crossdock.scratch.errors import LockedError, PeerFailed

from .rows import random_routing

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 10, 3, 129, 40
TOKENS = [20, 0, 33, 7]


def make_layer(transport, **settings):
    placement = ExpertPlacement.linear(EXPERTS, transport.world_size)
    here = (placement.expert_map(transport.rank) >= 0).nonzero().squeeze(1).tolist()
    experts = make_experts(
        "auto",
        ExpertWeights.random(here, hidden=HIDDEN, intermediate=INTERMEDIATE),
        workspace=WorkspaceManager("cpu"),
        num_experts=EXPERTS,
    )
    config = DispatchConfig(num_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, debug=True, **settings)
    return MoELayer(Dispatcher(config, transport, placement=placement), experts)


def inputs(rank, step, num_tokens):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
    return x, *random_routing(num_tokens, TOP_K, EXPERTS, remote=0.1, seed=100 * step + rank)


def check_step(layer, weights, step, *, num_tokens, wire="payload"):
    step_inputs = inputs(layer.dispatcher.transport.rank, step, num_tokens)
    out = layer(*step_inputs)
    expected, tolerance = reference_and_tolerance(*step_inputs, weights, wire=wire)
    assert ((out.float() - expected).abs() <= tolerance).all()


@pytest.mark.parametrize("algorithm", ["alltoall", "allgather"])
@pytest.mark.parametrize("wire", ["payload", "fp8"])
def test_each_rank_gets_the_oracles_answer_before_and_after_locking(wire, algorithm):
    weights = ExpertWeights.random(range(EXPERTS), hidden=HIDDEN, intermediate=INTERMEDIATE)

    def rank(transport):
        layer = make_layer(transport, wire=wire, algorithm=algorithm)
        with layer.dispatcher:
            for step in (0, 1):
                check_step(layer, weights, step, num_tokens=TOKENS[transport.rank], wire=wire)
            layer.lock()
            check_step(layer, weights, 1, num_tokens=TOKENS[transport.rank], wire=wire)

    run_local(4, rank)


def test_a_step_with_too_many_pairs_for_one_rank_is_refused_on_all_and_the_next_works():
    weights = ExpertWeights.random(range(EXPERTS), hidden=HIDDEN, intermediate=INTERMEDIATE)
    all_to_rank_0 = torch.tensor([[0, 1, 2]] * 2)

    def rank(transport):
        layer = make_layer(transport)
        with layer.dispatcher:
            check_step(layer, weights, 0, num_tokens=4)
            layer.lock()
            # 8 rows fit each bucket, but with three pairs each they do not fit rank 0's scratch.
            assert layer.experts.pair_capacity() < 4 * 2 * TOP_K
            with pytest.raises(LockedError, match="pairs"):
                layer(torch.ones(2, HIDDEN).bfloat16(), all_to_rank_0, torch.ones(2, TOP_K))
            check_step(layer, weights, 0, num_tokens=4)

    run_local(4, rank)


def test_experts_that_fail_on_one_rank_are_a_peer_failure_on_the_others():
    def rank(transport):
        layer = make_layer(transport)
        if transport.rank == 2:
            layer.experts = FailingExperts()
        failure = MemoryError if transport.rank == 2 else PeerFailed
        with layer.dispatcher, pytest.raises(failure):
            layer(*inputs(transport.rank, 0, 10))

    run_local(4, rank)


class FailingExperts:
    workspace = WorkspaceManager("cpu")

    def __call__(self, rows):
        raise MemoryError("no memory for the experts")

    def pair_capacity(self):
        return -1
