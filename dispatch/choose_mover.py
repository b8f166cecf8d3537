"""Which mover a transport takes."""

from __future__ import annotations

from crossdock.dispatch.algorithms.base import Algorithm
from crossdock.dispatch.config import DispatchConfig
from crossdock.dispatch.mover import Mover, PackedMover
from crossdock.dispatch.nvshmem.expert_mover import ExpertMover
from crossdock.dispatch.nvshmem.mover import NvshmemMover
from crossdock.dispatch.onesided.mover import OneSidedMover
from crossdock.dispatch.onesided.transport import OneSidedTransport
from crossdock.dispatch.transports.hierarchical import HierarchicalTransport
from crossdock.dispatch.transports.nvshmem import NvshmemTransport
from crossdock.dispatch.two_level import TwoLevelMover
from crossdock.dispatch.wire import WireFormat

__all__ = ["mover_for"]


def mover_for(
    algorithm: Algorithm, wire: WireFormat, num_slots: int, config: DispatchConfig
) -> Mover:
    """The mover of one dispatcher, by its transport."""
    transport = algorithm.transport
    if isinstance(transport, NvshmemTransport):
        if config.layout == "expert":
            return ExpertMover(algorithm, wire, num_slots, transport, config)
        return NvshmemMover(algorithm, wire, num_slots, transport, config)
    if isinstance(transport, HierarchicalTransport):
        return TwoLevelMover(algorithm, wire, num_slots, transport)
    if isinstance(transport, OneSidedTransport):
        return OneSidedMover(algorithm, wire, num_slots, transport)
    return PackedMover(algorithm, wire, num_slots)
