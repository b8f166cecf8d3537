"""What a failing rank leaves behind: its traceback in a file, and one line on the screen.

When one rank fails, all fail, most of them because of the first. The screen belongs to the cause;
everything else goes to files. A rank whose error is only a consequence waits a moment before it
ends, because launchers end all ranks once the first is gone and take that one for the cause.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from crossdock.dispatch.transports.watch import Process
from crossdock.scratch.errors import (
    ConfigError,
    CrossdockError,
    PeerClosed,
    PeerFailed,
    RankTimeout,
)

__all__ = [
    "EXIT_CONFIG",
    "EXIT_FAILED",
    "FailureNote",
    "die_with_supervisor",
    "end_rank",
    "end_stopped",
    "job_errors_dir",
    "make_errors_dir",
    "read_notes",
    "report_failure",
    "supervision",
]

EXIT_FAILED = 1
EXIT_CONFIG = 2
_LINGER_S = 1.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SUPERVISED = "CROSSDOCK_SUPERVISOR_ERRORS_DIR"


@dataclass(frozen=True, kw_only=True)
class FailureNote:
    """What a rank says about its failure.

    Attributes:
        rank: Which rank.
        time: Seconds since the epoch.
        line: The error in plain words.
        is_cause: Not the consequence of another rank's failure.
        exit_code: Status with which the rank ends.
    """

    rank: int
    time: float
    line: str
    is_cause: bool
    exit_code: int


def job_errors_dir(parent: Path | None) -> Path:
    """The directory that the ranks started by one launcher on one host have in common.

    Args:
        parent: Where the user wants it; None for the temporary directory.
    """
    supervised = os.environ.get(_SUPERVISED)
    if supervised:
        return Path(supervised)
    launcher = os.getppid()
    with open(f"/proc/{launcher}/stat") as file:
        started = file.read().rpartition(")")[2].split()[19]
    folder = f"crossdock-errors-{os.getuid()}-{launcher}-{started}"
    return (parent or Path(tempfile.gettempdir())) / folder


def supervision(errors_dir: Path) -> dict[str, str]:
    """Environment of ranks whose parent collects their notes and speaks for them."""
    return {_SUPERVISED: str(errors_dir)}


def die_with_supervisor() -> None:
    """Have the kernel end this rank if the process that supervises it is killed."""
    if _SUPERVISED in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_rank(
    error: BaseException, rank: int, errors_dir: Path, processes: Sequence[Process] = ()
) -> NoReturn:
    """Report a failure and leave.

    Leaves by ``os._exit``: after a lost rank, orderly ends (process groups, MPI) would wait for it.

    Args:
        error: What this rank failed with.
        rank: This rank.
        errors_dir: From ``job_errors_dir``.
        processes: Where each rank runs, once that is known.
    """
    note = report_failure(error, rank, errors_dir)
    sys.stdout.flush()
    sys.stderr.flush()
    if not note.is_cause:
        time.sleep(_LINGER_S)
    if isinstance(error, RankTimeout) and processes:
        end_stopped(processes[lost] for lost in error.ranks)
    os._exit(note.exit_code)


def report_failure(error: BaseException, rank: int, errors_dir: Path) -> FailureNote:
    """Write the traceback and a note to files; say the cause on the screen."""
    note = FailureNote(
        rank=rank,
        time=time.time(),
        line=_in_plain_words(error, rank),
        is_cause=_is_cause(error, rank),
        exit_code=EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED,
    )
    tracebacks = f"tracebacks in {errors_dir}"
    try:
        _leave_note(note, error, errors_dir)
    except OSError as problem:  # a full disk, say
        tracebacks = f"no tracebacks in {errors_dir}: {problem}"
    if note.is_cause:
        _tell_torchrun(note.line)
    if _SUPERVISED not in os.environ and _speaks(error, rank, errors_dir):
        if not isinstance(error, ConfigError):
            print(f"crossdock: {tracebacks}", file=sys.stderr)
        print(f"crossdock: {note.line}", file=sys.stderr)
    return note


def make_errors_dir(path: Path) -> None:
    """Make the directory that the user named, before anything needs it.

    Raises:
        ConfigError: It cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--errors-dir {path}: cannot be made: {error.strerror}") from None


def read_notes(errors_dir: Path) -> list[FailureNote]:
    """Notes of all ranks, causes first, then by time."""
    notes = [FailureNote(**json.loads(path.read_text())) for path in errors_dir.glob("rank-*.json")]
    return sorted(notes, key=lambda note: (not note.is_cause, note.time))


def end_stopped(lost: Iterable[Process]) -> None:
    """End the processes of this host that are stopped.

    Launchers end ranks by SIGTERM, which a stopped process does not see until it goes on.
    """
    for process in lost:
        if (process.trouble() or "").startswith("is stopped"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGTERM)
                os.kill(process.pid, signal.SIGCONT)


def _leave_note(note: FailureNote, error: BaseException, errors_dir: Path) -> None:
    errors_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    lines = "".join(traceback.format_exception(error))
    path = errors_dir / f"rank-{note.rank}.txt"
    path.write_text(lines, encoding="utf-8", errors="backslashreplace")
    _write_whole(path.with_suffix(".json"), json.dumps(asdict(note)))


def _in_plain_words(error: BaseException, rank: int) -> str:
    if isinstance(error, CrossdockError):
        return str(error)
    words = str(error).strip().splitlines()
    return f"rank {rank}: {type(error).__name__}: {words[0] if words else '(no message)'}"


def _is_cause(error: BaseException, rank: int) -> bool:
    """An agreed error is raised on all ranks: it is the cause on the first rank that it names."""
    if isinstance(error, PeerFailed | PeerClosed | RankTimeout):
        return False
    if isinstance(error, CrossdockError) and error.agreed:
        return rank == (error.ranks[0] if error.ranks else 0)
    return True


def _speaks(error: BaseException, rank: int, errors_dir: Path) -> bool:
    """Whether this rank's line goes to the screen where nobody speaks for all ranks."""
    if isinstance(error, RankTimeout):  # who is lost cannot speak: the first survivor does
        return rank == next(r for r in itertools.count() if r not in error.ranks)
    if not _is_cause(error, rank):
        return False
    # Often the same on all ranks of a host: the first says it, the others' are in their files.
    try:
        (errors_dir / "said").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # nobody can say that he said it
        return True
    return True


def _tell_torchrun(line: str) -> None:
    """Torchrun shows this in its summary."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": line, "timestamp": str(int(time.time()))}
        _write_whole(Path(path), json.dumps({"message": {"message": line, "extraInfo": extra}}))


def _write_whole(path: Path, text: str) -> None:
    """So that a reader never sees half of it."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)
