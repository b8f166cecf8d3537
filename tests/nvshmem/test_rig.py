"""The rig's own logic: ranks start together and none is left behind."""

from __future__ import annotations

import time

import pytest

from crossdock.launch.rig import mps, run_on_rig
from crossdock.scratch.errors import ConfigError


def test_every_rank_gets_its_seat(tmp_path):
    program = (
        "import os, pathlib; pathlib.Path(os.environ['FOLDER'], os.environ['RANK']).write_text("
        "os.environ['WORLD_SIZE'] + ' ' + os.environ['CUDA_MPS_ACTIVE_THREAD_PERCENTAGE'])"
    )
    status = run_on_rig(3, ["-c", program], environment={"FOLDER": str(tmp_path)})
    assert status == 0
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["3 33"] * 3


def test_a_failed_rank_ends_the_others():
    program = "import os, sys, time; time.sleep(60) if os.environ['RANK'] == '0' else sys.exit(7)"
    began = time.monotonic()
    assert run_on_rig(2, ["-c", program], timeout_s=50) == 7
    assert time.monotonic() - began < 30


def test_ranks_that_do_not_end_are_ended():
    assert run_on_rig(2, ["-c", "import time; time.sleep(60)"], timeout_s=1) == 124


def test_too_many_ranks_are_refused():
    with pytest.raises(ConfigError, match="1 to 16"):
        run_on_rig(17, ["-c", ""])


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_check_holds_on_the_rig(world_size):
    with mps() as variables:
        command = ["-m", "tests.nvshmem.ranks"]
        assert run_on_rig(world_size, command, timeout_s=120, environment=variables) == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("world_size", "puts"), [(2, "all"), (4, "2"), (4, "all")])
def test_every_check_holds_between_distant_ranks(world_size, puts):
    with mps() as variables:
        command = ["-m", "tests.nvshmem.ranks"]
        variables |= {"CROSSDOCK_NVSHMEM_PUTS": puts, "RIG_HANG_S": "110"}
        assert run_on_rig(world_size, command, timeout_s=120, environment=variables) == 0


@pytest.mark.gpu
def test_a_rank_that_misses_an_eager_step_is_named_on_the_rig():
    with mps() as variables:
        command = ["-m", "tests.nvshmem.ranks", "a_rank_that_misses_an_eager_step_is_named"]
        assert run_on_rig(3, command, timeout_s=60, environment=variables) == 0
