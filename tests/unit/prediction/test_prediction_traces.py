"""The recorded traces that are shipped, replayed: what NARX and the mixture owe on real measurements."""

import csv
import math
from pathlib import Path

import pytest

from hvd_hetero.prediction import EMA, NARX, Memoryless, Mixture, Reverting
from hvd_hetero.prediction.narx.narx import shipped

TRACES = sorted((Path(__file__).parents[2] / "data" / "traces").glob("series_*.csv"))
UNSEEN = [path for path in TRACES if path.name not in shipped()["trained_on"]]


def read(path):
    with path.open(encoding="utf-8", newline="") as file:
        return [tuple(float(row[k]) for k in ("samples_per_s", "cpu", "memory")) for row in csv.DictReader(file)]


def rmse(p, series):
    squares = []
    for k, (v, c, m) in enumerate(series):
        if k:
            squares.append((p.predict(c, m) - v) ** 2)
        p.update(v, c, m)
    return math.sqrt(sum(squares) / len(squares))


@pytest.mark.parametrize("path", UNSEEN, ids=lambda p: p.stem)
def test_narx_as_shipped_beats_ema_on_every_series_it_has_not_seen(path):
    """How far the target of 0.61 is met is for the benchmark to say; no series may fall back to EMA's level."""
    series = read(path)
    assert rmse(NARX(background=False), series) < 0.85 * rmse(EMA(), series)


@pytest.mark.parametrize("path", UNSEEN, ids=lambda p: p.stem)
def test_the_mixture_is_about_as_good_as_the_best_predictor(path):
    """Within a fiftieth by speeds alone, within a twentieth with drivers; NARX, no member, is judged, too."""
    driven = read(path)
    blind = [(v, math.nan, math.nan) for v, _, _ in driven]
    alone = [rmse(p, blind) for p in (Memoryless(), EMA(), EMA(0.5), Reverting())]
    knowing = [rmse(p, driven) for p in (NARX(background=False), Reverting(drivers=True))]
    assert rmse(Mixture(), blind) <= 1.02 * min(alone)
    assert rmse(Mixture(drivers=True), driven) <= 1.05 * min(alone + knowing)
