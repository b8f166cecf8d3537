"""A symmetric heap of fixed size: how it is asked for, and what is said when it runs out."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace

import pytest
import torch

from crossdock.dispatch import run_local
from crossdock.dispatch.nvshmem import runtime as runtime_module
from crossdock.dispatch.nvshmem.heap import check_heaps, heap_environment, parse_size
from crossdock.dispatch.nvshmem.runtime import Runtime
from crossdock.dispatch.transports.base import Transport
from crossdock.scratch.errors import CapacityError, ConfigError, DisagreementError

GIB = 2**30
VARIABLES = ("NVSHMEM_SYMMETRIC_SIZE", "NVSHMEM_DISABLE_CUDA_VMM")


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (4096, 4096),
        ("8GiB", 8 * GIB),
        ("512 MiB", 512 * 2**20),
        ("1.5GiB", 3 * GIB // 2),
        ("1KiB", 1024),
        ("64TiB", 2**46),
    ],
)
def test_sizes(value, size):
    assert parse_size(value) == size


@pytest.mark.parametrize(
    "value", [0, -1, True, 1.5, None, "8", "8GB", "8gib", "GiB", "-8GiB", "8GiB ", "65TiB", "0GiB"]
)
def test_what_is_no_size(value):
    with pytest.raises(ConfigError, match="such as 8GiB"):
        parse_size(value)


def test_heaps_must_be_one_size():
    check_heaps([GIB, GIB], [1, 2], [2 * GIB, GIB])
    with pytest.raises(DisagreementError, match=f"0 bytes on rank 0 but {GIB} on rank 1") as caught:
        check_heaps([0, GIB], [1, 2], [GIB, GIB])
    assert caught.value.agreed


def test_heaps_must_fit_all_ranks_of_a_gpu():
    check_heaps([GIB] * 3, [7, 8, 7], [2 * GIB, GIB, 2 * GIB])
    with pytest.raises(CapacityError, match=r"2 rank\(s\) on the GPU of rank 0") as caught:
        check_heaps([GIB] * 3, [7, 8, 7], [2 * GIB - 1, GIB, 2 * GIB])
    assert caught.value.ranks == (0,)
    assert caught.value.agreed


def test_the_environment_is_as_it_was_afterwards(monkeypatch):
    monkeypatch.setenv(VARIABLES[0], "7")
    monkeypatch.delenv(VARIABLES[1], raising=False)
    with heap_environment(GIB):
        assert [os.environ[name] for name in VARIABLES] == [str(GIB), "1"]
    with heap_environment(None):
        assert os.environ[VARIABLES[0]] == "7"
    assert os.environ[VARIABLES[0]] == "7"
    assert VARIABLES[1] not in os.environ


class FakeBindings:
    """As much of NVSHMEM as one rank asks for, in host memory."""

    Flags = SimpleNamespace(INIT_WITH_UNIQUEID=1)

    def __init__(self) -> None:
        self.room = True
        self.seen: list[str | None] = []
        self.memory: dict[int, torch.Tensor] = {}
        self._id = ctypes.create_string_buffer(128)

    def uniqueid(self) -> SimpleNamespace:
        return SimpleNamespace(ptr=ctypes.addressof(self._id))

    def get_uniqueid(self, address: int) -> None: ...

    def InitAttr(self) -> SimpleNamespace:
        return SimpleNamespace(ptr=0)

    def set_attr_uniqueid_args(self, *args: int) -> None: ...

    def hostlib_init_attr(self, flags: int, attributes: int) -> None:
        self.seen = [os.environ.get(name) for name in VARIABLES]

    def malloc(self, num_bytes: int) -> int:
        if not self.room:
            return 0
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        self.memory[memory.data_ptr()] = memory
        return memory.data_ptr()

    def ptr(self, address: int, rank: int) -> int:
        return address

    def free(self, address: int) -> None:
        del self.memory[address]


@pytest.fixture
def bindings(monkeypatch):
    fake = FakeBindings()
    monkeypatch.setattr(runtime_module, "import_bindings", lambda: fake)
    monkeypatch.setattr(runtime_module, "gpu_number", lambda device: 5)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * GIB, 20 * GIB))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(
        torch,
        "as_tensor",
        lambda span, device: fake.memory[span.__cuda_array_interface__["data"][0]],
    )
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return fake


def start(symmetric_heap: int | None) -> Runtime:
    def rank_main(transport: Transport) -> Runtime:
        return Runtime(transport, torch.device("cpu"), symmetric_heap)

    return run_local(1, rank_main)[0]


@pytest.mark.parametrize(("heap", "seen"), [(GIB, [str(GIB), "1"]), (None, [None, None])])
def test_nvshmem_starts_with_the_heap_that_was_asked_for(bindings, heap, seen):
    start(heap)
    assert bindings.seen == seen


def test_a_heap_larger_than_the_gpu_is_refused_before_nvshmem_starts(bindings):
    with pytest.raises(CapacityError, match=f"symmetric_heap = {11 * GIB} bytes"):
        start(11 * GIB)
    assert bindings.seen == []


def test_a_fixed_heap_says_what_was_asked_what_is_left_and_the_setting(bindings):
    runtime = start(4096)
    memory = runtime.allocate(1000)  # takes 1024
    runtime.require_room(3072)
    with pytest.raises(MemoryError, match=r"3073 bytes .*: 3072 of the 4096 .* symmetric_heap"):
        runtime.require_room(3073)
    runtime.free(memory)
    runtime.require_room(4096)


@pytest.mark.parametrize(
    ("heap", "setting"), [(4096, "raise symmetric_heap"), (None, "NVSHMEM_MAX_MEMORY_PER_GPU")]
)
def test_memory_that_nvshmem_does_not_have_names_the_setting(bindings, heap, setting):
    runtime = start(heap)
    runtime.allocate(512)
    bindings.room = False
    with pytest.raises(MemoryError, match=f"no 2048 bytes .* 512 in use: .*{setting}"):
        runtime.allocate(2048)


def test_a_heap_that_grows_says_how_to_reserve_it(bindings):
    with pytest.raises(MemoryError, match=r"are free\. .*symmetric_heap"):
        start(None).require_room(10 * GIB)
