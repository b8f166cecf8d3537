"""CUDA sources of the package to cubins: NVRTC at first use, kept on disk, no nvcc and no driver.

A cache entry is named by a hash of all that its content depends on: the source and the headers of
ours that it includes, macros, flags, architecture, compiler version, and what it is linked with. It
is written to a temporary file and renamed, so ranks and nodes that share a file system never see
half of one; it carries its own checksum, so what is damaged or not ours is built again.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from crossdock.scratch.errors import CrossdockError

__all__ = ["JitError", "JitMissingError", "JitReport", "cache_dir", "compile_cuda", "describe"]

logger = logging.getLogger(__name__)

MAGIC = b"crossdock-cubin-1\n"
INSTALL = (
    "pip install 'crossdock[cu13]' (or cu12), or by hand: cuda-core, cuda-bindings, "
    "nvidia-cuda-nvrtc, nvidia-cuda-runtime and nvidia-cuda-cccl of one CUDA major version"
)
_QUOTED_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


class JitError(CrossdockError):
    """A CUDA source does not compile or link; the message holds the compiler's log."""


class JitMissingError(JitError):
    """No run-time compiler here; the message says what to install."""


@dataclass(frozen=True, kw_only=True)
class JitReport:
    """What ``doctor`` shows.

    Attributes:
        directory: Where cubins are kept.
        num_entries: Cubins there.
        num_bytes: Their size on disk.
        compiler: The version of NVRTC, or None.
        missing: What to do where ``compiler`` is None.
    """

    directory: Path
    num_entries: int
    num_bytes: int
    compiler: str | None
    missing: str | None


def cache_dir() -> Path:
    """``CROSSDOCK_JIT_DIR``, or ``~/.cache/crossdock/jit``."""
    given = os.environ.get("CROSSDOCK_JIT_DIR")
    return Path(given) if given else Path.home() / ".cache" / "crossdock" / "jit"


def describe() -> JitReport:
    """The state of the cache and of the compiler on this machine."""
    entries = list(cache_dir().glob("*.cubin"))
    compiler, missing = None, None
    try:
        compiler = nvrtc_version()
    except JitMissingError as error:
        missing = str(error)
    return JitReport(
        directory=cache_dir(),
        num_entries=len(entries),
        num_bytes=sum(entry.stat().st_size for entry in entries),
        compiler=compiler,
        missing=missing,
    )


def compile_cuda(
    path: Path,
    *,
    arch: str,
    defines: Mapping[str, str | int] | None = None,
    prelude: str = "",
    include_dirs: Sequence[Path] = (),
    rdc: bool = False,
    link: Sequence[Path] = (),
) -> bytes:
    """Compiles one ``.cu`` file, or finds it in the cache.

    Args:
        path: The source. Headers that it includes in quotes are looked for beside it.
        arch: For example ``"sm_90"``.
        defines: Macros.
        prelude: Source text put before the file.
        include_dirs: Further directories of headers, before the toolkit's.
        rdc: Relocatable device code, as linking needs; functions without an execution space are
            then device functions.
        link: Device libraries (``.a``) to link with, through nvJitLink.

    Returns:
        A cubin.

    Raises:
        JitError: The compiler's or the linker's log.
        JitMissingError: There is no NVRTC, or its headers are missing.
    """
    macros = {name: str(value) for name, value in (defines or {}).items()}
    key = _key(path, arch, macros, prelude, include_dirs, rdc, link)
    entry = cache_dir() / f"{path.stem}-{arch}-{key}.cubin"
    cubin = _read(entry)
    if cubin is None:
        cubin = _build(path, arch, macros, prelude, include_dirs, rdc, link)
        _write(entry, cubin)
    return cubin


@lru_cache(maxsize=1)
def nvrtc_version() -> str:
    """NVRTC's version, like ``"13.0"``.

    Raises:
        JitMissingError: There is none.
    """
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # a library not found is a RuntimeError
        raise JitMissingError(f"no CUDA run-time compiler ({error}): {INSTALL}") from error
    assert int(status) == 0
    return f"{major}.{minor}"


@lru_cache(maxsize=1)
def toolkit_include_dirs() -> tuple[Path, ...]:
    """Directories of the CUDA and CCCL headers: of the wheels, else of an installed toolkit.

    Raises:
        JitMissingError: There are none.
    """
    major = nvrtc_version().split(".", maxsplit=1)[0]
    roots = [*_wheel_include_dirs(major)]
    roots += [
        Path(os.environ[v]) / "include" for v in ("CUDA_HOME", "CUDA_PATH") if v in os.environ
    ]
    roots.append(Path("/usr/local/cuda/include"))
    for root in roots:
        if (root / "cuda_bf16.h").exists():
            cccl = (r / "cccl" for r in (root, *roots) if (r / "cccl" / "cuda" / "std").exists())
            return (root, *cccl)
    raise JitMissingError(f"no CUDA headers in {', '.join(map(str, roots))}: {INSTALL}")


def _wheel_include_dirs(major: str) -> list[Path]:
    nvidia = importlib.util.find_spec("nvidia")  # a namespace package: each wheel adds a folder
    bases = nvidia.submodule_search_locations if nvidia else None
    places = [f"cu{major}/include", "cuda_runtime/include", "cuda_cccl/include"]
    return [Path(base) / place for base in bases or () for place in places]


def _key(
    path: Path,
    arch: str,
    macros: Mapping[str, str],
    prelude: str,
    include_dirs: Sequence[Path],
    rdc: bool,
    link: Sequence[Path],
) -> str:
    parts = [
        *(f"{file.name}\n{file.read_text()}" for file in _files_of(path)),
        prelude,
        json.dumps([arch, sorted(macros.items()), rdc, [str(d) for d in include_dirs]]),
        nvrtc_version(),
        *(_digest_of_library(file) for file in link),
    ]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()[:32]


@lru_cache
def _files_of(path: Path) -> tuple[Path, ...]:
    """A source and the headers beside it that it includes, directly or not."""
    found = [path]
    for file in found:  # grows while it is walked
        for name in _QUOTED_INCLUDE.findall(file.read_text()):
            header = path.parent / name
            if header.exists() and header not in found:
                found.append(header)
    return tuple(found)


@lru_cache
def _digest_of_library(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _build(
    path: Path,
    arch: str,
    macros: Mapping[str, str],
    prelude: str,
    include_dirs: Sequence[Path],
    rdc: bool,
    link: Sequence[Path],
) -> bytes:
    from cuda.core import Linker, LinkerOptions, ObjectCode, Program, ProgramOptions

    logger.info("compiling %s for %s", path.name, arch)
    options = ProgramOptions(
        name=path.name,
        arch=arch,
        std="c++17",
        define_macro=list(macros.items()) or None,
        include_path=[str(d) for d in (path.parent, *include_dirs, *toolkit_include_dirs())],
        relocatable_device_code=rdc,
        device_as_default_execution_space=rdc,
    )
    try:
        compiled = Program(prelude + path.read_text(), "c++", options).compile("cubin")
        if link:
            libraries = [ObjectCode.from_library(str(library)) for library in link]
            linker = Linker(compiled, *libraries, options=LinkerOptions(arch=arch))
            compiled = linker.link("cubin")
    except Exception as error:  # cuda.core names no public class; its message holds the log
        log = str(error).replace("\0", "").strip()
        raise JitError(f"{path.name} for {arch} with {dict(macros)}:\n{log}") from error
    return bytes(compiled.code)


def _read(entry: Path) -> bytes | None:
    try:
        content = entry.read_bytes()
    except OSError:  # not there, or nothing can be there
        return None
    head, cubin = content[: len(MAGIC) + 32], content[len(MAGIC) + 32 :]
    if head != MAGIC + hashlib.sha256(cubin).digest():
        logger.warning("%s is damaged or not ours: compiling again", entry)
        return None
    return cubin


def _write(entry: Path, cubin: bytes) -> None:
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=entry.parent) as directory:
            complete = Path(directory) / entry.name
            complete.write_bytes(MAGIC + hashlib.sha256(cubin).digest() + cubin)
            complete.replace(entry)
    except OSError as error:  # a read-only home: every process compiles for itself
        logger.warning("cannot keep %s (%s): set CROSSDOCK_JIT_DIR", entry.name, error)
