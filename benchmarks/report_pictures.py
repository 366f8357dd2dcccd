"""Make the pictures of docs/report.md: pages of seeded, simulated runs with 2, 8 and 1,000 ranks, seen by a browser.

    python benchmarks/report_pictures.py [--out FOLDER] [--rounds N] [--all] [--browser chromium]

Each page is made by ``hvd-hetero report`` from telemetry that a simulated training has written, and seen at 390 and at
1,440 pixels, light and dark. ``docs/`` keeps some of the pictures, cut to what a screen shows; ``--all`` writes all of
them, at full height, to look at. It prints how large each page is and how long it took.

The runs: two ranks with equal batches, one of which loses half of its processor on the way; eight unequal ranks with
equal batches and with LB-BSP, side by side; a thousand ranks, of which a rack of forty slows down for a while and one
is slow throughout. ``--rounds`` of the thousand ranks (300; 10,000 take a file of 500 MB).
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from hvd_hetero.policies import BSP, LBBSP, Policy
from hvd_hetero.telemetry import TelemetryWriter
from hvd_hetero.tools.cli import main as command
from hvd_hetero.tools.simulation import Availability, Cluster, Compute, Jitter, Network, RoundSimulation, Worker
from hvd_hetero.tools.simulation.whole_rounds import WholeRounds

DOCS = Path(__file__).resolve().parents[1] / "docs"
WIDTHS = {390: 6000, 1440: 3200}
"""Heights that hold a whole page of one run."""


@dataclass(frozen=True)
class Shot:
    """A picture that docs/ keeps."""

    page: str
    width: int
    height: int
    dark: bool

    @property
    def name(self) -> str:
        """Return the file's name."""
        return f"report-{self.page}{'-dark' if self.dark else ''}{'-phone' if self.width < 500 else ''}.png"


KEPT = (Shot("2-ranks", 390, 1400, True), Shot("8-ranks", 1440, 1500, False), Shot("1000-ranks", 1440, 2000, False))


def worker(samples_per_s: float, availability: Availability | None = None) -> Worker:
    """Return a machine whose rounds scatter by 3 %."""
    compute = Compute.at_speed(samples_per_s, 0.004)
    return Worker(compute, availability or Availability(), (Jitter("round", 0.03),))


def two() -> Cluster:
    """Return two equal machines, one of which has half of its processor from second 12 to 26."""
    network = Network(latency_s=1e-4, message_bytes=4e6, bandwidth=1e9)
    return Cluster((worker(800), worker(800, Availability((0.0, 12.0, 26.0), (1.0, 0.5, 1.0)))), network, seed=1)


def eight() -> Cluster:
    """Return eight machines between 1 and 0.45; one loses two fifths of its speed after 20 s."""
    speeds = (1000, 960, 900, 820, 700, 600, 520, 450)
    lost = Availability((0.0, 20.0), (1.0, 0.6))
    machines = [worker(speed, lost if rank == 2 else None) for rank, speed in enumerate(speeds)]
    return Cluster(tuple(machines), Network(latency_s=1e-4, message_bytes=8e6, bandwidth=1e9), seed=2)


def thousand(rounds: int) -> Cluster:
    """Return a thousand similar machines; a rack of forty slows down for a third of the time, and one is slow."""
    rng = np.random.default_rng(3)
    round_s = 0.15
    rack = Availability((0.0, 0.3 * rounds * round_s, 0.7 * rounds * round_s), (1.0, 0.7, 1.0))
    speeds = rng.normal(800, 25, 1000)
    speeds[417] = 560
    machines = [worker(float(v), rack if 240 <= rank < 280 else None) for rank, v in enumerate(speeds)]
    return Cluster(tuple(machines), Network(latency_s=2e-6, message_bytes=8e6, bandwidth=2e9), seed=3)


def record(path: Path, cluster: Cluster, policy: Policy, rounds: int) -> Path:
    """Write the telemetry of a simulated training, whose epochs end with a short round."""
    workers = len(cluster.workers)
    batch = 64 * workers
    writer = TelemetryWriter(path, policy=policy.name, workers=workers, global_batch=batch)
    data = WholeRounds(40 * batch + batch // 3, shuffle=True, seed=0)
    RoundSimulation(cluster, policy, batch, data=data, observer=writer).run(rounds)
    writer.close()
    return path


def look(browser: str, page: Path, picture: Path, width: int, height: int, dark: bool) -> None:
    """Let a browser draw a page."""
    subprocess.run(
        [
            browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            f"--window-size={width},{height}", f"--screenshot={picture}", page.as_uri(),
        ],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    with Image.open(picture) as seen:  # a palette takes a third of the bytes, and flat colours lose nothing
        small = seen.convert("RGB").quantize(128, dither=Image.Dither.NONE)
    small.save(picture, optimize=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of the pictures (docs)")
    parser.add_argument("--rounds", type=int, default=300, help="rounds of the thousand ranks (%(default)s)")
    parser.add_argument("--all", action="store_true", help="every page at every width, light and dark, in full height")
    parser.add_argument("--only", nargs="+", choices=[shot.page for shot in KEPT], help="some of the pages")
    parser.add_argument("--browser", default="chromium", help="the browser's command (%(default)s)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = {
            "2-ranks": lambda: [record(folder / "run.jsonl", two(), BSP(), 300)],
            "8-ranks": lambda: [
                record(folder / "bsp.jsonl", eight(), BSP(), 240),
                record(folder / "lb-bsp.jsonl", eight(), LBBSP(), 400),
            ],
            "1000-ranks": lambda: [record(folder / "thousand.jsonl", thousand(options.rounds), BSP(), options.rounds)],
        }  # fmt: skip
        for shot in KEPT:
            if options.only and shot.page not in options.only:
                continue
            files, page = made[shot.page](), folder / f"{shot.page}.html"
            began = time.perf_counter()
            if command(["report", *map(str, files), "--page", str(page)]):
                return 1
            print(f"{shot.page}: {page.stat().st_size / 1e6:.2f} MB in {time.perf_counter() - began:.1f} s")
            shots = [shot]
            if options.all:
                shots = [Shot(shot.page, width, high * len(files), dark) for width, high in WIDTHS.items()
                         for dark in (False, True)]  # fmt: skip
            for each in shots:
                look(options.browser, page, options.out / each.name, each.width, each.height, each.dark)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
