"""Every kernel compiles for the cards it is meant for, here, without one of them."""

from __future__ import annotations

import pytest

from crossdock.dispatch.nvshmem import device
from crossdock.dispatch.nvshmem.device import compile_with_nvshmem
from crossdock.dispatch.nvshmem.launch import PUTS, SOURCES, variants
from crossdock.launch.bench.peers import PEER_SHAPES
from crossdock.scratch.errors import TransportUnavailable
from crossdock.scratch.jit import JitMissingError, compile_cuda, nvrtc_version

ARCHS = ["sm_80", "sm_90", "sm_100"]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("source", "defines"),
    [*variants(), ("peers.cu", dict(PEER_SHAPES[0]))],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_every_variant_compiles(source, defines, arch):
    try:
        nvrtc_version()
    except JitMissingError as error:
        pytest.skip(str(error))
    if defines.get("FP8") and arch == "sm_80":
        pytest.skip("e4m3 conversion in hardware begins with sm_89")
    assert compile_cuda(SOURCES / source, arch=arch, defines=defines)[:4] == b"\x7fELF"


@pytest.mark.parametrize("arch", ARCHS)
def test_what_calls_nvshmem_compiles_and_links(arch):
    try:
        cubin = compile_with_nvshmem(PUTS, arch=arch)
    except (JitMissingError, TransportUnavailable) as error:
        pytest.skip(str(error))
    assert cubin[:4] == b"\x7fELF"
    # What NVSHMEM looks for when it initialises the module: its library was linked in.
    assert b"nvshmemi_device_state_d" in cubin


def test_without_its_device_library_nvshmem_is_asked_for(monkeypatch):
    monkeypatch.setattr(device, "_places", list)
    with pytest.raises(TransportUnavailable, match="pip install nvidia-nvshmem"):
        compile_with_nvshmem(PUTS, arch="sm_90")
