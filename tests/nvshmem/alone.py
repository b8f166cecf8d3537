"""``python -m tests.nvshmem.alone [CHECK ...]``: the kernels with one rank and without NVSHMEM.

For compute-sanitizer, under which NVSHMEM does not start. Memory of one rank is symmetric whoever
gives it; with PYTORCH_NO_CUDA_MEMORY_CACHING=1 (eager checks only) every tensor has its own.
"""

from __future__ import annotations

import logging
import sys

import torch

from crossdock.dispatch import run_local
from crossdock.dispatch.nvshmem.runtime import Symmetric
from crossdock.dispatch.transports import nvshmem as transport_module
from crossdock.dispatch.transports.base import Transport
from crossdock.dispatch.transports.nvshmem import NvshmemTransport
from tests.nvshmem import ranks

logger = logging.getLogger(__name__)

CHECKS = [
    ranks.fp8_is_the_quantiser_s_bits,
    ranks.fp8_of_extreme_numbers_is_the_quantiser_s_too,
    ranks.a_handle_s_way_is_taken_again,
    ranks.any_y_and_out_will_do,
    ranks.two_dispatchers_and_two_slots_interleave,
    ranks.a_graph_refuses_what_does_not_fit,
    *ranks.PAIRS,
]


class Runtime:
    """What the transport asks of NVSHMEM, for one rank."""

    def __init__(
        self, host: Transport, device: torch.device, symmetric_heap: int | None = None
    ) -> None:
        assert host.world_size == 1
        self._device = device
        self.reach = torch.ones(1, 1, dtype=torch.bool)

    def require_room(self, num_bytes: int) -> None:
        pass

    def allocate(self, num_bytes: int) -> Symmetric:
        buffer = torch.full((num_bytes,), 0xAA, dtype=torch.uint8, device=self._device)
        return Symmetric(buffer, [buffer.data_ptr()])

    def free(self, memory: Symmetric) -> None:
        memory.buffer.fill_(0xBB)

    def stop(self) -> None:
        pass


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    transport_module.Runtime = Runtime
    for check in CHECKS:
        if not sys.argv[1:] or check.__name__ in sys.argv[1:]:
            run_local(1, lambda host, check=check: check(NvshmemTransport(host, ranks.CUDA)))
            logger.info("ok %s", check.__name__)


if __name__ == "__main__":
    main()
