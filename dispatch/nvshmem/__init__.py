"""One-sided dispatch and combine on GPUs, through memory that NVSHMEM makes symmetric.

    runtime       NVSHMEM itself: start, symmetric memory, addresses on peers, stop
    heap          how large its symmetric memory is, where that is fixed
    device        how what calls it on the device is compiled
    layout        where everything lies, as the kernels of ``dispatch/cuda`` see it
    bucket        a slot's receive bucket: rows, metadata and results in symmetric memory
    launch        the kernels, one call each
    puts          those where some rank has no address for another's memory
    mover         a dispatcher's steps as launches
    eager         dispatches that ranks agree on by kernels: what hosts make of them
    expert_mover  the same steps where rows arrive grouped by expert

The protocol and its memory ordering are described in ``docs/nvshmem-protocol.md``.
"""
