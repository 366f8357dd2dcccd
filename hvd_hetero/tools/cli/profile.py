"""``hvd-hetero profile``: Gamma of this device for a user's step, a ``module:function`` of a batch size."""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hvd_hetero.tools.cli.output import printer, status

if TYPE_CHECKING:
    from hvd_hetero.allocation import Gamma
    from hvd_hetero.measurement.device_curve import DeviceCurve

_GAMMA = ("slope_s", "intercept_s", "saturation", "out_of_memory")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "step",
        metavar="MODULE:FUNCTION",
        help="a function of a batch size: forward, backward and update of such a batch",
    )
    for name, default, metavar, text in (
        ("smallest", 1, "N", "first batch size"),
        ("largest", 65536, "N", "largest batch size"),
        ("longest", 2.0, "S", "stop after a batch size that takes longer"),
        ("repeats", 5, "N", "measurements of each batch size"),
    ):
        kind, shown = type(default), f"{text} (%(default)s)"
        parser.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=shown)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit code is 1 if the times follow no curve."""
    from hvd_hetero.measurement.device_curve import profile_step
    from hvd_hetero.measurement.memory import CudaGauge, MemoryMeter

    for name in ("smallest", "largest", "longest", "repeats"):
        if not 0 < getattr(args, name) < math.inf:
            raise ValueError(
                f"--{name} must be positive and finite, got {getattr(args, name)}; omit it for the default"
            )

    step, memory = _function(args.step), MemoryMeter()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
        memory.gauge = CudaGauge(torch.cuda)
    with status("the first size", quiet=args.quiet or args.json) as tell:
        curve = profile_step(
            step,
            smallest=args.smallest,
            largest=args.largest,
            longest_s=args.longest,
            repeats=args.repeats,
            done=_wait_for_device,
            release=_release,
            memory=memory,
            progress=lambda m: tell(
                f"{m.batch} samples: {m.median_s:.4g} s" if m.fits else f"{m.batch} samples do not fit"
            ),
        )
    if args.json:
        measured = [{"batch": m.batch, "seconds": list(m.seconds), "fits": m.fits} for m in curve.measured]
        line = {"base_mib": memory.base / 2**20, "slope_mib": memory.slope / 2**20, "fits": memory.learned}
        gamma = None if curve.gamma is None else {name: getattr(curve.gamma, name) for name in _GAMMA}
        sys.stdout.write(
            json.dumps({"measured": measured, "gamma": gamma, "why": curve.why, "memory": line}, indent=1) + "\n"
        )
    else:
        _write(curve, args.step)
        if memory.fitted_line:
            printer().print(f"A step of x samples takes {memory.fitted_line} in {memory.share:.0%} of what is free.")
    return 0 if curve.gamma is not None else 1


def _function(name: str) -> Callable[[int], object]:
    module_name, colon, function_name = name.partition(":")
    if not (colon and function_name and all(map(str.isidentifier, module_name.split(".")))):
        raise ValueError(f"the step must be given as MODULE:FUNCTION, got {name!r}; for example: train:step")
    # As `python -m` does: the user's module lies in the current folder.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Otherwise the module is there, and one that it imports is not.
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise
        raise ValueError(
            f"there is no module {module_name!r} here; run the command in the folder that holds it"
        ) from error
    step = getattr(module, function_name, None)
    if not callable(step):
        raise ValueError(f"module {module_name!r} has no function {function_name!r}; name one that takes a batch size")
    return step  # type: ignore[no-any-return]


def _torch() -> Any:
    """Return PyTorch if the user's step has imported it and uses a CUDA device, else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized() else None


def _wait_for_device() -> None:
    if (torch := _torch()) is not None:
        torch.cuda.synchronize()


def _release() -> None:
    gc.collect()
    if (torch := _torch()) is not None:
        torch.cuda.empty_cache()


def _write(curve: DeviceCurve, name: str) -> None:
    from rich.table import Column, Table

    console, headings = printer(), ("samples", "seconds", "fitted", "samples/s")
    table = Table(*(Column(heading, justify="right") for heading in headings), title=f"one step of {name}")
    for m in curve.measured:
        if not m.fits:
            table.add_row(str(m.batch), "does not fit", "", "")
            continue
        fitted = "" if curve.gamma is None else f"{curve.gamma.seconds(m.batch):.4g}"
        table.add_row(str(m.batch), f"{m.median_s:.4g}", fitted, f"{m.batch / m.median_s:.4g}")
    console.print(table)
    if curve.gamma is None:
        console.print(f"No curve: {curve.why}")
        return
    gamma = curve.gamma
    console.print(f"seconds = {gamma.slope_s:.4g} x max(samples, {gamma.saturation:.4g}) + {gamma.intercept_s:.4g}")
    if gamma.saturation > 1:
        console.print(f"Below {gamma.saturation:.4g} samples a smaller batch saves no time.")
    if (failure := curve.smallest_failure) is None:
        console.print(f"Memory: {curve.largest} samples fit, and no larger batch was tried.")
    else:
        console.print(f"Memory: {curve.largest} samples fit, {failure} do not.")
    console.print("For a description that hvd-hetero simulate reads:\n")
    console.print("\n".join(_as_worker(gamma)), markup=False)


def _as_worker(gamma: Gamma) -> list[str]:
    """Return the lines of a description that hold this curve."""
    lines = ["[[workers]]", f"slope_ms = {gamma.slope_s * 1e3:.6g}"]
    # A fit to noisy times may be below zero, which a description refuses.
    lines += [f"fixed_ms = {gamma.intercept_s * 1e3:.6g}"] if gamma.intercept_s > 0 else []
    lines += [f"saturation = {gamma.saturation:.6g}"] if gamma.saturation > 1 else []
    return lines + ([f"memory_limit = {gamma.out_of_memory}"] if gamma.out_of_memory is not None else [])
