"""Building Horovod for NVIDIA's GPUs: which toolkit and which NCCL a build takes. No test here compiles Horovod."""

import os
import shutil
import subprocess
import sys
import tarfile

import pytest

from horovod_build import HorovodBuildError, cuda, patches, series
from horovod_build.cache import cache_root
from horovod_build.plan import Framework, make_plan
from horovod_build.source import HOROVOD_VERSION, SDIST_NAME

TORCH = Framework("torch", "PYTORCH", "2.11.0")
GIT = ("git", "apply", "-p1")
BY_NCCL = {"HOROVOD_GPU_OPERATIONS": "NCCL"}
NCCL_OF_THE_USER = ("HOROVOD_NCCL_HOME", "HOROVOD_NCCL_INCLUDE", "HOROVOD_NCCL_LIB")
LINKS = ("SHARED", "shared", "STATIC", "static")


def toolkit(home):
    """Lay out what tells a toolkit from a directory that merely has a program called nvcc."""
    executable(home / "bin" / "nvcc")
    (home / "include").mkdir()
    (home / "include" / "cuda.h").touch()
    return str(home)


def executable(path):
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


@pytest.fixture
def usual(tmp_path, monkeypatch):
    """Where toolkits usually are, for these tests; there is none yet."""
    monkeypatch.setattr(cuda, "_USUAL_HOME", str(tmp_path / "usual"))
    return tmp_path / "usual"


@pytest.fixture(autouse=True)
def wheel(tmp_path, monkeypatch):
    """The NCCL that came with torch, as its wheel lays it out, on the module search path."""
    nccl = tmp_path / "site" / "nvidia" / "nccl"
    for file in ("include/nccl.h", "lib/libnccl.so.2"):
        (nccl / file).parent.mkdir(parents=True)
        (nccl / file).write_text("#define NCCL_MAJOR 2\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "nvidia"]:
        monkeypatch.delitem(sys.modules, name)
    others = [folder for folder in sys.path if "site-packages" not in folder]  # an NCCL of this environment stays out
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *others])
    return nccl


def nccl_of(folder):
    return {
        "HOROVOD_NCCL_INCLUDE": f"{folder}/include",
        "HOROVOD_NCCL_LIB": f"{folder}/lib",
        "HOROVOD_NCCL_LINK": "SHARED",
    }


def toolkit_of(home):
    """Horovod reads one variable, torch another; with two toolkits, headers of one met the compiler of the other."""
    return {"HOROVOD_CUDA_HOME": home, "CUDA_HOME": home}


@pytest.mark.parametrize(
    ("environ", "takes_torchs", "home"),
    [
        ({}, False, None),  # a build for CPUs
        ({"HOROVOD_CUDA_HOME": "/cuda"}, False, None),
        (BY_NCCL | {"HOROVOD_GPU": "ROCM"}, False, None),  # AMD's have RCCL in NCCL's place
        ({"HOROVOD_GPU_OPERATIONS": "MPI"}, False, "usual"),
        (BY_NCCL, True, "usual"),
        ({"HOROVOD_GPU_ALLREDUCE": "NCCL"}, True, "usual"),
        *((BY_NCCL | {name: "/nccl"}, False, "usual") for name in NCCL_OF_THE_USER),
        *((BY_NCCL | {"HOROVOD_NCCL_LINK": link}, link in "SHARED shared", "usual") for link in LINKS),
        *((BY_NCCL | {name: "/mine"}, True, "/mine") for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")),
    ],
)
def test_a_build_for_gpus_takes_torchs_nccl_and_the_toolkit_here(usual, wheel, environ, takes_torchs, home):
    """Unless the user names others, or asks for a static NCCL, which no wheel has."""
    here = toolkit(usual)
    expected = (nccl_of(wheel) if takes_torchs else {}) | (
        toolkit_of(here if home == "usual" else home) if home else {}
    )
    assert environ | cuda.cuda_variables(environ, "") == environ | expected


def test_another_wheels_nccl_can_be_named_by_its_directory(usual, wheel, tmp_path):
    """It has no name that CMake knows either, so its directories are given as those of torch's."""
    other = wheel.rename(tmp_path / "a newer one")
    asked = BY_NCCL | {"HOROVOD_NCCL_HOME": str(other)}
    assert cuda.cuda_variables(asked, "").items() >= nccl_of(other).items()
    (other / "lib" / "libnccl_static.a").touch()
    assert cuda.cuda_variables(asked, "") == {}, "left to CMake"


@pytest.mark.parametrize("lacking", ["include/nccl.h", "lib/libnccl.so.2", ""])
def test_an_nccl_without_headers_or_library_is_none(usual, wheel, lacking):
    """Then CMake looks where it always has. An empty name takes away all of NVIDIA's packages."""
    (wheel / lacking).unlink() if lacking else shutil.rmtree(wheel.parent)
    assert cuda.cuda_variables(BY_NCCL, "") == {}


def test_the_toolkit_on_the_path_comes_before_the_usual_one(usual, tmp_path):
    """By its own directory, wherever a link to its compiler is."""
    toolkit(usual)
    home = toolkit(tmp_path / "cuda-13.0")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").symlink_to(f"{home}/bin/nvcc")
    assert cuda.cuda_variables(BY_NCCL, str(tmp_path / "bin"))["CUDA_HOME"] == home


def test_a_toolkit_that_a_link_leads_to_is_named_itself(usual, tmp_path):
    """So that a build with the toolkit before, which the same link led to, is not taken for one with this."""
    home = toolkit(tmp_path / "cuda-13.0")
    usual.symlink_to(home)
    assert cuda.cuda_variables(BY_NCCL, "")["CUDA_HOME"] == home


def test_a_script_called_nvcc_is_no_toolkit(usual, tmp_path):
    """A script that calls a toolkit's compiler has no headers beside it, where CMake and torch looked for them."""
    home = toolkit(usual)
    executable(tmp_path / "local" / "bin" / "nvcc")
    assert cuda.cuda_variables(BY_NCCL, str(tmp_path / "local" / "bin"))["CUDA_HOME"] == home


def test_a_build_for_gpus_has_another_key(usual):
    """A build for CPUs is not taken for one for GPUs, nor one with torch's NCCL for one with another."""
    plans = [
        make_plan((TORCH,), environ | {"PATH": ""})
        for environ in ({}, BY_NCCL, BY_NCCL | {"HOROVOD_NCCL_HOME": "/nccl"})
    ]
    assert len({p.key for p in plans}) == len({p.parts[0].key for p in plans}) == 3


@pytest.mark.parametrize("name", ["HOROVOD_GPU_OPERATIONS", "HOROVOD_CUDA_HOME", "CUDA_HOME", "HOROVOD_NCCL_HOME"])
def test_an_empty_variable_is_none(usual, name):
    """It makes no other build. Horovod would take an empty HOROVOD_CUDA_HOME for the root directory."""
    for environ in ({"PATH": ""}, {"PATH": ""} | BY_NCCL):
        if name not in environ:
            assert make_plan((TORCH,), environ | {name: ""}) == make_plan((TORCH,), environ)


@pytest.mark.parametrize("name", ["HOROVOD_GPU_OPERATIONS", "HOROVOD_GPU_ALLREDUCE"])
def test_operations_by_mpi_are_refused_without_mpi(usual, name):
    """Horovod would compile, and hand the GPU's addresses to operations on CPUs."""
    with pytest.raises(HorovodBuildError, match=f"{name}=MPI"):
        make_plan((TORCH,), {name: "MPI", "PATH": ""})
    variables = dict(make_plan((TORCH,), {name: "MPI", "HOROVOD_WITH_MPI": "1", "PATH": ""}).variables)
    assert "HOROVOD_WITHOUT_MPI" not in variables


@pytest.fixture
def source(tmp_path):
    """Horovod's own source, patched."""
    sdist = cache_root(os.environ) / SDIST_NAME
    if not sdist.exists():
        pytest.skip("Horovod's source is not in the cache, where building it leaves it")
    tree, ours = tmp_path / f"horovod-{HOROVOD_VERSION}", ("nccl-of-wheels.patch", "libcuda-of-drivers.patch")
    wanted = {f"{tree.name}/cmake/Modules/FindNCCL.cmake", f"{tree.name}/horovod/torch/cuda_util.cc"}
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, [m for m in archive if m.name in wanted], filter="data")
    patches.apply(tree, [patch for patch in series() if patch.name in ours], GIT, tmp_path / "log")
    return tree


@pytest.mark.skipif(shutil.which("cmake") is None, reason="without CMake nothing is built")
def test_cmake_takes_the_library_that_torch_brings(source, usual, wheel, tmp_path, monkeypatch):
    """And not the one of the system, which is where compilers look first: its name is the one they know."""
    system = tmp_path / "system"
    system.mkdir()
    (system / "libnccl.so").touch()
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.13)\nproject(probe NONE)\n"
        f'list(APPEND CMAKE_MODULE_PATH "{source}/cmake/Modules")\n'
        "set(CMAKE_FIND_LIBRARY_PREFIXES lib)\nset(CMAKE_FIND_LIBRARY_SUFFIXES .so .a)\n"
        f'set(CMAKE_SYSTEM_LIBRARY_PATH "{system}")\n'
        'find_package(NCCL REQUIRED)\nmessage(STATUS "took ${NCCL_LIBRARIES}")\n'
    )
    done = subprocess.run(
        ["cmake", "-S", str(tmp_path), "-B", str(tmp_path / "build")],
        env={**os.environ, **cuda.cuda_variables(BY_NCCL, "")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"took {wheel}/lib/libnccl.so.2\n" in done.stdout, done.stdout + done.stderr


def test_torchs_part_asks_for_the_library_that_drivers_bring(source):
    """`libcuda.so` comes with toolkits, as a link or as a stub; a container with a driver alone has `libcuda.so.1`."""
    text = (source / "horovod" / "torch" / "cuda_util.cc").read_text()
    opened = [part.partition('"')[0] for part in text.split('dlopen("')[1:]]
    assert opened == ["libcuda.so.1"]
