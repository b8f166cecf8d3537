"""Many ranks on one GPU, for tests and measurements: CUDA MPS lets their kernels run together.

The card's memory plays the fabric. No setting of the device is touched: MPS is a process of the
user's own, started before the ranks and ended after them.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from crossdock.scratch.errors import ConfigError, TransportUnavailable

__all__ = ["mps", "rig_environment", "run_on_rig"]

logger = logging.getLogger(__name__)

_CONTROL = "nvidia-cuda-mps-control"
_POLL_S = 0.05
_GRACE_S = 5.0


@contextmanager
def mps() -> Iterator[dict[str, str]]:
    """Run CUDA MPS.

    Yields:
        What its clients need in their environment.

    Raises:
        TransportUnavailable: MPS is not installed.
    """
    if shutil.which(_CONTROL) is None:
        raise TransportUnavailable(f"no {_CONTROL} on the PATH: it comes with NVIDIA's driver")
    with tempfile.TemporaryDirectory(prefix="crossdock-mps-") as folder:
        pipes, logs = Path(folder) / "pipe", Path(folder) / "log"
        pipes.mkdir()
        logs.mkdir()
        variables = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(logs)}
        environment = os.environ | variables
        subprocess.run([_CONTROL, "-d"], env=environment, check=True)
        try:
            yield variables
        finally:
            subprocess.run(
                [_CONTROL], input="quit\n", text=True, env=environment, check=False, timeout=30
            )


def rig_environment(rank: int, world_size: int, port: int, percentage: int) -> dict[str, str]:
    """Environment of one of ``world_size`` ranks that share a GPU.

    Ranks wait for each other in kernels, so together they must fit: ``percentage`` of the
    multiprocessors for each.
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),  # more than there are GPUs: all ranks are on the first
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percentage),
        "NVSHMEM_REMOTE_TRANSPORT": "none",
        "NVSHMEM_DISABLE_NVLS": "1",
        "OMP_NUM_THREADS": "1",
    }


def run_on_rig(
    world_size: int,
    command: Sequence[str],
    *,
    timeout_s: float = 60.0,
    environment: Mapping[str, str] | None = None,
    percentage: int | None = None,
) -> int:
    """Run a Python program on every rank, inside :func:`mps`.

    Args:
        world_size: R, ranks on the GPU.
        command: Arguments of the Python interpreter.
        timeout_s: Seconds after which all ranks are ended.
        environment: More variables; those of :func:`mps`.
        percentage: Of the GPU's multiprocessors, for each rank; by default an equal share of all.

    Returns:
        0 if every rank ended well, else the status of the first that did not (124 for time-out).
    """
    if not 1 <= world_size <= 16:
        raise ConfigError(f"{world_size} ranks on one GPU: 1 to 16")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base = os.environ | dict(environment or {})
    share = percentage or 100 // world_size
    processes = [
        subprocess.Popen(
            [sys.executable, *command], env=base | rig_environment(rank, world_size, port, share)
        )
        for rank in range(world_size)
    ]
    deadline = time.monotonic() + timeout_s
    failed = 0
    while any(process.poll() is None for process in processes):
        codes = [process.poll() for process in processes]
        if not failed and any(codes):
            failed = next(code for code in codes if code)
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        if time.monotonic() > deadline:
            logger.error("ranks %s did not end", [r for r, c in enumerate(codes) if c is None])
            failed = failed or 124
            break
        time.sleep(_POLL_S)
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
    return failed or next((p.returncode for p in processes if p.returncode), 0)


def main() -> int:
    """``python -m crossdock.launch.rig RANKS[+RANKS...] TIMEOUT_S PROGRAM...``.

    Several numbers of ranks run side by side, each with its own program, and share the GPU.
    """
    logging.basicConfig(level=logging.INFO)
    sizes, timeout_s, *command = sys.argv[1:]
    counts = [int(size) for size in sizes.split("+")]
    with mps() as variables, ThreadPoolExecutor(len(counts)) as pool:
        run = partial(
            run_on_rig,
            command=command,
            timeout_s=float(timeout_s),
            environment=variables,
            percentage=100 // sum(counts),
        )
        statuses = list(pool.map(run, counts))
    for count, status in zip(counts, statuses, strict=True):
        print(f"rig: {count} ranks: status {status}", flush=True)
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main())
