"""Every kernel compiles for the cards it is meant for, here, without one of them."""

from __future__ import annotations

import pytest

from crossdock.dispatch.nvshmem.launch import SOURCES, variants
from crossdock.scratch.jit import JitMissingError, compile_cuda, nvrtc_version


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize(
    ("source", "defines"), variants(), ids=lambda value: str(value).replace(" ", "")
)
def test_every_variant_compiles(source, defines, arch):
    try:
        nvrtc_version()
    except JitMissingError as error:
        pytest.skip(str(error))
    if defines.get("FP8") and arch == "sm_80":
        pytest.skip("e4m3 conversion in hardware begins with sm_89")
    assert compile_cuda(SOURCES / source, arch=arch, defines=defines)[:4] == b"\x7fELF"
