"""Loads what the JIT compiled, and launches it on torch's current stream."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crossdock.scratch import jit

__all__ = ["Kernel", "arch_of", "checked", "load_kernel"]

Argument = Tensor | int | float | None
Dim = int | tuple[int, int] | tuple[int, int, int]

_thread = threading.local()


class Kernel:
    """One ``extern "C" __global__`` function.

    By convention our kernels take pointers (a tensor, or None), ``long long`` (an int) and
    ``float`` (a float), nothing else.
    """

    def __init__(self, function: Any, library: Any) -> None:
        self._function = function
        self._library = library  # unloaded when it is collected, so it is kept

    @property
    def handle(self) -> int:
        """The driver's CUfunction, for launches by other means."""
        return int(self._function)

    def allow_shared_bytes(self, count: int, device: torch.device) -> None:
        """Let blocks have more shared memory than is allowed by default.

        Raises:
            RuntimeError: The device has less.
        """
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        kernel = driver.CUkernel(self.handle)
        index = device.index or 0
        checked(driver.cuKernelSetAttribute(attribute, count, kernel, driver.CUdevice(index)))

    def __call__(
        self,
        grid: Dim,
        block: Dim,
        *arguments: Argument,
        device: torch.device,
        overlap: bool = False,
    ) -> None:
        """Launches on the current stream of ``device``. An empty grid launches nothing.

        Args:
            grid: Blocks.
            block: Threads of a block.
            *arguments: In the order of the kernel's parameters.
            device: Whose stream.
            overlap: Programmatic dependent launch: the kernel may start before its predecessor in
                the stream ends, and waits for it itself (griddepcontrol.wait).

        Raises:
            RuntimeError: The driver refused; the message has its reason.
        """
        from cuda.bindings import driver

        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = _three(grid)
        config.blockDimX, config.blockDimY, config.blockDimZ = _three(block)
        if 0 in _three(grid):
            return
        if overlap:
            attribute = driver.CUlaunchAttribute()
            attribute.id = (
                driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            )
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs = [attribute]
            config.numAttrs = 1
        values = tuple(a.data_ptr() if isinstance(a, Tensor) else a or 0 for a in arguments)
        types = tuple(_ctype(a) for a in arguments)
        with torch.cuda.device(device):
            _make_context_current(device)
            config.hStream = torch.cuda.current_stream(device).cuda_stream
            checked(driver.cuLaunchKernelEx(config, self._function, (values, types), 0))


def arch_of(device: torch.device) -> str:
    """For example ``"sm_90"``."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def load_kernel(
    path: Path, name: str, *, device: torch.device, defines: Mapping[str, str | int] | None = None
) -> Kernel:
    """The function ``name`` of a source, compiled for ``device`` with these macros.

    Raises:
        JitError: See ``jit.compile_cuda``.
    """
    return _load(path, name, arch_of(device), tuple(sorted((defines or {}).items())))


@cache
def _load(path: Path, name: str, arch: str, defines: tuple[tuple[str, str | int], ...]) -> Kernel:
    from cuda.bindings import driver

    cubin = jit.compile_cuda(path, arch=arch, defines=dict(defines))
    (library,) = checked(driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
    (kernel,) = checked(driver.cuLibraryGetKernel(library, name.encode()))
    return Kernel(driver.CUfunction(int(kernel)), library)


def checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a call of the driver's bindings returns besides its status.

    Raises:
        RuntimeError: The driver refused; the message has its reason.
    """
    from cuda.bindings import driver

    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(status)
        raise RuntimeError(f"{status.name}: {text.decode()}")
    return tuple(values)


def _make_context_current(device: torch.device) -> None:
    """A new thread has no current context until torch has had a reason to set one."""
    if getattr(_thread, "ready", None) is None:
        from cuda.core import Device

        Device(device.index).set_current()
        _thread.ready = True


def _ctype(argument: Argument) -> type:
    if isinstance(argument, Tensor) or argument is None:
        return ctypes.c_void_p
    return ctypes.c_float if isinstance(argument, float) else ctypes.c_longlong


def _three(dim: Dim) -> tuple[int, int, int]:
    x, y, z = (*((dim,) if isinstance(dim, int) else dim), 1, 1)[:3]
    return x, y, z
