"""Gamma of this CUDA device, the end of its memory, and times by events.

    python benchmarks/gpu/curve.py [--write] [--memory-share 0.1] [--longest 0.3]

It needs a CUDA device. Without one it prints this and exits with 2, because nothing was measured. For a convolutional
network and a transformer, it measures three things that tests can only imitate:

1. the curve by the clock, around a synchronisation (``device_curve``), and the end of memory by running out of it, with
   the process limited to a share of the memory so that this does not take minutes;
2. the curve by events (``torch_hooks.cuda_stopwatch``) over the sizes of LB-BSP's ladder, learned as in training
   (``hvd_hetero.measurement.device_profile``), beside the curve of the very same steps by a clock that waits for the
   device. The two curves of the ladder separate events from the clock; the first one is of other sizes, each for itself
   and with the cache emptied: where memory is short, a device can be slower on the ladder;
3. what an event costs the host.
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


def on_the_ladder(step: Callable[[int], None], total: int) -> tuple[DeviceProfile, DeviceProfile, list[float]]:
    """Let one rank of two climb the ladder; the host waits only between rounds, as for the sum of gradients.

    Return what was learned by events and by the clock, and the seconds that recording an event took the host.
    """
    stopwatch = CudaStopwatch(torch.device("cuda"))
    by_events, by_clock = (DeviceProfile(enough=LADDER_STEPS - 2) for _ in range(2))
    host_s = []
    for q in range(LADDER_STEPS):
        batch = int(ladder(2, total, q)[0])
        for _ in range(ROUNDS_OF_A_STEP):
            begin_s = time.perf_counter()
            stopwatch.start()
            host_s.append(time.perf_counter() - begin_s)
            step(batch)
            stopwatch.stop()
            stopwatch.lap()
            torch.cuda.synchronize()
            by_clock.observe(batch, time.perf_counter() - begin_s)
            by_events.observe(batch, stopwatch.read().work_s)
    return by_events, by_clock, host_s


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
    by_events, by_clock, host_s = on_the_ladder(step, total=curve.largest)
    rows = [_row(name, "each size for itself, by the clock", curve.gamma, curve)]
    if by_events.gamma is None or by_clock.gamma is None:
        return [*rows, f"| {name} | on the ladder | no curve | | | | |"], False
    rows.append(_row("", "on the ladder, by the clock", by_clock.gamma, None))
    rows.append(_row("", "on the ladder, by events", by_events.gamma, None))
    sizes = [m.batch for m in curve.measured if m.fits and m.batch >= 0.1 * curve.largest]
    apart = [abs(by_events.gamma.seconds(b) / by_clock.gamma.seconds(b) - 1) for b in sizes]
    rows.append(
        f"| | the last two apart | {statistics.median(apart):.1%} (median over {len(sizes)} sizes), "
        f"{max(apart):.1%} at most | | | | an event costs the host {statistics.median(host_s) * 1e6:.1f} us |"
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
