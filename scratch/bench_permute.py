"""How fast permute and unpermute are beside a kernel that only copies: ``crossdock bench permute``.

On CUDA every figure is the median over replays of a captured graph, the L2 cache flushed before
each. Ceilings, in the same run, move the same bytes by plain 16-byte loads and stores: of permute,
all pairs read and written (the kernels may beat it, because they read a row once for all its
pairs); of unpermute, all pairs read and all rows written. On the CPU the ceiling of permute is one
``index_select`` of the pairs.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from crossdock.scratch import permute_cuda, permute_torch
from crossdock.scratch.convert import FP8, convert_rows, swiglu
from crossdock.scratch.kernels import load_kernel
from crossdock.scratch.permutation import Permuted, permute, unpermute
from crossdock.scratch.permute_scratch import PermuteScratch, permute_scratch
from crossdock.scratch.workspace import WorkspaceManager

__all__ = ["CASES", "CPU_CASES", "Case", "run_permute_bench"]

FLUSH_BYTES = 256 << 20  # several times any L2
COPY_THREADS = 256
COPY_UNROLL = 4  # UNROLL in copy.cu


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape.

    Attributes:
        name: What a table calls it.
        tokens: Rows, each routed to ``top_k`` different experts at random.
        top_k: K.
        num_experts: E.
        num_local_experts: The first of them are local; rows with none stay among the rows.
        hidden: H.
        dtype: Of the rows; fp8 ones have a scale for each 128.
    """

    name: str
    tokens: int
    top_k: int
    num_experts: int
    num_local_experts: int
    hidden: int = 7168
    dtype: torch.dtype = torch.bfloat16


CASES = (
    Case(name="prefill, all local", tokens=4096, top_k=8, num_experts=256, num_local_experts=256),
    Case(name="prefill, 32 of 256", tokens=4096, top_k=8, num_experts=256, num_local_experts=32),
    Case(name="decode, all local", tokens=128, top_k=8, num_experts=256, num_local_experts=256),
    Case(name="top-1 of 32", tokens=32768, top_k=1, num_experts=32, num_local_experts=32),
    Case(
        name="prefill fp8, all local",
        tokens=4096,
        top_k=8,
        num_experts=256,
        num_local_experts=256,
        dtype=FP8,
    ),
    Case(
        name="prefill fp8, 32 of 256",
        tokens=4096,
        top_k=8,
        num_experts=256,
        num_local_experts=32,
        dtype=FP8,
    ),
)

CPU_CASES = (
    Case(name="all local", tokens=1024, top_k=8, num_experts=64, num_local_experts=64, hidden=2048),
    Case(name="16 of 64", tokens=2048, top_k=8, num_experts=64, num_local_experts=16, hidden=2048),
    Case(name="decode", tokens=16, top_k=8, num_experts=64, num_local_experts=64, hidden=2048),
)


def run_permute_bench(
    device: torch.device | str = "auto",
    *,
    cases: tuple[Case, ...] | None = None,
    repeats: int = 30,
    seed: int = 0,
) -> dict[str, Any]:
    """Checks every case against plain torch, then times it.

    Args:
        device: ``"auto"`` is the GPU if there is one.
        cases: None for those of the device's kind.
        repeats: Timed runs of each figure.
        seed: Of the routing and the rows.

    Returns:
        JSON-able: ``device``, ``floor_us`` (an empty kernel, on CUDA), and for each case its shape,
        ``pairs``, ``permute_us``, ``permute_ceiling_us``, ``permute_ratio`` (ceiling / time),
        ``index_us``, and the same three for unpermute; ``activations``, SwiGLU alone and with
        quantisation, and ``conversions``, permutes that change the dtype, each beside a copy of
        as many bytes (``us``, ``ceiling_us``, ``ratio``). Each is the median in microseconds.

    Raises:
        AssertionError: A result differs from plain torch's.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    timer = _GraphTimer(device, repeats) if on_gpu else _HostTimer(repeats)
    chosen = cases or (CASES if on_gpu else CPU_CASES)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "cases": [_run_case(case, device, timer, seed) for case in chosen],
        "activations": _run_activations(device, timer, pairs=16384 if on_gpu else 1024),
        "conversions": _run_conversions(device, timer, pairs=16384 if on_gpu else 1024),
    }
    if on_gpu:
        nothing = load_kernel(permute_cuda.SOURCES / "copy.cu", "nothing", device=device)
        report["floor_us"] = timer.median_us(lambda: nothing(1, 32, device=device))
    return report


def _run_case(case: Case, device: torch.device, timer: _Timer, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(case.tokens, case.num_experts, generator=generator).topk(case.top_k).indices
    topk_idx = torch.where(chosen < case.num_local_experts, chosen, -1).to(device)
    weights = torch.rand(case.tokens, case.top_k, generator=generator).to(device)
    x = torch.randn(case.tokens, case.hidden, device=device).to(case.dtype)
    scale = None
    if case.dtype == FP8:
        scale = torch.rand(case.tokens, math.ceil(case.hidden / 128), device=device)
    num_pairs = int((topk_idx >= 0).sum())
    workspace = WorkspaceManager(device)
    scratch = permute_scratch(
        workspace,
        num_experts=case.num_experts,
        num_local_experts=case.num_local_experts,
        device=device,
    )
    pairs = torch.empty(num_pairs, case.hidden, dtype=case.dtype, device=device)
    scales = torch.empty(num_pairs, scale.shape[1], device=device) if scale is not None else None
    model_dtype = torch.bfloat16 if case.dtype == FP8 else case.dtype
    expert_out = torch.randn(num_pairs, case.hidden, device=device).to(model_dtype)
    out = torch.empty(case.tokens, case.hidden, dtype=model_dtype, device=device)

    def run() -> Permuted:
        return permute(
            x, scale, topk_idx, scratch, num_pairs=num_pairs, out=pairs, out_scale=scales
        )

    permuted = run()
    _check(x, topk_idx, permuted)
    workspace.lock()
    pair_bytes = pairs.nbytes + (scales.nbytes if scales is not None else 0)
    result: dict[str, Any] = {
        "name": case.name,
        "tokens": case.tokens,
        "top_k": case.top_k,
        "num_experts": case.num_experts,
        "num_local_experts": case.num_local_experts,
        "hidden": case.hidden,
        "dtype": str(case.dtype).removeprefix("torch."),
        "pairs": num_pairs,
        "permute_us": timer.median_us(run),
        "index_us": timer.median_us(lambda: _index(topk_idx, scratch, permuted)),
        "permute_ceiling_us": timer.copy_us(pairs, pair_bytes, pair_bytes),
        "unpermute_us": timer.median_us(lambda: unpermute(out, expert_out, weights, permuted)),
        "unpermute_ceiling_us": timer.copy_us(expert_out, expert_out.nbytes, out.nbytes),
    }
    for name in ("permute", "unpermute"):
        result[f"{name}_ratio"] = result[f"{name}_ceiling_us"] / result[f"{name}_us"]
    return result


def _run_activations(device: torch.device, timer: _Timer, *, pairs: int) -> list[dict[str, Any]]:
    intermediate = 2048
    gate_up = torch.randn(pairs, 2 * intermediate, device=device).bfloat16()
    results = []
    for name, dtype, num_scales in (
        ("swiglu", torch.bfloat16, 0),
        ("swiglu, fp8 by row", FP8, 1),
        ("swiglu, fp8 by 128", FP8, intermediate // 128),
    ):
        out = torch.empty(pairs, intermediate, dtype=dtype, device=device)
        scale = torch.empty(pairs, num_scales, device=device) if num_scales else None
        us = timer.median_us(partial(swiglu, gate_up, out=out, scale=scale))
        ceiling = timer.copy_us(gate_up, gate_up.nbytes, out.nbytes)
        results.append(
            {"name": name, "pairs": pairs, "width": intermediate, **_beside(us, ceiling)}
        )
    return results


def _run_conversions(device: torch.device, timer: _Timer, *, pairs: int) -> list[dict[str, Any]]:
    """Permutes that change the dtype, one local expert a row."""
    hidden, num_local, top_k = (7168, 32, 8) if device.type == "cuda" else (1024, 32, 8)
    topk_idx = torch.full((pairs, top_k), -1, dtype=torch.int64, device=device)
    topk_idx[:, 3] = torch.randint(num_local, (pairs,), device=device)
    wide = torch.randn(pairs, hidden, device=device).bfloat16()
    payload = torch.empty(pairs, hidden, dtype=FP8, device=device)
    scales = torch.empty(pairs, hidden // 128, device=device)
    convert_rows(wide, out=payload, scale=scales)
    workspace = WorkspaceManager(device)
    scratch = permute_scratch(
        workspace, num_experts=256, num_local_experts=num_local, device=device
    )
    scratch.reserve(pairs)
    workspace.lock()
    results = []
    for name, source, source_scale, dtype, num_scales in (
        ("bf16 to fp8 by row", wide, None, FP8, 1),
        ("bf16 to fp8 by 128", wide, None, FP8, hidden // 128),
        ("fp8 by 128 to bf16", payload, scales, torch.bfloat16, 0),
        ("fp8 by 128 to fp8 by row", payload, scales, FP8, 1),
    ):
        out = torch.empty(pairs, hidden, dtype=dtype, device=device)
        out_scale = torch.empty(pairs, num_scales, device=device) if num_scales else None
        run = partial(
            permute,
            source,
            source_scale,
            topk_idx,
            scratch,
            num_pairs=pairs,
            out=out,
            out_scale=out_scale,
        )
        us, ceiling = timer.median_us(run), timer.copy_us(source, source.nbytes, out.nbytes)
        results.append({"name": name, "pairs": pairs, "width": hidden, **_beside(us, ceiling)})
    return results


def _beside(us: float, ceiling_us: float) -> dict[str, float]:
    return {"us": us, "ceiling_us": ceiling_us, "ratio": ceiling_us / us}


def _index(topk_idx: Tensor, scratch: PermuteScratch, permuted: Permuted) -> None:
    if topk_idx.device.type == "cuda" and permute_cuda.is_available():
        permute_cuda.index(topk_idx, scratch, permuted)
    else:
        permute_torch.index(topk_idx, permuted)


def _check(x: Tensor, topk_idx: Tensor, permuted: Permuted) -> None:
    """Against a stable sort."""
    ids = topk_idx.reshape(-1)
    slots = (ids >= 0).nonzero().squeeze(1)
    source = slots[ids[slots].argsort(stable=True)] // topk_idx.shape[1]
    assert torch.equal(permuted.source.long(), source)
    for start in range(0, source.numel(), 4096):
        rows = source[start : start + 4096]
        want = x.view(torch.uint8)[rows]
        assert torch.equal(permuted.hidden[start : start + 4096].view(torch.uint8), want)


class _Timer:
    """Medians of ``repeats`` runs, in microseconds."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats

    def median_us(self, run: Callable[[], object]) -> float:
        raise NotImplementedError

    def copy_us(self, memory: Tensor, read: int, written: int) -> float:
        """A move of so many bytes of ``memory`` with no index work."""
        raise NotImplementedError


class _HostTimer(_Timer):
    def median_us(self, run: Callable[[], object]) -> float:
        run()
        times = []
        for _ in range(self.repeats):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e6

    def copy_us(self, memory: Tensor, read: int, written: int) -> float:
        in_order = torch.arange(memory.shape[0])
        target = torch.empty_like(memory)
        words, target = memory.view(torch.uint8), target.view(torch.uint8)
        return self.median_us(lambda: torch.index_select(words, 0, in_order, out=target))


class _GraphTimer(_Timer):
    def __init__(self, device: torch.device, repeats: int) -> None:
        super().__init__(repeats)
        self._device = device
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def median_us(self, run: Callable[[], object]) -> float:
        run()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        times = []
        for _ in range(self.repeats):
            start, end = _event(), _event()
            self._flush.zero_()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(float(start.elapsed_time(end)))
        return statistics.median(times) * 1e3

    def copy_us(self, memory: Tensor, read: int, written: int) -> float:
        kernel = load_kernel(permute_cuda.SOURCES / "copy.cu", "copy_words", device=self._device)
        source = torch.empty(read // 16 * 16, dtype=torch.uint8, device=self._device)
        target = torch.empty(written // 16 * 16, dtype=torch.uint8, device=self._device)
        words = max(read, written) // 16
        blocks = math.ceil(words / (COPY_THREADS * COPY_UNROLL))
        return self.median_us(
            lambda: kernel(
                blocks, COPY_THREADS, source, target, read // 16, written // 16, device=self._device
            )
        )


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
