from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from typer.testing import CliRunner

from crossdock.dispatch.transports.watch import Process
from crossdock.launch.cli import app
from crossdock.launch.failures import (
    FailureNote,
    end_stopped,
    job_errors_dir,
    read_notes,
    report_failure,
    supervision,
)
from crossdock.launch.start import first_error
from crossdock.scratch.errors import (
    ConfigError,
    CrossdockError,
    PeerFailed,
    RankTimeout,
    RoutingError,
)


def fail(folder: Path, error: BaseException, rank: int, *, agreed: bool = False) -> FailureNote:
    """Report an error that was raised."""
    if isinstance(error, CrossdockError):
        error.agreed = agreed
    try:
        raise error
    except BaseException as caught:
        return report_failure(caught, rank, folder)


def failure(exitcode: int) -> ProcessFailure:
    return ProcessFailure(local_rank=0, pid=1, exitcode=exitcode, error_file="")


def test_a_rank_says_its_error_in_one_line_and_keeps_its_traceback(tmp_path, capsys):
    note = fail(tmp_path, MemoryError("no room\nat all"), 3)
    said = capsys.readouterr().err
    assert said.splitlines()[-1] == "crossdock: rank 3: MemoryError: no room"
    assert "Traceback" not in said
    assert "Traceback" in (tmp_path / "rank-3.txt").read_text()
    assert read_notes(tmp_path) == [note]
    assert note.is_cause
    assert note.exit_code == 1


@pytest.mark.parametrize("rank", [0, 2])
def test_what_all_ranks_raise_is_said_by_the_rank_it_names(tmp_path, capsys, rank):
    fail(tmp_path, RoutingError("rank 2: id 99", ranks=(2,)), rank, agreed=True)
    assert ("rank 2: id 99" in capsys.readouterr().err) == (rank == 2)


@pytest.mark.parametrize(("rank", "speaks"), [(1, True), (3, False)])
def test_a_lost_rank_is_named_by_the_first_survivor(tmp_path, capsys, rank, speaks):
    note = fail(tmp_path, RankTimeout("rank 0 is dead", ranks=(0, 2)), rank)
    assert ("rank 0 is dead" in capsys.readouterr().err) == speaks
    assert not note.is_cause


def test_the_consequence_of_anothers_failure_is_not_said(tmp_path, capsys):
    assert not fail(tmp_path, PeerFailed("rank 1 failed"), 0).is_cause
    assert capsys.readouterr().err == ""


def test_an_error_of_several_ranks_is_said_by_the_first(tmp_path, capsys):
    for rank in (2, 0, 1):
        fail(tmp_path, TypeError("a bug"), rank)
    assert capsys.readouterr().err.splitlines()[1:] == ["crossdock: rank 2: TypeError: a bug"]
    assert len(read_notes(tmp_path)) == 3


def test_a_config_error_is_said_once_on_a_host_with_status_2(tmp_path, capsys):
    notes = [fail(tmp_path, ConfigError("c.yaml:1: wrong"), rank) for rank in (1, 0)]
    assert [note.exit_code for note in notes] == [2, 2]
    assert capsys.readouterr().err == "crossdock: c.yaml:1: wrong\n"


def test_a_supervised_rank_leaves_the_talking_to_its_parent(tmp_path, capsys, monkeypatch):
    for name, value in supervision(tmp_path).items():
        monkeypatch.setenv(name, value)
    fail(job_errors_dir(None), OSError("disk"), 0)
    assert capsys.readouterr().err == ""
    assert read_notes(tmp_path)[0].line == "rank 0: OSError: disk"


def test_torchrun_is_told_the_cause(tmp_path, monkeypatch):
    told = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(told))
    fail(tmp_path, OSError("disk"), 1)
    assert json.loads(told.read_text())["message"]["message"] == "rank 1: OSError: disk"


def test_a_rank_whose_directory_cannot_be_made_still_says_why_it_failed(tmp_path, capsys):
    (tmp_path / "file").touch()
    fail(tmp_path / "file" / "errors", OSError("disk"), 1)
    no_tracebacks, line = capsys.readouterr().err.splitlines()
    assert no_tracebacks.startswith(f"crossdock: no tracebacks in {tmp_path}/file/errors: ")
    assert line == "crossdock: rank 1: OSError: disk"


def test_a_traceback_that_cannot_be_encoded_is_kept(tmp_path):
    error = OSError("no trace")
    error.__cause__ = OSError("no file \udcff.bin")
    fail(tmp_path, error, 0)
    assert "no file \\udcff.bin" in (tmp_path / "rank-0.txt").read_text()


def test_an_errors_directory_that_cannot_be_made_is_refused(small, tmp_path):
    (tmp_path / "file").touch()
    arguments = ["run", str(small), "--errors-dir", str(tmp_path / "file" / "errors")]
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, ConfigError)
    assert "--errors-dir" in str(error)


IMPORTS_FOR_LONG = "import time; print('importing', flush=True); time.sleep(60)"


def test_ctrl_c_while_torch_is_imported_leaves_no_traceback(tmp_path):
    (tmp_path / "torch.py").write_text(IMPORTS_FOR_LONG)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", "crossdock.launch", "run", "x.yaml"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (-signal.SIGINT, "")


def test_the_first_error_is_the_killed_rank_then_a_cause_then_a_consequence(tmp_path):
    fail(tmp_path, PeerFailed("rank 1 failed"), 0)
    assert first_error({0: failure(1)}, tmp_path) == ("rank 1 failed", 1)
    fail(tmp_path, ConfigError("no GPU"), 1)
    assert first_error({0: failure(1)}, tmp_path) == ("no GPU", 2)
    lost = {0: failure(1), 3: failure(-signal.SIGKILL)}
    assert first_error(lost, tmp_path) == ("rank 3 was killed by SIGKILL", 1)
    ended_by_agent = {0: failure(-signal.SIGTERM)}
    assert first_error(ended_by_agent, tmp_path)[0] == "no GPU"


def test_a_rank_that_left_no_word_is_told_by_its_status(tmp_path):
    assert first_error({2: failure(7)}, tmp_path) == ("rank 2 ended with status 7", 7)


def test_ranks_of_one_launcher_share_a_directory(tmp_path):
    assert job_errors_dir(tmp_path) == job_errors_dir(tmp_path)
    assert job_errors_dir(tmp_path).parent == tmp_path


def test_a_stopped_process_is_ended():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    os.kill(process.pid, signal.SIGSTOP)
    started = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
    stopped = Process(host=Process.this().host, pid=process.pid, started=started)
    while stopped.trouble() is None:  # a signal takes effect when the process next runs
        time.sleep(0.01)
    end_stopped([stopped])
    assert process.wait(10) == -signal.SIGTERM
