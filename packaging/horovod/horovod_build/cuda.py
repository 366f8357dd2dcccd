"""Where a build with GPU operations finds CUDA and NCCL, unless the user says so."""

import importlib.util
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

_USUAL_HOME = "/usr/local/cuda"


def cuda_variables(variables: Mapping[str, str], path: str) -> dict[str, str]:
    """Return what is to be added to a build's variables; nothing if it has no GPU operations of NVIDIA's."""
    operations = {value for name, value in variables.items() if name.startswith("HOROVOD_GPU_")}
    if not operations or variables.get("HOROVOD_GPU", "CUDA") != "CUDA":
        return {}
    found = {}
    if (home := _toolkit(variables, path)) is not None:
        # The first is for Horovod, the second for torch, whose headers and libraries Horovod asks torch for.
        found = {"HOROVOD_CUDA_HOME": home, "CUDA_HOME": home}
    if "NCCL" in operations and not {"HOROVOD_NCCL_INCLUDE", "HOROVOD_NCCL_LIB"} & variables.keys():
        found |= _shared_nccl(variables)
    return found


def _toolkit(variables: Mapping[str, str], path: str) -> str | None:
    """Return the toolkit's directory. What the user names is taken as it is."""
    for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH"):
        if home := variables.get(name):
            return home
    nvcc = shutil.which("nvcc", path=path)
    homes = [*([Path(nvcc).resolve().parents[1]] if nvcc else []), Path(_USUAL_HOME).resolve()]
    # On the PATH may be a script that calls the nvcc of a toolkit elsewhere.
    whole = (h for h in homes if os.access(h / "bin/nvcc", os.X_OK) and (h / "include/cuda.h").exists())
    return next(map(str, whole), None)


def _shared_nccl(variables: Mapping[str, str]) -> dict[str, str]:
    """Name the directories of an NCCL without a static library, as in NVIDIA's wheels, which CMake would pass over.

    The NCCL is the user's, or else torch's: whatever Horovod is built with, torch has loaded its own before.
    """
    if variables.get("HOROVOD_NCCL_LINK", "").lower() == "static":
        return {}
    for folder in [variables["HOROVOD_NCCL_HOME"]] if "HOROVOD_NCCL_HOME" in variables else _nccl_of_torch():
        include, lib = Path(folder, "include"), Path(folder, "lib")
        static = (lib / "libnccl_static.a").exists()
        if (include / "nccl.h").exists() and (lib / "libnccl.so.2").exists() and not static:
            return {
                "HOROVOD_NCCL_INCLUDE": str(include),
                "HOROVOD_NCCL_LIB": str(lib),
                "HOROVOD_NCCL_LINK": "SHARED",  # or CMake would take a static library of the system's
            }
    return {}


def _nccl_of_torch() -> Iterable[str]:
    spec = importlib.util.find_spec("nvidia")
    return [f"{folder}/nccl" for folder in (spec and spec.submodule_search_locations) or ()]
