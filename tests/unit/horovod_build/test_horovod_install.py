"""The wheel's installation, and what is seen of the progress."""

import io
import subprocess
import sys

from fake_builds import TENSORFLOW, add_package, torch_wheel
from rich.console import Console

from horovod_build import progress, source, wheel
from horovod_build.plan import make_plan
from hvd_hetero.tools import cli


def test_is_installed_compares_the_wheel_itself(site):
    """Another build of the same version is not the same; pip's record of the hash decides."""
    built = torch_wheel(site / "horovod-0.28.1-x.whl")
    assert not wheel.is_installed(built)
    add_package(site, "horovod", "0.28.1")
    assert not wheel.is_installed(built)
    record = site / "horovod-0.28.1.dist-info" / "direct_url.json"
    record.write_text(f'{{"archive_info": {{"hashes": {{"sha256": "{source.sha256(built)}"}}}}, "url": "file:///x"}}')
    assert wheel.is_installed(built)
    record.write_text(f'{{"archive_info": {{"hashes": {{"sha256": "{"0" * 64}"}}}}, "url": "file:///x"}}')
    assert not wheel.is_installed(built)


def test_plain_progress_is_a_line_per_stage_and_tenth():
    """However often the percentage is reported, each tenth is one line, and a new stage begins again."""
    stream = io.StringIO()
    reporter = progress.Reporter(Console(file=stream))
    reporter.stage("compile")
    for value in (0, 5, 10, 11, 19, 35, 35):
        reporter.percent(value)
    reporter.stage("pack")
    lines = [line.partition("] ")[2] for line in stream.getvalue().splitlines()]
    assert lines == ["compile", "compile: 10 %", "compile: 30 %", "pack"]


def test_live_progress_shows_stages_and_the_share_done():
    """On a terminal, every stage is a line, with the percentage while it is known."""
    stream = io.StringIO()
    with progress.Reporter(Console(file=stream, force_terminal=True, width=100)) as reporter:
        reporter.note("for torch")
        reporter.stage("configure")
        reporter.stage("compile")
        reporter.percent(42)
        reporter._progress.refresh()
    said = stream.getvalue()
    assert all(text in said for text in ("for torch", "configure", "compile", " 42%", "100%"))


def test_install_replaces_horovod_and_adds_what_it_lacks(tmp_path, torch_plan, monkeypatch):
    """The wheel goes in without its requirements; then those that are absent, and no others."""
    calls: list[list[str]] = []
    monkeypatch.setattr(wheel, "run_logged", lambda argv, **_: calls.append(argv))
    monkeypatch.setattr(wheel, "installed_version", lambda name: None if name in ("cffi", "pyyaml") else "1")
    wheel.install(tmp_path / "x.whl", torch_plan, tmp_path / "log")
    wheel.install(tmp_path / "x.whl", make_plan((TENSORFLOW,), {}), tmp_path / "log")
    replacing = ["--no-deps", "--no-index", "--force-reinstall", str(tmp_path / "x.whl")]
    assert [argv[5:] for argv in calls] == [replacing, ["pyyaml", "cffi"], replacing, ["pyyaml"]]


def test_without_the_builder_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "horovod_build", None)
    assert cli.main(["build-horovod", "--quiet"]) == 1
    assert "pip install ./packaging/horovod" in capsys.readouterr().err


def test_jobs_must_be_positive():
    """--jobs 0 is a usage error."""
    done = subprocess.run(
        [sys.executable, "-m", "hvd_hetero.tools.cli", "build-horovod", "--jobs", "0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--jobs: must be at least 1, not 0" in done.stderr
