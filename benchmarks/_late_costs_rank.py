"""One rank of ``costs.py --only late``, which sleeps as long as its texts would take."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from _costs_rank import CLASSES, Job, arguments, compared, join_job
from _costs_simulated import reading_s

from hvd_hetero.testing import report

AT_SPEED_1 = 2.5  # times as long as simulated: rounds of about 100 ms


class Sleeper(torch.nn.Module):
    """Sleeps in the place of a transformer that is ``factor`` times slower than at speed 1."""

    def __init__(self, factor: float, *, padded: bool) -> None:
        super().__init__()
        self.head = torch.nn.Linear(1, CLASSES)
        self._factor, self._padded = factor, padded

    def forward(self, words: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """Return numbers for each class."""
        time.sleep(AT_SPEED_1 * self._factor * reading_s(np.array(lengths), padded=self._padded))
        return self.head(torch.ones(len(lengths), 1))


def main() -> None:
    options = arguments()
    padded = options.batches == "padded"
    join_job()
    job = Job(padded=padded, model=partial(Sleeper, options.factors[dist.get_rank()], padded=padded))
    busy_s: dict[str, list[float]] = {}
    schemes = {
        name: job.balanced(name, busy_s.setdefault(name, []), cost_of=cost_of)
        for name, cost_of in {"number": None, "known": job.lengths, "late": len}.items()
    }
    report(compared(schemes, busy_s, options.cycles))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
