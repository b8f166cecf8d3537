"""The size of NVSHMEM's symmetric heap, where it is fixed before NVSHMEM starts.

By itself the heap grows on demand (CUDA virtual memory), up to NVSHMEM_MAX_MEMORY_PER_GPU, and
NVSHMEM_SYMMETRIC_SIZE says nothing. With NVSHMEM_DISABLE_CUDA_VMM=1 it is one allocation of
NVSHMEM_SYMMETRIC_SIZE bytes, rounded up, taken when NVSHMEM starts (NVSHMEM's documentation,
"Environment Variables", and its ``mem_heap.cpp``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from crossdock.dispatch.agreement import mark_agreed
from crossdock.scratch.errors import CapacityError, ConfigError, DisagreementError

__all__ = ["SIZE_PATTERN", "check_heaps", "heap_environment", "parse_size"]

SIZE_PATTERN = r"^[0-9]{1,6}(\.[0-9]{1,3})? ?(KiB|MiB|GiB|TiB)$"
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_MOST = 2**46


def parse_size(value: object) -> int:
    """Bytes of a size such as ``"8GiB"``, ``"1.5 GiB"``, or of a whole number of bytes.

    Raises:
        ConfigError: It is neither, or not between 1 byte and 64 TiB.
    """
    size = 0
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (found := re.fullmatch(SIZE_PATTERN, value)):
        unit = found[2]
        size = int(float(value.removesuffix(unit)) * _UNITS[unit])
    if not 1 <= size <= _MOST:
        raise ConfigError(
            "bytes, or a size in KiB, MiB, GiB or TiB such as 8GiB, up to 64TiB is wanted"
        )
    return size


def check_heaps(heaps: Sequence[int], gpus: Sequence[int], free: Sequence[int]) -> None:
    """Whether the heaps that all ranks asked for are one size and fit.

    Args:
        heaps: [R] bytes that each rank asked for; 0 for a heap that grows.
        gpus: [R] number of each rank's GPU.
        free: [R] bytes that are free on it.

    Raises:
        DisagreementError: Ranks asked for different sizes.
        CapacityError: The heaps do not fit on some rank's GPU.
    """
    for rank, heap in enumerate(heaps):
        if heap != heaps[0]:
            raise mark_agreed(
                DisagreementError(
                    f"symmetric_heap = {heaps[0]} bytes on rank 0 but {heap} on rank {rank} "
                    "(0: it grows): the same on all ranks is wanted",
                    ranks=(0, rank),
                )
            )
    for rank, (heap, gpu, room) in enumerate(zip(heaps, gpus, free, strict=True)):
        sharers = gpus.count(gpu)
        if heap * sharers > room:
            raise mark_agreed(
                CapacityError(
                    f"symmetric_heap = {heap} bytes for each of the {sharers} rank(s) on the GPU "
                    f"of rank {rank}, where {room} bytes are free: ask for less, or start before "
                    "other memory is taken",
                    ranks=(rank,),
                )
            )


@contextmanager
def heap_environment(num_bytes: int | None) -> Iterator[None]:
    """What NVSHMEM reads when it starts, for a heap of that size; None leaves all as it is."""
    if num_bytes is None:
        yield
        return
    wanted = {"NVSHMEM_SYMMETRIC_SIZE": str(num_bytes), "NVSHMEM_DISABLE_CUDA_VMM": "1"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
