"""Launch two ranks that sum a vector: the one check that all parts work together.

Horovod launches them and sums; for ``torch.distributed``, which needs no Horovod, torchrun and Gloo do.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from hvd_hetero.testing.launch import HangError, LaunchError, LaunchResult, RankError, launch, torchrun
from hvd_hetero.tools.cli.installation.findings import BUILD, Finding

_RANKS, _LENGTH = 2, 1000
_ALONE = "torch.distributed"
_TORCH = "pip install --force-reinstall torch"
_PROGRAMS = {
    "torch": f"""
import torch
import horovod.torch as hvd
hvd.init()
summed = hvd.allreduce(torch.full(({_LENGTH},), hvd.rank() + 1.0), op=hvd.Sum, name="check")
print("sum", len(summed), float(summed.min()), float(summed.max()))
""",
    _ALONE: f"""
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
summed = torch.full(({_LENGTH},), dist.get_rank() + 1.0)
dist.all_reduce(summed)
print("sum", len(summed), float(summed.min()), float(summed.max()))
dist.destroy_process_group()
""",
    "tensorflow": f"""
import tensorflow as tf
import horovod.tensorflow as hvd
hvd.init()
summed = hvd.allreduce(tf.fill([{_LENGTH}], hvd.rank() + 1.0), op=hvd.Sum, name="check")
print("sum", len(summed), float(tf.reduce_min(summed)), float(tf.reduce_max(summed)))
""",
}
_EXPECTED = f"sum {_LENGTH} 3.0 3.0"
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}  # two ranks may share one GPU
_LONGEST = 200


def two_ranks(
    framework: str, timeout_s: float, launcher: Callable[..., LaunchResult] = launch, python: str = sys.executable
) -> Finding:
    """Launch the ranks and judge their output."""
    with tempfile.TemporaryDirectory(prefix="hvd-hetero-check-") as folder:
        script = Path(folder, "sum_of_two.py")
        script.write_text(_PROGRAMS[framework])
        starter = torchrun(_RANKS, python) if framework == _ALONE else []
        try:
            found = launcher(script, _RANKS, timeout_s=timeout_s, env=_ENVIRONMENT, python=python, starter=starter)
        except (LaunchError, OSError) as error:
            return judge(framework, error, timeout_s)
    return judge(framework, found.stdout, timeout_s)


def judge(framework: str, outcome: tuple[str, ...] | Exception, timeout_s: float) -> Finding:
    """Return the finding for what two ranks printed, or for why they did not."""
    name = f"two ranks, {framework}"
    with_horovod = framework != _ALONE
    module = f"horovod.{framework}" if with_horovod else framework
    if isinstance(outcome, HangError):
        text = f"not done after {timeout_s:g} s; does a firewall stop connections of this machine to itself?"
        return Finding(name, "failure", text, f"hvd-hetero check --timeout {4 * timeout_s:g}")
    if isinstance(outcome, RankError):
        text = str(outcome).splitlines()[0].partition("failed; ")[2][:_LONGEST]
        return Finding(name, "failure", text, f"{sys.executable} -c 'import {module}'")
    if isinstance(outcome, Exception):
        return Finding(name, "failure", str(outcome).splitlines()[0][:_LONGEST], BUILD if with_horovod else _TORCH)
    if any(_EXPECTED not in said for said in outcome) or len(outcome) != _RANKS:
        said = " and ".join(repr(text.strip()[-60:]) for text in outcome)
        text = f"the sum must be {_EXPECTED!r} on both, and is {said}"
        return Finding(name, "failure", text, f"{BUILD} --force" if with_horovod else _TORCH)
    return Finding(name, "ok", f"sum a vector of {_LENGTH} numbers")
