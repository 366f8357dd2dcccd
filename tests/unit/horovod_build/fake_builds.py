"""Small sources, wheels and packages that stand for those of Horovod and the frameworks."""

import io
import os
import stat
import tarfile
import zipfile

from rich.console import Console

from horovod_build import command, plan, progress, source
from horovod_build.patches import Patch
from horovod_build.plan import Framework

TORCH = Framework("torch", "PYTORCH", "2.13.0")
TENSORFLOW = Framework("tensorflow", "TENSORFLOW", "2.21.0")
SILENT = progress.Reporter(Console(quiet=True))
TOOLS = {"CXX": "c++", "PATH": os.environ["PATH"]}

COMPILED = Patch(
    "compiled.patch",
    "today's compilers",
    "Compile as C++17\n\n--- a/CMakeLists.txt\n+++ b/CMakeLists.txt\n"
    "@@ -1,2 +1,2 @@\n project(fake)\n-set(CMAKE_CXX_STANDARD 14)\n+set(CMAKE_CXX_STANDARD 17)\n",
)
PYTHON = Patch(
    "python.patch",
    "a longer queue",
    "Queue more\n\n--- a/horovod/runner/server.py\n+++ b/horovod/runner/server.py\n"
    "@@ -1,2 +1,2 @@\n import queue\n-SIZE = 5\n+SIZE = 4096\n",
)
# A source distribution in Horovod's shape: two files to patch, and a setup.py that "compiles" for what it is told.
FAKE_FILES = {
    "CMakeLists.txt": "project(fake)\nset(CMAKE_CXX_STANDARD 14)\n",
    "horovod/runner/server.py": "import queue\nSIZE = 5\n",
    "horovod/torch/__init__.py": "",
    "horovod/tensorflow/__init__.py": "",
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
        "setup(name='horovod', version='0.28.1', install_requires=['cffi'] if torch else [],\n"
        "      packages=find_namespace_packages(include=['horovod*']),\n"
        "      package_data={'horovod': ['*.json'], 'horovod.torch': ['*.so'], 'horovod.tensorflow': ['*.so']})\n"
    ),
}


def make_sdist(path, files, monkeypatch):
    """Write a source distribution and make it the expected one."""
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"horovod-0.28.1/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    monkeypatch.setattr(source, "SDIST_SHA256", source.sha256(path))
    return path


def use_patches(monkeypatch, *patches):
    """Make these the whole series."""
    for module in (command, plan):
        monkeypatch.setattr(module, "series", lambda: patches)


def make_wheel(path, *names):
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return path


def torch_wheel(path):
    return make_wheel(path, "horovod/torch/mpi_lib_v2.cpython-311.so")


def script(path, text):
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def add_package(site, name, version, distribution=""):
    (site / name).mkdir()
    (site / name / "__init__.py").write_text("raise ImportError('must not be imported to be found')")
    information = site / f"{distribution or name}-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Name: {distribution or name}\nVersion: {version}\n")
    (information / "top_level.txt").write_text(f"{name}\n")
