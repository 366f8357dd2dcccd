"""The cluster and the training to simulate: of a file (``docs/simulation.md``), or of a recorded run."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_hetero.policies import SelfAdaptive
from hvd_hetero.rounds import MAX_ROUND_SAMPLES
from hvd_hetero.telemetry import Run
from hvd_hetero.telemetry.files import named, read_text
from hvd_hetero.tools.simulation.cluster import Cluster
from hvd_hetero.tools.simulation.described_machines import MILLISECONDS, read_network, read_workers
from hvd_hetero.tools.simulation.engine import mixing_on
from hvd_hetero.tools.simulation.policy_choices import PolicyChoice, choose
from hvd_hetero.tools.simulation.recorded_machines import Replay, replay
from hvd_hetero.tools.simulation.settings import MAX_EPOCH_SAMPLES, MAX_ROUNDS, Setting, checked, read, shown

ROUNDS = Setting(int, 300, 1, MAX_ROUNDS, "the rounds to train on")
# Some policies re-allocate once an epoch. A recording without the end of one is taken for ten.
_EPOCHS_IF_UNKNOWN = 10
# The table of a worker takes a hundred bytes.
_DESCRIPTION_BYTES = 2**18
_TOP = {
    "training": Setting(dict),
    "workers": Setting(list),
    "network": Setting(dict, {}),
    **Cluster.settings,
    "policies": Setting(list, ("bsp", "lb-bsp")),
}
_TRAINING = {
    "global_batch": Setting(int, least=1, most=MAX_ROUND_SAMPLES, of="the samples of a round"),
    "rounds": ROUNDS,
    "rounds_ahead": Setting(int, 0, 0, 1000, "the rounds that plans are fixed ahead"),
    "signal_ms": MILLISECONDS,
    "dataset": Setting(int, None, 1, MAX_EPOCH_SAMPLES, "the samples of an epoch"),
}


@dataclass(frozen=True, slots=True)
class Description:
    """The contents of a file."""

    cluster: Cluster
    global_batch: int
    rounds: int
    """Rounds of ``global_batch`` samples that each policy trains on."""
    policies: tuple[PolicyChoice, ...]
    rounds_ahead: int = 0
    signal_s: float = 0.0
    dataset: int | None = None
    """Samples of an epoch; None: endless."""
    between: tuple[Cluster, ...] = ()
    """Other machines that those of a recorded run may be as well."""
    totals: tuple[int, ...] = ()
    """Samples of each round of a recorded run whose global batch has adapted; empty: all of ``global_batch``."""
    rate_error: float = 0.0
    """The share by which luck may move every policy's samples per second."""


def read_description(path: str | Path) -> Description:
    """Read and check a file; an error names the place in it, the rule, the value and the remedy."""
    file = Path(path)
    where = named(file.name)
    text = read_text(file, _DESCRIPTION_BYTES)
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{named(file)} is no TOML: {error}; docs/simulation.md shows a description, and a recorded run is read "
            "with --from"
        ) from None
    top = read(table, _TOP, where)
    training = read(top["training"], _TRAINING, f"{where}.training")
    cluster = Cluster(
        read_workers(top["workers"], where, file.parent),
        read_network(top["network"], f"{where}.network", file.parent),
        top["seed"],
        top["measurement_noise"],
    )
    choices = tuple(choose(entry, where) for entry in top["policies"])
    signal_s = training.pop("signal_ms") / 1e3
    described = Description(cluster, policies=choices, signal_s=signal_s, **training)
    check(described, where)
    return described


def check(described: Description, where: str) -> None:
    """Raise if the description cannot be simulated; the error names why, and ``where`` it was described."""
    workers = len(described.cluster.workers)
    of = f"the samples of a round, one at least for each of {workers} workers"
    samples = Setting(int, least=workers, most=MAX_ROUND_SAMPLES, of=of)
    checked(f"{where}.training: global_batch", described.global_batch, samples)
    if not described.policies:
        raise ValueError(f'{where}.policies must name at least one policy; write policies = ["bsp", "lb-bsp"]')
    labels = [choice.label for choice in described.policies]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise ValueError(f"{where}.policies: {shown(twice[0])} stands there twice; leave one out, or give it a label")
    for choice in described.policies:
        policy = choice.make()
        try:
            policy.first(workers, described.global_batch)
            mixing_on(described.cluster, policy, choice.sync)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{where}.policies, {choice.label}: {error}") from None
        if described.dataset is None and isinstance(policy, SelfAdaptive) and policy.every is None:
            raise ValueError(
                f"{where}.policies, {choice.label}: it re-allocates after every epoch, and the data have no end; add "
                "dataset = … (samples of an epoch) to [training], or give the policy every = … (rounds)"
            )


def recorded_description(run: Run, choices: Sequence[PolicyChoice]) -> tuple[Description, Replay]:
    """Return the machines and the training of a run, with these policies to compare."""
    machines = replay(run)
    totals = machines.totals
    batch = round(sum(totals) / len(totals))
    dataset = machines.dataset or max(machines.rounds // _EPOCHS_IF_UNKNOWN, 1) * batch  # no short rounds
    described = Description(
        machines.cluster,
        batch,
        max(round(int(machines.run.samples[list(machines.kept)].sum()) / batch), 1),
        tuple(choices),
        dataset=min(dataset, MAX_EPOCH_SAMPLES),
        between=machines.extremes,
        totals=totals if len(set(totals)) > 1 else (),
        rate_error=machines.rate_error,
    )
    return described, machines
