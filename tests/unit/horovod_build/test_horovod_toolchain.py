"""What a machine needs to compile Horovod."""

import os
import sys

import pytest
from fake_builds import SILENT, script

from horovod_build import HorovodBuildError, command, compile, toolchain
from horovod_build.patches import patch_command


def test_all_missing_tools_are_reported_at_once(bare):
    """Compiler, CMake, make and headers, each with Debian's and Fedora's package."""
    with pytest.raises(HorovodBuildError) as caught:
        toolchain.find_toolchain({"PATH": str(bare)})
    lines = str(caught.value).splitlines()[1:]
    for what, *packages in (
        ("C++ compiler", "apt install g++", "dnf install gcc-c++"),
        ("CMake 3.13 or newer", "apt install cmake", "dnf install cmake", "pip install cmake"),
        ("make:", "apt install make", "dnf install make"),
        ("patch, or git", "apt install patch", "dnf install patch"),
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
        ("cmake", "echo cmake version 3.5.1", r"CMake 3\.13.* 3\.5"),
        ("cmake", "echo nonsense", r"CMake.*nonsense"),
        ("c++", "echo 'error: no thread' >&2; exit 1", r"C\+\+17.*no thread"),
    ],
)
def test_tools_that_do_not_do_are_reported(bare, name, text, complaint):
    """An old or broken CMake and a compiler without its library are found by trying them."""
    script(bare / "cc", "exit 0")
    script(bare / "c++", "exit 0")
    script(bare / name, text)
    with pytest.raises(HorovodBuildError, match=complaint):
        toolchain.find_toolchain({"PATH": str(bare)})


def test_a_complete_toolchain_is_returned_and_handed_to_cmake(bare, torch_plan, monkeypatch):
    """CMake 4 will do, the interpreter's own scripts come first on PATH, and the build is told what was found."""
    for name in ("cc", "c++", "make", "cmake", "git"):
        script(bare / name, "echo cmake version 4.0.1")
    (bare.parent / "scripts").mkdir()
    script(bare.parent / "scripts" / "cmake", "echo cmake version 3.31.0")
    (bare.parent / "include").mkdir()
    (bare.parent / "include" / "Python.h").touch()
    monkeypatch.setattr(toolchain, "installed_version", lambda name: "80.9")
    tools = toolchain.find_toolchain({"PATH": str(bare)})
    own = str(bare.parent / "scripts")
    found = {"CC": f"{bare}/cc", "CXX": f"{bare}/c++", "HOROVOD_CMAKE": f"{own}/cmake"}
    assert tools.items() >= found.items()
    assert tools["PATH"].split(os.pathsep)[0] == own
    assert patch_command(tools["PATH"]) == (f"{bare}/git", "apply", "-p1")
    assert compile.build_environment(torch_plan, tools, 1, {}).items() >= tools.items()


@pytest.mark.parametrize(("version", "complaint"), [("81.0.0", "81.0.0"), (None, "absent")])
def test_setuptools_must_be_below_81(monkeypatch, version, complaint):
    """A setuptools that is too new, or absent, is reported with the requirement to install."""
    monkeypatch.setattr(toolchain, "installed_version", lambda name: version if name == "setuptools" else "1.0")
    with pytest.raises(HorovodBuildError, match=f"{complaint}.*'setuptools<81'"):
        toolchain.find_toolchain(os.environ)


def test_nothing_is_downloaded_where_tools_are_missing(bare, cache, torch_plan, monkeypatch):
    """The tools are looked for first, and the cache is not even created."""
    monkeypatch.setattr(command, "fetch", lambda *_: pytest.fail("downloaded before the tools were checked"))
    with pytest.raises(HorovodBuildError, match=r"C\+\+ compiler"):
        command.ensure_wheel(torch_plan, cache, {"PATH": str(bare)}, SILENT, jobs=1)
    assert not cache.root.exists()
