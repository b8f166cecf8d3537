"""What kernels and host must agree on, and what the host decides alone."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch

from crossdock.dispatch import ExpertPlacement, connect
from crossdock.dispatch.nvshmem import layout
from crossdock.dispatch.nvshmem.launch import SOURCES
from crossdock.dispatch.nvshmem.layout import BucketLayout, expert_codes, experts_by_rank
from crossdock.dispatch.wire import WireFormat
from crossdock.scratch.errors import ConfigError


@pytest.mark.parametrize("name", ["State", "Kind", "Report"])
def test_enumerations_are_those_of_the_kernels(name):
    source = (SOURCES / "group.cuh").read_text()
    body = re.search(rf"enum {name} {{([^}}]*)}}", source).group(1)
    value, words = -1, {}
    for word in body.split(","):
        label, _, given = word.partition("=")
        value = int(given) if given else value + 1
        words[label.strip()] = value
    assert words == {word.name: int(word) for word in getattr(layout, name)}


@pytest.mark.parametrize(("name", "value"), [("CHUNK", layout.CHUNK), ("MAX_RANKS", 64)])
def test_constants_are_those_of_the_kernels(name, value):
    assert f"constexpr int {name} = {value};" in (SOURCES / "group.cuh").read_text()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("capacity", [1, 2, 1024])
@pytest.mark.parametrize("hidden", [8, 136, 7168])
def test_parts_of_a_bucket_do_not_overlap_and_are_aligned(capacity, hidden, fp8):
    wire = WireFormat(hidden=hidden, top_k=5, dtype=torch.bfloat16, fp8=fp8)
    at = BucketLayout.of(capacity, wire)
    sizes = [
        (0, hidden * (1 if fp8 else 2)),
        (at.scale, 4 * -(-hidden // 128) if fp8 else 0),
        (at.ids, 40),
        (at.weights, 20),
        (at.source, 16),
        (at.y, max(2 * hidden, 32)),
        (at.num_bytes, 0),
    ]
    for (begin, width), (following, _) in pairwise(sizes):
        assert begin % 256 == 0
        assert begin + capacity * width <= following


@pytest.mark.parametrize("owner", [[0, 1, 2, 0, 1, 0], [2, 2, 2], [0]])
def test_codes_and_lists_of_experts_are_each_other_s_inverse(owner):
    placement = ExpertPlacement.from_owner(owner, ep_size=3)
    codes, lists = expert_codes(placement), experts_by_rank(placement)
    for expert, code in enumerate(codes.tolist()):
        rank, local = code >> 24, code & 0xFFFFFF
        assert rank == owner[expert]
        assert lists[rank, local] == expert
    assert int((lists >= 0).sum()) == len(owner)


def test_cpus_are_refused():
    with pytest.raises(ConfigError, match="nvshmem joins GPUs"):
        connect("nvshmem", device="cpu")
