"""``hvd-hetero check``: each judgement by what was read, so that no machine need be broken, and the whole command."""

from __future__ import annotations

import argparse
import math
import types

import pytest

from hvd_hetero.testing import HangError, LaunchResult, RankError
from hvd_hetero.tools.cli import check, findings, installed
from hvd_hetero.tools.cli.build_horovod import BUILDER_MISSING
from hvd_hetero.tools.cli.findings import Finding, judge, two_ranks
from hvd_hetero.tools.cli.installed import HorovodFacts

TORCH = {"torch": "2.13.0"}
TENSORFLOW = {"tensorflow": "2.21.0"}
BOTH = {**TORCH, **TENSORFLOW}
OURS = HorovodFacts("0.28.1", BOTH, ("Gloo",), is_patched=True, lacks=())
KEPT = {"MALLOC_TRIM_THRESHOLD_": "1", "MALLOC_MMAP_THRESHOLD_": "1", "MALLOC_TOP_PAD_": "1"}
TOOLS = (
    "to build Horovod 0.28.1, this machine lacks\n  - a C++ compiler: `apt install g++` (Debian, Ubuntu)\n"
    "  - make: `apt install make` (Debian, Ubuntu)"
)


def with_(**changes) -> HorovodFacts:
    fields = {name: getattr(OURS, name) for name in HorovodFacts.__dataclass_fields__}
    return HorovodFacts(**{**fields, **changes})


@pytest.mark.parametrize(
    ("finding", "verdict", "told", "command"),
    [
        (findings.python((3, 11, 7)), "ok", "3.11.7", ""),
        (findings.python((3, 10, 1)), "failure", "3.11 or newer", "apt install python3.11-venv"),
        (findings.tools("", needed=True), "ok", "CMake", ""),
        (findings.tools(TOOLS, needed=True), "failure", "a C++ compiler; make", "apt install g++ && apt install make"),
        (
            findings.tools(TOOLS, needed=False),
            "warning",
            "should Horovod be built",
            "apt install g++ && apt install make",
        ),
        (
            findings.tools(BUILDER_MISSING, needed=False),
            "warning",
            "hvd-hetero-horovod",
            "pip install ./packaging/horovod",
        ),
        (findings.frameworks(BOTH), "ok", "torch 2.13.0, tensorflow 2.21.0", ""),
        (findings.frameworks({}), "failure", "neither", "pip install torch"),
        (findings.horovod(OURS, BOTH), "ok", "built for torch and tensorflow", ""),
        (findings.horovod(OURS, TORCH), "ok", "built for torch", ""),
        (findings.horovod(with_(version=None), BOTH), "warning", "trains with torchrun, Keras needs", findings.BUILD),
        (findings.horovod(with_(version=None), TENSORFLOW), "failure", "not installed", findings.BUILD),
        (findings.horovod(with_(built_for={}), BOTH), "failure", "not built for torch or tensor", findings.BUILD),
        (findings.horovod(with_(built_for=TORCH), BOTH), "warning", "not for tensorflow", findings.BUILD),
        (
            findings.horovod(with_(built_for={"torch": "2.12.0"}), TORCH),
            "failure",
            "built for torch 2.12.0, but 2.13.0 is installed",
            f"{findings.BUILD} --force",
        ),
        (findings.horovod(with_(built_for={"torch": ""}), TORCH), "ok", "built for torch", ""),
        (findings.horovod_operations(OURS, 0), "ok", "Gloo", ""),
        (findings.horovod_operations(with_(operations=("MPI",)), 0), "warning", "elastic", f"{findings.BUILD} --force"),
        (
            findings.horovod_operations(OURS, 2),
            "warning",
            "2 GPUs",
            f"HOROVOD_GPU_OPERATIONS=NCCL {findings.BUILD} --force",
        ),
        (findings.horovod_operations(with_(operations=("Gloo", "NCCL")), 2), "ok", "Gloo, NCCL", ""),
        (findings.horovod_patches(OURS), "ok", "all of its patches", ""),
        (
            findings.horovod_patches(with_(is_patched=False, lacks=("a launcher that",))),
            "warning",
            "a stock Horovod; it lacks: a launcher that",
            f"{findings.BUILD} --force",
        ),
        (findings.horovod_patches(with_(lacks=("x",))), "warning", "an earlier", f"{findings.BUILD} --force"),
        (findings.keras(TORCH, {}), "ok", "not used", ""),
        (findings.keras({**BOTH, "keras": "3.15.1"}, {}), "ok", "synchronises nothing", ""),
        (
            findings.keras({**BOTH, "keras": "2.15.0"}, {}),
            "warning",
            "Keras 3 with TensorFlow 2.16 or newer, or tf_keras; only PyTorch trains here",
            "pip install 'tensorflow>=2.16' 'keras>=3'",
        ),
        (
            findings.keras({"tensorflow": "2.15.0", "keras": "2.15.0"}, {}),
            "failure",
            "Keras 3 with TensorFlow 2.16 or newer, or tf_keras",
            "pip install 'tensorflow>=2.16' 'keras>=3'",
        ),
        (findings.keras(BOTH, {}), "failure", "without Keras", "pip install 'keras>=3'"),
        (
            findings.keras({**BOTH, "keras": "3.15.1"}, {}, "jax"),
            "warning",
            "on jax",
            "export KERAS_BACKEND=tensorflow",
        ),
        (
            findings.keras({"tensorflow": "2.21.0", "keras": "3.15.1"}, {}, "jax"),
            "failure",
            "on jax",
            "export KERAS_BACKEND=tensorflow",
        ),
        (
            findings.keras({**BOTH, "keras": "3.15.1"}, {"TF_USE_LEGACY_KERAS": "1"}),
            "failure",
            "tf_keras is not installed",
            "pip install tf_keras",
        ),
        (findings.keras({**BOTH, "tf_keras": "2.21.0"}, {"TF_USE_LEGACY_KERAS": "1"}), "ok", "tf_keras 2.21.0", ""),
        (findings.container(math.inf, 4, math.inf, 0.0, 4), "ok", "no limits", ""),
        (findings.container(1.5, 4, math.inf, 0.0, 2), "warning", "1.5 of 4", "docker update --cpus 2 CONTAINER"),
        (findings.container(2.0, 4, math.inf, 0.0, 2), "ok", "CPU limited to 2 of 4 cores", ""),
        (findings.container(8.0, 4, 2.0**30, 2.0**29, 2), "ok", "memory limited to 1 GiB, 0.5 used", ""),
        (
            findings.container(8.0, 4, 2.0**30, 0.95 * 2**30, 2),
            "warning",
            "less than 10% is free",
            "docker update --memory 2g CONTAINER",
        ),
        (findings.cores(4, 2), "ok", "4 for 2 ranks", ""),
        (findings.cores(2, 3), "warning", "slow each other down", "horovodrun -np 2 …"),
        (findings.threads("", 4, 2), "warning", "not set", "export OMP_NUM_THREADS=2"),
        (findings.threads("", 4, 1), "ok", "uses all 4 cores", ""),
        (findings.threads("", 1, 2), "ok", "not set", ""),
        (findings.threads("2", 4, 2), "ok", "2 for each of 2 ranks", ""),
        (findings.threads("4", 4, 2), "warning", "4 for each", "export OMP_NUM_THREADS=2"),
        (findings.threads("1", 2, 4), "ok", "1 for each", ""),
        (findings.threads("all", 4, 2), "warning", "'all'", "export OMP_NUM_THREADS=2"),
        (findings.threads("2,1", 4, 2), "ok", "2 for each", ""),
        (findings.allocator(KEPT, "glibc"), "ok", "keeps", ""),
        (findings.allocator({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, "glibc"), "ok", "jemalloc", ""),
        (findings.allocator({}, ""), "ok", "no advice", ""),
        (
            findings.allocator({**KEPT, "MALLOC_TOP_PAD_": ""}, "glibc"),
            "warning",
            "not set: MALLOC_TOP_PAD_)",
            "export MALLOC_TRIM_THRESHOLD_=1000000000 MALLOC_MMAP_THRESHOLD_=1000000000 MALLOC_TOP_PAD_=67108864",
        ),
    ],
)
def test_each_judgement_says_what_is_amiss_and_what_mends_it(finding, verdict, told, command):
    assert (finding.verdict, finding.command) == (verdict, command)
    assert told in finding.text


@pytest.mark.parametrize(
    ("against", "installed", "same"),
    [
        ("2.13.0+cu126", "2.13.0", True),
        ("2.13.0", "2.13.0+cpu", True),
        ("2.13.0+cpu", "2.13.0+cpu", True),
        ("2.13.0+cu126", "2.13.0+cpu", False),
        ("2.12.1+cpu", "2.13.0", False),
    ],
)
def test_local_parts_of_versions_count_where_both_have_one(against, installed, same):
    finding = findings.horovod(with_(built_for={"torch": against}), {"torch": installed})
    assert finding.verdict == ("ok" if same else "failure")


def test_the_advised_command_is_that_of_the_documentation(request):
    document = (request.config.rootpath / "docs" / "cpu.md").read_text()
    assert findings.allocator({}, "glibc").command in document


# Container limits.


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        (
            "0::/job",
            {
                "cgroup.controllers": "",
                "job/cpu.max": "150000 100000",
                "job/memory.max": "1024",
                "job/memory.current": "1000",
                "job/memory.stat": "anon 250\ninactive_file 700\nactive_file 50",
            },
            (1.5, (1024.0, 300.0)),
        ),
        (
            "2:cpu,cpuacct:/job\n3:memory:/job",
            {
                "cpu,cpuacct/job/cpu.cfs_quota_us": "50000",
                "cpu,cpuacct/job/cpu.cfs_period_us": "100000",
                "memory/job/memory.limit_in_bytes": "2048",
                "memory/job/memory.usage_in_bytes": "512",
                "memory/memory.limit_in_bytes": str(2**63 - 4096),
            },
            (0.5, (2048.0, 512.0)),
        ),
        ("0::/", {"cgroup.controllers": "", "cpu.max": "max 100000", "memory.max": "max"}, (math.inf, (math.inf, 0.0))),
    ],
)
def test_limits_are_read_in_both_versions_of_control_groups(tmp_path, membership, files, expected):
    process, root = tmp_path / "process", tmp_path / "groups"
    process.mkdir()
    (process / "cgroup").write_text(membership + "\n")
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    assert (installed.cpu_quota(process, root), installed.memory_limit(process, root)) == expected


def test_the_backend_is_that_of_the_environment_or_of_the_settings_of_keras(tmp_path):
    assert installed.keras_backend({"HOME": str(tmp_path)}) == "tensorflow"
    (tmp_path / ".keras").mkdir()
    (tmp_path / ".keras" / "keras.json").write_text('{"backend": "jax"}')
    assert installed.keras_backend({"HOME": str(tmp_path)}) == "jax"
    assert installed.keras_backend({"KERAS_HOME": str(tmp_path / ".keras")}) == "jax"
    assert installed.keras_backend({"HOME": str(tmp_path), "KERAS_BACKEND": "torch"}) == "torch"
    (tmp_path / ".keras" / "keras.json").write_text("no settings")
    assert installed.keras_backend({"HOME": str(tmp_path)}) == "tensorflow"


# Two ranks.

SUMMED = "sum 1000 3.0 3.0\n"


def result(*stdout: str) -> LaunchResult:
    return LaunchResult(2, 1.0, stdout, ("", ""), (None, None), "")


def test_two_ranks_that_sum_are_fine_and_run_the_frameworks_own_program():
    seen = []

    def launcher(script, ranks, **options):
        seen.append((script.read_text(), ranks, options["timeout_s"]))
        return result(SUMMED, f"a warning\n{SUMMED}")

    assert two_ranks("torch", 7.0, launcher).verdict == "ok"
    ((program, ranks, timeout),) = seen
    assert "horovod.torch" in program
    assert (ranks, timeout) == (2, 7.0)


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        (("sum 1000 1.0 1.0\n", "sum 1000 2.0 2.0\n"), "must be 'sum 1000 3.0 3.0' on both"),
        ((SUMMED,), "on both"),
        (HangError("slow", result("", ""), {}), "not done after 7 s"),
        (RankError("x on 2 ranks: failed; rank 1 exited with 1", result("", ""), {1: 1}), "rank 1 exited with 1"),
        (FileNotFoundError("horovodrun is neither here nor there"), "horovodrun is neither"),
    ],
)
def test_two_ranks_that_do_not_sum_are_a_failure_with_a_way_on(outcome, told):
    finding = judge("torch", outcome, 7.0)
    assert finding.verdict == "failure"
    assert told in finding.text
    assert finding.command


# The command.


def arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    check.add_arguments(parser)
    return parser.parse_args(argv)


@pytest.mark.parametrize(("verdicts", "code"), [(("ok", "ok"), 0), (("ok", "warning"), 0), (("warning", "failure"), 1)])
def test_the_exit_code_counts_failures_alone(monkeypatch, capsys, verdicts, code):
    monkeypatch.setattr(check, "_findings", lambda *_: [Finding(v, v, "as found", "mend") for v in verdicts])
    assert check.run(arguments()) == code
    assert ("cannot train" in capsys.readouterr().out) == bool(code)


def test_without_a_terminal_lines_are_plain_and_whole(capsys):
    check.write([Finding("threads", "warning", "x" * 300, "export A=1")])
    assert capsys.readouterr().out == (
        f"warning  threads: {'x' * 300}\n         mend it by: export A=1\nThis installation can train: 1 warning.\n"
    )


def test_on_a_terminal_there_is_a_table_and_no_text_is_markup(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    check.write([Finding("threads", "failure", "[bold]no markup[/bold]", "export A=1")])
    out = capsys.readouterr().out
    assert "[bold]no" in out
    assert "mend it by" in out


def test_all_checks_run_on_this_machine_without_a_launch():
    found = list(check._findings(arguments("--no-launch"), {"PATH": "/usr/bin:/bin"}))
    names = [finding.name for finding in found]
    assert names[:4] == ["Python", "compiler", "frameworks", "Horovod"]
    assert names[-4:] == ["container", "cores", "threads", "allocator"]


def test_a_broken_horovod_is_not_launched(monkeypatch):
    monkeypatch.setattr("hvd_hetero.tools.cli.installed.read_horovod", lambda: with_(built_for={}))
    launched = types.SimpleNamespace(two_ranks=None)
    monkeypatch.setattr("hvd_hetero.tools.cli.findings.two_ranks", launched.two_ranks)
    found = list(check._findings(arguments(), {"PATH": "/usr/bin:/bin"}))
    assert [finding.verdict for finding in found if finding.name == "Horovod"] == ["failure"]


@pytest.mark.parametrize("argv", [("--ranks", "0"), ("--timeout", "0"), ("--timeout", "nan")])
def test_wrong_options_are_named(argv):
    with pytest.raises(ValueError, match=argv[0]):
        check.run(arguments(*argv))
