"""The index kernels without a GPU: their own source as plain C++, a block's threads as fibers."""

from __future__ import annotations

import ctypes
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch

from crossdock.scratch import PermuteScratch, permute_cuda
from crossdock.scratch.jit import toolkit_include_dirs
from crossdock.scratch.permutation import Permuted
from crossdock.scratch.permute_scratch import MAX_TILES, padded_experts
from tests.scratch.oracle import expected_permutation

EMULATOR = Path(__file__).parents[1] / "nvshmem"
INTRINSICS = """
template <class F> static inline int sum_over_lanes(int value, F term) {
  exchanged[threadIdx.x] = static_cast<unsigned>(value);
  meet_warp();
  int sum = 0;
  for (int lane = 0; lane < 32; ++lane) {
    sum += term(lane, static_cast<int>(exchanged[threadIdx.x / 32 * 32 + lane]));
  }
  meet_warp();
  return sum;
}
static inline int __reduce_add_sync(unsigned, int value) {
  return sum_over_lanes(value, [](int, int other) { return other; });
}
static inline unsigned __match_any_sync(unsigned, int value) {
  return sum_over_lanes(value, [=](int lane, int other) { return (other == value) << lane; });
}
static inline float __fdividef(float a, float b) { return a / b * 0.9999997f; } // two ulps off
"""


@cache
def build(folder: Path, experts: int) -> ctypes.CDLL:
    text = permute_cuda.INDEX.read_text()
    common = (permute_cuda.SOURCES / "common.cuh").read_text()
    common = re.sub(r"asm volatile.*;|#pragma once", "", common)
    text = text.replace('#include "common.cuh"', common)
    source, library = folder / f"index-{experts}.cpp", folder / f"index-{experts}.so"
    source.write_text(f'#include "cuda_on_cpu.h"\n{INTRINSICS}{text}')
    command = ["g++", "-std=c++17", "-O2", "-w", "-shared", "-fPIC", "-fno-gnu-unique"]
    command += [f"-I{directory}" for directory in (EMULATOR, *toolkit_include_dirs())]
    command += [f"-DEXPERTS={experts}"]
    subprocess.run([*command, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture(autouse=True)
def _index_on_cpu(kernels, monkeypatch):
    def load_kernel(path, name, *, device, defines):
        library = build(kernels, defines["EXPERTS"])

        def launch(grid, block, *arguments, device, overlap=False):
            words = [a.data_ptr() if isinstance(a, torch.Tensor) else a or 0 for a in arguments]
            library.launch(getattr(library, name), grid, block, (ctypes.c_longlong * 12)(*words))

        return launch

    monkeypatch.setattr(permute_cuda, "load_kernel", load_kernel)


def check(idx, num_experts, *, num_rows=None, room=0):
    """Index of the first ``num_rows`` rows, on the host and on the device, against the oracle."""
    valid = idx.shape[0] if num_rows is None else num_rows
    legal = (idx >= 0) & (idx < num_experts)
    want = expected_permutation(torch.where(legal, idx, -1)[:valid], num_experts)
    pairs = want.source.numel()
    for count in (valid, torch.tensor([valid])):
        scratch = PermuteScratch(num_experts, num_experts, "cpu")
        scratch.tile_counts = torch.full((MAX_TILES * padded_experts(num_experts),), -9).int()
        scratch.reserve(pairs + room)
        permuted = Permuted(
            hidden=torch.empty(0),
            scale=None,
            offsets=scratch.offsets.fill_(-9),
            inverse=torch.full_like(idx, -9, dtype=torch.int32),
            source=scratch.source(pairs + room).fill_(-9),
            num_rows=count,
        )
        permute_cuda.index(idx, scratch, permuted)
        assert torch.equal(permuted.offsets, want.offsets)
        assert torch.equal(permuted.inverse[:valid], want.inverse)
        assert torch.equal(permuted.source[:pairs], want.source)
        assert (permuted.inverse[valid:] == -9).all()
        assert (permuted.source[pairs:] == -9).all()


@pytest.mark.parametrize("experts", [0, 1, 40, 256, 1024])
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (7, 3), (33, 31), (1024, 1), (1, 1024)])
def test_few_ids(shape, experts):
    check(torch.randint(-1, experts, shape), experts, room=3)


@pytest.mark.parametrize("experts", [40, 256, 1000])
@pytest.mark.parametrize("shape", [(129, 8), (1500, 4)])
def test_many_ids(shape, experts):
    check(torch.randint(-1, experts, shape), experts)


@pytest.mark.parametrize("tokens", [128, 300])
def test_rows_past_num_rows_do_not_count(tokens):
    idx = torch.randint(0, 40, (tokens, 8))
    check(idx, 40, num_rows=tokens - 5, room=3)
    check(idx, 40, num_rows=0)


@pytest.mark.parametrize("tokens", [100, 300])
def test_skewed_remote_and_illegal_ids(tokens):
    idx = torch.full((tokens, 4), 7)
    check(idx, 16)
    check(torch.full_like(idx, -1), 16)
    idx[::3, 1], idx[::5, 2], idx[-1, 3] = 16, 10**12, -(2**40)
    check(idx, 16)


@pytest.mark.parametrize("tokens", [100, 300])
def test_pairs_without_room_are_dropped(tokens):
    idx = torch.randint(0, 16, (tokens, 4))
    want = expected_permutation(idx, 16)
    scratch = PermuteScratch(16, 16, "cpu")
    scratch.tile_counts = torch.empty(MAX_TILES * 32, dtype=torch.int32)
    scratch.reserve(400)
    permuted = Permuted(
        hidden=torch.empty(0),
        scale=None,
        offsets=scratch.offsets,
        inverse=torch.empty_like(idx, dtype=torch.int32),
        source=scratch.source(400)[:50],
        num_rows=tokens,
    )
    scratch.source(400).fill_(-9)
    permute_cuda.index(idx, scratch, permuted)
    assert torch.equal(permuted.offsets, want.offsets.clamp(max=50))
    assert torch.equal(permuted.source, want.source[:50])
    assert torch.equal(permuted.inverse, torch.where(want.inverse < 50, want.inverse, -1))
    assert (scratch.source(400)[50:] == -9).all()
