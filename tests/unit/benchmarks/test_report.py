"""Tables that benchmarks store name the command that made them."""

import sys
from pathlib import Path

import pytest
from script_modules import load

report = load("_report", "benchmarks")
ROOT = Path(report.__file__).parents[1]


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        (
            [str(ROOT / "benchmarks" / "speed_torch.py"), "--only", "half"],
            "python benchmarks/speed_torch.py --only half",
        ),
        (["/somewhere/else/mine.py", "--title", "two words"], "python mine.py --title 'two words'"),
    ],
)
def test_the_command_is_told_wherever_the_script_lies(typed, shown, monkeypatch):
    monkeypatch.setattr(sys, "argv", typed)
    assert report._command() == shown


def test_the_error_of_a_median_is_that_of_the_normal_law():
    """Of 400 samples of 101 normal numbers each: 1.2533 sigma / sqrt(101)."""
    import numpy as np

    rng = np.random.default_rng(0)
    samples = rng.normal(0.0, 2.0, (400, 101))
    told = np.mean([report.error_of_median(of.tolist(), 101) for of in samples])
    assert told == pytest.approx(np.median(samples, axis=1).std(), rel=0.1)
