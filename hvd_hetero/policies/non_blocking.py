"""Non-blocking SGD: the first rank to finish ends the round, and the others contribute what they have."""

from __future__ import annotations

from typing import ClassVar, Literal

from hvd_hetero.checks import integer
from hvd_hetero.policies.policy import Policy, equal_plan
from hvd_hetero.rounds import RoundPlan


class NonBlocking(Policy):
    r"""Every rank may do up to N micro-batches; when the first has done N, all stop (non-blocking-sgd, Algorithm 1).

    Rank i is given ``x_i = X / n`` samples in N micro-batches and does ``n_i <= N`` of them, ``S_i <= x_i`` samples;
    ``S = sum S_i``. A rank stops at the end of its current micro-batch, and does at least one. A round thus lasts as
    long as its fastest rank needs, and what the others then still need for one micro-batch. To shorten that, a rank
    does not begin a micro-batch of which it expects to do more than half after the others are done
    (``hvd_hetero.measurement.anticipation``).

    **Scaling.** With G_i the sum of the gradients of the samples that rank i did,

        unbiased:    g = (1 / S) sum_i G_i             the mean over all samples done, by whichever rank
        n/N:         g = (1 / X) sum_i (S_i / x_i) G_i the paper's rule (section 3.2 and Eq. 19)

    The paper shrinks the learning rate of rank i by n_i / N, which is S_i / x_i where micro-batches are equal, as all
    its are. Where x_i is no multiple of N they differ by a sample, and the share is in samples: 1/6, and not 1/4,
    after the first of (1, 1, 2, 2). The gradient of rank i is a sum over n_i micro-batches. So what a slow rank saw
    weighs (n_i / N)^2 against a fast rank's: samples count less for having been computed slowly, and the step is
    shorter. If the data are spread evenly, that only costs speed. If slow ranks hold other data than fast ones, it also
    turns the optimum away from them. Hence unbiased is the default.

    Differences from the paper: micro-batches that were not done return to the front of the queue, so that an epoch
    visits every sample once (the paper shuffles, and hopes). The round that takes the last samples of an epoch ends
    when all are done. There, a rank stops for the signal alone (``anticipates=False``). Gradients are
    means over samples where the paper adds, which only names the learning rate differently.
    """

    name: ClassVar[str] = "non-blocking"
    measures: ClassVar[bool] = False
    keeps_total: ClassVar[bool] = False

    def __init__(
        self,
        micro_batches: int = 8,
        *,
        scaling: Literal["unbiased", "n/N"] = "unbiased",
        anticipates: bool = True,
    ) -> None:
        self.micro_batches = integer("micro_batches", micro_batches, 1, remedy="give the micro-batches of one rank")
        if scaling not in ("unbiased", "n/N"):
            raise ValueError(
                f"scaling must be 'unbiased' or 'n/N', got {scaling!r}; with 'unbiased' all samples weigh the same"
            )
        self.scaling = scaling
        self.anticipates = anticipates
        self.shrinks_early_steps = scaling == "n/N"

    def first(self, workers: int, global_batch: int) -> RoundPlan:
        """Return equal shares, each in as many micro-batches."""
        least = workers * self.micro_batches
        if global_batch < least:
            raise ValueError(
                f"global_batch must be at least {least}, a sample for each of the {self.micro_batches} micro-batches "
                f"of {workers} ranks; got {global_batch}: raise global_batch or lower micro_batches"
            )
        samples = equal_plan(workers, global_batch).samples
        return RoundPlan(samples, (self.micro_batches,) * workers, ends="first")
