"""Forks of a process with its imports done: how they end, and agents among them."""

import sys

import pytest
from clocks import JumpingClock
from pids import ended
from support.preload import Preloaded

from hvd_hetero.testing import HangError, RankError, launch, rank

AGENT = """
import os, subprocess, sys
print("numpy" in sys.modules, os.getppid(), os.getpid(), flush=True)
sys.exit(subprocess.run(sys.argv[1:], env={**os.environ, "RANK": "0"}).returncode)
"""


@pytest.fixture(scope="module")
def preloaded():
    with Preloaded("numpy") as preloaded:
        yield preloaded


@pytest.fixture
def run(tmp_path, preloaded):
    """Launch a script given as text on one rank, by an agent."""
    (tmp_path / "agent.py").write_text(AGENT)

    def launch_text(text, **keywords):
        (tmp_path / "job.py").write_text(f"import os, sys, time\nfrom hvd_hetero.testing import report\n{text}")
        starter = [sys.executable, rank.__file__, rank.AGENT, str(tmp_path / "agent.py")]
        return launch(tmp_path / "job.py", 1, starter=starter, env=preloaded.variables, **keywords)

    return launch_text


def test_an_agent_and_its_ranks_are_forks_of_the_process_that_has_imported(run, preloaded):
    result = run("report(['numpy' in sys.modules, os.getppid()])")
    number = preloaded._process.pid
    assert result.launcher_output.split()[:2] == ["True", str(number)]
    assert result.reports == ([True, number],)


def test_an_agent_ends_with_a_job_that_hangs(run, monkeypatch):
    """The launcher's clock is moved on once the rank is there, however long a busy machine takes to start it."""
    clock = JumpingClock()
    monkeypatch.setattr(sys.modules["hvd_hetero.testing.launch"], "time", clock)
    with pytest.raises(HangError) as caught:
        run("print('here'); time.sleep(1000)", timeout_s=60, on_line=lambda *_: setattr(clock, "ahead_s", 60.0))
    assert sorted(caught.value.stacks) == [0], "an agent is no rank"
    assert ended(int(caught.value.result.launcher_output.split()[2]))


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [("sys.exit(7)", 7, ""), ("sys.exit('no data')", 1, "no data\n"), ("raise KeyError(3)", 1, "KeyError: 3\n")],
)
def test_a_forked_rank_ends_with_the_code_that_its_interpreter_would_end_with(run, end, code, said):
    with pytest.raises(RankError) as caught:
        run(f"print('here'); {end}")
    assert str(caught.value).splitlines()[0].endswith(f"horovodrun exited with {code}")
    assert caught.value.result.stdout == ("here\n",)
    assert caught.value.result.stderr[0].endswith(said)
