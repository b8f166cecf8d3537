"""Tokens in blocks that stay in a core's cache, for passes that come back to each token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["token_blocks"]

_BLOCK_BYTES = 1 << 20  # about what a core's own cache holds


def token_blocks(
    num_tokens: int, bytes_per_token: int, tokens: Sequence[Tensor], device: torch.device
) -> Iterator[tuple[int, int, list[slice]]]:
    """Cut tokens into blocks, and lists of tokens along with them. On a GPU all are one block.

    Args:
        num_tokens: T.
        bytes_per_token: What a pass touches of each.
        tokens: int64 [n_i] each, tokens in [0, T); ascending.
        device: Where they are.

    Yields:
        First token of a block, the first after it, and which part of each list lies between.
    """
    size = max(1, _BLOCK_BYTES // bytes_per_token)
    if device.type != "cpu" or num_tokens <= size:
        yield 0, num_tokens, [slice(0, len(part)) for part in tokens]
        return
    edges = [*range(0, num_tokens, size), num_tokens]
    cuts = [torch.searchsorted(part, torch.tensor(edges)).tolist() for part in tokens]
    for block, (start, end) in enumerate(pairwise(edges)):
        yield start, end, [slice(cut[block], cut[block + 1]) for cut in cuts]
