"""What the tests of the build share."""

import sys

import pytest
from fake_builds import COMPILED, PYTHON, TORCH, use_patches

from horovod_build import toolchain
from horovod_build.cache import WheelCache
from horovod_build.plan import make_plan


@pytest.fixture
def torch_plan():
    return make_plan((TORCH,), {})


@pytest.fixture
def small(monkeypatch):
    """A series of two patches, for the small source."""
    use_patches(monkeypatch, COMPILED, PYTHON)


@pytest.fixture
def cache(tmp_path):
    return WheelCache(tmp_path / "cache")


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """An interpreter whose scripts, headers and PATH are empty directories; returns the directory on PATH."""
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda name: str(tmp_path / name))
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A module search path with nothing on it but this directory."""
    for name in ("torch", "tensorflow", "horovod"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if isinstance(finder, type)])
    return tmp_path
