"""One rank of the main job, whoever started it: join, run, report, end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from crossdock.dispatch import connect
from crossdock.dispatch.transports.watch import Process
from crossdock.launch.config import Job, load_job
from crossdock.launch.failures import EXIT_FAILED, end_rank, job_errors_dir
from crossdock.launch.join import Membership, Seat, check_world_size, join
from crossdock.launch.report import RankReport, RunReport
from crossdock.launch.run import run_layer
from crossdock.launch.screen import make_console
from crossdock.scratch.errors import ConfigError

__all__ = ["run_as_rank"]


def run_as_rank(
    seat: Seat,
    config: Path,
    overrides: list[str],
    *,
    json_path: Path | None,
    check: bool,
    errors_dir: Path | None,
) -> NoReturn:
    """Be the rank that the launcher says this process is; ends the process."""
    notes = job_errors_dir(errors_dir)
    processes: tuple[Process, ...] = ()
    try:
        job = load_job(config, overrides)
        check_world_size(seat, job.topology)
        membership = join(seat, job.topology, job.config.dispatch.timeout_s)
        processes = membership.processes
        ok = _run(job, membership, json_path, check)
    except BaseException as error:
        end_rank(error, seat.rank, notes, processes)
    sys.exit(0 if ok else EXIT_FAILED)


def _run(job: Job, membership: Membership, json_path: Path | None, check: bool) -> bool:
    """True if all results of all ranks matched."""
    console = make_console()
    timeout_s = job.config.dispatch.timeout_s
    transport = connect(
        job.config.dispatch.transport, device=_device(job, membership.seat), timeout_s=timeout_s
    )
    with _progress(console, job, speaks=membership.seat.rank == 0) as on_step:
        mine = run_layer(job, transport, check=check, on_step=on_step)
    reports = membership.gather("report", asdict(mine))
    ok = None
    if reports is not None:
        report = RunReport(
            job=job,
            transport=transport.name,
            ranks=[RankReport(**rank) for rank in reports],
            checked=check,
        )
        report.show(console)
        if json_path is not None:
            report.write_json(json_path)
        ok = report.ok
    # Launchers end all ranks when one fails: nobody leaves before rank 0 has reported.
    ok = bool(membership.share("verdict", ok))
    transport.close()
    dist.destroy_process_group()
    return ok


def _device(job: Job, seat: Seat) -> torch.device:
    if job.config.cluster.device == "cpu":
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        raise ConfigError(f"cluster.device is cuda, and torch sees no GPU on {os.uname().nodename}")
    return torch.device("cuda", seat.local_rank % num_gpus)  # srun may show each rank only its own


@contextmanager
def _progress(console: Console, job: Job, *, speaks: bool) -> Iterator[Callable[[int], None]]:
    """A function to call after each step, which shows progress on rank 0."""
    steps, name = job.config.run.steps, job.config.name
    if not speaks:
        yield lambda step: None
    elif console.is_terminal:
        columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task(name, total=steps)
            yield lambda step: progress.update(task, completed=step)
    else:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        yield lambda step: console.print(f"{name}: step {step} of {steps}")
