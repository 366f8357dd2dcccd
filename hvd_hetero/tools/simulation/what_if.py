"""Other machines than the recorded ones: without some workers, with more of them, with others, on another network.

A change is text in the form that a description has, so each option of the command line reads like the file:

    drop      "2" or "0,2"                          these workers leave
    add       "0", or "samples_per_s = 400"         one more like worker 0, or one described by its settings
    replace   "2: 0", or "2: slope_ms = 2.5"        worker 2 becomes like worker 0, or the one described
    network   "bandwidth_mbps = 1000, message_mb = 5"

Workers are counted from 0 as they were before any change. Each replaced worker keeps its place, the dropped ones leave,
and the added ones come last. A worker that is like another has the same ups and downs at the same moments, as far as
they were recorded.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hvd_hetero.tools.simulation.cluster import Cluster, Worker
from hvd_hetero.tools.simulation.described_machines import read_network, read_workers
from hvd_hetero.tools.simulation.settings import shown


def changed(
    cluster: Cluster, drop: str | None, add: Sequence[str], replacing: Sequence[str], network: str | None
) -> Cluster:
    """Return the changed cluster; an error names the option."""
    workers = list(cluster.workers)
    for text in replacing:
        which, colon, by = text.partition(":")
        if not colon:
            raise ValueError(f'--replace must be "WORKER: OTHER", got {shown(text)}; write --replace "2: 0"')
        workers[_index(which, cluster, "--replace")] = _worker(by, cluster, "--replace")
    leave = {_index(each, cluster, "--drop") for each in drop.split(",")} if drop is not None else set()
    workers = [worker for i, worker in enumerate(workers) if i not in leave]
    workers += [_worker(text, cluster, "--add") for text in add]
    if not workers:
        raise ValueError(f"--drop must leave a worker, got {shown(drop)}: that is all of them; drop fewer")
    cluster = replace(cluster, workers=tuple(workers))
    if network is None:
        return cluster
    return replace(cluster, network=read_network(_table(network, "--network"), "--network", Path()))


def _index(text: str, cluster: Cluster, option: str) -> int:
    count = len(cluster.workers)
    name = text.strip()
    if not (name.isascii() and name.isdigit() and len(name) < 10 and int(name) < count):
        raise ValueError(f"{option} must name a worker from 0 to {count - 1}, got {shown(name)}; count from 0")
    return int(name)


def _worker(text: str, cluster: Cluster, option: str) -> Worker:
    if "=" not in text:
        return cluster.workers[_index(text, cluster, option)]
    return read_workers([_table(text, option)], option, Path())[0]


def _table(text: str, option: str) -> dict[str, object]:
    """Return the settings of a text of TOML, with or without braces around them."""
    inner = text.strip()
    if not inner.startswith("{"):
        inner = "{ " + inner + " }"
    try:
        return dict(tomllib.loads(f"it = {inner}")["it"])
    except (ValueError, RecursionError) as error:
        raise ValueError(f'{option} is no list of settings: {error}; write {option} "name = value, …"') from None
