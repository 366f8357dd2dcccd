"""The example for torchrun, of which rank 1 is killed once, in the middle of an epoch, between two saves."""

from __future__ import annotations

import os
import runpy
import signal
import sys

import torch_hooks

KILLED_AT = 33  # steps; it saves every 5 rounds


class Mortal(torch_hooks.DistributedOptimizer):
    """Whose process does not survive so many steps, the first time."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps == KILLED_AT and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)


torch_hooks.DistributedOptimizer = Mortal
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
