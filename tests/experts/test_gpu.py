"""Workers on a GPU, eager and in CUDA graphs. humming's tests are skipped where it is missing.

Each format of humming compiles for some ten seconds: two in the default run, all with ``-m slow``.
"""

import importlib.util

import pytest
import torch

from crossdock.experts import ExpertWeights, make_experts, reference_and_tolerance
from crossdock.scratch import WorkspaceManager
from crossdock.scratch.errors import ConfigError, LockedError

from .rows import make_rows, quantised_channels, random_routing, wire_fp8

pytestmark = pytest.mark.gpu

needs_humming = pytest.mark.skipif(
    importlib.util.find_spec("humming") is None, reason="needs humming-kernels"
)


needs_hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] not in (9, 10),
    reason="needs SM 9.0 or 10.x",
)


def on_gpu(weights, **changes):
    fields = {**vars(weights), **changes}
    return ExpertWeights(
        **{k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in fields.items()}
    )


def poisoned_workspace(num_lanes=1):
    workspace = WorkspaceManager("cuda", num_lanes=num_lanes)
    (buffer,) = workspace.get_simultaneous(((1 << 24,), torch.uint8))
    buffer.fill_(0xFF)  # NaN in bf16, fp16, fp32 and e4m3
    return workspace


def gpu_rows(x, topk_idx, topk_weights, num_local_experts, *, fp8=False):
    payload, scale = wire_fp8(x) if fp8 else (x, None)
    return make_rows(
        payload,
        topk_idx.cuda(),
        topk_weights.cuda(),
        num_local_experts=num_local_experts,
        scale=scale,
        dtype=x.dtype,
    )


def check(experts, weights, x, topk_idx, topk_weights, *, fp8=False, activations="plain"):
    rows = gpu_rows(x, topk_idx, topk_weights, weights.num_local_experts, fp8=fp8)
    found = experts(rows)[: rows.num_rows].float().cpu()
    compare(found, weights, x, topk_idx, topk_weights, fp8=fp8, activations=activations)
    assert rows.y[rows.num_rows :].isnan().all()


def compare(found, weights, x, topk_idx, topk_weights, *, fp8=False, activations="plain"):
    out, tolerance = reference_and_tolerance(
        x.cpu(),
        topk_idx.cpu(),
        topk_weights.cpu(),
        weights,
        dtype=x.dtype,
        wire="fp8" if fp8 else "payload",
        activations=activations,
    )
    assert found.isfinite().all()
    assert ((found - out).abs() <= tolerance).all()
    alone = (topk_idx < 0).all(dim=1).cpu()
    assert (found[alone] == 0).all()


SHAPES = pytest.mark.parametrize(
    ("hidden", "inter", "num_experts", "num_rows", "top_k"),
    [(129, 40, 4, 50, 3), (256, 128, 8, 300, 8), (1, 1, 2, 7, 1), (512, 264, 40, 64, 6)],
    ids=["H129-I40", "H256-I128", "H1-I1", "H512-I264"],
)


@pytest.mark.parametrize("fp8", [False, True], ids=["plain-rows", "fp8-rows"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@SHAPES
def test_torch_worker(hidden, inter, num_experts, num_rows, top_k, dtype, fp8):
    weights = ExpertWeights.random(
        range(num_experts), hidden=hidden, intermediate=inter, dtype=dtype
    )
    experts = make_experts("torch", on_gpu(weights), workspace=poisoned_workspace())
    x = torch.randn(num_rows, hidden).to("cuda", dtype)
    check(experts, weights, x, *random_routing(num_rows, top_k, num_experts), fp8=fp8)
    empty = random_routing(5, top_k, num_experts, remote=1.0)
    check(experts, weights, x[:5], *empty, fp8=fp8)


@needs_hopper
@pytest.mark.parametrize("fp8", [False, True], ids=["plain-rows", "fp8-rows"])
@pytest.mark.parametrize("loaded", ["from-bf16", "from-fp8"])
@SHAPES
def test_cutlass_fp8_worker(hidden, inter, num_experts, num_rows, top_k, loaded, fp8):
    plain = ExpertWeights.random(
        range(num_experts), hidden=hidden, intermediate=inter, format="fp8_channel"
    )
    weights = quantised_channels(plain)
    given = plain if loaded == "from-bf16" else weights
    experts = make_experts("auto", on_gpu(given), workspace=poisoned_workspace())
    assert experts.name == "cutlass_fp8"
    x = torch.randn(num_rows, hidden).to("cuda", torch.bfloat16)
    routing = random_routing(num_rows, top_k, num_experts)
    check(experts, weights, x, *routing, fp8=fp8, activations="fp8_token")


def dequantised_by_humming(weights):
    """What humming's own quantiser makes of the weights, back in fp32."""
    from humming.schema import HummingWeightSchema

    from crossdock.experts.humming_gemm import WEIGHT_CONFIGS

    schema = HummingWeightSchema.from_config(
        {"quant_method": "humming", **WEIGHT_CONFIGS[weights.format]}
    )
    dense = {}
    for name in ("w13", "w2"):
        tensors = HummingWeightSchema.quant_tensor(
            getattr(weights, name).cuda(), schema, torch.bfloat16
        )
        dense[name] = schema.dequant_tensors(tensors).float().cpu()
    return ExpertWeights(**dense)


@needs_humming
@pytest.mark.parametrize(
    ("weight_format", "activations"),
    [
        ("fp8_block", "fp8_block"),
        pytest.param("fp8_channel", "fp8_token", marks=pytest.mark.slow),
        pytest.param("int4", "fp8_token", marks=pytest.mark.slow),
        pytest.param("mxfp4", "fp8_token", marks=pytest.mark.slow),
        ("mxfp4", "plain"),
        pytest.param("nvfp4", "plain", marks=pytest.mark.slow),
    ],
)
def test_humming_worker(weight_format, activations):
    hidden, inter, num_experts = 256, 128, 8
    weights = ExpertWeights.random(
        range(num_experts), hidden=hidden, intermediate=inter, format=weight_format
    )
    reference = dequantised_by_humming(weights)
    experts = make_experts(
        "humming", on_gpu(weights), workspace=poisoned_workspace(), activations=activations
    )
    x = torch.randn(300, hidden).to("cuda", torch.bfloat16)
    routing = random_routing(300, 3, num_experts)
    for fp8 in (False, True):
        check(experts, reference, x, *routing, fp8=fp8, activations=activations)
    steps, graphs = graph_follows_device_counts(
        experts, reference, fp8=True, activations=activations
    )
    if weight_format == "mxfp4":
        return  # how it is packed depends on the weights' range, so a reload may be refused
    weights = ExpertWeights.random(
        range(num_experts), hidden=hidden, intermediate=inter, format=weight_format, seed=2
    )
    experts.reload(on_gpu(weights))
    topk_idx, topk_weights = random_routing(300, 3, num_experts, seed=9)
    refill(steps[0], x, topk_idx, topk_weights, fp8=True)
    graphs[0].replay()
    found = steps[0].y[:300].float().cpu()
    reference = dequantised_by_humming(weights)
    compare(found, reference, x, topk_idx, topk_weights, fp8=True, activations=activations)


@needs_humming
def test_humming_takes_blocks_that_come_quantised():
    plain = ExpertWeights.random(range(3), hidden=256, intermediate=128)
    fields = {}
    for name in ("w13", "w2"):
        weight = getattr(plain, name).float()
        experts, n, k = weight.shape
        blocks = weight.view(experts, n // 128, 128, k // 128, 128)
        scale = blocks.abs().amax(dim=(2, 4)) / 448
        payload = (blocks / scale[:, :, None, :, None]).view(weight.shape)
        fields |= {name: payload.to(torch.float8_e4m3fn), f"{name}_scale": scale}
    weights = ExpertWeights(**fields, format="fp8_block")
    experts = make_experts("auto", on_gpu(weights), workspace=poisoned_workspace())
    assert experts.name == "humming"
    x = torch.randn(70, 256).to("cuda", torch.bfloat16)
    check(experts, weights, x, *random_routing(70, 2, 3), fp8=True, activations="fp8_block")


def capture(experts, rows, stream=None):
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        experts(rows)
    return graph


def refill(rows, x, topk_idx, topk_weights, *, fp8):
    """New inputs of the same or smaller size into a captured step's buffers."""
    num_rows = x.shape[0]
    for name in ("x", "scale", "topk_weights"):
        tensor = getattr(rows, name)
        if tensor is not None:
            tensor.view(torch.uint8).fill_(0xFF)
    payload, scale = wire_fp8(x) if fp8 else (x, None)
    rows.x[:num_rows] = payload
    if scale is not None:
        rows.scale[:num_rows] = scale
    rows.topk_idx.fill_(-1)
    rows.topk_idx[:num_rows] = topk_idx.cuda()
    rows.topk_weights[:num_rows] = topk_weights.cuda()


def graph_follows_device_counts(experts, reference, *, fp8, activations):
    """Warm up, lock, capture two sizes, replay them in any order with other inputs."""
    hidden, num_experts = experts.hidden, experts.num_local_experts
    steps = []
    for num_rows in (300, 64):
        topk_idx, topk_weights = random_routing(num_rows, 3, num_experts, remote=0.0)
        x = torch.randn(num_rows, hidden).to("cuda", torch.bfloat16)
        rows = gpu_rows(x, topk_idx, topk_weights, num_experts, fp8=fp8)
        experts(rows)
        steps.append(rows)
    experts.workspace.lock()
    graphs = [capture(experts, rows) for rows in steps]
    for number, which in enumerate((0, 1, 1, 0, 1)):
        rows, num_rows = steps[which], (300, 64)[which] - 17 * number
        if num_rows < 0:
            num_rows = 0
        topk_idx, topk_weights = random_routing(num_rows, 3, num_experts, seed=number)
        x = torch.randn(num_rows, hidden).to("cuda", torch.bfloat16)
        refill(rows, x, topk_idx, topk_weights, fp8=fp8)
        rows.y.fill_(torch.nan)
        graphs[which].replay()
        found = rows.y[:num_rows].float().cpu()
        compare(found, reference, x, topk_idx, topk_weights, fp8=fp8, activations=activations)
    return steps, graphs


@needs_hopper
@pytest.mark.parametrize("fp8", [False, True], ids=["plain-rows", "fp8-rows"])
@pytest.mark.parametrize("backend", ["torch", "cutlass_fp8"])
def test_graphs_replay_with_other_inputs_and_follow_a_weight_reload(backend, fp8):
    def random(seed):
        return ExpertWeights.random(range(8), hidden=264, intermediate=136, seed=seed)

    def reference(weights):
        return weights if backend == "torch" else quantised_channels(weights)

    weights = random(1)
    workspace = poisoned_workspace()
    activations = "plain" if backend == "torch" else "fp8_token"
    experts = make_experts(backend, on_gpu(weights), workspace=workspace)
    steps, graphs = graph_follows_device_counts(
        experts, reference(weights), fp8=fp8, activations=activations
    )

    weights = random(2)
    experts.reload(on_gpu(weights))
    topk_idx, topk_weights = random_routing(200, 3, 8, seed=9)
    x = torch.randn(200, 264).to("cuda", torch.bfloat16)
    refill(steps[0], x, topk_idx, topk_weights, fp8=fp8)
    graphs[0].replay()
    found = steps[0].y[:200].float().cpu()
    compare(found, reference(weights), x, topk_idx, topk_weights, fp8=fp8, activations=activations)

    # Experts made anew find the scratch; what was captured before still replays.
    anew = make_experts(backend, on_gpu(random(3)), workspace=workspace)
    assert anew._scratch() is experts._scratch()
    assert anew.pair_capacity() == experts.pair_capacity()
    steps[0].y.fill_(torch.nan)
    graphs[0].replay()
    assert torch.equal(steps[0].y[:200].float().cpu(), found)


@needs_hopper
def test_two_lanes_replay_side_by_side():
    weights = ExpertWeights.random(range(8), hidden=256, intermediate=128)
    workspace = poisoned_workspace(num_lanes=2)
    experts = make_experts("torch", on_gpu(weights), workspace=workspace)
    steps, inputs = [], []
    for lane in range(2):
        topk_idx, topk_weights = random_routing(500, 3, 8, seed=lane)
        x = torch.randn(500, 256).to("cuda", torch.bfloat16)
        inputs.append((x, topk_idx, topk_weights))
        steps.append(gpu_rows(*inputs[-1], 8))
        with workspace.use(lane=lane):
            experts(steps[-1])
    workspace.lock()
    streams = [torch.cuda.Stream() for _ in range(2)]
    graphs = []
    for lane in range(2):
        with workspace.use(lane=lane):
            graphs.append(capture(experts, steps[lane], streams[lane]))
    for _ in range(20):
        for rows in steps:
            rows.y.fill_(torch.nan)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for rows, (x, topk_idx, topk_weights) in zip(steps, inputs, strict=True):
            compare(rows.y[:500].float().cpu(), weights, x, topk_idx, topk_weights)


def abandoned_capture(experts, rows):
    with pytest.raises((ConfigError, LockedError)) as caught:
        capture(experts, rows)
    return str(caught.value)


def test_capture_before_lock_is_refused():
    weights = ExpertWeights.random(range(2), hidden=64, intermediate=32)
    experts = make_experts("torch", on_gpu(weights), workspace=WorkspaceManager("cuda"))
    rows = gpu_rows(torch.randn(9, 64).cuda().bfloat16(), *random_routing(9, 2, 2), 2)
    experts(rows)
    assert "before lock()" in abandoned_capture(experts, rows)


def test_the_torch_worker_refuses_capture_where_grouped_mm_asks_the_host():
    weights = ExpertWeights.random(range(2), hidden=64, intermediate=32, dtype=torch.float16)
    experts = make_experts("torch", on_gpu(weights), workspace=WorkspaceManager("cuda"))
    rows = gpu_rows(torch.randn(9, 64).cuda().half(), *random_routing(9, 2, 2), 2)
    experts(rows)
    experts.workspace.lock()
    assert "reads the offsets on the host" in abandoned_capture(experts, rows)
