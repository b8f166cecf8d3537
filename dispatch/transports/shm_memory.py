"""Anonymous shared memory and the waiting on it: the system calls of the ``shm`` transport.

Memory is a memfd: it has no name in any file system, so when the last process that maps it is gone,
however it went, the kernel takes it back. Other processes reach it by /proc/<pid>/fd/<fd> while the
owner keeps the descriptor open. Mappings hold no descriptor.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from functools import cache

import torch
from torch import Tensor

__all__ = ["Memory", "futex_wait", "futex_wake", "map_memory_of"]

_SYS_FUTEX = 202  # x86-64
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_EVERYBODY = 2**31 - 1
_MAP_FAILED = ctypes.c_void_p(-1).value


class Memory:
    """Memory of this process that others can map.

    Attributes:
        buffer: uint8 [num_bytes], page-aligned, zeros at first.
        fd: Descriptor by which others find it, until :meth:`settle`; -1 for no bytes at all.

    Raises:
        MemoryError: There is not as much.
    """

    def __init__(self, num_bytes: int) -> None:
        self.fd = -1
        if num_bytes == 0:
            self.buffer = torch.empty(0, dtype=torch.uint8)
            return
        try:
            # Pages are taken when they are first written, and nothing would refuse too many.
            available = available_bytes()
            if num_bytes > available:
                raise MemoryError(
                    f"no {num_bytes} bytes of shared memory: {available} are available"
                )
            self.fd = os.memfd_create("crossdock", os.MFD_CLOEXEC)
            os.ftruncate(self.fd, num_bytes)
            self.buffer = _map(self.fd, num_bytes)
        except OSError as error:  # too many open files, say
            self.settle()
            raise MemoryError(f"no {num_bytes} bytes of shared memory: {error}") from error
        except BaseException:
            self.settle()
            raise

    def settle(self) -> None:
        """Close the descriptor; whoever has mapped the memory keeps it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.settle()


def map_memory_of(pid: int, fd: int, num_bytes: int) -> Tensor:
    """The memory that another process of this user and PID namespace offers, uint8 [num_bytes].

    Raises:
        OSError: It cannot be opened or mapped.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return _map(opened, num_bytes)
    finally:
        os.close(opened)


def available_bytes() -> int:
    """Memory that this machine has left, by the kernel's estimate."""
    with open("/proc/meminfo") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    raise MemoryError("the kernel does not say how much memory is available")


def futex_wait(address: int, seen: int, seconds: float) -> None:
    """Sleep until woken, or for ``seconds``, unless the 32-bit word is no longer ``seen``."""
    limit = _TimeSpec(int(seconds), int(seconds % 1 * 1e9))
    _libc().syscall(_SYS_FUTEX, address, _FUTEX_WAIT, seen & 0xFFFFFFFF, ctypes.byref(limit), 0, 0)


def futex_wake(address: int) -> None:
    """Wake all that sleep on the 32-bit word."""
    _libc().syscall(_SYS_FUTEX, address, _FUTEX_WAKE, _EVERYBODY, None, 0, 0)


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.syscall.restype = ctypes.c_long
    libc.syscall.argtypes = [
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_long,
        ctypes.c_long,
    ]
    return libc


def _map(fd: int, num_bytes: int) -> Tensor:
    # The mmap module would keep a duplicate of the descriptor for as long as the mapping lives.
    libc = _libc()
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = libc.mmap(None, num_bytes, protection, mmap.MAP_SHARED, fd, 0)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {num_bytes} bytes: {errno.errorcode.get(code, code)}")
    view = (ctypes.c_uint8 * num_bytes).from_address(address)
    # Tensors keep the view alive; the process' end unmaps what is left.
    weakref.finalize(view, libc.munmap, address, num_bytes).atexit = False
    # A tensor made in inference mode could not be written outside of it.
    with torch.inference_mode(False):
        return torch.frombuffer(view, dtype=torch.uint8)
