import pytest
import torch

from crossdock.experts import ExpertWeights, MoELayer, make_experts
from crossdock.scratch import WorkspaceManager
from crossdock.scratch.errors import LockedError

from .rows import make_rows


class OneRank:
    """A dispatcher of one rank that only records what the layer asks of it."""

    def __init__(self, num_experts, *, refuse_lock=False):
        self.num_experts = num_experts
        self.refuse_lock = refuse_lock
        self.calls = []

    def dispatch(self, x, topk_idx, topk_weights):
        self.calls.append("dispatch")
        return make_rows(x, topk_idx, topk_weights, num_local_experts=self.num_experts), "handle"

    def combine(self, y, handle):
        assert handle == "handle"
        self.calls.append("combine")
        return y

    def lock(self, pair_capacity):
        if self.refuse_lock:
            raise LockedError("no")
        self.calls.append(("lock", pair_capacity))

    def unlock(self):
        self.calls.append("unlock")

    def abort(self, exc):
        self.calls.append(("abort", exc))


def one_rank_layer(**options):
    weights = ExpertWeights.random(range(3), hidden=8, intermediate=4)
    experts = make_experts("auto", weights, workspace=WorkspaceManager("cpu"))
    return MoELayer(OneRank(3, **options), experts)


STEP = (torch.ones(6, 8).bfloat16(), torch.tensor([[0, 2]] * 6), torch.ones(6, 2))


def test_a_layer_dispatches_computes_and_combines():
    layer = one_rank_layer()
    out = layer(*STEP)
    assert layer.dispatcher.calls == ["dispatch", "combine"]
    assert out[:6].isfinite().all()


def test_lock_locks_the_workspace_and_tells_the_pairs_that_fit():
    layer = one_rank_layer()
    layer(*STEP)
    layer.lock()
    assert layer.experts.workspace.is_locked()
    assert layer.dispatcher.calls[-1] == ("lock", 12)
    layer.unlock()
    assert not layer.experts.workspace.is_locked()
    assert layer.dispatcher.calls[-1] == "unlock"


def test_a_lock_that_the_ranks_do_not_agree_on_leaves_the_workspace_unlocked():
    layer = one_rank_layer(refuse_lock=True)
    with pytest.raises(LockedError):
        layer.lock()
    assert not layer.experts.workspace.is_locked()


def test_a_failure_of_the_experts_aborts_the_step_and_is_raised():
    layer = one_rank_layer()
    failure = MemoryError("no memory")

    class Failing:
        workspace = layer.experts.workspace

        def __call__(self, rows):
            raise failure

    layer.experts = Failing()
    with pytest.raises(MemoryError):
        layer(*STEP)
    assert layer.dispatcher.calls == ["dispatch", ("abort", failure)]
