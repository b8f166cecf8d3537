"""Tokens to the ranks that own their experts, and results home.

    partition   which of the attention side's tokens this rank dispatches
    routing     which ranks each token goes to, once per rank
    agreement   one small exchange: operation, problems, counts, limits
    buckets     grow or refuse, alike on every rank
    wire        a row and its metadata as one run of bytes
    algorithms  who sends what to whom (alltoall, allgather)
    movers      how rows get to their places: packed, one-sided, on two levels
    transports  how bytes move: process groups, MPI, shared memory, NVSHMEM, threads

``dispatcher`` strings these together; ``reference`` is the plain answer that all of it must equal.
This package knows nothing of experts, and takes only ``errors`` and the JIT (``jit``, ``kernels``)
from ``scratch``.
"""

from crossdock.dispatch import errors
from crossdock.dispatch.config import DispatchConfig
from crossdock.dispatch.dispatcher import Dispatcher
from crossdock.dispatch.handle import Handle
from crossdock.dispatch.partition import Partition, pcp_chunks
from crossdock.dispatch.pending import Pending
from crossdock.dispatch.placement import ExpertPlacement
from crossdock.dispatch.rows import ReceivedRows
from crossdock.dispatch.topology import Topology
from crossdock.dispatch.transports.connect import connect
from crossdock.dispatch.transports.local import run_local

__all__ = [
    "DispatchConfig",
    "Dispatcher",
    "ExpertPlacement",
    "Handle",
    "Partition",
    "Pending",
    "ReceivedRows",
    "Topology",
    "connect",
    "errors",
    "pcp_chunks",
    "run_local",
]
