"""Gamma of this CUDA device, the end of its memory, and times by events.

    python benchmarks/gpu/curve.py [--write] [--memory-share 0.1] [--longest 0.3]

It needs a CUDA device. Without one it says so and exits with 2, because nothing was measured. For a convolutional
network and a transformer, it measures three things that tests can only imitate:

1. the curve by the clock, around a synchronisation (``device_curve``), and the end of memory by running out of it, with
   the process limited to a share of the memory so that this does not take minutes;
2. the curve by events in a loop that never waits within a step (``torch_hooks.cuda_stopwatch``), over the sizes of
   LB-BSP's ladder, learned as in training (``hvd_hetero.measurement.device_profile``);
3. the difference of the two, and the cost of events for the host.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from _report import write_result
from gpu.networks import Network, networks
from torch.nn import functional

from hvd_hetero.allocation import Gamma
from hvd_hetero.measurement.device_curve import DeviceCurve, Measured, profile_step
from hvd_hetero.measurement.device_profile import DeviceProfile
from hvd_hetero.policies.device_shares import LADDER_STEPS, ladder
from torch_hooks.cuda_stopwatch import CudaStopwatch

ROUNDS_OF_A_STEP = 3


def make_step(network: Network) -> Callable[[int], None]:
    """Return a step of training on so many samples, made again on the device."""
    model = network.make("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(batch: int) -> None:
        x, y = network.batch(batch, "cuda")
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def by_events(step: Callable[[int], None], total: int) -> tuple[DeviceProfile, list[float]]:
    """Let one rank of two climb the ladder; the host waits only between rounds, as for the sum of gradients."""
    stopwatch, profile = CudaStopwatch(torch.device("cuda")), DeviceProfile(enough=LADDER_STEPS - 2)
    host_s = []
    for q in range(LADDER_STEPS):
        batch = int(ladder(2, total, q)[0])
        for _ in range(ROUNDS_OF_A_STEP):
            begin_s = time.perf_counter()
            stopwatch.start()
            host_s.append(time.perf_counter() - begin_s)
            step(batch)
            stopwatch.stop()
            torch.cuda.synchronize()
            profile.observe(batch, stopwatch.read())
    return profile, host_s


def measured(name: str, network: Network, longest_s: float) -> tuple[list[str], bool]:
    """Return the rows of a network, and whether there are curves."""
    step = make_step(network)

    def tell(found: Measured) -> None:
        print(f"{name} {found.batch:>7} {f'{found.median_s:.4g} s' if found.fits else 'does not fit'}", flush=True)

    curve = profile_step(
        step, longest_s=longest_s, done=torch.cuda.synchronize, release=torch.cuda.empty_cache,
        progress=tell,
    )  # fmt: skip
    if curve.gamma is None:
        return [f"| {name} | by the clock | no curve: {curve.why} | | | | |"], False
    profile, host_s = by_events(step, total=curve.largest)
    clock, events = curve.gamma, profile.gamma
    rows = [_row(name, "by the clock", clock, curve)]
    if events is None:
        return [*rows, f"| {name} | by events, as in training | no curve | | | | |"], False
    rows.append(_row("", "by events, as in training", events, None))
    sizes = [m.batch for m in curve.measured if m.fits and m.batch >= 0.1 * curve.largest]
    apart = [abs(events.seconds(b) / clock.seconds(b) - 1) for b in sizes]
    rows.append(
        f"| | apart | {statistics.median(apart):.1%} (median over {len(sizes)} sizes), {max(apart):.1%} at most | | | "
        f"| an event costs the host {statistics.median(host_s) * 1e6:.1f} us |"
    )
    return rows, True


def _row(name: str, how: str, gamma: Gamma, curve: DeviceCurve | None) -> str:
    ends = "|" if curve is None else f"{curve.largest} | {curve.smallest_failure or 'not reached'}"
    slope, intercept = 1e6 * gamma.slope_s, 1e3 * gamma.intercept_s
    return f"| {name} | {how} | {slope:.2f} | {intercept:.3f} | {gamma.saturation:.0f} | {ends} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the table under benchmarks/results/gpu")
    parser.add_argument("--memory-share", type=float, default=0.1, help="of the device's memory (%(default)s)")
    parser.add_argument("--longest", type=float, default=0.3, help="seconds of the longest step to time (%(default)s)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("curve: no CUDA device here (torch.cuda.is_available() is False); nothing was measured", file=sys.stderr)
        return 2
    torch.cuda.set_per_process_memory_fraction(args.memory_share)
    rows = ["| network | | us per sample | ms per batch | saturation | largest that fits | smallest that does not |"]
    rows.append("|---|---|---:|---:|---:|---:|---:|")
    met = True
    for name, network in networks("cuda").items():
        found, known = measured(name, network, args.longest)
        rows += found
        met &= known
    text = "\n".join([f"{torch.cuda.get_device_name()}, {args.memory_share:g} of its memory.", "", *rows])
    print(text)
    if args.write:
        print(f"written: {write_result('gpu/curve', text)}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
