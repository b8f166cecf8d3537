"""The kernels on a GPU: exact against a stable sort, safe against poison, steady under graphs."""

from __future__ import annotations

import itertools
import logging
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from crossdock.scratch import (
    PermuteScratch,
    WorkspaceManager,
    convert_rows,
    permute,
    permute_scratch,
    swiglu,
    unpermute,
)
from crossdock.scratch.errors import LockedError
from tests.scratch.oracle import bits, expected_permutation, poison_, random_routing

logger = logging.getLogger(__name__)

pytestmark = pytest.mark.gpu

FP8 = torch.float8_e4m3fn
TRACES = Path(__file__).parents[2] / "configs" / "traces"
TOKENS = [0, 1, 2, 7, 33, 64, 127, 224, 1024, 5000, 32768, 65536]
HIDDEN = [128, 1024, 2048, 7168, 8 * 33, 129]
EXPERTS = [8, 16, 40, 64, 128, 256, 512]
TOP_K = [1, 2, 6, 8, 16, 31]
WORLDS = [1, 4, 8, 16, 64]
CHUNK_BYTES = 1 << 28
DTYPES = [torch.bfloat16, torch.float16, torch.float32, FP8]


@pytest.fixture(scope="module")
def device():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    return torch.device("cuda", 0)


def local_ids(tokens: int, top_k: int, experts: int, world: int, device, seed: int):
    """A random rank's view of random routing, and its number of local experts."""
    generator = torch.Generator(device=device).manual_seed(seed)
    share, extra = divmod(experts, world)
    rank = random.Random(seed).randrange(world)
    first = rank * share + min(rank, extra)
    num_local = share + (rank < extra)
    scores = torch.rand(tokens, experts, device=device, generator=generator)
    idx = scores.topk(top_k, dim=1).indices - first
    return torch.where((idx >= 0) & (idx < num_local), idx, -1), num_local


def oracle(idx: torch.Tensor, num_local: int):
    """Offsets, source and inverse by a stable sort on the idx's own device."""
    ids = idx.reshape(-1)
    slots = (ids >= 0).nonzero().squeeze(1)
    slots = slots[ids[slots].argsort(stable=True)]
    counts = torch.bincount(ids[slots], minlength=num_local)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    inverse = torch.full_like(ids, -1, dtype=torch.int32)
    inverse[slots] = torch.arange(slots.numel(), dtype=torch.int32, device=idx.device)
    return offsets, (slots // idx.shape[1]).int(), inverse.view_as(idx)


def chunks_of(rows: int, hidden: int):
    """Slices of so many rows of fp32 that a few are quick to work on and none fills a GPU."""
    step = max(1, CHUNK_BYTES // (4 * hidden))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def weighted_sum(pairs: torch.Tensor, weights: torch.Tensor, inverse: torch.Tensor):
    """fp32 sums, a chunk of rows at a time; nothing in it asks the host."""
    out = torch.zeros(inverse.shape[0], pairs.shape[1], device=pairs.device)
    if not len(pairs):
        return out
    for chunk in chunks_of(*out.shape):
        for k in range(inverse.shape[1]):
            place = inverse[chunk, k].long().unsqueeze(1)
            values = pairs[place.squeeze(1).clamp_min(0)].float() * weights[chunk, k].unsqueeze(1)
            out[chunk] += torch.where(place >= 0, values, 0)
    return out


def check(idx, num_local, hidden, dtype, *, pad=0, spare=0):
    """One whole round trip with poison in every tail."""
    device = idx.device
    tokens, top_k = idx.shape
    offsets, source, inverse = oracle(idx, num_local)
    pairs = source.numel()
    x = poison_(torch.empty(tokens, hidden + pad, dtype=dtype, device=device))[:, :hidden]
    for rows in chunks_of(tokens, hidden):
        x[rows] = torch.randn(x[rows].shape, device=device).to(dtype)
    x[(idx < 0).all(1)] = poison_(x[:1].clone())  # rows that nobody may read
    scale = torch.rand(tokens, -(-hidden // 128), device=device) if dtype == FP8 else None
    scratch = PermuteScratch(max(num_local, 1), num_local, device)
    out = poison_(torch.empty(pairs + spare, hidden + pad, dtype=dtype, device=device))[:, :hidden]

    permuted = permute(x, scale, idx, scratch, num_pairs=pairs + spare, out=out)

    assert torch.equal(permuted.offsets, offsets)
    assert torch.equal(permuted.source[:pairs], source)
    assert torch.equal(permuted.inverse, inverse)
    for chunk in chunks_of(pairs, hidden):
        rows = source[chunk].long()
        want = x.view(torch.uint8)[rows] if dtype == FP8 else x[rows]
        assert torch.equal(bits(permuted.hidden[chunk]), bits(want))
        if scale is not None:
            assert torch.equal(permuted.scale[chunk], scale[rows])
    assert out[pairs:].float().isnan().all()

    sum_dtype = torch.bfloat16 if dtype == FP8 else dtype
    expert_out = permuted.hidden.to(sum_dtype)
    weights = torch.where(idx >= 0, torch.rand(idx.shape, device=device), float("nan"))
    y = poison_(torch.empty(tokens, hidden, dtype=sum_dtype, device=device))
    unpermute(y, expert_out, weights, permuted)
    want = weighted_sum(expert_out, weights, inverse)
    epsilon = torch.finfo(sum_dtype).eps
    torch.testing.assert_close(y.float(), want, rtol=epsilon, atol=8e-6 * top_k)
    assert not y[(idx < 0).all(1)].count_nonzero()


def bytes_needed(tokens, top_k, world, hidden):
    return tokens * hidden * 4 * (4 + 3 * top_k / world) + tokens * (512 + 40 * top_k) * 8


def run_grid(cases, device):
    skipped = 0
    for seed, (tokens, hidden, experts, top_k, world) in enumerate(cases):
        need = bytes_needed(tokens, top_k, world, hidden)
        if need > torch.cuda.mem_get_info(device)[0]:
            torch.cuda.empty_cache()
            if need > torch.cuda.mem_get_info(device)[0]:
                skipped += 1
                continue
        idx, num_local = local_ids(tokens, top_k, experts, world, device, seed)
        try:
            check(idx, num_local, hidden, DTYPES[seed % 4], pad=16 * (seed % 3), spare=seed % 2)
        except AssertionError as error:
            pytest.fail(f"{tokens=} {hidden=} {experts=} {top_k=} {world=}: {error}")
    logger.info("%d cases ran, %d skipped for want of memory", len(cases) - skipped, skipped)


def whole_grid():
    every = itertools.product(TOKENS, HIDDEN, EXPERTS, TOP_K, WORLDS)
    return [case for case in every if case[3] <= case[2]]


def test_a_thinned_grid(device):
    run_grid(random.Random(0).sample([c for c in whole_grid() if c[0] <= 5000], 150), device)


@pytest.mark.slow
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("tokens", TOKENS)
def test_the_whole_grid(device, tokens, hidden):
    run_grid([case for case in whole_grid() if case[:2] == (tokens, hidden)], device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("tokens", [33, 1024])
def test_every_dtype_and_width_with_strides_that_align_and_do_not(device, tokens, hidden, dtype):
    for pad in (0, 1, 16):
        idx, num_local = local_ids(tokens, 6, 64, 4, device, pad)
        check(idx, num_local, hidden, dtype, pad=pad, spare=3)


@pytest.mark.parametrize("tokens", [0, 1, 100, 4096])
def test_nothing_local_one_expert_only_and_no_expert(device, tokens):
    none = torch.full((tokens, 8), -1, dtype=torch.int64, device=device)
    one = none.clone()
    one[:, 3] = 5
    check(none, 8, 256, torch.bfloat16)
    check(none, 0, 256, torch.bfloat16)
    check(one, 8, 256, torch.bfloat16)
    check(none.new_full((tokens, 40), -1), 4, 256, torch.bfloat16)


@pytest.mark.parametrize("experts", [64, 256])
@pytest.mark.parametrize("world", WORLDS)
def test_recorded_routing(device, experts, world):
    trace = load_file(TRACES / f"routing-e{experts}-k8.safetensors")["topk_idx"]
    share = experts // world
    for layer, rank in ((0, 0), (5, world - 1)):
        idx = trace[layer, :4096].to(device).long() - rank * share
        check(torch.where((idx >= 0) & (idx < share), idx, -1), share, 1024, torch.bfloat16)


def test_more_than_32_bits_of_bytes(device):
    tokens, hidden = 40000, 65536  # 5.2 GB of rows
    if torch.cuda.mem_get_info(device)[0] < 40e9:
        pytest.skip("needs 40 GB of free memory")
    idx = torch.arange(tokens, device=device).remainder(3).unsqueeze(1)
    check(idx, 3, hidden, torch.bfloat16)


def test_garbage_ids_are_no_expert(device):
    for tokens in (50, 5000):
        idx, num_local = local_ids(tokens, 4, 16, 2, device, 0)
        clean = idx.clone()
        idx[idx < 0] = 10**12
        pairs = int((clean >= 0).sum())
        x = torch.randn(tokens, 64, device=device)
        scratch = PermuteScratch(16, num_local, device)
        permuted = permute(x, None, idx, scratch, num_pairs=pairs)
        assert torch.equal(permuted.inverse, oracle(clean, num_local)[2])


def test_too_many_pairs_never_write_past_the_end(device):
    for tokens in (50, 5000):
        idx = torch.zeros(tokens, 1, dtype=torch.int64, device=device)
        room = torch.full((tokens, 64), 7.0, device=device)
        x = torch.randn(tokens, 64, device=device)
        half = tokens // 2
        scratch = PermuteScratch(1, 1, device)
        permuted = permute(x, None, idx, scratch, num_pairs=half, out=room)
        assert (room[half:] == 7.0).all()
        assert permuted.offsets.tolist() == [0, half]
        assert (permuted.inverse[half:] == -1).all()


class Step:
    """Static inputs of one captured permute and unpermute, with counts on the device."""

    def __init__(self, workspace, capacity, top_k, hidden, device):
        self.capacity = capacity
        self.x = torch.empty(capacity, hidden, dtype=torch.bfloat16, device=device)
        self.idx = torch.empty(capacity, top_k, dtype=torch.int64, device=device)
        self.weights = torch.empty(capacity, top_k, device=device)
        self.num_rows = torch.zeros(1, dtype=torch.int32, device=device)
        self.y = torch.empty(capacity, hidden, dtype=torch.bfloat16, device=device)
        self.pairs = capacity * top_k
        self.workspace = workspace

    def run(self):
        scratch = permute_scratch(
            self.workspace, num_experts=16, num_local_experts=8, device=self.x.device
        )
        (pairs,) = self.workspace.get_simultaneous(((self.pairs, self.x.shape[1]), torch.bfloat16))
        permuted = permute(
            self.x, None, self.idx, scratch, num_pairs=self.pairs, num_rows=self.num_rows, out=pairs
        )
        unpermute(self.y, permuted.hidden, self.weights, permuted)
        return permuted

    def load(self, num_rows, seed):
        top_k = self.idx.shape[1]
        idx = random_routing(self.capacity, self.capacity, top_k, 8, local_share=0.5, seed=seed)
        self.idx.copy_(idx)
        self.idx[num_rows:] = 3  # garbage, were it read
        poison_(self.x)[:num_rows] = torch.randn(num_rows, self.x.shape[1])
        self.weights.copy_(torch.rand(self.weights.shape))
        self.weights[self.idx < 0] = float("nan")
        self.num_rows.fill_(num_rows)
        self.y.fill_(7.0)

    def check(self, num_rows):
        inverse = oracle(self.idx[:num_rows], 8)[2]
        source = oracle(self.idx[:num_rows], 8)[1]
        want = weighted_sum(self.x[source.long()], self.weights[:num_rows], inverse)
        torch.testing.assert_close(self.y[:num_rows].float(), want, rtol=2**-7, atol=1e-4)
        assert (self.y[num_rows:] == 7.0).all()


def capture(step):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    return graph


def test_graphs_of_several_sizes_share_one_scratch_and_replay_in_any_order(device):
    workspace = WorkspaceManager(device)
    steps = [Step(workspace, capacity, 4, 512, device) for capacity in (64, 512, 4096)]
    for step in steps:
        step.load(step.capacity, 0)
        step.run()
    workspace.lock()
    graphs = [capture(step) for step in steps]
    for seed, i in enumerate([0, 1, 2, 1, 0, 2, 0, 0, 2]):
        rows = random.Random(seed).randrange(steps[i].capacity + 1)
        steps[i].load(rows, seed)
        graphs[i].replay()
        steps[i].check(rows)


def test_a_reload_after_locking_keeps_addresses_and_graphs(device):
    workspace = WorkspaceManager(device)
    step = Step(workspace, 256, 4, 512, device)
    step.load(200, 0)
    first = step.run()
    workspace.lock()
    graph = capture(step)
    scratch = permute_scratch(workspace, num_experts=16, num_local_experts=8, device="cuda")
    again = step.run()
    assert again.source.data_ptr() == first.source.data_ptr() == scratch.source(1).data_ptr()
    assert again.offsets.data_ptr() == first.offsets.data_ptr()
    assert again.hidden.data_ptr() == first.hidden.data_ptr()
    step.load(123, 1)
    graph.replay()
    step.check(123)
    with pytest.raises(LockedError, match="1025 pairs wanted, 1024 present"):
        scratch.reserve(1025)


def test_a_graph_outlives_the_growth_that_replaced_its_memory(device):
    workspace = WorkspaceManager(device)
    step = Step(workspace, 64, 4, 512, device)
    step.load(64, 0)
    step.run()
    workspace.lock()
    graph = capture(step)
    workspace.unlock()
    larger = Step(workspace, 512, 4, 512, device)
    larger.load(512, 0)
    larger.run()
    torch.cuda.empty_cache()
    larger.run()
    step.load(50, 1)
    graph.replay()
    step.check(50)
    larger.check(512)
    del graph
    workspace.release_captured()


def test_capture_before_lock_is_refused(device):
    workspace = WorkspaceManager(device)
    step = Step(workspace, 64, 4, 512, device)
    step.load(64, 0)
    step.run()
    with pytest.raises(LockedError, match="lock"):
        capture(step)


def test_two_lanes_run_side_by_side(device):
    workspace = WorkspaceManager(device, num_lanes=2)
    steps = [Step(workspace, 4096, 4, 512, device) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    for lane, step in enumerate(steps):
        with workspace.use(lane=lane):
            step.load(4096, lane)
            step.run()
    workspace.lock()
    graphs = []
    for lane, step in enumerate(steps):
        with workspace.use(lane=lane):
            graphs.append(capture(step))
    for seed in range(20):
        for step in steps:
            step.load(3000 + seed, seed)
        torch.cuda.synchronize()
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for step in steps:
            step.check(3000 + seed)


def test_a_step_asks_the_host_nothing(device):
    workspace = WorkspaceManager(device)
    step = Step(workspace, 4096, 4, 512, device)
    step.load(4096, 0)
    step.run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [8, 128, 129, 2048, 2056, 20000])
def test_swiglu_and_fp8_equal_plain_torch(device, width, dtype):
    gate_up = poison_(torch.empty(37, 2 * width, dtype=dtype))
    gate_up[:30] = torch.randn(30, 2 * width)
    gate_up[4] = 0
    rows = torch.tensor([30], device=device)
    plain = swiglu(gate_up, out=torch.zeros(37, width, dtype=dtype), num_rows=30)
    out = torch.zeros(37, width, dtype=dtype, device=device)
    swiglu(gate_up.to(device), out=out, num_rows=rows)
    epsilon = torch.finfo(dtype).eps
    torch.testing.assert_close(out.cpu(), plain, rtol=2 * epsilon, atol=1e-6)
    for num_scales in {1, -(-width // 128)}:
        values = gate_up[:, :width]
        want, want_scale = torch.zeros(37, width, dtype=FP8), torch.zeros(37, num_scales)
        convert_rows(values, out=want, scale=want_scale, num_rows=30)
        got, got_scale = torch.zeros_like(want, device=device), want_scale.to(device).fill_(0)
        convert_rows(values.to(device), out=got, scale=got_scale, num_rows=rows)
        assert torch.equal(got_scale.cpu(), want_scale)
        assert torch.equal(bits(got.cpu()), bits(want))
        swiglu(gate_up.to(device), out=got, scale=got_scale, num_rows=rows)
        swiglu(gate_up, out=want, scale=want_scale, num_rows=30)
        factor = got_scale if num_scales == 1 else got_scale.repeat_interleave(128, 1)[:, :width]
        torch.testing.assert_close(got_scale.cpu(), want_scale, rtol=1e-5, atol=0)
        error = (got.float() * factor).cpu() - plain.float()
        assert (error.abs() <= plain.float().abs() / 14 + factor.cpu() / 512).all()


@pytest.mark.parametrize("tokens", [33, 3000])
@pytest.mark.parametrize("hidden", [129, 1024, 7168])
def test_permute_converts_as_plain_torch_does(device, tokens, hidden):
    idx = random_routing(tokens, tokens - 3, 4, 8, local_share=0.5)
    pairs = expected_permutation(idx, 8).source.numel()
    x = poison_(torch.empty(tokens, hidden, dtype=torch.bfloat16))
    x[: tokens - 3] = torch.randn(tokens - 3, hidden)
    blocks = -(-hidden // 128)
    fp8, fp8_scale = torch.zeros(tokens, hidden, dtype=FP8), torch.rand(tokens, blocks)
    convert_rows(x, out=fp8, scale=fp8_scale)
    for source, scale, dtype, num_scales in (
        (x, None, FP8, blocks),
        (x, None, FP8, 1),
        (fp8, fp8_scale, torch.bfloat16, 0),
        (fp8, fp8_scale, FP8, 1),
    ):
        results = []
        for place in (torch.device("cpu"), device):
            out = torch.empty(pairs, hidden, dtype=dtype, device=place)
            out_scale = torch.empty(pairs, num_scales, device=place) if num_scales else None
            permuted = permute(
                source.to(place),
                scale.to(place) if scale is not None else None,
                idx.to(place),
                PermuteScratch(8, 8, place),
                num_pairs=pairs,
                out=out,
                out_scale=out_scale,
            )
            results.append((permuted.hidden.cpu(), permuted.scale))
        (want, want_scale), (got, got_scale) = results
        assert torch.equal(bits(got), bits(want))
        if want_scale is not None:
            assert torch.equal(got_scale.cpu(), want_scale)
