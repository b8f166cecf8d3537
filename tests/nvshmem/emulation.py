"""The nvshmem transport without a GPU: its kernels' own sources run on the CPU, ranks are threads.

Everything above the launch and the symmetric memory is the real code.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch

from crossdock.dispatch import run_local
from crossdock.dispatch.nvshmem import eager as eager_module
from crossdock.dispatch.nvshmem import launch as launch_module
from crossdock.dispatch.nvshmem import mover as mover_module
from crossdock.dispatch.nvshmem import puts as puts_module
from crossdock.dispatch.nvshmem.runtime import Symmetric, pretended_reach
from crossdock.dispatch.transports import nvshmem as transport_module
from crossdock.dispatch.transports.base import Transport
from crossdock.dispatch.transports.nvshmem import NvshmemTransport
from crossdock.scratch.jit import toolkit_include_dirs
from tests.nvshmem import graphs

__all__ = ["CPU", "build", "emulate", "record_by_repeating", "run_emulated"]

HERE = Path(__file__).parent
CPU = torch.device("cpu")
T = TypeVar("T")
_building = threading.Lock()
_thread = threading.local()
PTX = {
    # A thread that waits lets the others of its block go on, as on a GPU: one may owe a signal.
    r"ld\.acquire": "sched_yield(); yield(); value = __atomic_load_n(at, __ATOMIC_ACQUIRE);",
    r"st\.release": "__atomic_store_n(at, value, __ATOMIC_RELEASE);",
    r"globaltimer": "now = std::chrono::steady_clock::now().time_since_epoch().count();",
    r"rcp\.approx": "guess = 1 / x;",
    r"cp\.async\.cg": "*to = *from;",
    r"cp\.async\.(?:commit|wait)_group": "",
}


def emulate(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let ``NvshmemTransport(host, CPU)`` work in this process, and graphs be steps repeated."""

    def load(path, name, num_words, *, device, defines, shared_bytes=0, runtime=None):
        return _Kernel(folder, path, name, tuple(sorted(defines.items())), runtime)

    monkeypatch.setattr(launch_module, "Launch", load)
    monkeypatch.setattr(puts_module, "Launch", load)
    for module in (eager_module, mover_module):
        monkeypatch.setattr(module, "pinned_words", lambda n: torch.zeros(n, dtype=torch.int64))
    monkeypatch.setattr(transport_module, "raw_stream", lambda _: 0)
    monkeypatch.setattr(transport_module, "current_device", lambda: CPU.index)
    monkeypatch.setattr(transport_module, "Runtime", _Runtime)
    event = SimpleNamespace(record=lambda *_: None, synchronize=lambda: None)
    for name, fake in {
        "get_device_properties": lambda _: SimpleNamespace(
            multi_processor_count=2, shared_memory_per_multiprocessor=227 << 10, major=9, minor=0
        ),
        "synchronize": lambda *_: None,
        "set_device": lambda *_: None,
        "device": lambda _: nullcontext(),
        "Event": lambda: event,
        "is_current_stream_capturing": lambda: getattr(_thread, "captures", False),
        "current_stream": lambda *_: SimpleNamespace(synchronize=lambda: None, query=lambda: True),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(graphs, "record", record_by_repeating)


def run_emulated(world_size: int, fn: Callable[..., T], *args: Any) -> list[T]:
    """``[fn(transport, *args) of every rank]`` after :func:`emulate`; ranks are threads."""
    return run_local(world_size, lambda host: fn(NvshmemTransport(host, CPU), *args))


def record_by_repeating(step: Callable[[], None]) -> Callable[[], None]:
    """Instead of a graph: the step again, as it is when captured. The first time is at once."""

    def replay() -> None:
        _thread.captures = True
        try:
            step()
        finally:
            _thread.captures = False

    replay()
    return replay


def build(folder: Path, path: Path, name: str) -> Callable[..., None]:
    """A kernel on its own: call it with a grid, a block and its words."""
    return _Kernel(folder, path, name, (), None)


class _Runtime:
    """Symmetric memory of ranks that share an address space."""

    def __init__(
        self, host: Transport, device: torch.device, symmetric_heap: int | None = None
    ) -> None:
        self._host = host
        self._spans: dict[int, list[int]] = {}
        self.reach = pretended_reach(host.world_size)

    def require_room(self, num_bytes: int) -> None:
        pass

    def allocate(self, num_bytes: int) -> Symmetric:
        memory = torch.full((num_bytes + 256,), 0xAA, dtype=torch.uint8)
        start = -memory.data_ptr() % 256
        buffer = memory[start : start + num_bytes]
        copies = self._host.exchange(torch.tensor([buffer.data_ptr()])).flatten()
        self._spans[buffer.data_ptr()] = [num_bytes, *copies.tolist()]
        return Symmetric(buffer, (copies * self.reach[self._host.rank]).tolist())

    def free(self, memory: Symmetric) -> None:
        memory.buffer.fill_(0xBB)
        del self._spans[memory.buffer.data_ptr()]
        self._host.exchange(torch.zeros(1, dtype=torch.int64))

    def stop(self) -> None:
        pass

    def read(self, to: torch.Tensor, memory: Symmetric, begin: int, rank: int) -> None:
        if not memory.addresses[rank]:
            spans = ((own, own + span[0]) for own, span in self._spans.items())
            assert any(begin <= to.data_ptr() < end for begin, end in spans)
        copies = self._spans[memory.buffer.data_ptr()][1:]
        ctypes.memmove(to.data_ptr(), copies[rank] + begin, to.numel())

    def let_put(self, library: ctypes.CDLL) -> None:
        """Tell a kernel's stand-in for NVSHMEM where this rank's memory is, and the others'."""
        words = [word for own, span in self._spans.items() for word in (own, *span)]
        self._words = (ctypes.c_longlong * len(words))(*words)  # the library keeps a pointer
        library.set_spans(self._words, len(self._spans), self._host.world_size)


class _Kernel:
    """Built at its first launch: most of what a dispatcher loads is not used by a test."""

    def __init__(
        self, folder: Path, path: Path, name: str, defines: tuple, runtime: _Runtime | None
    ) -> None:
        self._source, self._name = (folder, path, defines, runtime is not None), name
        self._runtime = runtime

    def __call__(self, grid: int, block: int, *words: int) -> None:
        with _building:  # ranks are threads
            library = _build(*self._source)
        if self._runtime is not None:
            self._runtime.let_put(library)
        packed = (ctypes.c_longlong * 12)(*words)
        library.launch(getattr(library, self._name), grid, block, packed)


@cache
def _build(folder: Path, path: Path, defines: tuple, puts: bool) -> ctypes.CDLL:
    text = _inline(path)
    for pattern, plain in PTX.items():
        text = re.sub(rf'asm(?: volatile)?\("[^"]*{pattern}[^;]*;"[^;]*;', plain, text)
    text = text.replace("extern __shared__ uint4 stages[]", "__shared__ uint4 stages[1 << 14]")
    assert "asm" not in text
    stem = "-".join([path.stem, *(re.sub(r"\W", "", str(value)) for _, value in defines)])
    source, library = folder / f"{stem}.cpp", folder / f"{stem}.so"
    headers = ["cuda_on_cpu.h", *(["nvshmem_on_cpu.h"] if puts else [])]
    source.write_text("".join(f'#include "{HERE / name}"\n' for name in headers) + text)
    command = ["g++", "-std=c++17", "-O2", "-ffp-contract=off", "-w"]
    command += ["-shared", "-fPIC", "-fno-gnu-unique"]
    command += [f"-D{name}={value}" for name, value in defines]
    command += [f"-I{directory}" for directory in (HERE, *toolkit_include_dirs())]
    subprocess.run([*command, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def _inline(path: Path, seen: set[str] | None = None) -> str:
    seen = set() if seen is None else seen

    def included(found: re.Match[str]) -> str:
        name = found.group(1)
        if name in seen:
            return ""
        seen.add(name)
        return _inline(path.parent / name, seen)

    text = path.read_text().replace("#pragma once", "")
    return re.sub(r'#include "(\w+\.cuh)"', included, text)
