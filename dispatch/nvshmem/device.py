"""Kernels that call NVSHMEM: compiled by NVRTC, linked with its device library by nvJitLink."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from crossdock.scratch.errors import TransportUnavailable
from crossdock.scratch.jit import compile_cuda

__all__ = ["compile_with_nvshmem"]

# NVSHMEM's headers expect the standard library's names, which NVRTC has under ``cuda::std`` alone.
# Its library was built by nvcc, for which uint64_t is unsigned long; NVRTC's is unsigned long long,
# and functions of it would not be found.
_PRELUDE = """
#include <cuda/std/cstddef>
#include <cuda/std/cstdint>
#include <cuda/std/limits>
#include <cuda/std/type_traits>
#include <cuda_awbarrier_primitives.h>
#include <cuda_pipeline_primitives.h>
namespace std { using namespace cuda::std; }
using cuda::std::ptrdiff_t;
using cuda::std::size_t;
typedef unsigned long nvshmem_uint64;
typedef long nvshmem_int64;
#define uint64_t nvshmem_uint64
#define int64_t nvshmem_int64
#include <nvshmem.h>
#include <nvshmemx.h>
"""


def compile_with_nvshmem(path: Path, *, arch: str) -> bytes:
    """A cubin whose module NVSHMEM has to initialise before a kernel of it is launched.

    Args:
        path: The source.
        arch: For example ``"sm_90"``.

    Raises:
        JitError: See ``jit.compile_cuda``.
        TransportUnavailable: NVSHMEM's headers and device library are not installed.
    """
    for root in map(Path, _places()):
        library = root / "lib" / "libnvshmem_device.a"
        if library.exists():
            return compile_cuda(
                path,
                arch=arch,
                prelude=_PRELUDE,
                include_dirs=[root / "include"],
                rdc=True,
                link=[library],
            )
    raise TransportUnavailable(
        "no NVSHMEM device library: pip install nvidia-nvshmem-cu13 (or -cu12)"
    )


def _places() -> Sequence[str]:
    try:
        found = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:  # no package of NVIDIA's at all
        return []
    return (found and found.submodule_search_locations) or []
