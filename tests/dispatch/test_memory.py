"""What one dispatch costs in memory: the bucket and one packed send buffer."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

import torch

from crossdock.dispatch import DispatchConfig, Dispatcher, ExpertPlacement
from tests.dispatch.cases import data_parallel
from tests.harness.child import Seat, open_transport
from tests.harness.lost import lone_ranks

NUM_TOKENS = 16384  # half of them to each of two ranks: a bucket without a tail
HIDDEN = 2048
TOP_K = 2
MB = 1024 * 1024


def measure(seat: Seat, link: Connection) -> None:
    """Peak of this process above what it held before, for the step that grows and the next."""
    transport = open_transport(seat)
    config = DispatchConfig(num_experts=4, top_k=TOP_K, hidden=HIDDEN, timeout_s=60.0)
    dispatcher = Dispatcher(
        config,
        transport,
        topology=data_parallel(seat.world_size),
        placement=ExpertPlacement.linear(4, seat.world_size),
    )
    x = torch.ones(NUM_TOKENS, HIDDEN, dtype=torch.bfloat16)
    home = torch.arange(NUM_TOKENS) % 2
    topk_idx = torch.stack([2 * home, 2 * home + 1], dim=1)
    topk_weights = torch.rand(NUM_TOKENS, TOP_K)

    rows, handle = dispatcher.dispatch(x[:2], topk_idx[:2], topk_weights[:2])  # sockets, threads
    dispatcher.combine(rows.y.fill_(1.0), handle)
    del rows, handle

    peaks = []
    for _ in range(2):
        before = start_peak()
        rows, handle = dispatcher.dispatch(x, topk_idx, topk_weights)
        peaks.append(memory("VmHWM") - before)
        row_bytes = rows.x.stride(0) * rows.x.element_size()
        assert rows.capacity == NUM_TOKENS
        dispatcher.combine(rows.y.fill_(1.0), handle)
        del rows, handle
    link.send((row_bytes, peaks))


def start_peak() -> int:
    """Forget the old peak; the memory held now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {name}")


def test_a_dispatch_peaks_at_the_bucket_and_one_packed_send_buffer():
    with lone_ranks(2, measure) as ranks:
        for rank in ranks:
            row_bytes, (growing, steady) = rank.receive()
            bucket = NUM_TOKENS * row_bytes
            packed = NUM_TOKENS * row_bytes
            assert growing <= 1.05 * (bucket + packed), (
                f"{growing / MB:.0f} MB for {bucket / MB:.0f} + {packed / MB:.0f}"
            )
            # The bucket is there by now: only the send buffer is new.
            assert steady <= 1.05 * packed + 0.05 * bucket, f"{steady / MB:.0f} MB"
