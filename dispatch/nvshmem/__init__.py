"""One-sided dispatch and combine on GPUs, through memory that NVSHMEM makes symmetric.

    runtime  NVSHMEM itself: start, symmetric memory, addresses on peers, stop
    layout   where everything lies, as the kernels of ``dispatch/cuda`` see it
    bucket   a slot's receive bucket: rows, metadata and results in symmetric memory
    launch   the kernels, one call each
    puts     those where some rank has no address for another's memory
    device   how what calls NVSHMEM is compiled
    mover    a dispatcher's steps as launches

The protocol and its memory ordering are described in ``docs/nvshmem-protocol.md``.
"""
