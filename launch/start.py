"""Starting the ranks of a configuration on this machine, and speaking for them when they fail."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from crossdock.launch.failures import EXIT_FAILED, read_notes, supervision
from crossdock.launch.models import ClusterSection
from crossdock.scratch.errors import ConfigError

__all__ = ["first_error", "start_ranks"]


def start_ranks(cluster: ClusterSection, arguments: Sequence[str], errors_dir: Path | None) -> int:
    """Run ``python -m crossdock.launch`` with these arguments as every rank of the cluster.

    All nodes' ranks run here. Each finds itself in a torchrun-like environment, as under torchrun.

    Returns:
        The exit status: 0, or that of the rank that failed first.

    Raises:
        ConfigError: This machine lacks the GPUs, or tracebacks cannot be written where asked.
    """
    num_gpus = torch.cuda.device_count()
    if cluster.device == "cuda" and num_gpus < cluster.num_ranks:
        raise ConfigError(
            f"the configuration wants {cluster.num_ranks} GPUs and this machine has {num_gpus}: "
            "start it on its cluster (crossdock render writes the commands), let ranks share a GPU "
            "over nvshmem (configs/rig-4.yaml says how), or take cluster.device=cpu"
        )
    try:
        notes = Path(tempfile.mkdtemp(prefix="crossdock-errors-", dir=errors_dir))
    except OSError as error:
        raise ConfigError(f"no place for tracebacks (--errors-dir): {error}") from None
    # The agent's own account of a failure repeats ours at length.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.update(supervision(notes))
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // cluster.num_ranks)))
    launch = elastic_launch(_launch_config(cluster.num_ranks, notes), sys.executable)
    try:
        launch("-m", "crossdock.launch", *arguments)
    except ChildFailedError as error:
        return _say_why(error.failures, notes)
    except SignalException as error:
        return 128 + error.sigval
    _remove_if_unused(notes)
    return 0


def _launch_config(num_ranks: int, logs: Path) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.05,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs)),
    )


def _say_why(failures: dict[int, ProcessFailure], notes_dir: Path) -> int:
    """Print the first error as the last line; the status with which its rank ended."""
    notes = read_notes(notes_dir)
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")  # a progress bar that died left the cursor hidden
    if notes:
        print(f"crossdock: tracebacks in {notes_dir}", file=sys.stderr)
    line, status = first_error(failures, notes_dir)
    print(f"crossdock: {line}", file=sys.stderr)
    return status


def first_error(failures: dict[int, ProcessFailure], notes_dir: Path) -> tuple[str, int]:
    """What to say about failed ranks (by rank), and the status to end with."""
    notes = read_notes(notes_dir)
    by_time = sorted(failures.items(), key=lambda item: item[1].timestamp)
    killed = [
        (rank, signal.Signals(-failure.exitcode).name)
        for rank, failure in by_time
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM
    ]
    if killed:
        rank, name = killed[0]
        return f"rank {rank} was killed by {name}", EXIT_FAILED
    if notes:
        return notes[0].line, notes[0].exit_code
    rank, failure = by_time[0]
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        return f"rank {rank} was killed by {name}", EXIT_FAILED
    return f"rank {rank} ended with status {failure.exitcode}", failure.exitcode


def _remove_if_unused(notes: Path) -> None:
    for folder, _, files in os.walk(notes, topdown=False):
        if not files:
            os.rmdir(folder)
