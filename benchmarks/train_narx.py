"""Train the parameters of NARX that the package ships, on this project's recorded traces.

    python benchmarks/train_narx.py             # writes hvd_hetero/prediction/narx/warm.json

The fit sees series with even numbers only, so that `benchmarks/prediction.py` can judge the shipped parameters on the
others. It starts from ten random networks and keeps the one with the least loss; it takes seconds.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hvd_hetero.prediction import NARX  # noqa: E402
from hvd_hetero.prediction.narx import neural_network  # noqa: E402

TRACES = ROOT / "tests" / "data" / "traces"
TARGET = ROOT / "hvd_hetero" / "prediction" / "narx" / "warm.json"
STARTS, WARM_UP_ROUNDS = 10, 10  # the running means mean little before
Series = list[tuple[float, float, float]]  # samples per second, cpu, memory


def read(path: Path) -> Series:
    """Return a recorded series."""
    with path.open(encoding="utf-8", newline="") as file:
        return [(float(r["samples_per_s"]), float(r["cpu"]), float(r["memory"])) for r in csv.DictReader(file)]


def fit(several: Sequence[Series]) -> neural_network.FittedNetwork:
    """Return the parameters that fit these series best; all rounds of all series count alike."""
    rows: list[tuple[float, ...]] = []
    for series in several:
        # From scratch and never trained: only its window of examples is wanted.
        narx = NARX(warm_start=None, background=False, rounds_from_scratch=len(series) + 1)
        for speed, cpu, memory in series:
            narx.update(speed, cpu, memory)
        rows += narx.examples[WARM_UP_ROUNDS:]
    data = np.array(rows)
    inputs, targets = data[:, : neural_network.INPUTS], data[:, -2]
    fits = [
        neural_network.fit(neural_network.start(seed), inputs, targets, pull=0.1, max_steps=300)
        for seed in range(STARTS)
    ]
    return min(fits, key=lambda f: f.loss)


def warm_start(parameters: Sequence[float], **notes: object) -> dict[str, object]:
    """Return the argument of `NARX(warm_start=...)`, with notes on its origin."""
    return {"predictor": NARX.name, "version": NARX.version, "parameters": list(parameters), **notes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder with the recorded series")
    parser.add_argument("--out", type=Path, default=TARGET)
    options = parser.parse_args()
    paths = sorted(options.traces.glob("series_*.csv"))[::2]
    if not paths:
        parser.error(f"no series_*.csv in {options.traces}: record some with benchmarks/record_traces.py")
    found = fit([read(path) for path in paths])
    notes = {
        "trained_by": "benchmarks/train_narx.py",
        "trained_on": [path.name for path in paths],
        "relative_loss": round(found.loss, 4),
    }
    state = warm_start([round(p, 6) for p in found.parameters], **notes)
    options.out.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    print(f"fitted on {', '.join(p.name for p in paths)}: loss {found.loss:.4f}")
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
