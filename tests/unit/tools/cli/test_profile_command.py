"""Profiling a step: the curve and the end of memory are found, whatever the step is."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hvd_hetero.measurement.device_curve import profile_step
from hvd_hetero.measurement.memory import MemoryMeter
from hvd_hetero.tools.cli import commands as cli
from hvd_hetero.tools.simulation.description import read_description
from tests.support.device_model import DeviceModel


class World:
    def __init__(self):
        self.now_s = 0.0
        self.seen: list[int] = []

    def clock(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


def step_of(world, device):
    first: set[int] = set()

    def step(batch):
        world.seen.append(batch)
        with device.step(batch):
            pass
        if batch not in first:
            first.add(batch)
            world.now_s += 5.0  # kernels are tuned

    return step


def model(world, *figures, **options):
    return DeviceModel(*figures, clock=world.clock, sleep=world.sleep, **options)


def test_the_curve_is_found_and_memory_to_a_hundredth():
    world, released = World(), []
    curve = profile_step(
        step_of(world, model(world, 1e-3, 8e-3, 24, 777)), clock=world.clock, release=lambda: released.append(1)
    )
    assert curve.gamma.slope_s == pytest.approx(1e-3)
    assert curve.gamma.intercept_s == pytest.approx(8e-3)
    assert curve.gamma.saturation == pytest.approx(24, abs=1)
    assert 777 - 8 <= curve.gamma.out_of_memory == curve.largest <= 777 < curve.smallest_failure <= 777 + 8
    assert len(released) == sum(not m.fits for m in curve.measured)
    assert [m.batch for m in curve.measured] == sorted({m.batch for m in curve.measured})


class Gauge:
    """40 + x MiB of 500, for the latest size."""

    def __init__(self, world: World) -> None:
        self.world = world

    def reset(self) -> None:
        pass

    def peak(self) -> float:
        return (40.0 + self.world.seen[-1]) * 2**20

    def available(self) -> float:
        return 500.0 * 2**20


def test_the_line_of_memory_is_found_and_the_largest_batch_with_headroom():
    world, memory = World(), MemoryMeter()
    memory.gauge = Gauge(world)
    profile_step(step_of(world, model(world, 1e-3, 8e-3, 24, 460)), clock=world.clock, memory=memory)
    assert memory.fitted_line == "40 + 1 x MiB on this rank, so 410 fit"


def test_it_ends_with_the_first_size_that_takes_too_long():
    world = World()
    curve = profile_step(step_of(world, model(world, 0.1, 0.1)), clock=world.clock, longest_s=1.0)
    assert 9 < curve.largest <= 14
    assert curve.smallest_failure is None
    assert curve.gamma.out_of_memory is None


def test_another_error_of_the_step_is_not_swallowed():
    def step(batch):
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        profile_step(step)


SCRIPT = """
now_s = 0.0
def step(batch):
    global now_s
    if batch > 60:
        raise MemoryError
    now_s += 1e-3 * max(batch, 10)
number = 3
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The folder of a step with a clock of its own, so that no other process makes it longer."""
    (tmp_path / "mine_to_profile.py").write_text(SCRIPT)
    monkeypatch.setitem(profile_step.__kwdefaults__, "clock", lambda: sys.modules["mine_to_profile"].now_s)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    sys.modules.pop("mine_to_profile", None)


def test_the_command_prints_json(here, capsys):
    command = ["profile", "mine_to_profile:step", "--smallest", "8", "--largest", "40", "--repeats", "5", "--json"]
    assert cli.main(command) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["gamma"]["slope_s"] == pytest.approx(1e-3)
    assert document["gamma"]["out_of_memory"] is None
    assert document["measured"][-1]["batch"] == 40


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("mine_to_profile", "must be given as MODULE:FUNCTION"),
        ("./mine_to_profile.py:step", "must be given as MODULE:FUNCTION"),
        ("nowhere:step", "there is no module 'nowhere'"),
        ("mine_to_profile:other", "has no function 'other'"),
        ("mine_to_profile:number", "has no function 'number'"),
    ],
)
def test_a_step_that_is_not_there_is_one_line(here, capsys, step, message):
    assert cli.main(["profile", step]) == 2
    assert message in capsys.readouterr().err


def test_the_help_imports_nothing_heavy():
    code = (
        "import sys; from hvd_hetero.tools.cli import commands as cli\n"
        "try: cli.main(['profile', '--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('numpy', 'torch', 'hvd_hetero.measurement.device_curve') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_printed_workers_table_is_one_of_a_description(here, capsys):
    """Pasted under [training], it describes the measured device: slope, saturation and memory."""
    assert cli.main(["profile", "mine_to_profile:step", "--smallest", "8", "--repeats", "1", "--quiet"]) == 0
    said = capsys.readouterr().out
    assert "Memory: 60 samples fit, 61 do not." in said
    assert "seconds = 0.00" in said
    path = here / "cluster.toml"
    path.write_text("[training]\nglobal_batch = 60\n" + said[said.index("[[workers]]") :])
    (worker,) = read_description(path).cluster.workers
    assert worker.compute.slope_s == pytest.approx(1e-3)
    assert worker.compute.memory_limit == 60


@pytest.mark.parametrize(
    ("option", "value"),
    [("longest", "-1"), ("longest", "nan"), ("longest", "inf"), ("repeats", "0"), ("smallest", "0")],
)
def test_an_impossible_option_is_told_by_its_name(option, value, here, capsys):
    assert cli.main(["profile", "mine_to_profile:step", f"--{option}", value]) == 2
    assert f"--{option} must be positive and finite" in capsys.readouterr().err
