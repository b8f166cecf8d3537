"""Check that the cu12, cu13 and nvrtc extras fit the NVSHMEM that torch itself pins.

pip's resolver is asked, without installing anything. For the CUDA that PyPI's torch is built for,
the extra and torch must resolve together, to one NVSHMEM. For the other CUDA the extra must resolve
by itself (torch then comes from elsewhere), to the version that torch pins for its own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NVSHMEM = re.compile(r"nvidia-nvshmem-cu\d+")


def resolve(*requirements: str) -> dict[str, str]:
    """What pip would install for these requirements: name -> version."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        ask = ["install", "--quiet", "--dry-run", "--ignore-installed", "--only-binary=:all:"]
        command = [sys.executable, "-m", "pip", *ask, "--report", str(report), *requirements]
        subprocess.run(command, check=True)
        installs = json.loads(report.read_text())["install"]
    return {item["metadata"]["name"].lower(): item["metadata"]["version"] for item in installs}


def main() -> None:
    """Resolve the extras at the newest torch that the project and this pip allow."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    torch = next(r for r in project["dependencies"] if r.startswith("torch"))
    pinned = {n: v for n, v in resolve(torch).items() if NVSHMEM.fullmatch(n)}
    if not pinned:
        sys.exit(f"{torch} resolves to a build without NVSHMEM here: nothing to compare with")
    ((own, version),) = pinned.items()
    for extra, name in (
        ("cu12", "nvidia-nvshmem-cu12"),
        ("cu13", "nvidia-nvshmem-cu13"),
        ("nvrtc", "nvidia-nvshmem-cu13"),
    ):
        beside = [torch] if name == own else []
        resolved = resolve(*beside, *project["optional-dependencies"][extra])
        if resolved[name] != version:
            sys.exit(f"{extra}: {name} {resolved[name]}, but torch pins {own} {version}")
        print(f"{extra}: {name} {resolved[name]} = torch's {own} {version}")


if __name__ == "__main__":
    main()
