"""Building Horovod: what is decided before, beside and after the compiler runs. No test here compiles Horovod."""

import importlib.util
import io
import json
import os
import signal
import stat
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import psutil
import pytest
from pids import ended
from rich.console import Console

from hvd_hetero.cli import commands as cli
from hvd_hetero.horovod_build import command, compile, edits, install, plan, process, progress, source, toolchain
from hvd_hetero.horovod_build.cache import WheelCache, cache_root
from hvd_hetero.horovod_build.edits import PACKAGE_EDITS, SOURCE_EDITS, Edit
from hvd_hetero.horovod_build.errors import HorovodBuildError
from hvd_hetero.horovod_build.plan import Framework, make_plan

TORCH = Framework("torch", "PYTORCH", "2.13.0")
TENSORFLOW = Framework("tensorflow", "TENSORFLOW", "2.21.0")
SILENT = progress.Reporter(Console(quiet=True))
TOOLS = toolchain.Toolchain("cc", "c++", "cmake", "make")

EDITS = SOURCE_EDITS + PACKAGE_EDITS
# A source distribution in Horovod's shape: the places to edit, and a setup.py that "compiles" for what it is told.
FAKE_FILES = {
    **{path: "\n".join(e.old for e in EDITS if e.path == path) for path in {edit.path for edit in EDITS}},
    "horovod/__init__.py": "",
    "setup.py": (
        "import json, os\n"
        "from setuptools import find_namespace_packages, setup\n"
        "assert '17' in open('CMakeLists.txt').read()\n"
        "torch, other = (os.environ.get(f'HOROVOD_WITH_{name}') == '1' for name in ('PYTORCH', 'TENSORFLOW'))\n"
        "print('[  5%] Building', '[ 50%] Building', sep='\\n', flush=True)\n"
        "if torch: open('horovod/torch/mpi_lib_v2.fake.so', 'w').close()\n"
        "if other: open('horovod/tensorflow/mpi_lib.fake.so', 'w').close()\n"
        "versions = {'pytorch': '2.13.0'} if torch else {'tensorflow': '2.21.0'}\n"
        "json.dump(versions | {'dummy': 'none'}, open('horovod/metadata.json', 'w'))\n"
        "setup(name='horovod', version='0.28.1', packages=find_namespace_packages(include=['horovod*']),\n"
        "      package_data={'horovod': ['*.json'], 'horovod.torch': ['*.so'], 'horovod.tensorflow': ['*.so']})\n"
    ),
}


def make_sdist(path: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a source distribution and make it the expected one."""
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"horovod-0.28.1/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    monkeypatch.setattr(source, "SDIST_SHA256", source.sha256(path))
    return path


def make_wheel(path: Path, *names: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return path


def torch_wheel(path: Path) -> Path:
    return make_wheel(path, "horovod/torch/mpi_lib_v2.cpython-311.so")


def script(path: Path, text: str) -> None:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def torch_plan() -> plan.BuildPlan:
    return make_plan((TORCH,), {})


@pytest.fixture
def cache(tmp_path: Path) -> WheelCache:
    return WheelCache(tmp_path / "cache")


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter whose scripts, headers and PATH are empty directories; returns the directory on PATH."""
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda name: str(tmp_path / name))
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


# --- the plan and its key


def test_key_changes_with_whatever_changes_the_binary() -> None:
    """Every framework, version, interpreter, C library and build variable makes another key."""
    one = make_plan((TORCH, TENSORFLOW), {})
    others = [
        make_plan((TORCH,), {}),
        make_plan((TENSORFLOW,), {}),
        make_plan((Framework("torch", "PYTORCH", "2.13.0+cpu"), TENSORFLOW), {}),
        make_plan((TORCH, TENSORFLOW), {"HOROVOD_WITH_MPI": "1"}),
        make_plan((TORCH, TENSORFLOW), {"CXXFLAGS": "-O0"}),
        plan.BuildPlan(one.frameworks, "cpython-312", one.libc, one.variables),
        plan.BuildPlan(one.frameworks, one.python, "glibc2.17", one.variables),
    ]
    assert len({one.key, *(other.key for other in others)}) == 1 + len(others)


def test_key_changes_with_the_edits(monkeypatch: pytest.MonkeyPatch, torch_plan: plan.BuildPlan) -> None:
    """A wheel of an older recipe is not taken for one of the new."""
    before, compiled = torch_plan.key, torch_plan.compiled_key
    monkeypatch.setattr(plan, "PACKAGE_EDITS", PACKAGE_EDITS[:2])
    assert torch_plan.key != before
    assert torch_plan.compiled_key == compiled, "a change in a Python file compiles nothing again"
    before = torch_plan.key
    monkeypatch.setattr(plan, "SOURCE_EDITS", SOURCE_EDITS[:2])
    assert torch_plan.key != before
    assert torch_plan.compiled_key != compiled


@pytest.fixture
def set_up(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script behind every target of the Makefile."""
    scripts = Path(__file__).parents[3] / "scripts"
    monkeypatch.syspath_prepend(scripts)
    spec = importlib.util.spec_from_file_location("set_up", scripts / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_set_up_of_a_checkout_builds_anew_when_any_part_of_the_recipe_changes(set_up: ModuleType) -> None:
    """Its stamps are hashes of all files of the recipe, those of the edits included."""
    contents = [stage.content for stage in set_up.stages() if stage.name in ("horovod", "tensorflow")]
    assert len(contents) == 2
    for part in (command, source, edits.authentication, edits.edit):
        assert all(Path(part.__file__ or "").read_text() in content for content in contents)


def test_the_demo_waits_for_torch_alone(set_up: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stages are the first of all, so that what comes later goes on from there and does nothing again."""
    monkeypatch.setattr(set_up, "VENV", tmp_path / "venv")
    monkeypatch.setattr(set_up, "STAMPS", tmp_path / "stamps")
    monkeypatch.setattr(set_up, "INSTALLED", tmp_path / "installed")
    monkeypatch.setattr(set_up, "STATE", tmp_path)
    monkeypatch.setattr(set_up, "listed", lambda: subprocess.CompletedProcess([], 0, "", ""))
    ran: list[str] = []
    whole = [stage._replace(action=partial(_note, ran, stage.name)) for stage in set_up.stages()]
    monkeypatch.setattr(set_up, "stages", lambda: whole)
    assert set_up.main(["torch"]) == 0
    assert ran == ["venv", "tools", "project", "check", "torch", "horovod"]
    assert set_up.main([]) == 0
    assert ran[6:] == ["development", "tensorflow"]
    assert set_up.main(["torch"]) == set_up.main([]) == 0
    assert len(ran) == 8
    assert set_up.main(["jax"]) == 2
    before = whole[4]
    for pinned in (before._replace(content="another torch"), before):
        whole[4] = pinned
        assert set_up.main(["torch"]) == 0
    del ran[:]
    assert set_up.main([]) == 0
    assert ran == ["development", "tensorflow"], "Horovod is for torch alone now, though all pins are the old ones"


def test_horovod_for_torch_is_built_without_a_tensorflow_from_before(
    set_up: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pin may have changed: the old TensorFlow's part would be compiled for nothing. The last stage has both."""
    monkeypatch.setattr(set_up.subprocess, "run", lambda *_, env, **__: subprocess.CompletedProcess([], len(env)))
    without = {stage.name: stage.action() for stage in set_up.stages() if stage.name in ("horovod", "tensorflow")}
    assert without["horovod"] == without["tensorflow"] + 1


def _note(ran: list[str], name: str) -> int:
    ran.append(name)
    return 0


def test_key_is_the_same_inside_a_job(torch_plan: plan.BuildPlan) -> None:
    """Horovod's run-time variables do not enter the key, and the key is one path component."""
    inside = make_plan((TORCH,), {"HOROVOD_RANK": "1", "HOROVOD_CYCLE_TIME": "2", "PATH": "/bin"})
    assert inside.key == torch_plan.key
    assert "/" not in torch_plan.key


def test_absent_frameworks_are_switched_off(torch_plan: plan.BuildPlan) -> None:
    """A build for torch alone says so to Horovod, and is by Gloo, without MPI."""
    variables = dict(torch_plan.variables)
    assert variables["HOROVOD_WITH_PYTORCH"] == variables["HOROVOD_WITHOUT_TENSORFLOW"] == "1"
    assert variables["HOROVOD_WITH_GLOO"] == variables["HOROVOD_WITHOUT_MPI"] == "1"
    assert "HOROVOD_WITH_TENSORFLOW" not in variables


def test_users_build_variables_win() -> None:
    """Who asks for MPI gets it, and no contradiction beside it; own compiler flags stay."""
    variables = dict(make_plan((TORCH,), {"HOROVOD_WITH_MPI": "1", "CXXFLAGS": "-O1"}).variables)
    assert variables["HOROVOD_WITH_MPI"] == "1"
    assert "HOROVOD_WITHOUT_MPI" not in variables
    assert variables["CXXFLAGS"].startswith("-O1 ")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module search path with nothing on it but this directory."""
    for name in ("torch", "tensorflow", "horovod"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if isinstance(finder, type)])
    return tmp_path


def add_package(site: Path, name: str, version: str) -> None:
    (site / name).mkdir()
    (site / name / "__init__.py").write_text("raise ImportError('must not be imported to be found')")
    (site / f"{name}-{version}.dist-info").mkdir()
    (site / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")


def test_frameworks_are_found_without_importing_them(site: Path) -> None:
    """Both frameworks are named with the versions of their distributions; one that is switched off is left out."""
    add_package(site, "torch", "9.1")
    add_package(site, "tensorflow", "8.2")
    assert [(f.module, f.version) for f in plan.find_frameworks({})] == [("torch", "9.1"), ("tensorflow", "8.2")]
    assert [f.module for f in plan.find_frameworks({"HOROVOD_WITHOUT_PYTORCH": "1"})] == ["tensorflow"]


def test_no_framework_is_an_error_with_a_way_out(site: Path) -> None:
    """A mere directory called torch is not torch, and the error says what to install."""
    (site / "torch").mkdir()
    with pytest.raises(HorovodBuildError, match=r"neither torch nor tensorflow is installed.*pip install torch"):
        plan.find_frameworks({})


# --- the source: download, hash, edits


def test_edits_change_what_they_name(tmp_path: Path) -> None:
    """After the edits, both standards are 17, and the XLA source is gone; other files stay."""
    for name, text in FAKE_FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    source.apply_edits(tmp_path, SOURCE_EDITS)
    assert "set(CMAKE_CXX_STANDARD 17)" in (tmp_path / "CMakeLists.txt").read_text()
    assert "set(CMAKE_CXX_STANDARD 17)" in (tmp_path / "horovod/torch/CMakeLists.txt").read_text()
    assert "xla" not in (tmp_path / "horovod/tensorflow/CMakeLists.txt").read_text()
    assert (tmp_path / "setup.py").read_text() == FAKE_FILES["setup.py"]


@pytest.mark.parametrize("edit", [SOURCE_EDITS[0], PACKAGE_EDITS[0]], ids=lambda edit: edit.path)
@pytest.mark.parametrize("places", [0, 2, None], ids=["nothing to change", "two places", "no such file"])
def test_an_edit_that_does_not_fit_names_its_file(tmp_path: Path, edit: Edit, places: int | None) -> None:
    """Zero or two places to change, or no file, are errors that name the file, and the file stays as it was."""
    path = tmp_path / edit.path
    path.parent.mkdir(parents=True, exist_ok=True)
    if places is not None:
        path.write_text(edit.old * places)
    with pytest.raises(HorovodBuildError, match=f"^{edit.path}.*exactly once.*found {places or 0} times"):
        source.apply_edits(tmp_path, (edit,))
    assert places is None or path.read_text() == edit.old * places


def test_download_with_another_hash_is_refused(tmp_path: Path) -> None:
    """A wrong file is an error with both hashes, and is not kept."""

    def download(into: Path, log: Path) -> None:
        (into / source.SDIST_NAME).write_text("something else")

    kept, work = tmp_path / "kept", tmp_path / "work"
    kept.mkdir()
    work.mkdir()
    with pytest.raises(HorovodBuildError, match=f"{source.SDIST_SHA256}.*but it is [0-9a-f]{{64}}"):
        source.fetch(kept, work, tmp_path / "log", download)
    assert list(kept.iterdir()) == []


def test_source_is_downloaded_once_and_again_if_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kept copy is used while it is intact; a damaged one is replaced."""
    original = make_sdist(tmp_path / "original", FAKE_FILES, monkeypatch)
    kept, work, calls = tmp_path / "kept", tmp_path / "work", []
    kept.mkdir()
    work.mkdir()

    def download(into: Path, log: Path) -> None:
        calls.append(into)
        (into / source.SDIST_NAME).write_bytes(original.read_bytes())

    for damage, downloads in ((False, 1), (False, 1), (True, 2)):
        if damage:
            (kept / source.SDIST_NAME).write_bytes(original.read_bytes()[:100])
        found = source.fetch(kept, work, tmp_path / "log", download)
        assert found.read_bytes() == original.read_bytes()
        assert len(calls) == downloads


# --- the tools


def test_all_missing_tools_are_reported_at_once(bare: Path) -> None:
    """Compiler, CMake, make and headers, each with Debian's and Fedora's package."""
    with pytest.raises(HorovodBuildError) as caught:
        toolchain.find_toolchain({"PATH": str(bare)})
    lines = str(caught.value).splitlines()[1:]
    for what, *packages in (
        ("C++ compiler", "apt install g++", "dnf install gcc-c++"),
        ("CMake 3.13 or newer", "apt install cmake", "dnf install cmake", "pip install cmake"),
        ("make:", "apt install make", "dnf install make"),
        (
            "Python.h",
            f"apt install python3.{sys.version_info[1]}-dev",
            f"dnf install python3.{sys.version_info[1]}-devel",
        ),
    ):
        (line,) = (line for line in lines if what in line)
        assert all(package in line for package in packages)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("cmake", "echo cmake version 3.5.1", "CMake 3.13 or newer .*is 3.5"),
        ("cmake", "echo nonsense", "a CMake that runs .*nonsense"),
        ("c++", "echo 'error: no thread' >&2; exit 1", "a C\\+\\+17 compiler that works .*error: no thread"),
    ],
)
def test_tools_that_do_not_do_are_reported(bare: Path, name: str, text: str, complaint: str) -> None:
    """An old or broken CMake and a compiler without its library are found by trying them."""
    script(bare / "cc", "exit 0")
    script(bare / "c++", "exit 0")
    script(bare / name, text)
    with pytest.raises(HorovodBuildError, match=complaint):
        toolchain.find_toolchain({"PATH": str(bare)})


def test_a_complete_toolchain_is_returned_and_handed_to_cmake(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CMake 4 will do, the interpreter's own scripts come first on PATH, and the build is told what was found."""
    for name in ("cc", "c++", "make", "cmake"):
        script(bare / name, "echo cmake version 4.0.1")
    (bare.parent / "scripts").mkdir()
    script(bare.parent / "scripts" / "cmake", "echo cmake version 3.31.0")
    (bare.parent / "include").mkdir()
    (bare.parent / "include" / "Python.h").touch()
    monkeypatch.setattr(toolchain, "installed_version", lambda name: "80.9")
    tools, path = toolchain.find_toolchain({"PATH": str(bare)})
    own = str(bare.parent / "scripts")
    assert tools == toolchain.Toolchain(f"{bare}/cc", f"{bare}/c++", f"{own}/cmake", f"{bare}/make")
    assert path.split(os.pathsep)[0] == own
    assert tools.variables(path).items() >= {"CXX": tools.cxx, "HOROVOD_CMAKE": tools.cmake, "PATH": path}.items()


@pytest.mark.parametrize(("version", "complaint"), [("81.0.0", "here is 81.0.0"), (None, "it is absent")])
def test_setuptools_must_be_below_81(monkeypatch: pytest.MonkeyPatch, version: str | None, complaint: str) -> None:
    """A setuptools that is too new, or absent, is reported with the requirement to install."""
    monkeypatch.setattr(toolchain, "installed_version", lambda name: version if name == "setuptools" else "1.0")
    with pytest.raises(HorovodBuildError, match=f"{complaint}.*pip install 'setuptools<81'"):
        toolchain.find_toolchain(os.environ)


def test_nothing_is_downloaded_where_tools_are_missing(
    bare: Path, cache: WheelCache, torch_plan: plan.BuildPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tools are looked for first, and the cache is not even created."""
    monkeypatch.setattr(command, "fetch", lambda *_: pytest.fail("downloaded before the tools were checked"))
    with pytest.raises(HorovodBuildError, match="this machine lacks"):
        command.ensure_wheel(torch_plan, cache, {"PATH": str(bare)}, SILENT, jobs=1)
    assert not cache.root.exists()


# --- the cache


def test_cache_root_follows_xdg() -> None:
    """An absolute XDG_CACHE_HOME counts; a relative or empty one does not."""
    assert cache_root({"XDG_CACHE_HOME": "/somewhere"}) == Path("/somewhere/hvd-hetero/horovod")
    home = Path.home() / ".cache" / "hvd-hetero" / "horovod"
    assert cache_root({}) == cache_root({"XDG_CACHE_HOME": "relative"}) == home


def test_a_hit_needs_no_tools(bare: Path, cache: WheelCache, torch_plan: plan.BuildPlan, tmp_path: Path) -> None:
    """What is cached is returned on a machine that could not build it."""
    wheel = cache.store(torch_plan, torch_wheel(tmp_path / "horovod-0.28.1-x.whl"))
    assert command.ensure_wheel(torch_plan, cache, {"PATH": str(bare)}, SILENT, jobs=1) == wheel


def test_a_wheel_is_a_hit_only_as_it_was_stored(cache: WheelCache, tmp_path: Path) -> None:
    """Not one that was cut short, nor one with other content, nor one of which it is not known what it was."""
    both = make_plan((TORCH, TENSORFLOW), {})
    names = ("horovod/torch/mpi_lib_v2.so", "horovod/tensorflow/mpi_lib.so")
    path = cache.store(both, make_wheel(tmp_path / "horovod-0.28.1-x.whl", *names))
    assert cache.find(both) == path
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    assert cache.find(both) is None
    make_wheel(path, *names, "horovod/another.py")
    assert cache.find(both) is None, "all names are there"
    path.write_bytes(whole)
    assert cache.find(both) == path
    path.with_name(path.name + ".sha256").unlink()
    assert cache.find(both) is None


def test_a_wheel_without_its_extension_is_not_stored(
    cache: WheelCache, torch_plan: plan.BuildPlan, tmp_path: Path
) -> None:
    """Horovod may build without what it did not find; that is an error that names the framework and the log."""
    built = make_wheel(tmp_path / "horovod-0.28.1-x.whl", "horovod/__init__.py")
    with pytest.raises(HorovodBuildError, match=r"no extension for torch.*build\.log"):
        cache.store(torch_plan, built)
    assert cache.find(torch_plan) is None


def test_an_interrupted_build_leaves_nothing(
    cache: WheelCache, torch_plan: plan.BuildPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted while compiling: no wheel, no work directory, and the next build starts from scratch and succeeds."""
    sdist = make_sdist(tmp_path / "sdist", FAKE_FILES, monkeypatch)
    monkeypatch.setattr(command, "find_toolchain", lambda environ: (TOOLS, os.defpath))
    with monkeypatch.context() as patch:
        patch.setattr(command, "compile_wheel", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            command.ensure_wheel(torch_plan, cache, {}, SILENT, jobs=1, sdist=sdist)
    assert cache.find(torch_plan) is None
    assert list(cache.root.glob("work-*")) == []
    assert command.ensure_wheel(torch_plan, cache, os.environ, SILENT, jobs=1, sdist=sdist).exists()


def _interrupt(*_: object) -> Path:
    raise KeyboardInterrupt


def test_what_a_killed_build_left_is_swept(cache: WheelCache) -> None:
    """The next build removes work directories that nobody is left to own."""
    (cache.root / "work-killed" / "deep").mkdir(parents=True)
    with cache.locked(pytest.fail), cache.workspace() as work:
        assert [path.name for path in cache.root.glob("work-*")] == [work.name]


def test_a_second_build_waits_and_takes_the_first_ones_wheel(
    cache: WheelCache, torch_plan: plan.BuildPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the lock is held, another build says so and waits; then it finds the wheel and does not build."""
    monkeypatch.setattr(command, "find_toolchain", lambda environ: (TOOLS, os.defpath))
    monkeypatch.setattr(command, "fetch", lambda *_: pytest.fail("the second build must not build"))
    waiting, found = threading.Event(), []

    class Reporter(progress.Reporter):
        def note(self, text: str) -> None:
            if f"process {os.getpid()}" in text:
                waiting.set()

    def second() -> None:
        found.append(command.ensure_wheel(torch_plan, cache, {}, Reporter(Console(quiet=True)), jobs=1))

    thread = threading.Thread(target=second)
    with cache.locked(pytest.fail):
        thread.start()
        assert waiting.wait(10)
        assert found == []
        wheel = cache.store(torch_plan, torch_wheel(cache.root / "horovod-0.28.1-x.whl"))
    thread.join(10)
    assert found == [wheel]


# --- the build


def test_the_whole_way_with_a_small_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unpacked, edited, built by pip, checked, cached; stdout holds the path alone; the second run builds nothing."""
    sdist = make_sdist(tmp_path / "sdist", FAKE_FILES, monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(command, "find_frameworks", lambda environ: (TORCH,))
    monkeypatch.setattr(command, "find_toolchain", lambda environ: (TOOLS, os.environ["PATH"]))
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
        for edit in PACKAGE_EDITS:
            assert edit.new in archive.read(edit.path).decode()

    # A change in a Python file needs no compiler: what that left is still there.
    monkeypatch.setattr(command, "PACKAGE_EDITS", PACKAGE_EDITS[:1])
    monkeypatch.setattr(plan, "PACKAGE_EDITS", PACKAGE_EDITS[:1])
    (log,) = wheel.parent.parent.glob("*_compiled/build.log")
    said = log.read_text()
    assert cli.main(["build-horovod", "--print-path", "--quiet"]) == 0
    other = Path(capsys.readouterr().out.removesuffix("\n"))
    assert other != wheel
    with zipfile.ZipFile(other) as archive:
        assert PACKAGE_EDITS[0].new in archive.read(PACKAGE_EDITS[0].path).decode()
        assert PACKAGE_EDITS[-1].new not in archive.read(PACKAGE_EDITS[-1].path).decode()
    assert log.read_text() == said
    assert "Building" in said


def test_a_framework_that_comes_later_is_compiled_alone(
    cache: WheelCache, torch_plan: plan.BuildPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch has stays; the wheel for both has both extensions, and both versions for Horovod to compare."""
    sdist = make_sdist(tmp_path / "sdist", FAKE_FILES, monkeypatch)
    monkeypatch.setattr(command, "find_toolchain", lambda environ: (TOOLS, os.environ["PATH"]))
    alone = command.ensure_wheel(torch_plan, cache, os.environ, SILENT, jobs=1, sdist=sdist)
    compiled_for = []

    def compile_part(part: plan.BuildPlan, *rest: object) -> Path:
        compiled_for.extend(part.frameworks)
        return compile.compile_wheel(part, *rest)

    monkeypatch.setattr(command, "compile_wheel", compile_part)
    both = command.ensure_wheel(make_plan((TORCH, TENSORFLOW), {}), cache, os.environ, SILENT, jobs=1, sdist=sdist)
    assert compiled_for == [TENSORFLOW]
    with zipfile.ZipFile(alone) as before, zipfile.ZipFile(both) as after:
        assert set(after.namelist()) - set(before.namelist()) == {"horovod/tensorflow/mpi_lib.fake.so"}
        assert json.loads(after.read("horovod/metadata.json")) == {
            "pytorch": "2.13.0",
            "tensorflow": "2.21.0",
            "dummy": "none",
        }


def test_a_failing_build_shows_the_end_of_the_log(
    cache: WheelCache, torch_plan: plan.BuildPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error holds the reason and the path of the whole log, which survives the work directory."""
    broken = FAKE_FILES | {"setup.py": "raise SystemExit('ops.cc:1: error: no such type')"}
    sdist = make_sdist(tmp_path / "sdist", broken, monkeypatch)
    monkeypatch.setattr(command, "find_toolchain", lambda environ: (TOOLS, os.defpath))
    with pytest.raises(HorovodBuildError, match="Horovod did not build") as caught:
        command.ensure_wheel(torch_plan, cache, os.environ, SILENT, jobs=1, sdist=sdist)
    log = cache.compiled_entry(torch_plan) / "build.log"
    assert "ops.cc:1: error: no such type" in str(caught.value)
    assert str(caught.value).endswith(str(log))
    assert "ops.cc:1: error: no such type" in log.read_text()


def test_a_framework_for_cuda_without_its_toolkit_is_told_with_three_ways_out(
    cache: WheelCache, torch_plan: plan.BuildPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a fresh environment with PyTorch from PyPI on a machine without a GPU."""
    broken = FAKE_FILES | {"setup.py": "raise SystemExit('Could NOT find CUDAToolkit (missing: CUDA_CUDART)')"}
    sdist = make_sdist(tmp_path / "sdist", broken, monkeypatch)
    monkeypatch.setattr(command, "find_toolchain", lambda environ: (TOOLS, os.defpath))
    with pytest.raises(HorovodBuildError, match="torch was built for CUDA") as caught:
        command.ensure_wheel(torch_plan, cache, os.environ, SILENT, jobs=1, sdist=sdist)
    assert "leave torch out by HOROVOD_WITHOUT_PYTORCH=1" in str(caught.value)
    assert str(caught.value).endswith("build.log")
    asking = plan.make_plan(torch_plan.frameworks, {"HOROVOD_GPU_OPERATIONS": "NCCL", "PATH": ""})
    with pytest.raises(HorovodBuildError, match="HOROVOD_GPU_OPERATIONS asks for operations on GPUs"):
        command.ensure_wheel(asking, cache, os.environ, SILENT, jobs=1, sdist=sdist)


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ("a.cc:3: error: boom", "error: boom"),
        ("CMake Error at CMakeLists.txt:107 (message):\n  HOROVOD_GPU_OPERATIONS=nccl is invalid", "nccl is invalid"),
    ],
)
def test_what_is_wrong_is_shown_however_far_up(tmp_path: Path, said: str, wrong: str) -> None:
    """The message holds it, with make's chatter after it. CMake's stands below the line that is marked as an error."""
    program = tmp_path / "program.py"  # the log begins with the command, which must not say it
    program.write_text(f"import sys; print({said!r}); print('chatter\\n' * 100); sys.exit(2)")
    with pytest.raises(HorovodBuildError, match=r"it failed \(exit code 2\)") as caught:
        process.run_logged([sys.executable, str(program)], log=tmp_path / "log", doing="it failed")
    assert wrong in str(caught.value)


def test_an_interrupted_command_takes_its_children_along(tmp_path: Path) -> None:
    """A process that the command started is gone soon after the interruption."""
    started: list[int] = []

    def interrupt(line: str) -> None:
        started.append(int(line))
        raise KeyboardInterrupt

    parent = "import subprocess; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    with pytest.raises(KeyboardInterrupt):
        process.run_logged([sys.executable, "-c", parent], log=tmp_path / "log", doing="", on_line=interrupt)
    assert ended(started[0])


@pytest.fixture(params=[signal.SIGTERM, signal.SIGHUP])
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal that does what it does by default, whatever started the tests: nohup has them ignore SIGHUP."""
    before = signal.signal(request.param, signal.SIG_DFL)
    yield request.param
    signal.signal(request.param, before)


def test_a_terminated_build_cleans_up(cache: WheelCache, number: signal.Signals) -> None:
    """The work directory is gone and the exit code tells the signal, which then means what it meant before."""
    with pytest.raises(SystemExit, match=str(128 + number)):
        _be_sent(number, cache)
    assert list(cache.root.glob("work-*")) == []
    assert signal.getsignal(number) is signal.SIG_DFL


def _be_sent(number: signal.Signals, cache: WheelCache) -> None:
    with command._terminated_as_exit(), cache.locked(pytest.fail), cache.workspace():
        os.kill(os.getpid(), number)
        time.sleep(10)


def test_a_build_goes_on_under_nohup(number: signal.Signals) -> None:
    """What is ignored when a build begins stays ignored in it and after it."""
    signal.signal(number, signal.SIG_IGN)
    with command._terminated_as_exit():
        os.kill(os.getpid(), number)
        assert signal.getsignal(number) is signal.SIG_IGN
    assert signal.getsignal(number) is signal.SIG_IGN


def test_build_environment_is_the_plans(torch_plan: plan.BuildPlan) -> None:
    """An outer make and a surrounding job do not leak in; the plan's variables and the jobs do."""
    outer = {"MAKELEVEL": "1", "MAKEFLAGS": "-j64 --jobserver-auth=3,4", "HOROVOD_RANK": "1", "HOME": "/home/x"}
    environ = compile.build_environment(torch_plan, TOOLS, "/bin", 3, outer)
    assert environ["MAKEFLAGS"] == "-j3"
    assert environ["HOME"] == "/home/x"
    assert environ["HOROVOD_WITH_PYTORCH"] == "1"
    assert not {"MAKELEVEL", "HOROVOD_RANK"} & set(environ)


def test_default_jobs_follow_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """One per core, fewer where memory is short, and at least one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    memory = psutil.virtual_memory()
    for gib, jobs in ((64, 8), (6, 3), (0.5, 1)):
        monkeypatch.setattr(psutil, "virtual_memory", lambda gib=gib: memory._replace(available=int(gib * 2**30)))
        assert compile.default_jobs() == jobs


# --- installation and progress


def test_is_installed_compares_the_wheel_itself(site: Path) -> None:
    """Another build of the same version is not the same; pip's record of the hash decides."""
    wheel = torch_wheel(site / "horovod-0.28.1-x.whl")
    assert not install.is_installed(wheel)
    add_package(site, "horovod", "0.28.1")
    assert not install.is_installed(wheel)
    record = site / "horovod-0.28.1.dist-info" / "direct_url.json"
    record.write_text(f'{{"archive_info": {{"hashes": {{"sha256": "{source.sha256(wheel)}"}}}}, "url": "file:///x"}}')
    assert install.is_installed(wheel)
    record.write_text(f'{{"archive_info": {{"hashes": {{"sha256": "{"0" * 64}"}}}}, "url": "file:///x"}}')
    assert not install.is_installed(wheel)


def test_plain_progress_is_a_line_per_stage_and_tenth() -> None:
    """However often the percentage is reported, each tenth is one line, and a new stage begins again."""
    stream = io.StringIO()
    reporter = progress.Reporter(Console(file=stream))
    reporter.stage("compile")
    for value in (0, 5, 10, 11, 19, 35, 35):
        reporter.percent(value)
    reporter.stage("pack")
    lines = [line.partition("] ")[2] for line in stream.getvalue().splitlines()]
    assert lines == ["compile", "compile: 10 %", "compile: 30 %", "pack"]


def test_live_progress_shows_stages_and_the_share_done() -> None:
    """On a terminal, every stage is a line, with the percentage while it is known."""
    stream = io.StringIO()
    with progress.Reporter(Console(file=stream, force_terminal=True, width=100)) as reporter:
        reporter.note("for torch")
        reporter.stage("configure")
        reporter.stage("compile")
        reporter.percent(42)
        reporter._progress.refresh()
    said = stream.getvalue()
    assert all(text in said for text in ("for torch", "configure", "compile", " 42%", "100%"))


@pytest.mark.parametrize("terminal", [True, False])
def test_a_quiet_reporter_is_silent(terminal: bool) -> None:
    """On a terminal, too."""
    stream = io.StringIO()
    with progress.Reporter(Console(file=stream, force_terminal=terminal, quiet=True)) as reporter:
        reporter.note("for torch")
        reporter.stage("compile")
        reporter.percent(42)
    assert stream.getvalue() == ""


def test_install_replaces_horovod_and_adds_what_it_lacks(
    tmp_path: Path, torch_plan: plan.BuildPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel goes in without its requirements; then those that are absent, and no others."""
    calls: list[list[str]] = []
    monkeypatch.setattr(install, "run_logged", lambda argv, **_: calls.append(argv))
    monkeypatch.setattr(install, "installed_version", lambda name: None if name in ("cffi", "pyyaml") else "1")
    install.install(tmp_path / "x.whl", torch_plan, tmp_path / "log")
    install.install(tmp_path / "x.whl", make_plan((TENSORFLOW,), {}), tmp_path / "log")
    wheel = ["--no-deps", "--no-index", "--force-reinstall", str(tmp_path / "x.whl")]
    assert [argv[5:] for argv in calls] == [wheel, ["pyyaml", "cffi"], wheel, ["pyyaml"]]


def test_jobs_must_be_positive() -> None:
    """--jobs 0 is a usage error."""
    done = subprocess.run(
        [sys.executable, "-m", "hvd_hetero.cli", "build-horovod", "--jobs", "0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--jobs: must be at least 1, not 0" in done.stderr
