"""A distributed job that goes wrong ends in time, leaves nothing behind, and says what happened on every rank."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from hvd_hetero.testing import HangError, RankError, quota_available

pytestmark = pytest.mark.distributed
HANG = Path(__file__).parent / "workers" / "hang.py"


@pytest.fixture
def folder(preloaded, monkeypatch, tmp_path):
    """Where the job's processes work, to find them by another mark than the launcher's own."""
    preloaded("torch")  # not one of them, so it begins elsewhere
    monkeypatch.chdir(tmp_path)
    return tmp_path


def alive(folder):
    """The processes that work there, with their names, but for those that have ended and whose memory is given back."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it may end between any two of these questions
            if process.pid != os.getpid() and process.cwd() == str(folder) and process.cmdline():
                found[process] = process.name()
    return found


def test_a_job_that_ends_well_returns_what_each_rank_printed_and_reported(launch, folder):
    result = launch("hang.py", 2, ["well"], framework="torch")
    assert result.stdout == ("rank 0 is done\n", "rank 1 is done\n")
    assert all(f"rank {rank} warns\n" in result.stderr[rank] for rank in range(2))
    assert result.reports == ({"rank": 0, "total": [3.0]}, {"rank": 1, "total": [3.0]})
    assert alive(folder) == {}


def test_a_hanging_job_is_ended_in_time_with_the_stack_of_every_rank_and_no_process_survives(launch, folder):
    for timeout_s in (8, 45, 120):  # on a busy machine the ranks may not yet hang at the end of the first
        begin_s = time.monotonic()
        with pytest.raises(HangError, match=rf"hang\.py.* {timeout_s} s") as caught:
            launch("hang.py", 2, ["hang"], timeout_s=timeout_s, framework="torch")
        assert time.monotonic() - begin_s < timeout_s + 60
        assert alive(folder) == {}
        stacks = caught.value.stacks
        if "in synchronize" in stacks.get(0, "") and "in never_post" in stacks.get(1, ""):
            break
    assert sorted(stacks) == [0, 1]
    assert "in wait_inside_horovod" in stacks[0]
    assert "in synchronize" in stacks[0]  # where Horovod waits, below Python
    assert "in never_post" in stacks[1]
    message = str(caught.value)
    assert message.index("rank 0: pid") < message.index("wait_inside_horovod") < message.index("rank 1: pid")
    assert message.index("rank 1: pid") < message.index("never_post")


def test_a_rank_that_raises_is_reported_with_its_traceback(launch, folder):
    with pytest.raises(RankError) as caught:
        launch("hang.py", 2, ["raise"], framework="torch")
    assert caught.value.exit_codes[1] == 1
    message = str(caught.value)
    assert "rank 1 exited with 1" in message
    assert "in fail_here" in message
    assert "KeyError: 'the cause of it all'" in message
    assert caught.value.result.reports[1] == {"rank": 1, "total": [3.0]}  # what it told before is not lost
    assert alive(folder) == {}


def test_a_rank_that_is_killed_is_reported_so_and_leaves_no_control_group(launch, folder):
    with pytest.raises(RankError, match=r"rank 1.*SIGKILL") as caught:
        launch("hang.py", 2, ["kill"], framework="torch")
    assert caught.value.exit_codes[1] == -signal.SIGKILL
    assert alive(folder) == {}
    # Its own: ranks of other tests may be killed in groups at the same time.
    groups = caught.value.result.stdout[1].splitlines()
    assert len(groups) == bool(quota_available())
    assert not any(Path(group).exists() for group in groups)


def test_ranks_do_not_outlive_their_launcher(folder):
    """Killing the launching process outright ends every rank, within seconds on a machine that is not busy."""
    code = f"from hvd_hetero.testing import launch; launch({str(HANG)!r}, 2, ['hang'], on_line=print)"
    # Its run directory is what a launcher that is killed leaves behind, so let that be where pytest cleans up.
    environment = dict(os.environ) | {"TMPDIR": str(folder)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen([sys.executable, "-u", "-c", code], env=environment, stdout=subprocess.PIPE) as launcher:
        assert b"hanging" in launcher.stdout.readline()
        assert len(alive(folder)) >= 4  # two ranks, horovodrun, the launcher
        launcher.kill()
    deadline_s = time.monotonic() + 60
    while set(left := alive(folder).values()) - {"sleep"} and time.monotonic() < deadline_s:
        time.sleep(0.05)
    for process in alive(folder):  # the rank's own child: nobody promised that it follows
        with suppress(psutil.NoSuchProcess):
            process.kill()
    assert set(left) <= {"sleep"}


def test_a_test_that_hangs_without_a_launch_fails_at_its_limit_and_one_stuck_for_good_ends_pytest(tmp_path):
    """The folder's conftest, on two tests that hang: one in Python code, one where the interpreter takes no signals."""
    conftest = (Path(__file__).parent / "conftest.py").read_text()
    shorter = conftest.replace("LAST_RESORT_S = 30.0", "LAST_RESORT_S = 5.0")
    assert shorter != conftest
    (tmp_path / "conftest.py").write_text(shorter)
    (tmp_path / "test_hanging.py").write_text(
        "import pytest, signal, time\n"
        "@pytest.mark.distributed(timeout_s=0.5)\n"
        "def test_in_python():\n    time.sleep(60)\n"
        "def test_next():\n    pass\n"
        "@pytest.mark.distributed(timeout_s=0.5)\n"
        "def test_stuck():\n    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})\n    time.sleep(60)\n"
    )
    marker = "markers=distributed: as here"
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-o", marker, "--rootdir", tmp_path, tmp_path],
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))), capture_output=True, text=True,
        timeout=120, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert "test_in_python FAILED" in ended.stdout
    assert "test_next PASSED" in ended.stdout  # a hanging test does not take the others with it
    assert "in test_stuck" in ended.stderr
    assert ended.returncode == 1
