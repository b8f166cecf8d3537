"""Figures of the experts: what a worker costs beside its GEMMs, and what memory pairs save.

Times are medians of CUDA graph replays with a cold L2 (a large buffer is overwritten before each).
All that is compared is replayed in turn, in one loop: under full load the card's clocks drift by
several percent within seconds, more than some of the differences.
"""

from __future__ import annotations

import importlib.util
import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crossdock.dispatch.rows import ReceivedRows
from crossdock.experts.backends import make_experts
from crossdock.experts.gemm import Groups
from crossdock.experts.weights import ExpertWeights, WeightFormat
from crossdock.experts.worker import Worker
from crossdock.scratch import WorkspaceManager, permute_scratch

__all__ = ["experts_memory_table", "run_experts_bench"]

logger = logging.getLogger(__name__)

WARM_UP = 3
REPEATS = 20
FLUSH_BYTES = 1 << 28


def run_experts_bench(
    *,
    num_pairs: int = 16384,
    hidden: int = 7168,
    intermediate: int = 2048,
    num_local_experts: int = 32,
    top_k: int = 8,
) -> dict[str, Any]:
    """Workers whole and their two GEMMs alone: torch in bf16, cutlass_fp8, and humming fp8_block.

    Two cases with the same pairs: ``all_local``, num_pairs / top_k rows whose experts are all
    here, and ``one_local``, num_pairs rows with one expert here, as expert parallelism makes them.

    Returns:
        ``{"gpu", "shape", "cases": {case: {backend: {...}}}}``: for each worker microseconds of the
        whole (``worker_us``) and of the GEMMs (``gemms_us``), their TFLOP/s, ``overhead`` =
        (worker - gemms) / gemms, and against torch in bf16 ``worker_speedup``, ``gemm_speedup`` and
        their quotient ``kept``. humming is left out where it is not installed.

    Raises:
        ConfigError: This GPU lacks one of the workers.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    plain = _random_weights(num_local_experts, hidden, intermediate, device)
    workers = [
        make_experts("auto", replace(plain, format=kind), workspace=WorkspaceManager(device))
        for kind in _formats()
    ]
    cases = {}
    for case, num_rows in (("all_local", num_pairs // top_k), ("one_local", num_pairs)):
        rows = _random_rows(num_rows, num_pairs, hidden, num_local_experts, top_k, device)
        cases[case] = _measure(workers, rows)
        logger.info("%s: %s", case, cases[case])
    return {
        "gpu": torch.cuda.get_device_name(device),
        "shape": {
            "num_pairs": num_pairs,
            "hidden": hidden,
            "intermediate": intermediate,
            "num_local_experts": num_local_experts,
            "top_k": top_k,
        },
        "cases": cases,
    }


def experts_memory_table(
    trace: Path,
    *,
    ep_sizes: tuple[int, ...] = (8, 32, 64),
    tokens_per_rank: int = 4096,
    hidden: int = 7168,
    intermediate: int = 2048,
) -> list[dict[str, Any]]:
    """Bytes of workspace and permute scratch by pairs, and by rows x top_k as is common.

    Rank r of R takes ``tokens_per_rank`` tokens of the trace after those of the ranks before it;
    each wrap moves to the next layer. Placement is linear. Computed, not run: the torch worker in
    bf16, plus the two outputs that torch's allocator gives it, of which one is alive at a time.

    Args:
        trace: A safetensors file with ``topk_idx`` [layers, tokens, K]; E is the largest id + 1.
        ep_sizes: R.
        tokens_per_rank: T.
        hidden: H.
        intermediate: I.

    Returns:
        One row for each R; bytes are those of the rank that needs most.
    """
    from safetensors.torch import load_file

    layers = load_file(trace)["topk_idx"].long()
    num_experts, top_k = int(layers.max()) + 1, layers.shape[2]
    table = []
    for ep_size in ep_sizes:
        total = ep_size * tokens_per_rank
        at = torch.arange(total)
        topk_idx = layers[at // layers.shape[1] % layers.shape[0], at % layers.shape[1]]
        owner = topk_idx * ep_size // num_experts
        pairs = owner.flatten().bincount(minlength=ep_size)
        here = torch.zeros(total, ep_size, dtype=torch.bool).scatter_(1, owner, True)
        rows = here.sum(0)
        bytes_per_pair = _bytes_per_pair(hidden, intermediate)
        table.append(
            {
                "ep_size": ep_size,
                "rows_max": int(rows.max()),
                "pairs_max": int(pairs.max()),
                "pairs_mean": float(pairs.float().mean()),
                "bytes_by_pairs": int(pairs.max()) * bytes_per_pair,
                "bytes_by_rows_x_top_k": int(rows.max()) * top_k * bytes_per_pair,
                "bytes_by_max_tokens_x_top_k": total * top_k * bytes_per_pair,
            }
        )
    return table


def _bytes_per_pair(hidden: int, intermediate: int) -> int:
    bf16, index = 2, 4
    return (max(hidden, intermediate) + max(2 * intermediate, hidden)) * bf16 + index


def _measure(workers: Sequence[Worker], rows: ReceivedRows) -> dict[str, dict[str, float]]:
    """Figures by worker; the first one is what the others are compared with."""
    graphs = []
    for worker in workers:
        worker.workspace.unlock()
        worker(rows)
        worker.workspace.lock()
        graphs += [_capture(partial(worker, rows)), _capture(_gemms_alone(worker, rows))]
    times = iter(_medians_us(graphs))
    operations = 2 * int(rows.num_pairs) * 3 * workers[0].hidden * workers[0].intermediate
    figures: dict[str, dict[str, float]] = {}
    for worker in workers:
        worker_us, gemms_us = next(times), next(times)
        base = figures.get(workers[0].name, {"worker_us": worker_us, "gemms_us": gemms_us})
        worker_speedup = base["worker_us"] / worker_us
        gemm_speedup = base["gemms_us"] / gemms_us
        figures[worker.name] = {
            "worker_us": worker_us,
            "gemms_us": gemms_us,
            "gemms_tflops": operations / gemms_us * 1e-6,
            "overhead": (worker_us - gemms_us) / gemms_us,
            "worker_speedup": worker_speedup,
            "gemm_speedup": gemm_speedup,
            "kept": worker_speedup / gemm_speedup,
        }
    return figures


def _gemms_alone(worker: Worker, rows: ReceivedRows) -> Callable[[], None]:
    """The two GEMMs on random activations, with the groups that ``rows`` made in the scratch."""
    num_pairs, device = int(rows.num_pairs), rows.x.device
    scratch = permute_scratch(
        worker.workspace,
        num_experts=worker.num_experts,
        num_local_experts=worker.num_local_experts,
        device=device,
    )
    groups = Groups(scratch.offsets)
    _ = groups.ends  # made once, before the clock runs
    x, x_scale = _activations(worker, num_pairs, worker.hidden, device)
    activation, activation_scale = _activations(worker, num_pairs, worker.intermediate, device)
    out13 = out2 = None
    if worker.gemm13.writes_out:
        out13 = x.new_empty((num_pairs, 2 * worker.intermediate), dtype=worker.gemm13.dtype)
        out2 = x.new_empty((num_pairs, worker.hidden), dtype=worker.gemm2.dtype)

    def gemms() -> None:
        worker.gemm13(x, x_scale, groups, out=out13)
        worker.gemm2(activation, activation_scale, groups, out=out2)

    return gemms


def _formats() -> tuple[WeightFormat, ...]:
    has_humming = importlib.util.find_spec("humming") is not None
    return ("plain", "fp8_channel", "fp8_block") if has_humming else ("plain", "fp8_channel")


def _activations(
    worker: Worker, num_pairs: int, width: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Random ones as the worker's GEMMs read them."""
    values = torch.randn(num_pairs, width, device=device)
    kind = worker.gemm13.activations
    if kind == "plain":
        return values.to(worker.gemm13.dtype), None
    scales = 1 if kind == "fp8_token" else width // 128
    return values.to(torch.float8_e4m3fn), torch.ones(num_pairs, scales, device=device)


@dataclass(frozen=True)
class _Captured:
    """A graph, and the call whose memory it uses."""

    graph: torch.cuda.CUDAGraph
    call: Callable[[], object]


def _capture(call: Callable[[], object]) -> _Captured:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return _Captured(graph, call)


def _medians_us(captured: Sequence[_Captured]) -> list[float]:
    """Median microseconds of each, replayed in turn."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    spans: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in captured]
    for round_number in range(WARM_UP + REPEATS):
        for each, of_each in zip(captured, spans, strict=True):
            start, end = _timing_event(), _timing_event()
            flush.zero_()
            start.record()
            each.graph.replay()
            end.record()
            if round_number >= WARM_UP:
                of_each.append((start, end))
    torch.cuda.synchronize()
    return [
        1e3 * statistics.median(float(start.elapsed_time(end)) for start, end in of_each)
        for of_each in spans
    ]


def _timing_event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


def _random_weights(
    experts: int, hidden: int, intermediate: int, device: torch.device
) -> ExpertWeights:
    """Drawn on the GPU, where billions of them take no time."""
    w13 = torch.randn(experts, 2 * intermediate, hidden, dtype=torch.bfloat16, device=device)
    w2 = torch.randn(experts, hidden, intermediate, dtype=torch.bfloat16, device=device)
    return ExpertWeights(w13=w13.mul_(hidden**-0.5), w2=w2.mul_(intermediate**-0.5))


def _random_rows(
    num_rows: int, num_pairs: int, hidden: int, experts: int, top_k: int, device: torch.device
) -> ReceivedRows:
    """``num_rows`` rows with num_pairs / num_rows local experts each, in random columns."""
    local = num_pairs // num_rows
    ids = torch.rand(num_rows, experts, device=device).argsort(dim=1)[:, :top_k]
    ids[:, local:] = -1
    columns = torch.rand(num_rows, top_k, device=device).argsort(dim=1)
    topk_idx = ids.gather(1, columns)
    y = torch.empty(num_rows, hidden, dtype=torch.bfloat16, device=device)
    topk_weights = torch.rand(num_rows, top_k, device=device)

    def take_y() -> Tensor:
        return y

    return ReceivedRows(
        x=torch.randn(num_rows, hidden, device=device).bfloat16(),
        scale=None,
        topk_idx=topk_idx,
        topk_weights=topk_weights.masked_fill_(topk_idx < 0, 0),
        num_rows=num_rows,
        rows_per_expert=topk_idx[topk_idx >= 0].bincount(minlength=experts),
        num_pairs=num_rows * local,
        source=torch.zeros(num_rows, 2, dtype=torch.int64, device=device),
        dtype=torch.bfloat16,
        take_y=take_y,
    )
