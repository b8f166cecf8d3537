"""From rows as they came to :class:`ReceivedRows`."""

from __future__ import annotations

import torch

from crossdock.dispatch.algorithms.base import Algorithm
from crossdock.dispatch.buckets import BucketMemory
from crossdock.dispatch.handle import Handle
from crossdock.dispatch.rows import ReceivedRows
from crossdock.dispatch.wire import WireFormat

__all__ = ["describe", "unpack"]


def unpack(
    memory: BucketMemory, handle: Handle, wire: WireFormat, algorithm: Algorithm, *, debug: bool
) -> ReceivedRows:
    """Read the metadata that lies within the rows of a bucket; see :func:`describe`."""
    rank = algorithm.transport.rank
    num_rows = handle.plan.received[rank]
    valid = memory.raw[:num_rows]
    memory.topk_idx[:num_rows] = wire.ids(valid)
    memory.topk_weights[:num_rows] = wire.weights(valid)

    counts = torch.tensor(handle.plan.recv_rows(rank), device=memory.raw.device)
    ranks = torch.arange(len(counts), device=counts.device)
    memory.source[:num_rows, 0] = torch.repeat_interleave(ranks, counts, output_size=num_rows)
    memory.source[:num_rows, 1] = wire.token(valid)
    return describe(memory, handle, wire, algorithm, debug=debug)


def describe(
    memory: BucketMemory, handle: Handle, wire: WireFormat, algorithm: Algorithm, *, debug: bool
) -> ReceivedRows:
    """The rows in a bucket whose metadata is in place, with the ids that travelled.

    Args:
        memory: The bucket; its first rows are the received ones.
        handle: Of the step.
        wire: Format of the rows.
        algorithm: Knows which ids travelled.
        debug: Fill what holds no row with NaN.
    """
    rank = algorithm.transport.rank
    num_rows = handle.plan.received[rank]
    num_local_experts = algorithm.placement.num_local_experts(rank)
    ids = memory.topk_idx[:num_rows]
    algorithm.localize(ids, memory.topk_weights[:num_rows])
    memory.topk_idx[num_rows:] = -1
    # One more bin, the first, takes the -1 entries.
    rows_per_expert = torch.bincount(ids.flatten() + 1, minlength=num_local_experts + 1)[1:]

    if debug:
        memory.poison(num_rows)
    return ReceivedRows(
        x=memory.x,
        scale=memory.scale,
        topk_idx=memory.topk_idx,
        topk_weights=memory.topk_weights,
        num_rows=num_rows,
        rows_per_expert=rows_per_expert,
        num_pairs=handle.pairs[rank],
        source=memory.source,
        dtype=wire.dtype,
        take_y=memory.y,
    )
