"""Gamma of this CUDA device for a small convolutional network, the end of its memory, and times by events.

    python benchmarks/gamma_cuda.py [--write] [--memory-share 0.1]

It needs a CUDA device and no Horovod. Without a device it says so and exits with 2, because nothing was measured.

It measures three things that tests can only imitate:

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
from importlib import util
from pathlib import Path

from hvd_hetero.measurement.device_curve import profile_step
from hvd_hetero.measurement.device_profile import DeviceProfile
from hvd_hetero.policies.device_shares import LADDER_STEPS, ladder

ROUNDS_OF_A_STEP = 3


def stopwatch_class():
    """Load the stopwatch by its file, because its package needs Horovod and this benchmark does not."""
    path = Path(__file__).resolve().parent.parent / "torch_hooks" / "cuda_stopwatch.py"
    spec = util.spec_from_file_location("cuda_stopwatch", path)
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.CudaStopwatch


def make_step(torch):
    """Return a step of a network like that of lb-bsp's first figure, on images of 32 x 32."""
    layers = []
    for before, after in ((3, 64), (64, 64), (64, 128), (128, 128)):
        layers += [torch.nn.Conv2d(before, after, 3, padding=1), torch.nn.ReLU()]
    layers += [torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(2048, 10)]
    net = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    def step(batch: int) -> None:
        x = torch.randn(batch, 3, 32, 32, device="cuda")
        y = torch.randint(10, (batch,), device="cuda")
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


def by_events(torch, step, total: int) -> tuple[DeviceProfile, list[float]]:
    """Let one rank of two climb the ladder; the host waits only between rounds, as for the sum of gradients."""
    stopwatch, profile = stopwatch_class()(torch.device("cuda")), DeviceProfile(enough=LADDER_STEPS - 2)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the table under benchmarks/results")
    parser.add_argument("--memory-share", type=float, default=0.1, help="of the device's memory (%(default)s)")
    args = parser.parse_args()
    try:
        import torch
    except ImportError:
        print("gamma_cuda: PyTorch is not installed; nothing was measured", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print(
            "gamma_cuda: no CUDA device here (torch.cuda.is_available() is False); nothing was measured",
            file=sys.stderr,
        )
        return 2
    torch.cuda.set_per_process_memory_fraction(args.memory_share)
    step = make_step(torch)
    curve = profile_step(
        step,
        done=torch.cuda.synchronize,
        release=torch.cuda.empty_cache,
        progress=lambda m: print(f"{m.batch:>7} " + (f"{m.median_s:.4g} s" if m.fits else "does not fit"), flush=True),
    )
    if curve.gamma is None:
        print(f"gamma_cuda: no curve by the clock: {curve.why}", file=sys.stderr)
        return 1
    profile, host_s = by_events(torch, step, total=curve.largest)
    if profile.gamma is None:
        print("gamma_cuda: no curve by events", file=sys.stderr)
        return 1
    clock, events = curve.gamma, profile.gamma
    sizes = [m.batch for m in curve.measured if m.fits and m.batch >= 0.1 * curve.largest]
    apart = [abs(events.seconds(b) / clock.seconds(b) - 1) for b in sizes]
    text = "\n".join(
        [
            f"{torch.cuda.get_device_name()}, {args.memory_share:g} of its memory.",
            "",
            "| | seconds per sample | and per batch | saturation | largest that fits |",
            "|---|---:|---:|---:|---:|",
            f"| by the clock | {clock.slope_s:.4g} | {clock.intercept_s:.4g} | {clock.saturation} | {curve.largest} |",
            f"| by events, learned as in training | {events.slope_s:.4g} | {events.intercept_s:.4g} | "
            f"{events.saturation} | |",
            "",
            f"Smallest batch that does not fit: {curve.smallest_failure}. The curves are "
            f"{statistics.median(apart):.1%} apart (median over {len(sizes)} sizes; {max(apart):.1%} at most). "
            f"Recording an event takes the host {statistics.median(host_s) * 1e6:.1f} us (median).",
        ]
    )
    print(text)
    if args.write:
        from _report import write_result

        print(f"written: {write_result('gamma_cuda', text)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
