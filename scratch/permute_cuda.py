"""Permute and unpermute by our CUDA kernels: ``permute_torch``'s results, and no host wait.

Work is in proportion to local pairs, beyond one read of the ids and one write of ``inverse``:

    count_tiles, place_pairs   a counting sort of the local ids; place_chunk alone for few ids
    move_rows                  each row read once, written to all of its pairs

Each kernel starts while its predecessor ends, and reads its inputs meanwhile.
"""

from __future__ import annotations

import logging
import math
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from crossdock.scratch import jit
from crossdock.scratch.kernels import load_kernel
from crossdock.scratch.permute_scratch import MAX_TILES, PermuteScratch, padded_experts

if TYPE_CHECKING:
    from crossdock.scratch.permutation import Permuted

__all__ = ["SOURCES", "index", "is_available", "permute", "supports", "unpermute"]

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "cuda"
INDEX = SOURCES / "index.cu"

MAX_EXPERTS = 1024
CHUNK = 1024  # ids of a block at a time, in index.cu
INDEX_THREADS = 512
CHUNK_THREADS = 256  # of place_chunk
WARPS = 8  # of a block of move_rows
WORDS_IN_FLIGHT = 4  # UNROLL in rows.cu
SUM_THREADS = 128  # THREADS in unpermute.cu
C_TYPES = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half", torch.float32: "float"}


@lru_cache(maxsize=1)
def is_available() -> bool:
    """Whether the kernels can be compiled here; says once why not."""
    try:
        jit.toolkit_include_dirs()
    except jit.JitMissingError as error:
        logger.warning("permute and unpermute run in plain torch, which is slower: %s", error)
        return False
    return True


def supports(topk_idx: Tensor, scratch: PermuteScratch) -> bool:
    """Whether ids and experts are few enough for the kernels' 32-bit slots and shared memory."""
    return topk_idx.numel() < 2**31 and scratch.num_local_experts <= MAX_EXPERTS


def permute(
    hidden: Tensor,
    scale: Tensor | None,
    topk_idx: Tensor,
    scratch: PermuteScratch,
    permuted: Permuted,
) -> None:
    """Fills ``permuted``, whose tensors are allocated; ``topk_idx`` is contiguous."""
    device_rows, num_rows = row_count(permuted)
    top_k = topk_idx.shape[1]
    rows = _row_arguments(hidden, permuted.hidden, scale, permuted.scale)
    width = alignment(hidden, permuted.hidden)
    words = hidden.shape[1] * hidden.dtype.itemsize // width
    index(topk_idx, scratch, permuted)
    num_parts = max(1, math.ceil(words / (32 * WORDS_IN_FLIGHT)))
    move_rows = load_kernel(
        SOURCES / "rows.cu", "move_rows", device=hidden.device, defines={"WIDTH": width}
    )
    move_rows(
        math.ceil(num_rows * num_parts / WARPS),
        32 * WARPS,
        *rows,
        topk_idx,
        permuted.inverse,
        device_rows,
        num_rows,
        top_k,
        scratch.num_local_experts,
        num_parts,
        device=hidden.device,
        overlap=True,
    )


def index(topk_idx: Tensor, scratch: PermuteScratch, permuted: Permuted) -> None:
    """Fills offsets, inverse and source of ``permuted``; moves no rows.

    Args:
        topk_idx: As in ``permutation.permute``, contiguous.
        scratch: Where the counts of tiles go.
        permuted: Its tensors are allocated.
    """
    device_rows, num_rows = row_count(permuted)
    top_k = topk_idx.shape[1]
    num_slots = num_rows * top_k
    device = topk_idx.device
    defines = {"EXPERTS": padded_experts(scratch.num_local_experts)}
    ids = (topk_idx, device_rows, num_rows, top_k, scratch.num_local_experts)
    results = (permuted.offsets, permuted.inverse, permuted.source)
    num_pairs = permuted.source.numel()
    if num_slots <= CHUNK:
        place_chunk = load_kernel(INDEX, "place_chunk", device=device, defines=defines)
        num_warps = scratch.num_local_experts + 1 + num_slots  # one an offset, one a slot
        num_blocks = math.ceil(num_warps / (CHUNK_THREADS // 32))
        place_chunk(num_blocks, CHUNK_THREADS, *ids, num_pairs, *results, device=device)
        return
    tile = math.ceil(num_slots / (MAX_TILES * CHUNK)) * CHUNK
    num_tiles = math.ceil(num_slots / tile)
    counts = scratch.tile_counts
    count_tiles = load_kernel(INDEX, "count_tiles", device=device, defines=defines)
    count_tiles(num_tiles, INDEX_THREADS, *ids, tile, counts, device=device)
    place_pairs = load_kernel(INDEX, "place_pairs", device=device, defines=defines)
    place_pairs(
        num_tiles,
        INDEX_THREADS,
        *ids,
        num_pairs,
        tile,
        counts,
        *results,
        device=device,
        overlap=True,
    )


def unpermute(out: Tensor, expert_out: Tensor, topk_weights: Tensor, permuted: Permuted) -> None:
    """Fills ``out``."""
    device_rows, num_rows = row_count(permuted)
    if topk_weights.stride(1) != 1:
        topk_weights = topk_weights.contiguous()
    hidden = out.shape[1]
    elements = min(
        alignment(expert_out) // expert_out.dtype.itemsize,
        # Sixteen bytes in may be thirty-two out: two stores, aligned to sixteen.
        alignment(out) // out.dtype.itemsize if alignment(out) < 16 else 8,
    )
    kernel = load_kernel(
        SOURCES / "unpermute.cu",
        "unpermute",
        device=out.device,
        defines={
            "IN": C_TYPES[expert_out.dtype],
            "OUT": C_TYPES[out.dtype],
            "ELEMENTS": elements,
        },
    )
    num_parts = max(1, math.ceil(hidden / (32 * elements)))
    kernel(
        math.ceil(num_rows * num_parts * 32 / SUM_THREADS),
        SUM_THREADS,
        expert_out,
        expert_out.stride(0),
        out,
        out.stride(0),
        hidden,
        topk_weights,
        topk_weights.stride(0),
        permuted.inverse,
        device_rows,
        num_rows,
        permuted.inverse.shape[1],
        num_parts,
        device=out.device,
    )


def row_count(permuted: Permuted) -> tuple[Tensor | None, int]:
    """Where the device finds the number of rows, if it must, and its bound on the host."""
    if isinstance(permuted.num_rows, Tensor):
        return permuted.num_rows, permuted.inverse.shape[0]
    return None, permuted.num_rows


def alignment(*tensors: Tensor) -> int:
    """Bytes, at most 16, that divide the start and the row stride of all of them."""
    return math.gcd(
        16, *(t.data_ptr() for t in tensors), *(t.stride(0) * t.dtype.itemsize for t in tensors)
    )


def _row_arguments(
    hidden: Tensor, out: Tensor, scale: Tensor | None, out_scale: Tensor | None
) -> tuple[Tensor | int | None, ...]:
    itemsize = hidden.dtype.itemsize
    rows = (
        hidden,
        out,
        hidden.stride(0) * itemsize,
        out.stride(0) * itemsize,
        hidden.shape[1] * itemsize,
    )
    if scale is None or out_scale is None:
        return (*rows, None, None, 0, 0, 0)
    scales = (scale, out_scale, scale.stride(0), out_scale.stride(0), scale.shape[1])
    return (*rows, *scales)
