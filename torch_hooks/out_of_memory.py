"""A micro-batch that does not fit in memory is undone, and done again in parts."""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from hvd_hetero.balancer import Balancer
from hvd_hetero.measurement.memory_errors import is_out_of_memory
from torch_hooks.beside.redone import PartDone
from torch_hooks.gradients.gathered import Gathered

if TYPE_CHECKING:
    from torch_hooks.beside.scaled_rounds import ScaledRounds

logger = logging.getLogger(__name__)

_HOW_TO_SURVIVE = (
    "and out of memory ends the training on all ranks; to survive it, write: for batch in loader: "
    "with balance.surviving_out_of_memory(): … (docs/gpu.md), or set max_micro_batch of the policy"
)


def _failures() -> int:
    """Return how often the device's allocator has failed in this process."""
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.memory_stats().get("num_ooms", 0))


class Shortage:
    """The micro-batches of one rank that did not fit in its memory."""

    def __init__(self, balancer: Balancer) -> None:
        self._balancer = balancer
        self._parts = 0
        self._memory_in_use = False
        self.end_others: Callable[[str], object] = str
        """A function that ends all other ranks with a message, beside a reducer."""
        self.survives = False
        """Whether the loop lets micro-batches be done again."""
        self._micro_batches = 0
        self._failures_seen = _failures()

    @property
    def failed(self) -> bool:
        """Whether the last micro-batch did not fit, and is to be done again."""
        return self._parts > 0

    def begins(self, *, memory_in_use: bool) -> None:
        """Begin a micro-batch; ``memory_in_use``: right after one that did not fit."""
        self._micro_batches += 1
        if self._micro_batches == 2 and not self.survives and self._balancer.meter.learner.profile is not None:
            policy = self._balancer.policy.name
            logger.warning("policy %r tries larger batches than you have tried, %s", policy, _HOW_TO_SURVIVE)
        self._memory_in_use = memory_in_use
        self._parts = 0  # of one that failed, and was abandoned

    @contextmanager
    def survived(self, gathered: Sequence[Gathered | ScaledRounds], repeats: Callable[[], bool]) -> Iterator[None]:
        """Run the loop's body, and undo the micro-batch if it runs out of memory and the layers can ``repeat`` it."""
        self.survives = True
        try:
            for each in gathered:
                each.guard()
            yield
        except PartDone:  # from the backward pass of a part (`beside.redone`); the rest of the body is for the whole
            return
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._parts = self._undo(gathered, error, repeats)
            # Frames of functions that have ended still hold activations.
            traceback.clear_frames(error.__traceback__)

    def take_parts(self) -> int:
        """Return how large the parts may be in which to do the last micro-batch again; 0: it is done."""
        parts, self._parts = self._parts, 0
        if parts:
            # Only now has the loop let go of the exception, whose traceback holds tensors of the failed attempt.
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return parts

    def left(self) -> None:
        """Log what could have been done, if memory was short when the loop's body was left while it computed."""
        balancer = self._balancer
        if balancer.computing and _failures() > self._failures_seen:
            logger.error(
                "round %d: rank %d has run out of memory with %d samples, %s", balancer.rounds, balancer.rank,
                balancer.work.samples, _HOW_TO_SURVIVE,
            )  # fmt: skip

    def _undo(self, gathered: Sequence[Gathered | ScaledRounds], error: Exception, repeats: Callable[[], bool]) -> int:
        """Undo the current micro-batch, which has run out of memory; return how large its parts may be."""
        balancer = self._balancer
        if len(gathered) > 1:
            when = "with several optimizers, whose batches are not done again"
        elif balancer.work.round < 0:
            when = "with a batch of your own, which only a BalancedLoader could cut"
        elif not repeats():
            when = "with layers that wait for other ranks (FSDP2, DeepSpeed, SyncBatchNorm), so it is not done again"
        elif balancer.computing and gathered and gathered[0].undo():
            self._failures_seen = _failures()
            return balancer.out_of_memory(memory_in_use=self._memory_in_use)
        else:
            when = "where gradients may have left for other ranks, in step() or after it, which is not done again"
        fatal = balancer.out_of_memory_error(when)
        self.end_others(str(fatal))
        raise fatal from error
