"""Small sources, wheels and packages that stand for those of Horovod and the frameworks."""

import io
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest
from rich.console import Console

from hvd_hetero.horovod_build import progress, source, toolchain
from hvd_hetero.horovod_build.edits import PACKAGE_EDITS, SOURCE_EDITS
from hvd_hetero.horovod_build.plan import Framework

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


def add_package(site: Path, name: str, version: str) -> None:
    (site / name).mkdir()
    (site / name / "__init__.py").write_text("raise ImportError('must not be imported to be found')")
    (site / f"{name}-{version}.dist-info").mkdir()
    (site / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
