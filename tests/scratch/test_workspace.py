"""The workspace: one buffer and one dictionary for each (ubatch, lane)."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from crossdock.scratch import PermuteScratch, WorkspaceManager, permute_scratch, simultaneous_bytes
from crossdock.scratch.errors import CapacityError, ConfigError, LockedError


def test_views_lie_side_by_side_from_offset_zero_aligned_to_256_bytes():
    workspace = WorkspaceManager("cpu")
    a, b, c = workspace.get_simultaneous(
        ((3, 5), torch.float32), ((0, 7), torch.bfloat16), ((9,), torch.float8_e4m3fn)
    )
    assert [a.shape, b.shape, c.shape] == [(3, 5), (0, 7), (9,)]
    assert [a.dtype, b.dtype, c.dtype] == [torch.float32, torch.bfloat16, torch.float8_e4m3fn]
    assert all(t.is_contiguous() for t in (a, b, c))
    assert a.data_ptr() % 256 == 0
    assert c.data_ptr() - a.data_ptr() == 256
    assert workspace.capacity_bytes() == 512


def test_every_call_hands_out_the_same_bytes():
    workspace = WorkspaceManager("cpu")
    (a,) = workspace.get_simultaneous(((100,), torch.float32))
    (b,) = workspace.get_simultaneous(((50,), torch.int64))
    assert a.data_ptr() == b.data_ptr()


def test_the_buffer_grows_to_what_is_asked_and_never_shrinks():
    workspace = WorkspaceManager("cpu")
    for elements, capacity in ((64, 256), (1000, 4096), (10, 4096)):
        workspace.get_simultaneous(((elements,), torch.float32))
        assert workspace.capacity_bytes() == capacity
    assert workspace.num_bytes == 4096


def test_growth_drops_the_old_buffer_before_it_takes_the_new(monkeypatch):
    workspace = WorkspaceManager("cpu")
    workspace.get_simultaneous(((64,), torch.float32))
    empty = torch.empty
    present_at_allocation = []

    def spy(size, **kwargs):
        if size:
            present_at_allocation.append(workspace.num_bytes)
        return empty(size, **kwargs)

    monkeypatch.setattr(torch, "empty", spy)
    workspace.get_simultaneous(((1000,), torch.float32))
    assert present_at_allocation == [0]


def test_growth_touches_only_the_ubatch_and_lane_that_asked():
    workspace = WorkspaceManager("cpu", num_ubatches=2, num_lanes=2)
    (first,) = workspace.get_simultaneous(((64,), torch.float32))
    with workspace.use(ubatch=1, lane=1):
        (other,) = workspace.get_simultaneous(((1000,), torch.float32))
        assert workspace.capacity_bytes() == 4096
    (again,) = workspace.get_simultaneous(((64,), torch.float32))
    assert again.data_ptr() == first.data_ptr() != other.data_ptr()
    assert workspace.capacity_bytes() == 256


def test_use_nests_restores_and_belongs_to_the_thread():
    workspace = WorkspaceManager("cpu", num_lanes=2)
    seen = []
    with workspace.use(lane=1):
        workspace.get_simultaneous(((64,), torch.float32))
        with workspace.use(lane=0):
            assert workspace.capacity_bytes() == 0
        assert workspace.capacity_bytes() == 256
        thread = threading.Thread(target=lambda: seen.append(workspace.capacity_bytes()))
        thread.start()
        thread.join()
    assert seen == [0]
    assert workspace.capacity_bytes() == 0


def test_use_of_a_lane_that_does_not_exist_says_how_many_there_are():
    workspace = WorkspaceManager("cpu", num_lanes=2)
    with pytest.raises(ConfigError, match="num_lanes=2"), workspace.use(lane=2):
        pass


def test_locked_growth_names_caller_need_and_capacity():
    workspace = WorkspaceManager("cpu")
    workspace.get_simultaneous(((1_000_000,), torch.uint8))
    workspace.lock()
    assert workspace.is_locked()
    workspace.get_simultaneous(((1_000_000,), torch.uint8))
    here = rf"{Path(__file__).name}:\d+ wants 2\.000 MB .* 1\.000 MB are present"
    with pytest.raises(LockedError, match=here):
        workspace.get_simultaneous(((2_000_000,), torch.uint8))
    workspace.unlock()
    workspace.get_simultaneous(((2_000_000,), torch.uint8))
    assert not workspace.is_locked()


def test_locked_errors_are_capacity_errors():
    workspace = WorkspaceManager("cpu")
    workspace.lock()
    with pytest.raises(CapacityError):
        workspace.get_simultaneous(((1,), torch.uint8))


def test_persistent_resources_are_made_once_per_ubatch_and_lane():
    workspace = WorkspaceManager("cpu", num_ubatches=2)
    first = workspace.get_persistent_resource("key", object)
    assert workspace.get_persistent_resource("key", object) is first
    with workspace.use(ubatch=1):
        assert workspace.get_persistent_resource("key", object) is not first


def test_a_missing_key_after_locking_is_named():
    workspace = WorkspaceManager("cpu")
    kept = workspace.get_persistent_resource("present", object)
    workspace.lock()
    assert workspace.get_persistent_resource("present", object) is kept
    with pytest.raises(LockedError, match="'absent'"):
        workspace.get_persistent_resource("absent", object)


def test_simultaneous_bytes_is_what_a_call_takes():
    requests = (((3, 5), torch.float32), ((300,), torch.bfloat16))
    workspace = WorkspaceManager("cpu")
    workspace.get_simultaneous(*requests)
    assert workspace.capacity_bytes() == simultaneous_bytes(*requests) == 256 + 768


def test_zero_ubatches_are_refused():
    with pytest.raises(ConfigError, match="num_ubatches = 0"):
        WorkspaceManager("cpu", num_ubatches=0)


def test_permute_scratch_is_shared_by_layers_of_one_shape_and_never_by_lanes():
    workspace = WorkspaceManager("cpu", num_lanes=2)
    shape = {"num_experts": 8, "num_local_experts": 2, "device": "cpu"}
    first = permute_scratch(workspace, **shape)
    assert permute_scratch(workspace, **shape) is first
    assert permute_scratch(workspace, **{**shape, "num_local_experts": 3}) is not first
    with workspace.use(lane=1):
        assert permute_scratch(workspace, **shape) is not first


def test_permute_scratch_grows_to_need_until_locked_and_keeps_its_address():
    workspace = WorkspaceManager("cpu")
    shape = {"num_experts": 8, "num_local_experts": 2, "device": "cpu"}
    scratch = permute_scratch(workspace, **shape)
    assert scratch.capacity == 0
    scratch.reserve(130)
    address = scratch.source(130).data_ptr()
    workspace.lock()
    reloaded = permute_scratch(workspace, **shape)
    for pairs in (0, 1, 130):
        reloaded.reserve(pairs)
        assert reloaded.source(pairs).data_ptr() == (address if pairs else 0)
    message = "^Scratch growth is not allowed after locking.*131 pairs wanted, 130 present"
    with pytest.raises(LockedError, match=message):
        reloaded.reserve(131)
    assert reloaded.capacity == 130
    workspace.unlock()
    reloaded.reserve(131)
    assert reloaded.capacity == 131


def test_permute_scratch_refuses_more_local_experts_than_experts():
    with pytest.raises(ConfigError, match="num_local_experts = 9"):
        PermuteScratch(8, 9, "cpu")
