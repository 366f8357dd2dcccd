"""The launcher, with a horovodrun of our own that starts the ranks and says how they ended, in the same words."""

import json
import os
import sys
import textwrap
from functools import partial

import numpy as np
import pytest
from clocks import JumpingClock
from pids import ended

from hvd_hetero.testing import HangError, RankError, launch, report
from hvd_hetero.testing.processes import stacks
from hvd_hetero.testing.rank import RUN_DIR

HOROVODRUN = """
import os, subprocess, sys
arguments = sys.argv[1:]
ranks = int(arguments[arguments.index("-np") + 1])
command = arguments[next(i for i, a in enumerate(arguments) if a.endswith("python")):]
print("options:", *arguments[: len(arguments) - len(command)])
if "--refuse" in arguments:
    sys.exit("horovodrun: no slots")
started = [
    subprocess.Popen(command, env=dict(os.environ, HOROVOD_RANK=str(rank)), start_new_session=True)
    for rank in range(ranks)
]
codes = [process.wait() for process in started]
for rank, code in enumerate(codes):
    if code:
        print(f"Process {rank} exit with status code {code if code > 0 else 128 - code}.")
sys.exit(int(any(codes)))
"""


@pytest.fixture
def run(tmp_path):
    """Launch a script given as text."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, command in (("python", ""), ("horovodrun", f" {folder}/horovodrun.py")):
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable}{command} "$@"\n')
        (folder / name).chmod(0o755)
    (folder / "horovodrun.py").write_text(HOROVODRUN)

    def launch_text(text, ranks=2, *args, **keywords):
        script = tmp_path / "job.py"
        script.write_text(
            "import os, signal, sys, time\nrank = int(os.environ['HOROVOD_RANK'])\n" + textwrap.dedent(text)
        )
        return launch(keywords.pop("target", script), ranks, args, python=str(folder / "python"), **keywords)

    return launch_text


def test_each_rank_keeps_its_output_to_itself_even_from_below_python(run):
    result = run("print('hello', rank, *sys.argv[1:]); os.write(1, b'raw\\n'); os.write(2, b'oops\\n')", 2, "a b", 7)
    assert result.stdout == ("hello 0 a b 7\nraw\n", "hello 1 a b 7\nraw\n")
    assert result.stderr == ("oops\n", "oops\n")
    assert result.reports == (None, None)
    assert (result.ranks, result.wall_s > 0) == (2, True)


def test_the_ranks_get_the_environment_of_a_calm_job_and_what_the_caller_adds(run, monkeypatch):
    monkeypatch.delenv("HOROVOD_CYCLE_TIME", raising=False)
    names = ["OMP_NUM_THREADS", "PYTHONFAULTHANDLER", "HOROVOD_GLOO_TIMEOUT_SECONDS", "HOROVOD_CYCLE_TIME", "MINE"]
    result = run(
        f"from hvd_hetero.testing.reports import report; report([os.environ.get(name) for name in {names}])",
        1,
        env={"MINE": "x", "OMP_NUM_THREADS": "2"},
    )
    assert result.reports == (["2", "1", "60", None, "x"],)


def test_hosts_are_named_unless_a_discovery_script_finds_them(run):
    assert "options: -np 2 --gloo -H localhost:2 --network-interface lo" in run("").launcher_output
    elastic = run("", options=["--host-discovery-script", "hosts.sh"]).launcher_output
    assert "options: -np 2 --gloo --network-interface lo --host-discovery-script hosts.sh" in elastic


def test_lines_are_handed_over_while_the_job_runs(run):
    """The job ends only once the test has seen its first line, so a line that comes at the end comes too late."""
    seen = []

    def on_line(rank, line):
        seen.append((rank, line))
        if line.startswith("go "):
            with open(line.removeprefix("go "), "w"):
                pass

    run(
        """
        flag = os.path.join(os.environ["HVD_HETERO_RUN_DIR"], "seen")
        print("go", flag)
        while not os.path.exists(flag):
            time.sleep(0.01)
        sys.stdout.write("last, without an end")
        """,
        1,
        on_line=on_line,
        timeout_s=20,
    )
    assert [line.split()[0] for _, line in seen] == ["go"]


def test_a_failure_names_what_each_rank_raised_and_ends_with_the_first_to_fail(run):
    """Each rank warns at length before; rank 0, which fails first, is dumped by its end, as with faulthandler."""
    with pytest.raises(RankError) as caught:
        run(
            """
            print("w" * 5000, *range(300), sep="\\n", file=sys.stderr, flush=True)
            def lost():
                raise RuntimeError(f"of rank {rank}")
            try:
                lost()
            finally:
                sys.excepthook(*sys.exc_info())
                if rank == 0:
                    print(*(f"  File thread {n}" for n in range(250)), sep="\\n", file=sys.stderr, flush=True)
                os._exit(1)
            """
        )
    message = str(caught.value)
    first, rest = message.split("\n", 1)
    assert first.endswith(
        "rank 0 exited with 1 (RuntimeError: of rank 0), then rank 1 exited with 1 (RuntimeError: of rank 1)"
    )
    assert rest.index("--- rank 1, standard error") < rest.index("--- rank 0, standard error")
    assert rest.count("in lost\n") == 2
    assert message.endswith("File thread 249")
    assert max(map(len, rest.splitlines())) < 500


def test_a_crash_among_many_threads_is_told_from_its_first_line_on(run):
    """With many threads it is hundreds of lines above the end, which shows the oldest threads alone."""
    with pytest.raises(RankError, match=r"rank 0.*SIGSEGV") as caught:
        run(
            """
            import faulthandler, threading
            for _ in range(40):
                threading.Thread(target=threading.Event().wait, daemon=True).start()
            if not rank:
                faulthandler._sigsegv()
            """
        )
    message = str(caught.value)
    assert "last 100 of" in message
    assert "Fatal Python error: Segmentation fault" in message, message[:9000]


def test_a_launch_that_fails_before_any_rank_shows_what_horovodrun_said(run):
    with pytest.raises(RankError, match=r"horovodrun.* 1\n(.|\n)*horovodrun: no slots") as caught:
        run("", options=["--refuse"])
    assert caught.value.exit_codes == {}


def test_a_job_that_hangs_is_ended_with_all_threads_of_all_living_ranks_in_the_message(run, monkeypatch):
    """Rank 1 has ended, rank 0 waits in its main thread and in another, ignores SIGTERM, and has hidden a child."""
    clock = JumpingClock()
    monkeypatch.setattr(sys.modules["hvd_hetero.testing.launch"], "time", clock)
    with pytest.raises(HangError) as caught:
        run(
            """
            import subprocess, threading
            def in_a_thread(child):
                print(child, os.getpid())
                threading.Event().wait()
            def in_main():
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                child = subprocess.Popen(["sleep", "1000"], start_new_session=True).pid
                threading.Thread(target=in_a_thread, args=(child,), daemon=True).start()
                threading.Event().wait()
            if rank == 0:
                in_main()
            """,
            timeout_s=60,
            on_line=lambda rank, line: setattr(clock, "ahead_s", 60.0),
        )
    assert caught.value.result.wall_s > 60
    message = str(caught.value)
    assert "not done after 60 s" in message
    assert "in in_a_thread" in caught.value.stacks[0]
    assert "in in_main" in caught.value.stacks[0]
    assert caught.value.stacks[0] in message
    assert "die_with_launcher" not in message
    pids = [int(pid) for pid in caught.value.result.stdout[0].split()]
    assert len(pids) == 2
    assert ended(*pids)


def test_a_caller_that_raises_takes_the_job_with_it(run, tmp_path):
    """An exception in on_line stands for any, KeyboardInterrupt among them."""
    pids = []

    def on_line(rank, line):
        pids.append(int(line))
        raise KeyError("the caller's own")

    with pytest.raises(KeyError, match="the caller's own"):
        run("print(os.getpid()); time.sleep(1000)", 1, on_line=on_line, timeout_s=20)
    assert ended(pids[0])


def test_a_python_without_horovod_is_told_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="hvd-hetero build-horovod"):
        launch("module", 1, python=str(tmp_path / "python"))


def test_a_report_is_plain_json_with_arrays_as_lists_and_the_last_one_counts(tmp_path, monkeypatch):
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    monkeypatch.setenv("HOROVOD_RANK", "3")
    report("first")
    report({"x": np.arange(3), "y": np.float32(0.5)})
    (file,) = tmp_path.iterdir()
    assert file.name == f"3.{os.getpid()}.report"
    assert json.loads(file.read_text()) == {"x": [0, 1, 2], "y": 0.5}
    with pytest.raises(TypeError, match="object"):
        report(object())
    assert json.loads(file.read_text()) == {"x": [0, 1, 2], "y": 0.5}  # what cannot be reported spoils nothing


def test_a_module_runs_like_a_script(run, tmp_path):
    (tmp_path / "some_job.py").write_text("import sys; print(__name__, sys.argv[1:])")
    result = run("", 1, "x", target="some_job", env={"PYTHONPATH": str(tmp_path)})
    assert result.stdout == ("__main__ ['x']\n",)


def test_a_rank_that_has_ended_or_cannot_answer_is_said_so(run, monkeypatch):
    """Rank 0 is stopped, as a debugger would; rank 1 has ended before rank 0 says so."""
    clock = JumpingClock()
    monkeypatch.setattr(sys.modules["hvd_hetero.testing.launch"], "time", clock)
    monkeypatch.setattr(sys.modules["hvd_hetero.testing.launch"], "stacks", partial(stacks, patience_s=0.3))
    with pytest.raises(HangError) as caught:
        run(
            """
            from pathlib import Path
            run_dir = Path(os.environ["HVD_HETERO_RUN_DIR"])
            if rank == 1:
                (run_dir / "pid").with_suffix(".new").write_text(str(os.getpid()))
                (run_dir / "pid").with_suffix(".new").rename(run_dir / "pid")
                sys.exit()
            while not (run_dir / "pid").exists():
                time.sleep(0.01)
            stat = Path("/proc", (run_dir / "pid").read_text(), "stat")
            while True:
                try:
                    if " Z " in stat.read_text():
                        break
                except OSError:  # gone, perhaps while it was read
                    break
                time.sleep(0.01)
            print("stopping")
            os.kill(os.getpid(), signal.SIGSTOP)
            """,
            timeout_s=60,
            on_line=lambda rank, line: setattr(clock, "ahead_s", 60.0),
        )
    assert "gave no answer" in caught.value.stacks[0]
    assert "rank 1: no process; it ended, or never started" in str(caught.value)
