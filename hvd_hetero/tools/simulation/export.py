"""A recorded run as a description: files that ``hvd-hetero simulate`` reads back with the same answer.

``NAME.toml`` holds the likely machines. ``NAME.csv`` has a row for each recorded round: for each worker the factor of
its time, and the CPU and memory that it read; and the seconds of the rest of the round. If the run leaves the
fixed costs open, ``NAME.least.toml`` and ``NAME.most.toml`` hold the machines at either end, with their own series. The
first file names them as ``between``. Numbers of series carry ten digits. Of existing files, only those of
an earlier export are replaced.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

from hvd_hetero.telemetry.files import check_output, named, write_whole
from hvd_hetero.tools.simulation.availability import ALWAYS
from hvd_hetero.tools.simulation.cluster import Cluster, Worker
from hvd_hetero.tools.simulation.description import Description
from hvd_hetero.tools.simulation.variation import Recorded

__all__ = ["export"]

_MARK = "# Written by hvd-hetero simulate --export"
_OURS = re.compile(_MARK.encode() + rb"|(rest_s|(factor|cpu|memory) \d+)[,\n]")  # how a description or a table begins


def export(described: Description, path: Path) -> list[Path]:
    """Write the files and return their paths. The machines must come from a recorded run, changed or not."""
    if path.suffix != ".toml":
        raise ValueError(f"--export must end in .toml, got {named(path)}; write --export cluster.toml")
    if not path.parent.is_dir():
        raise ValueError(f"--export must name a file in a folder, got {named(path)}; make its folder, or name another")
    ends = [each for each in described.between if each.workers != described.cluster.workers]
    others = [path.with_suffix(f".{name}.toml") for name in (("least", "most") if ends else ())]
    contents = _contents(path, described.cluster, described, [other.name for other in others])
    for other, cluster in zip(others, described.between if ends else (), strict=True):
        contents |= _contents(other, cluster, described, [])
    for file in contents:
        check_output(file, "--export", "file of an earlier --export", lambda begin: bool(_OURS.match(begin)))
    for file, content in contents.items():
        with write_whole(file) as written:
            written.write(content)
    return list(contents)


def _contents(path: Path, cluster: Cluster, described: Description, between: list[str]) -> dict[Path, str]:
    """Return the files of one cluster, with their paths."""
    table = path.with_suffix(".csv")
    columns: dict[str, list[str]] = {}
    lines = [_MARK, *_training(cluster, described, between), "", "[network]"]
    network = cluster.network
    if network.kind == "recorded":
        columns["rest_s"] = [f"{s:.10g}" for s in network.recorded_s]
        lines += ['kind = "recorded"', f"file = {_quoted(table.name)}", 'column = "rest_s"']
    else:
        lines += [f'kind = "{network.kind}"', f"latency_ms = {network.latency_s * 1e3!r}"]
        lines += [f"message_mb = {network.message_bytes / 1e6!r}"]
        if network.bandwidth < math.inf:
            lines += [f"bandwidth_mbps = {network.bandwidth * 8 / 1e6!r}"]
        if network.server_bandwidth < math.inf:
            lines += [f"server_bandwidth_mbps = {network.server_bandwidth * 8 / 1e6!r}"]
    for number, worker in enumerate(cluster.workers):
        lines += ["", "[[workers]]", *_worker(worker, number, table.name, columns)]
    contents = {path: "\n".join(lines) + "\n"}
    if columns:
        file = io.StringIO()
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(columns)
        rows.writerows(zip(*_repeated(columns), strict=True))
        contents[table] = file.getvalue()
    return contents


def _training(cluster: Cluster, described: Description, between: list[str]) -> Iterator[str]:
    yield f"seed = {cluster.seed}"
    yield f"policies = [{', '.join(scheme.written for scheme in described.schemes)}]"
    if between:
        yield f"between = [{', '.join(map(_quoted, between))}]"
    if described.rate_error:
        yield f"rate_error = {described.rate_error!r}"
    yield ""
    yield "[training]"
    yield f"global_batch = {described.global_batch}"
    yield f"rounds = {described.rounds}"
    if described.dataset is not None:
        yield f"dataset = {described.dataset}"


def _worker(worker: Worker, number: int, file: str, columns: dict[str, list[str]]) -> Iterator[str]:
    compute = worker.compute
    recorded = all(isinstance(variation, Recorded) for variation in worker.variation)
    if not (recorded and worker.availability is ALWAYS and worker.link is ALWAYS and worker.bandwidth is None):
        raise ValueError(
            f"--export cannot write worker {number}, whose speed or link changes by a rule; add a plain one, and put "
            "the rule into the exported file"
        )
    yield f"slope_ms = {compute.slope_s * 1e3!r}"
    yield f"fixed_ms = {compute.intercept_s * 1e3!r}"
    if compute.saturation != 1:
        yield f"saturation = {compute.saturation!r}"
    if compute.memory_limit is not None:
        yield f"memory_limit = {compute.memory_limit}"
    for variation in worker.variation:
        if isinstance(variation, Recorded):
            columns[f"factor {number}"] = [f"{f:.10g}" for f in variation.factors]
            yield f'variation = [{{ kind = "recorded", file = {_quoted(file)}, column = "factor {number}" }}]'
    if readings := worker.drivers.recorded:
        columns[f"cpu {number}"] = [f"{r.cpu:.10g}" for r in readings]
        columns[f"memory {number}"] = [f"{r.memory:.10g}" for r in readings]
        yield f'drivers = {{ file = {_quoted(file)}, cpu_column = "cpu {number}", memory_column = "memory {number}" }}'


def _quoted(name: str) -> str:
    """Return a string of TOML, which every string of JSON is."""
    return json.dumps(name, ensure_ascii=False)


def _repeated(columns: dict[str, list[str]]) -> list[list[str]]:
    """Return the rows of the table: all series have one value for each recorded round."""
    longest = max(map(len, columns.values()))
    assert all(len(values) == longest for values in columns.values()), "series of unequal length"
    return list(columns.values())
