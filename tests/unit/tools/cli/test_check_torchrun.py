"""``hvd-hetero check`` where PyTorch is installed and Horovod is not: torchrun can train, so nothing is broken."""

from __future__ import annotations

import argparse

import pytest

from hvd_hetero.testing import LaunchResult, torchrun
from hvd_hetero.tools.cli import check, installed
from hvd_hetero.tools.cli.findings import Finding, judge, two_ranks
from hvd_hetero.tools.cli.installed import HorovodFacts

ABSENT = HorovodFacts(None, {}, (), is_patched=False, lacks=())


@pytest.fixture
def arguments(monkeypatch):
    """Those of the command; PyTorch is here, without Horovod and a compiler, and no rank is launched."""
    monkeypatch.setattr("hvd_hetero.tools.cli.installed.read_horovod", lambda: ABSENT)
    monkeypatch.setattr(installed, "frameworks", lambda environ: {"torch": "2.13.0"})
    monkeypatch.setattr(installed, "missing_tools", lambda environ: "this machine lacks\n  - make: `apt install make`")
    ranks = "hvd_hetero.tools.cli.findings.two_ranks"
    monkeypatch.setattr(ranks, lambda framework, timeout_s: Finding(f"two ranks, {framework}", "ok", "sum"))
    parser = argparse.ArgumentParser()
    check.add_arguments(parser)
    return parser.parse_args([])


def test_it_can_train_and_is_told_what_it_lacks_for_keras(arguments, capsys):
    assert check.run(arguments, {"PATH": "/usr/bin:/bin"}) == 0
    out = capsys.readouterr().out
    assert "warning  Horovod: not installed; PyTorch trains with torchrun, Keras needs it" in out
    assert "mend it by: hvd-hetero build-horovod --install" in out
    assert "warning  compiler: missing, should Horovod be built here: make" in out
    assert "ok       two ranks, torch.distributed: sum" in out
    assert "This installation can train" in out


def test_the_two_ranks_are_started_by_torchrun_and_import_no_horovod():
    seen = []

    def launcher(script, ranks, **options):
        seen.append((script.read_text(), options["starter"]))
        said = ("sum 1000 3.0 3.0\n",) * ranks
        return LaunchResult(ranks, 1.0, said, ("", ""), (None, None), "")

    assert two_ranks("torch.distributed", 7.0, launcher, "python").verdict == "ok"
    ((program, starter),) = seen
    assert "horovod" not in program
    assert starter == torchrun(2, "python")


def test_a_failure_of_theirs_is_not_mended_by_building_horovod():
    for outcome in (("sum 1000 1.0 1.0\n",) * 2, FileNotFoundError("python is gone")):
        finding = judge("torch.distributed", outcome, 7.0)
        assert (finding.verdict, finding.command) == ("failure", "pip install --force-reinstall torch")
