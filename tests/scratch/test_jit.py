"""The JIT without a GPU: every kernel compiles, and the cache survives whatever happens to it."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from crossdock.scratch import jit
from crossdock.scratch.permute_cuda import SOURCES

ARCHS = ["sm_80", "sm_90", "sm_100"]
BF16 = "__nv_bfloat16"
SUM = {"IN": BF16, "OUT": BF16, "ELEMENTS": 8}
CONVERT = {"IN": BF16, "OUT": BF16, "IN_ALIGNED": 1, "OUT_ALIGNED": 1, "ITEMS": 2}
FROM_FP8 = {**CONVERT, "IN": "unsigned char", "SOURCE": "SCALED"}
VARIANTS = [
    ("copy", {}),
    ("index", {"EXPERTS": 32}),
    ("index", {"EXPERTS": 1024}),
    ("rows", {"WIDTH": 16}),
    ("rows", {"WIDTH": 2}),
    ("rows", {"WIDTH": 1}),
    ("unpermute", SUM),
    ("unpermute", {**SUM, "OUT": "float"}),
    ("unpermute", {"IN": "__half", "OUT": "__half", "ELEMENTS": 1}),
    ("convert", {**CONVERT, "SOURCE": "SWIGLU", "TARGET": "PLAIN"}),
    ("convert", {**CONVERT, "SOURCE": "SWIGLU", "TARGET": "BLOCK"}),
    ("convert", {**CONVERT, "SOURCE": "SWIGLU", "TARGET": "ROW"}),
    ("convert", {**CONVERT, "SOURCE": "PLAIN", "TARGET": "BLOCK", "IN_ALIGNED": 0}),
    ("convert", {**FROM_FP8, "TARGET": "PLAIN"}),
    ("convert", {**FROM_FP8, "TARGET": "ROW", "OUT_ALIGNED": 0}),
]


@pytest.fixture(scope="module", autouse=True)
def compiler():
    try:
        jit.toolkit_include_dirs()
    except jit.JitMissingError as error:
        pytest.skip(str(error))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CROSSDOCK_JIT_DIR", str(tmp_path / "jit"))
    return tmp_path / "jit"


@pytest.fixture
def source(tmp_path):
    (tmp_path / "value.cuh").write_text("constexpr int VALUE = 1;\n")
    path = tmp_path / "small.cu"
    path.write_text('#include "value.cuh"\nextern "C" __global__ void f(int* x) { *x = VALUE; }\n')
    return path


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("name", "defines"),
    VARIANTS,
    ids=[f"{n}-{'-'.join(map(str, d.values()))}" for n, d in VARIANTS],
)
def test_every_kernel_compiles(name, defines, arch, cache):
    cubin = jit.compile_cuda(SOURCES / f"{name}.cu", arch=arch, defines=defines)
    assert cubin[:4] == b"\x7fELF"


def test_every_source_is_among_the_variants():
    assert {path.stem for path in SOURCES.glob("*.cu")} == {name for name, _ in VARIANTS}


def test_a_second_build_comes_from_the_cache(cache, source, monkeypatch):
    first = jit.compile_cuda(source, arch="sm_90")
    monkeypatch.setattr(jit, "_build", None)
    assert jit.compile_cuda(source, arch="sm_90") == first
    (entry,) = cache.iterdir()
    assert entry.name.startswith("small-sm_90-")


@pytest.mark.parametrize(
    "damage",
    [lambda b: b"", lambda b: b[:-1], lambda b: b"something else", lambda b: b[:-1] + b"\x00\x01"],
    ids=["empty", "cut", "foreign", "changed"],
)
def test_a_damaged_or_foreign_entry_is_built_again(cache, source, damage):
    first = jit.compile_cuda(source, arch="sm_90")
    (entry,) = cache.iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    assert jit.compile_cuda(source, arch="sm_90") == first
    assert entry.read_bytes() == whole


@pytest.mark.parametrize(
    "change",
    [
        {"arch": "sm_80"},
        {"defines": {"X": 1}},
        {"rdc": True},
        {"prelude": "// other\n"},
        {"include_dirs": (Path("/nowhere"),)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_the_result_depends_on_is_in_the_key(cache, source, change):
    jit.compile_cuda(source, arch="sm_90")
    jit.compile_cuda(source, **{"arch": "sm_90", **change})
    assert len(list(cache.iterdir())) == 2


def test_a_changed_header_or_compiler_is_another_entry(cache, source, monkeypatch):
    jit.compile_cuda(source, arch="sm_90")
    (source.parent / "value.cuh").write_text("constexpr int VALUE = 2;\n")
    jit.compile_cuda(source, arch="sm_90")
    monkeypatch.setattr(jit, "nvrtc_version", lambda: "0.0")
    jit.compile_cuda(source, arch="sm_90")
    assert len(list(cache.iterdir())) == 3


def test_a_compile_error_shows_the_compilers_log(cache, tmp_path):
    path = tmp_path / "wrong.cu"
    path.write_text("__global__ void f() { int x = missing; }\n")
    with pytest.raises(jit.JitError, match=r'(?s)wrong\.cu for sm_90.*identifier "missing"'):
        jit.compile_cuda(path, arch="sm_90")
    assert not cache.exists()


def test_a_directory_that_cannot_be_written_costs_only_the_cache(tmp_path, source, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CROSSDOCK_JIT_DIR", str(tmp_path / "file" / "jit"))
    assert jit.compile_cuda(source, arch="sm_90")[:4] == b"\x7fELF"


def test_processes_that_build_the_same_at_once_all_succeed(cache, source):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        cubins = pool.map(_compile, [source] * 4)
    assert len(set(cubins)) == 1
    assert len(list(cache.iterdir())) == 1


def _compile(path: Path) -> bytes:
    return jit.compile_cuda(path, arch="sm_90")


def test_describe_counts_entries(cache, source):
    assert jit.describe().num_entries == 0
    cubin = jit.compile_cuda(source, arch="sm_90")
    report = jit.describe()
    assert report.directory == cache
    assert report.num_entries == 1
    assert report.num_bytes > len(cubin)
    assert report.compiler is not None
