"""The build itself, of a small source: its log, its failures and its end. No test here compiles Horovod."""

import json
import os
import signal
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from fake_builds import COMPILED, FAKE_FILES, PYTHON, SILENT, TENSORFLOW, TOOLS, TORCH, make_sdist, use_patches
from pids import ended

from horovod_build import HorovodBuildError, command, compile, process
from horovod_build.plan import make_plan
from hvd_hetero.tools.cli import commands as cli


def test_the_whole_way_with_a_small_source(small, tmp_path, monkeypatch, capsys):
    """Unpacked, patched, built by pip, checked, cached; stdout holds the path alone; the second run builds nothing."""
    sdist = make_sdist(tmp_path / "sdist", FAKE_FILES, monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(command, "find_frameworks", lambda environ: (TORCH,))
    monkeypatch.setattr(command, "find_toolchain", lambda environ: TOOLS)
    assert cli.main(["build-horovod", "--print-path", "--sdist", str(sdist)]) == 0
    first = capsys.readouterr()
    wheel = Path(first.out.removesuffix("\n"))
    assert wheel.exists()
    assert wheel.is_relative_to(tmp_path / "cache")
    assert "Horovod 0.28.1 for torch 2.13.0" in first.err
    assert "compile for torch: 50 %" in first.err
    assert list(wheel.parent.parent.glob("work-*")) == []

    monkeypatch.setattr(command, "compile_wheel", lambda *_: pytest.fail("built although it was cached"))
    assert cli.main(["build-horovod", "--print-path", "--quiet"]) == 0
    assert capsys.readouterr() == (f"{wheel}\n", "")
    with zipfile.ZipFile(wheel) as archive:
        assert "4096" in archive.read("horovod/runner/server.py").decode()
        assert archive.read("horovod-0.28.1.dist-info/hvd-hetero-patches").decode() == COMPILED.line + PYTHON.line

    # A change in a Python file needs no compiler: what that left is still there.
    use_patches(monkeypatch, COMPILED, replace(PYTHON, text=PYTHON.text.replace("4096", "128")))
    (log,) = wheel.parent.parent.glob("*_compiled/build.log")
    said = log.read_text()
    assert cli.main(["build-horovod", "--print-path", "--quiet", "--sdist", str(sdist)]) == 0
    other = Path(capsys.readouterr().out.removesuffix("\n"))
    assert other != wheel
    with zipfile.ZipFile(other) as archive:
        assert archive.read("horovod/runner/server.py").decode() == "import queue\nSIZE = 128\n"
    assert log.read_text() == said
    assert "Building" in said


def test_a_framework_that_comes_later_is_compiled_alone(cache, small, torch_plan, tmp_path, monkeypatch):
    """What torch has stays; the wheel for both has both extensions, and both versions for Horovod to compare."""
    sdist = make_sdist(tmp_path / "sdist", FAKE_FILES, monkeypatch)
    monkeypatch.setattr(command, "find_toolchain", lambda environ: TOOLS)
    alone = command.ensure_wheel(torch_plan, cache, os.environ, SILENT, jobs=1, sdist=sdist)
    compiled_for = []

    def compile_part(part, *rest):
        compiled_for.extend(part.frameworks)
        return compile.compile_wheel(part, *rest)

    monkeypatch.setattr(command, "compile_wheel", compile_part)
    both = command.ensure_wheel(make_plan((TORCH, TENSORFLOW), {}), cache, os.environ, SILENT, jobs=1, sdist=sdist)
    assert compiled_for == [TENSORFLOW]
    with zipfile.ZipFile(alone) as before, zipfile.ZipFile(both) as after:
        assert set(after.namelist()) - set(before.namelist()) == {"horovod/tensorflow/mpi_lib.fake.so"}
        requirements = "horovod-0.28.1.dist-info/METADATA"
        assert b"cffi" in after.read(requirements) == before.read(requirements)
        assert json.loads(after.read("horovod/metadata.json")) == {
            "pytorch": "2.13.0",
            "tensorflow": "2.21.0",
            "dummy": "none",
        }


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("ops.cc:1: error: no such type", "ops.cc:1: error: no such type"),
        # As in a fresh environment with PyTorch from PyPI on a machine without a GPU.
        ("Could NOT find CUDAToolkit (missing: CUDA_CUDART)", "leave torch out by HOROVOD_WITHOUT_PYTORCH=1"),
    ],
)
def test_a_failing_build_tells_why_and_where_its_log_is(cache, small, torch_plan, tmp_path, monkeypatch, said, told):
    """The log survives the work directory."""
    sdist = make_sdist(tmp_path / "sdist", FAKE_FILES | {"setup.py": f"raise SystemExit({said!r})"}, monkeypatch)
    monkeypatch.setattr(command, "find_toolchain", lambda environ: TOOLS)
    with pytest.raises(HorovodBuildError, match="Horovod") as caught:
        command.ensure_wheel(torch_plan, cache, os.environ, SILENT, jobs=1, sdist=sdist)
    log = cache.entry(torch_plan.parts[0]) / "build.log"
    assert told in str(caught.value)
    assert str(caught.value).endswith(str(log))
    assert said in log.read_text()


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ("a.cc:3: error: boom", "error: boom"),
        ("CMake Error at CMakeLists.txt:107 (message):\n  HOROVOD_GPU_OPERATIONS=nccl is invalid", "nccl is invalid"),
    ],
)
def test_what_is_wrong_is_shown_however_far_up(tmp_path, said, wrong):
    """The message holds it, with make's chatter after it. CMake's stands below the line that is marked as an error."""
    program = tmp_path / "program.py"  # the log begins with the command, which must not say it
    program.write_text(f"import sys; print({said!r}); print('chatter\\n' * 100); sys.exit(2)")
    with pytest.raises(HorovodBuildError, match="exit code 2") as caught:
        process.run_logged([sys.executable, str(program)], log=tmp_path / "log", doing="it failed")
    assert wrong in str(caught.value)


def test_an_interrupted_command_takes_its_children_along(tmp_path):
    """A process that the command started is gone soon after the interruption."""
    started: list[int] = []

    def interrupt(line):
        started.append(int(line))
        raise KeyboardInterrupt

    parent = "import subprocess; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    with pytest.raises(KeyboardInterrupt):
        process.run_logged([sys.executable, "-c", parent], log=tmp_path / "log", doing="", on_line=interrupt)
    assert ended(started[0])


@pytest.fixture(params=[signal.SIGTERM, signal.SIGHUP])
def number(request):
    """A signal that does what it does by default, whatever started the tests: nohup has them ignore SIGHUP."""
    before = signal.signal(request.param, signal.SIG_DFL)
    yield request.param
    signal.signal(request.param, before)


def test_a_terminated_build_cleans_up(cache, number):
    """The work directory is gone and the exit code tells the signal, which then means what it meant before."""
    with pytest.raises(SystemExit, match=str(128 + number)):
        _be_sent(number, cache)
    assert list(cache.root.glob("work-*")) == []
    assert signal.getsignal(number) is signal.SIG_DFL


def _be_sent(number, cache):
    with command._terminated_as_exit(), cache.locked(pytest.fail), cache.workspace():
        os.kill(os.getpid(), number)
        time.sleep(10)


def test_build_environment_is_the_plans(torch_plan):
    """An outer make and a surrounding job do not leak in; the plan's variables and the jobs do."""
    outer = {"MAKELEVEL": "1", "MAKEFLAGS": "-j64 --jobserver-auth=3,4", "HOROVOD_RANK": "1", "HOME": "/home/x"}
    environ = compile.build_environment(torch_plan, TOOLS, 3, outer)
    assert environ["MAKEFLAGS"] == "-j3"
    assert environ["HOME"] == "/home/x"
    assert environ["HOROVOD_WITH_PYTORCH"] == "1"
    assert not {"MAKELEVEL", "HOROVOD_RANK"} & set(environ)
