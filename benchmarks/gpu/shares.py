"""Unequal GPUs out of one: CUDA's Multi-Process Service gives each process a share of the multiprocessors.

Without it, processes on one GPU take turns, each on all of it. With it their kernels run side by side, and
``CUDA_MPS_ACTIVE_THREAD_PERCENTAGE``, read when a process first uses the device, bounds the multiprocessors of each.
Memory and its bandwidth stay common, so a share of a half is about half as fast, and the curves are measured ones.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CONTROL = "nvidia-cuda-mps-control"
_PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_ELSEWHERE = ("/usr/local/nvidia/bin", "/usr/bin", "/opt/bin")  # folders of drivers that are not on every PATH


def control() -> str | None:
    """Return the service's command, if it is installed."""
    return shutil.which(_CONTROL) or shutil.which(_CONTROL, path=os.pathsep.join(_ELSEWHERE))


@contextmanager
def multi_process_service() -> Iterator[dict[str, str]]:
    """Run the service, and yield the environment of its clients. It ends with this, and changes nothing else.

    Raises RuntimeError if it is not available.
    """
    command = control()
    if command is None:
        raise RuntimeError(f"{_CONTROL} is not installed")
    with tempfile.TemporaryDirectory() as directory:
        env = {"CUDA_MPS_PIPE_DIRECTORY": f"{directory}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{directory}/log"}
        for folder in env.values():
            Path(folder).mkdir()
        with open(f"{directory}/said", "w+") as said:
            how = {"env": os.environ | env, "stdout": said, "stderr": said, "timeout": 30.0}
            started = subprocess.run([command, "-d"], check=False, **how)  # type: ignore[call-overload]
            if started.returncode:
                said.seek(0)
                raise RuntimeError(f"{_CONTROL} -d: {said.read().strip() or f'exit status {started.returncode}'}")
        try:
            yield env
        finally:
            subprocess.run([command], input="quit\n", text=True, env=os.environ | env, timeout=60, check=False)


def take_share(percentages: str, rank: int) -> None:
    """Bound this process, before it uses the device: ``percentages`` has one number for each rank."""
    if percentages:
        os.environ[_PERCENTAGE] = percentages.split(",")[rank]
