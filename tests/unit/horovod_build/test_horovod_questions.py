"""What the launcher of the Horovod that is installed asks before it starts a rank: what was built, and which hosts."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import horovod_build
from hvd_hetero.testing import LaunchError, launch

pytest.importorskip("horovod")

ASK = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "tensorflow", "mxnet"):
            raise AssertionError(f"{name} was imported")

sys.meta_path.insert(0, Refused())
from horovod.common.util import gloo_built, mpi_built
print(gloo_built(), mpi_built())
"""


def test_what_horovod_was_built_with_is_told_without_a_framework():
    """`horovodrun` asks both questions before each job; importing TensorFlow to answer took it 17 s."""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, env=environ, check=False)
    assert (done.stdout, done.returncode) == ("True False\n", 0), done.stderr


@pytest.fixture
def util(tmp_path):
    """Horovod's ``common/util.py`` in a package without extensions."""
    spec = importlib.util.find_spec("horovod.common.util")
    copy = tmp_path / "horovod" / "common" / "util.py"
    copy.parent.mkdir(parents=True)
    shutil.copy(spec.origin, copy)
    moved = importlib.util.spec_from_file_location("moved_util", copy)
    module = importlib.util.module_from_spec(moved)
    moved.loader.exec_module(module)
    return module


def extension(util, package, content):
    path = Path(util.__file__).parents[1] / package / f"mpi_lib_v2{util.get_ext_suffix()}"
    path.parent.mkdir()
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("content", "answers"),
    [
        (b"..N7horovod6common14GlooControllerE..", (True, False)),
        (b"..N7horovod6common13MPIControllerE..", (False, True)),
        (b"..13MPIController..14GlooController..", (True, True)),
        (b"a log that speaks of GlooController and of MPIController", (False, False)),
    ],
)
def test_the_first_extension_there_is_answers(util, content, answers):
    """A class counts by the name that the compiler wrote; the second framework answers where the first lacks."""
    extension(util, "torch", content)
    assert (util.gloo_built(), util.mpi_built()) == answers


@pytest.fixture
def released(tmp_path, monkeypatch):
    """A Horovod whose launcher asks as released ones do, and frameworks that cannot be imported; its package."""
    spec = importlib.util.find_spec("horovod")
    package = tmp_path / "horovod"
    shutil.copytree(Path(spec.origin).parent, package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    patch = Path(horovod_build.__file__).parent / "patches" / "ask-without-frameworks.patch"
    subprocess.run(["patch", "-R", "-p1", "-s", "-i", str(patch)], cwd=tmp_path, check=True)
    for name in ("torch", "tensorflow", "mxnet"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('of no use here')")
    (tmp_path / "job.py").write_text("import horovod\nprint(horovod.__file__)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return package


def test_a_launch_by_a_released_horovod_imports_no_framework(released):
    """`launch` answers in the place of its launcher, which would import TensorFlow and torch to learn of Gloo."""
    (released / "torch" / "mpi_lib_v2.so").write_bytes(b"..14GlooController..")
    assert launch(released.parent / "job.py", 2).stdout == (f"{released}/__init__.py\n",) * 2


def test_a_released_horovod_without_gloo_says_so_itself(released):
    """As those of conda-forge are, which have MPI only."""
    (released / "torch" / "mpi_lib_v2.so").write_bytes(b"..13MPIController..")
    with pytest.raises(LaunchError, match="Gloo"):
        launch(released.parent / "job.py", 2)


DISCOVER = """
import sys, time
from horovod.runner.elastic.discovery import HostDiscoveryScript

if __name__ == "__main__":
    begin_s = time.monotonic()
    try:
        print(HostDiscoveryScript(sys.argv[1], 1).find_available_hosts_and_slots())
    except RuntimeError as error:
        print(error)
    print(time.monotonic() - begin_s, file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("echo one:2", "{'one': 2}"),
        ("echo one:2; sleep 1000", "was not done after 3 s, and was ended"),
        ("echo one:2; sleep 1000 &", "{'one': 2}"),  # what it leaves behind is ended, and not waited for
        ("echo one:2; exit 3", "Exit code: 3"),
    ],
)
def test_a_discovery_script_that_hangs_is_ended(content, said, tmp_path):
    """While it ran the launcher held its lock, and could neither start ranks, nor end, nor say for what it waits."""
    script, program = tmp_path / "discover.sh", tmp_path / "discover.py"
    script.write_text(f"#!/bin/sh\n{content}\n")
    script.chmod(0o755)
    program.write_text(DISCOVER)
    done = subprocess.run(
        [sys.executable, str(program), str(script)],
        env={**os.environ, "HOROVOD_DISCOVERY_TIMEOUT_SECONDS": "3"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert said in done.stdout, done.stdout + done.stderr
    assert float(done.stderr.split()[-1]) < 50


@pytest.mark.parametrize("value", ["soon", "0", "nan"])
def test_a_time_limit_that_is_none_is_refused_by_name(value):
    done = subprocess.run(
        [sys.executable, "-c", "import horovod.runner.elastic.discovery"],
        env={**os.environ, "HOROVOD_DISCOVERY_TIMEOUT_SECONDS": value},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert f"HOROVOD_DISCOVERY_TIMEOUT_SECONDS must be a number of seconds above 0, got {value};" in done.stderr
