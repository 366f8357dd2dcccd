"""Where a build with GPU operations finds CUDA and NCCL, unless the user says so."""

import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

__all__ = ["cuda_variables"]

_NCCL_VARIABLES = ("HOROVOD_NCCL_HOME", "HOROVOD_NCCL_INCLUDE", "HOROVOD_NCCL_LIB", "HOROVOD_NCCL_LINK")
_USUAL_HOME = "/usr/local/cuda"


def cuda_variables(variables: Mapping[str, str], path: str) -> dict[str, str]:
    """Return what is to be added to a build's variables; nothing if it has no GPU operations of NVIDIA's."""
    operations = {value for name, value in variables.items() if name.startswith("HOROVOD_GPU_") and value}
    if not operations or variables.get("HOROVOD_GPU", "CUDA") != "CUDA":
        return {}
    found = {}
    if (home := _toolkit(variables, path)) is not None:
        # The first is for Horovod, the second for torch, whose headers and libraries Horovod asks torch for.
        found = {"HOROVOD_CUDA_HOME": home, "CUDA_HOME": home}
    if "NCCL" in operations and not any(name in variables for name in _NCCL_VARIABLES):
        found |= _nccl_of_the_wheel()
    return found


def _toolkit(variables: Mapping[str, str], path: str) -> str | None:
    """Return the toolkit's directory. What the user names is taken as it is."""
    for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH"):
        if home := variables.get(name):
            return home
    nvcc = shutil.which("nvcc", path=path)
    homes = [*([str(Path(nvcc).resolve().parents[1])] if nvcc else []), _USUAL_HOME]
    # On the PATH may be a script that calls the nvcc of a toolkit elsewhere.
    return next((h for h in homes if os.access(f"{h}/bin/nvcc", os.X_OK) and Path(h, "include/cuda.h").exists()), None)


def _nccl_of_the_wheel() -> dict[str, str]:
    """Name the NCCL that torch brought: whichever NCCL Horovod is built with, torch has loaded its own before."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return {}
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        include, lib = Path(folder, "include"), Path(folder, "lib")
        if (include / "nccl.h").exists() and (lib / "libnccl.so.2").exists():
            return {
                "HOROVOD_NCCL_INCLUDE": str(include),
                "HOROVOD_NCCL_LIB": str(lib),
                "HOROVOD_NCCL_LINK": "SHARED",  # it has no static library, and one of the system must not be taken
            }
    return {}
