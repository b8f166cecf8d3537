"""``python -m tests.nvshmem.compile_all``: ranks shall find every kernel compiled for this GPU."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

import torch

from crossdock.dispatch.nvshmem.device import compile_with_nvshmem
from crossdock.dispatch.nvshmem.launch import PUTS, SOURCES, variants
from crossdock.launch.bench.onesided import CEILING_SHAPES
from crossdock.launch.bench.peers import PEER_SHAPES
from crossdock.scratch.jit import compile_cuda


def main() -> None:
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    sources = [
        *variants(),
        *(("ceiling.cu", shape.macros()) for shape in CEILING_SHAPES),
        *(("peers.cu", dict(shape)) for shape in PEER_SHAPES),
    ]
    with ProcessPoolExecutor(16) as pool:
        jobs = [
            pool.submit(compile_cuda, SOURCES / name, arch=arch, defines=defines)
            for name, defines in sources
        ]
        jobs.append(pool.submit(compile_with_nvshmem, PUTS, arch=arch))
        for job in jobs:
            job.result()


if __name__ == "__main__":
    main()
