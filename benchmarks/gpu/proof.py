"""What only a GPU can show, on one device that two ranks share: times by events, memory that ends, unequal speeds.

    python benchmarks/gpu/proof.py [PART ...] [--write] [--device cuda] [--backend cpu:gloo,cuda:gloo]

`scripts/gpu_proof.sh` runs it, and `curve.py`. The parts:

*tests*: the tests of conformance and exactness that torch.distributed passes on CPUs, with models, data and gradients
on the device. *horovod*: the tests that Horovod passes, if there is one that was built with NCCL; not among the default

*stopwatch*: seconds of a batch as a training measures them, by events that are read a round later, over those of the
same steps in plain PyTorch by a clock that waits for the device around every step. One rank, over NCCL.

*memory*: trainings of two ranks in which the memory of one ends (it is limited), in float64, against one process that
has all samples of each round at once.

*unequal*: samples per second of DDP with equal batches, of ``LBBSP(device="gpu")``, and of a split that was set by hand
(`_by_hand.py`), in turns of one job. Two processes have 66 and 33 % of the multiprocessors (`shares.py`); where that
service cannot be had, or on a CPU, they are alike and one computes each gradient twice.

*overhead*: the seconds of a step over those of DDP, two equal ranks (50 % each), alternating blocks of one job.

*beside*: scaled losses beside DDP and FSDP2 (by NCCL alone): exactness, the gain and each rank's own time on 66 and
33 %, the overhead on 50 and 50 %.

Two ranks on one device use Gloo, which carries gradients by way of the host. NCCL takes one rank per device before
2.30; with a later one, ``--backend cpu:gloo,cuda:nccl`` makes them use the device. With ``--device cpu`` everything
runs in small, to see that it does; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from _alternating import STOCK_S
from _report import error_of_median, judged, write_result
from gpu.networks import networks
from gpu.shares import control, multi_process_service

from hvd_hetero.testing import launch, torchrun

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("exactness", "torch_conformance", "wires")
OVER_TORCH = "torch.distributed"
LIMIT_S = 200.0
TARGETS = {"stopwatch": 0.05, "difference": 1e-10, "oracle": 0.97, "ddp": 1.01}
SHARES = {"unequal": "66,33", "overhead": "50,50"}
SCARCE_MB = 400


class Proof:
    """The circumstances of all parts."""

    def __init__(self, device: str, backend: str, cycles: int, pairs: int) -> None:
        self.device, self.backend, self.cycles, self.pairs = device, backend, cycles, pairs

    def run(
        self, what: str, network: str, ranks: int = 2, times: int = 0, shares: str = "",
        env: Mapping[str, str] | None = None, backend: str = "",
    ) -> Any:  # fmt: skip
        """Return what each rank of a job reports."""
        arguments = [what, network, self.device, backend or self.backend, shares, times]
        script = Path(__file__).with_name("_rank.py")
        return launch(script, ranks, arguments, timeout_s=240, env=env, starter=torchrun(ranks)).reports

    def with_shares(self, what: str, network: str, times: int) -> tuple[Any, str]:
        """Run it on shares of the device, or say why not and run it without."""
        if self.device == "cpu":
            return self.run(what, network, times=times), "on a CPU"
        try:
            with multi_process_service() as env:
                shares = SHARES[what.split()[0]]
                return self.run(what, network, times=times, shares=shares, env=env), f"shares {shares} %"
        except Exception as error:  # noqa: BLE001 - whatever that service says is told, and the part runs without it
            why = str(error)
            print(f"no shares of the device: {why}", file=sys.stderr, flush=True)
        return self.run(what, network, times=times), f"without shares ({why.splitlines()[0][:200]})"


def stopwatch(proof: Proof) -> tuple[list[str], bool]:
    """Measure times by events."""
    backend = "cpu:gloo,cuda:nccl" if proof.device == "cuda" else "gloo"
    rows = [f"One rank, {backend}.", "", "| network | samples | rounds | by events over by clock |"]
    rows += ["|---|---:|---:|---:|"]
    apart = []
    for network in networks(proof.device):
        for found in proof.run("stopwatch", network, ranks=1, backend=backend)[0]:
            ratio = found["events_s"] / found["clock_s"]
            apart.append(abs(ratio - 1))
            rows.append(f"| {network} | {found['samples']} | {found['rounds']} | {ratio:.3f} |")
            print(rows[-1], flush=True)
    met = max(apart) <= TARGETS["stopwatch"]
    return [*rows, "", f"At most {max(apart):.1%} apart; target {TARGETS['stopwatch']:.0%}: {_said(met)}."], met


def memory(proof: Proof) -> tuple[list[str], bool]:
    """Survive a lack of memory."""
    rows = [
        f"Two ranks, of which the first may use {SCARCE_MB} MiB; twelve rounds.",
        "",
        "| policy | failures survived | difference to one process | between ranks | epochs, each sample once |",
        "|---|---:|---:|---:|---|",
    ]
    reports = proof.run("memory", "convolutional", times=SCARCE_MB)
    met = True
    for policy, found in reports[-1].items():
        same = (
            found["difference"] <= TARGETS["difference"] < found["moved"]
            and found["between_ranks"] == 0
            and found["each_once"]
        )
        met &= same and found["failures"][0] > 0
        once = f"{found['epochs']}, {'yes' if found['each_once'] else '**no**'}"
        cells = f"{found['difference']:.1e} | {found['between_ranks']:.1e} | {once}"
        rows.append(f"| {policy} | {' + '.join(map(str, found['failures']))} | {cells} |")
    return [*rows, "", f"Target {TARGETS['difference']:g} and at least one failure: {_said(met)}."], met


def unequal(proof: Proof) -> tuple[list[str], bool]:
    """Train two ranks of unequal speed."""
    rows = [
        "| network | how unequal | LB-BSP over DDP | error | over the oracle | error | oracle's split | LB-BSP's |",
        "|---|---|---:|---:|---:|---:|---|---|",
    ]
    curves, met = [], True
    for network in networks(proof.device):
        reports, how = proof.with_shares("unequal", network, proof.cycles)
        rates = reports[0]["rates"]
        cells = []
        for other in ("ddp", "oracle"):
            ratios = [a / b for a, b in zip(rates["lb-bsp"], rates[other], strict=True)]
            cells.append(f"{statistics.median(ratios):.3f} | {error_of_median(ratios, len(ratios)):.3f}")
        met &= statistics.median(ratios) >= TARGETS["oracle"]
        splits = [":".join(map(str, reports[0][which])) for which in ("oracle", "now")]
        rows.append(f"| {network} | {how} | {' | '.join([*cells, *splits])} |")
        print(rows[-1], flush=True)
        for rank, told in enumerate(reports):
            slope, intercept, saturation = told["gamma"] or (float("nan"),) * 3
            curves.append(f"| {network} | {rank} | {1e6 * slope:.2f} | {1e3 * intercept:.2f} | {saturation:.0f} |")
    rows += ["", "Curves as LB-BSP has learned them while training:", ""]
    rows += ["| network | rank | us per sample | ms per batch | saturation |", "|---|---:|---:|---:|---:|", *curves]
    return [*rows, "", f"Target {TARGETS['oracle']} of the oracle: {_said(met)}."], met


def overhead(proof: Proof) -> tuple[list[str], bool]:
    """Train equal ranks."""
    rows = [
        "| network | how equal | pairs | BSP over DDP | error | LB-BSP | error | DDP's step "
        f"| at most {TARGETS['ddp']} |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    met = True
    for network in networks(proof.device):
        reports, how = proof.with_shares("overhead", network, proof.pairs)
        row, small = _cost(reports, proof.pairs)
        met &= small
        rows.append(f"| {network} | {how} | {proof.pairs} | {row} |")
        print(rows[-1], flush=True)
    return rows, met


def beside(proof: Proof) -> tuple[list[str], bool]:
    """Scale losses beside DDP and FSDP2: exactness, gain and own times on unequal ranks, overhead on equal ones."""
    nccl = "nccl" in proof.backend or proof.device == "cpu"
    reducers = ("DDP", "FSDP2") if nccl else ("DDP",)
    exact, gain, cost, met = [], [], [], True
    for reducer in reducers:
        found = proof.run(f"exact beside {reducer}", "convolutional")[0]
        met &= found["difference"] <= TARGETS["difference"] < found["moved"]
        exact.append(f"| {reducer} | {found['splits']} | {found['difference']:.1e} |")
        print(exact[-1], flush=True)
        for network in networks(proof.device):
            reports, how = proof.with_shares(f"unequal beside {reducer}", network, proof.cycles * 2 // 3)
            row, held = _gain(reports[0])
            gain.append(f"| {reducer} | {network} | {how} | {row} |")
            print(gain[-1], flush=True)
            reports, how = proof.with_shares(f"overhead beside {reducer}", network, proof.pairs * 2 // 3)
            row, small = _cost(reports, proof.pairs * 2 // 3)
            cost.append(f"| {reducer} | {network} | {how} | {row} |")
            print(cost[-1], flush=True)
            met &= held and small
    target = f"at least {TARGETS['oracle']} of the split by hand, own times within {TARGETS['stopwatch']:.0%}"
    return [
        *([] if nccl else ["FSDP2 needs NCCL: name it by --backend cpu:gloo,cuda:nccl.", ""]),
        "Float64, against one process:", "", "| reducer | splits | difference |", "|---|---:|---:|", *exact, "",
        "LB-BSP's samples per second, and own seconds by events over those by the clock without the other rank:",
        "", "| reducer | network | how unequal | over the reducer | error | over the split by hand | error "
        "| over the fast rank alone | error | own time, rank 0, 1 | split by hand | LB-BSP's |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---|---|---|", *gain, "",
        "Equal ranks, step time over that of the reducer alone:", "",
        f"| reducer | network | how equal | BSP | error | LB-BSP | error | a step | at most {TARGETS['ddp']} |",
        "|---|---|---|---:|---:|---:|---:|---:|---|", *cost, "", f"Targets: {target}: {_said(met)}.",
    ], met  # fmt: skip


def _gain(told: dict[str, Any]) -> tuple[str, bool]:
    rates = told["rates"]
    cells, medians = [], []
    for other in ("stock", "oracle", "alone"):
        ratios = [a / b for a, b in zip(rates["lb-bsp"], rates[other], strict=True)]
        medians.append(statistics.median(ratios))
        cells.append(f"{medians[-1]:.3f} | {error_of_median(ratios, len(ratios)):.3f}")
    own = [events / clock for events, clock in zip(told["own_s"], told["clock_s"], strict=True)]
    splits = [":".join(map(str, told[which])) for which in ("oracle", "now")]
    met = medians[1] >= TARGETS["oracle"] and max(abs(each - 1) for each in own) <= TARGETS["stopwatch"]
    return " | ".join([*cells, ", ".join(f"{each:.3f}" for each in own), *splits]), met


def _cost(reports: Any, pairs: int) -> tuple[str, bool]:
    medians = []
    for kind in ("bsp", "lb-bsp"):
        ratios = [ratio for rank in reports for ratio in rank[kind]]
        medians.append((statistics.median(ratios), error_of_median(ratios, pairs)))
    said = judged(medians, TARGETS["ddp"], 0.005)
    step_s = statistics.median(s for rank in reports for s in rank[STOCK_S])
    cells = " | ".join(f"{median:.3f} | {error:.3f}" for median, error in medians)
    return f"{cells} | {1e3 * step_s:.1f} ms | {said}", said == "met"


def _passed(proof: Proof, over: str, which: str) -> tuple[list[str], bool]:
    """Run the TESTS whose names fit ``which``, side by side."""
    rows = [f"| tests over {over} | |", "|---|---|"]
    env = os.environ | {"HVD_HETERO_TEST_DEVICE": proof.device, "HVD_HETERO_TEST_BACKEND": proof.backend}
    with ExitStack() as stack:
        how = [] if proof.device == "cpu" else ["", "Processes take turns on the device."]
        if proof.device == "cuda" and control() is not None:
            env |= stack.enter_context(multi_process_service())
            how = ["", "Kernels of different processes run side by side (multi-process service)."]
        running = {}
        for name in TESTS:
            log = stack.enter_context(tempfile.TemporaryFile("w+"))
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", which]
            file = f"tests/distributed/test_{name}.py"
            running[file] = log, subprocess.Popen([*command, file], stdout=log, stderr=log, env=env, cwd=ROOT)
        failed, end_s = False, time.monotonic() + LIMIT_S
        for file, (log, job) in running.items():
            try:
                job.wait(max(end_s - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                job.send_signal(signal.SIGINT)  # pytest says what it has found so far, and ends its ranks
                try:
                    job.wait(30)
                except subprocess.TimeoutExpired:
                    job.kill()
                    job.wait()
            log.seek(0)
            said = log.read()
            last = (said.strip().splitlines() or ["said nothing"])[-1].strip("= ")
            failed |= job.returncode != 0
            rows.append(f"| {file} | {last} |")
            print(said if job.returncode else rows[-1], flush=True)
    return [*rows, *how], not failed


def tests(proof: Proof) -> tuple[list[str], bool]:
    """Run the tests of the wire, of conformance and of exactness, with everything on the device."""
    return _passed(proof, OVER_TORCH, OVER_TORCH)


def horovod(proof: Proof) -> tuple[list[str], bool]:
    """Run the same tests over Horovod."""
    try:
        import horovod.torch as hvd
    except ImportError as reason:
        raise SystemExit(f"there is no Horovod for PyTorch here ({reason}); see docs/gpu.md") from None
    if proof.device == "cuda" and not hvd.nccl_built():
        raise SystemExit("Horovod was built without NCCL here; see docs/gpu.md")
    return _passed(proof, "Horovod", f"not {OVER_TORCH} and not keras")


PARTS: dict[str, Callable[[Proof], tuple[list[str], bool]]] = {
    "tests": tests, "stopwatch": stopwatch, "memory": memory, "unequal": unequal, "overhead": overhead,
    "beside": beside, "horovod": horovod,
}  # fmt: skip
OF_ONE_BACKEND = ("stopwatch", "horovod")  # whatever --backend says


def _said(met: bool) -> str:
    return "met" if met else "**missed**"


def _nccl() -> str:
    """Return the version of the library that is loaded, which need not be the one that PyTorch was built with."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except OSError:  # PyTorch has it within
        return ".".join(map(str, torch.cuda.nccl.version()))
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def _device(device: str) -> str:
    if device == "cpu":
        return "On a CPU, in small: these figures mean nothing."
    properties = torch.cuda.get_device_properties(0)
    return (
        f"{properties.name}, {properties.multi_processor_count} multiprocessors, {properties.total_memory / 2**30:.0f} "
        f"GiB; CUDA {torch.version.cuda}, NCCL {_nccl()}."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PARTS)}; all but the last by default")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--backend", default="gloo", help="of torch.distributed, between two ranks (default %(default)s)"
    )
    parser.add_argument("--cycles", type=int, default=12, help="turns of each scheme (default %(default)s)")
    parser.add_argument("--pairs", type=int, default=24, help="blocks of each kind (default %(default)s)")
    parser.add_argument("--write", action="store_true", help="store the tables in benchmarks/results/gpu")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; the parts are {', '.join(PARTS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "gpu proof: no CUDA device here (torch.cuda.is_available() is False): nothing was measured", file=sys.stderr
        )
        return 2
    os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")  # for every user of NCCL: Horovod is one, too
    proof, met = Proof(options.device, options.backend, options.cycles, options.pairs), True
    for part in options.parts or [part for part in PARTS if part != "horovod"]:
        lines, held = PARTS[part](proof)
        met &= held
        backend = "" if part in OF_ONE_BACKEND else options.backend
        talk = [f"Ranks talk by {backend}.", ""] if backend else []
        text = "\n".join([_device(options.device), "", *talk, *lines])
        print(f"\n{part}\n{text}", flush=True)
        if options.write:
            write_result(f"gpu/{part}{'_nccl' if 'nccl' in backend else ''}", text)
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
