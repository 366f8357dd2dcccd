"""A recorded run as the description of a cluster and a training, ready to compare schemes on."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_hetero.telemetry import Run
from hvd_hetero.tools.simulation.description import Description
from hvd_hetero.tools.simulation.limits import MOST_SAMPLES
from hvd_hetero.tools.simulation.replay import Replay, replay
from hvd_hetero.tools.simulation.schemes import SchemeChoice

__all__ = ["recorded_description"]

_EPOCHS = 10  # if the recording holds no end of an epoch: some schemes re-allocate once an epoch


def recorded_description(run: Run, schemes: Sequence[SchemeChoice]) -> tuple[Description, Replay]:
    """Return the machines and the training of a run, with these schemes to compare."""
    machines = replay(run)
    dataset = machines.dataset or max(machines.rounds // _EPOCHS, 1) * run.global_batch  # no short rounds
    described = Description(
        machines.cluster,
        run.global_batch,
        machines.full_rounds,
        tuple(schemes),
        dataset=min(dataset, MOST_SAMPLES),
        between=machines.extremes,
        rate_error=machines.rate_error,
    )
    return described, machines
