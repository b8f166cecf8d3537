"""One rank of a job, whoever started it: join, do the job, end together."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from crossdock.dispatch import connect
from crossdock.dispatch.transports.base import Transport
from crossdock.dispatch.transports.watch import Process
from crossdock.launch.config import Job, load_job
from crossdock.launch.failures import die_with_supervisor, end_rank, job_errors_dir
from crossdock.launch.join import Membership, Seat, check_world_size, join
from crossdock.launch.report import RankReport, RunReport
from crossdock.launch.run import run_layer
from crossdock.launch.screen import make_console, write_json
from crossdock.scratch.errors import ConfigError, CrossdockError

__all__ = ["Work", "bench_work", "run_as_rank", "run_work"]

Work = Callable[[Job, Transport, Membership], bool | None]
"""What ranks do once they have met; on rank 0 the result says whether all went well."""


def run_as_rank(
    seat: Seat, config: Path, overrides: list[str], work: Work, *, errors_dir: Path | None
) -> NoReturn:
    """Be the rank that the launcher says this process is; ends the process."""
    # A launcher passes Ctrl-C on to its ranks: end as by SIGTERM, nobody wants their tracebacks.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_supervisor()
    notes = job_errors_dir(errors_dir)
    processes: tuple[Process, ...] = ()
    try:
        job = load_job(config, overrides)
        check_world_size(seat, job.topology)
        timeout_s = job.config.dispatch.timeout_s
        membership = join(seat, job.topology, timeout_s)
        processes = membership.processes
        transport = connect(
            job.config.dispatch.transport,
            device=_device(job, seat),
            timeout_s=timeout_s,
            symmetric_heap=job.config.dispatch.symmetric_heap,
        )
        # Launchers end all ranks when one ends badly: nobody leaves before rank 0 has reported.
        ok = membership.share("verdict", work(job, transport, membership))
        if not ok:
            raise _mismatch()
        transport.close()
        dist.destroy_process_group()
        membership.gather("left", True)  # rank 0 may serve the store: it leaves last
    except BaseException as error:
        end_rank(error, seat.rank, notes, processes)
    sys.exit(0)


def run_work(json_path: Path | None, check: bool) -> Work:
    """The main job."""
    return partial(_run, json_path=json_path, check=check)


def bench_work(json_path: Path | None, rounds: int, beside: Sequence[str]) -> Work:
    """Dispatch and combine, measured; over the transports ``beside`` the job's own as well."""
    return partial(_bench, json_path=json_path, rounds=rounds, beside=beside)


def _run(
    job: Job,
    transport: Transport,
    membership: Membership,
    *,
    json_path: Path | None,
    check: bool,
) -> bool | None:
    console = make_console()
    with _progress(console, job, speaks=transport.rank == 0) as on_step:
        mine = run_layer(job, transport, check=check, on_step=on_step)
    ranks = membership.gather("report", asdict(mine))
    if ranks is None:
        return None
    report = RunReport(
        job=job,
        transport=transport.name,
        ranks=[RankReport(**rank) for rank in ranks],
        checked=check,
    )
    report.show(console)
    if json_path is not None:
        write_json(report.as_json(), json_path)
    return report.ok


def _bench(
    job: Job,
    transport: Transport,
    membership: Membership,
    *,
    json_path: Path | None,
    rounds: int,
    beside: Sequence[str],
) -> bool | None:
    from crossdock.launch.bench.dispatch import bench_dispatch, show_dispatch
    from crossdock.launch.bench.transports import bench_transports

    if beside:
        timeout_s = job.config.dispatch.timeout_s
        others = [connect(n, device=transport.device, timeout_s=timeout_s) for n in beside]
        result = bench_transports(job, [transport, *others], rounds=rounds)
        for other in others:
            other.close()
    else:
        result = bench_dispatch(job, transport, rounds=rounds)
    if transport.rank == 0:
        show_dispatch(result, make_console())
        if json_path is not None:
            write_json(result, json_path)
    return True


def _mismatch() -> CrossdockError:
    error = CrossdockError("results differ from the single-process oracle: see the table")
    error.agreed = True
    return error


def _device(job: Job, seat: Seat) -> torch.device:
    if job.config.cluster.device == "cpu":
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        raise ConfigError(f"cluster.device is cuda, and torch sees no GPU on {os.uname().nodename}")
    device = torch.device("cuda", seat.local_rank % num_gpus)  # srun may show a rank only its own
    torch.cuda.set_device(device)
    return device


@contextmanager
def _progress(console: Console, job: Job, *, speaks: bool) -> Iterator[Callable[[int], None]]:
    """A function to call after each step, which shows progress on rank 0."""
    steps, name = job.config.run.steps, job.config.name
    if not speaks:
        yield lambda step: None
    elif console.is_terminal:
        columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True, refresh_per_second=2) as progress:
            task = progress.add_task(name, total=steps)
            yield lambda step: progress.update(task, completed=step)
    else:
        yield _PlainProgress(console, name, steps)


class _PlainProgress:
    """A line each second, and for the last step."""

    def __init__(self, console: Console, name: str, steps: int) -> None:
        self._console, self._name, self._steps = console, name, steps
        self._said = -math.inf

    def __call__(self, step: int) -> None:
        now = time.monotonic()
        if step == self._steps or now - self._said >= 1:
            self._console.print(f"{self._name}: step {step} of {self._steps}")
            self._console.file.flush()
            self._said = now
