"""``hvd-hetero check``: each judgement by what was read, so that no machine need be broken, and the whole command."""

import argparse
import math
import sys

import pytest

from horovod_build import series
from hvd_hetero.testing import HangError, LaunchResult, RankError, torchrun
from hvd_hetero.tools.cli import check, installed
from hvd_hetero.tools.cli import findings as of
from hvd_hetero.tools.cli.build_horovod import BUILDER_MISSING
from hvd_hetero.tools.cli.findings import Finding, judge, two_ranks
from hvd_hetero.tools.cli.installed import HorovodFacts, horovod_in, read_horovod

TORCH = {"torch": "2.13.0"}
TENSORFLOW = {"tensorflow": "2.21.0"}
BOTH = {**TORCH, **TENSORFLOW}
OURS = HorovodFacts("0.28.1", BOTH, ("Gloo",), is_patched=True, lacks=())
KEPT = {"MALLOC_TRIM_THRESHOLD_": "1", "MALLOC_MMAP_THRESHOLD_": "1", "MALLOC_TOP_PAD_": "1"}
KEEP = "export MALLOC_TRIM_THRESHOLD_=1000000000 MALLOC_MMAP_THRESHOLD_=1000000000 MALLOC_TOP_PAD_=67108864"
KERAS_3 = "pip install 'tensorflow>=2.16' 'keras>=3'"
TOOLS = (
    "to build Horovod 0.28.1, this machine lacks\n  - a C++ compiler: `apt install g++` (Debian, Ubuntu)\n"
    "  - make: `apt install make` (Debian, Ubuntu)"
)


def with_(**changes):
    fields = {name: getattr(OURS, name) for name in HorovodFacts.__dataclass_fields__}
    return HorovodFacts(**{**fields, **changes})


@pytest.mark.parametrize(
    ("finding", "verdict", "command"),
    [
        (of.python((3, 11, 7)), "ok", ""),
        (of.python((3, 10, 1)), "failure", "apt install python3.11-venv"),
        (of.tools("", needed=True), "ok", ""),
        (of.tools(TOOLS, needed=True), "failure", "apt install g++ && apt install make"),
        (of.tools(TOOLS, needed=False), "warning", "apt install g++ && apt install make"),
        (of.tools(BUILDER_MISSING, needed=False), "warning", "pip install ./packaging/horovod"),
        (of.frameworks(BOTH), "ok", ""),
        (of.frameworks({}), "failure", "pip install torch"),
        (of.horovod(OURS, BOTH), "ok", ""),
        (of.horovod(OURS, TORCH), "ok", ""),
        (of.horovod(with_(version=None), BOTH), "warning", of.BUILD),
        (of.horovod(with_(version=None), TENSORFLOW), "failure", of.BUILD),
        (of.horovod(with_(built_for={}), BOTH), "failure", of.BUILD),
        (of.horovod(with_(built_for=TORCH), BOTH), "warning", of.BUILD),
        (of.horovod(with_(built_for={"torch": "2.12.0"}), TORCH), "failure", f"{of.BUILD} --force"),
        (of.horovod(with_(built_for={"torch": ""}), TORCH), "ok", ""),
        (of.horovod_operations(OURS, 0), "ok", ""),
        (of.horovod_operations(with_(operations=("MPI",)), 0), "warning", f"{of.BUILD} --force"),
        (of.horovod_operations(OURS, 2), "warning", f"HOROVOD_GPU_OPERATIONS=NCCL {of.BUILD} --force"),
        (of.horovod_operations(with_(operations=("Gloo", "NCCL")), 2), "ok", ""),
        (of.horovod_patches(OURS), "ok", ""),
        (of.horovod_patches(with_(is_patched=False, lacks=("a launcher that",))), "warning", f"{of.BUILD} --force"),
        (of.horovod_patches(with_(lacks=("x",))), "warning", f"{of.BUILD} --force"),
        (of.keras(TORCH, {}), "ok", ""),
        (of.keras({**BOTH, "keras": "3.15.1"}, {}), "ok", ""),
        (of.keras({**BOTH, "keras": "2.15.0"}, {}), "warning", KERAS_3),
        (of.keras({"tensorflow": "2.15.0", "keras": "2.15.0"}, {}), "failure", KERAS_3),
        (of.keras(BOTH, {}), "failure", "pip install 'keras>=3'"),
        (of.keras({**BOTH, "keras": "3.15.1"}, {}, "jax"), "warning", "export KERAS_BACKEND=tensorflow"),
        (of.keras({**TENSORFLOW, "keras": "3.15.1"}, {}, "jax"), "failure", "export KERAS_BACKEND=tensorflow"),
        (of.keras({**BOTH, "keras": "3.15.1"}, {"TF_USE_LEGACY_KERAS": "1"}), "failure", "pip install tf_keras"),
        (of.keras({**BOTH, "tf_keras": "2.21.0"}, {"TF_USE_LEGACY_KERAS": "1"}), "ok", ""),
        (of.container(math.inf, 4, math.inf, 0.0, 4), "ok", ""),
        (of.container(1.5, 4, math.inf, 0.0, 2), "warning", "docker update --cpus 2 CONTAINER"),
        (of.container(2.0, 4, math.inf, 0.0, 2), "ok", ""),
        (of.container(8.0, 4, 2.0**30, 2.0**29, 2), "ok", ""),
        (of.container(8.0, 4, 2.0**30, 0.95 * 2**30, 2), "warning", "docker update --memory 2g CONTAINER"),
        (of.cores(4, 2), "ok", ""),
        (of.cores(2, 3), "warning", "horovodrun -np 2 …"),
        (of.threads("", 4, 2), "warning", "export OMP_NUM_THREADS=2"),
        (of.threads("", 4, 1), "ok", ""),
        (of.threads("", 1, 2), "ok", ""),
        (of.threads("2", 4, 2), "ok", ""),
        (of.threads("4", 4, 2), "warning", "export OMP_NUM_THREADS=2"),
        (of.threads("1", 2, 4), "ok", ""),
        (of.threads("all", 4, 2), "warning", "export OMP_NUM_THREADS=2"),
        (of.threads("2,1", 4, 2), "ok", ""),
        (of.allocator(KEPT, "glibc"), "ok", ""),
        (of.allocator({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, "glibc"), "ok", ""),
        (of.allocator({}, ""), "ok", ""),
        (of.allocator({**KEPT, "MALLOC_TOP_PAD_": ""}, "glibc"), "warning", KEEP),
    ],
)
def test_each_judgement_says_what_mends_it(finding, verdict, command):
    assert (finding.verdict, finding.command) == (verdict, command)
    assert finding.text


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
    finding = of.horovod(with_(built_for={"torch": against}), {"torch": installed})
    assert finding.verdict == ("ok" if same else "failure")


def test_the_advised_command_is_that_of_the_documentation(request):
    document = (request.config.rootpath / "docs" / "cpu.md").read_text()
    assert of.allocator({}, "glibc").command in document


def test_the_backend_is_that_of_the_environment_or_of_the_settings_of_keras(tmp_path):
    assert installed.keras_backend({"HOME": str(tmp_path)}) == "tensorflow"
    (tmp_path / ".keras").mkdir()
    (tmp_path / ".keras" / "keras.json").write_text('{"backend": "jax"}')
    assert installed.keras_backend({"HOME": str(tmp_path)}) == "jax"
    assert installed.keras_backend({"KERAS_HOME": str(tmp_path / ".keras")}) == "jax"
    assert installed.keras_backend({"HOME": str(tmp_path), "KERAS_BACKEND": "torch"}) == "torch"
    (tmp_path / ".keras" / "keras.json").write_text("no settings")
    assert installed.keras_backend({"HOME": str(tmp_path)}) == "tensorflow"


SUMMED = "sum 1000 3.0 3.0\n"


def result(*stdout):
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


def arguments(*argv):
    parser = argparse.ArgumentParser()
    check.add_arguments(parser)
    return parser.parse_args(argv)


@pytest.mark.parametrize(("verdicts", "code"), [(("ok", "ok"), 0), (("ok", "warning"), 0), (("warning", "failure"), 1)])
def test_the_exit_code_counts_failures_alone(monkeypatch, capsys, verdicts, code):
    monkeypatch.setattr(check, "_findings", lambda *_: [Finding(v, v, "as found", "mend") for v in verdicts])
    assert check.run(arguments()) == code
    assert ("cannot train" in capsys.readouterr().out) == bool(code)


def test_all_checks_run_on_this_machine_without_a_launch():
    found = list(check._findings(arguments("--no-launch"), {"PATH": "/usr/bin:/bin"}))
    names = [finding.name for finding in found]
    assert names[:4] == ["Python", "compiler", "frameworks", "Horovod"]
    assert names[-4:] == ["container", "cores", "threads", "allocator"]


# Where PyTorch is installed and Horovod is not, torchrun can train, so nothing is broken.

ABSENT = HorovodFacts(None, {}, (), is_patched=False, lacks=())


@pytest.fixture
def without_horovod(monkeypatch):
    """Those of the command; PyTorch is here, without Horovod and a compiler, and no rank is launched."""
    monkeypatch.setattr("hvd_hetero.tools.cli.installed.read_horovod", lambda: ABSENT)
    monkeypatch.setattr(installed, "frameworks", lambda environ: {"torch": "2.13.0"})
    monkeypatch.setattr(installed, "missing_tools", lambda environ: "this machine lacks\n  - make: `apt install make`")
    ranks = "hvd_hetero.tools.cli.findings.two_ranks"
    monkeypatch.setattr(ranks, lambda framework, timeout_s: Finding(f"two ranks, {framework}", "ok", "sum"))
    parser = argparse.ArgumentParser()
    check.add_arguments(parser)
    return parser.parse_args([])


def test_it_can_train_and_is_told_what_it_lacks_for_keras(without_horovod, capsys):
    assert check.run(without_horovod, {"PATH": "/usr/bin:/bin"}) == 0
    out = capsys.readouterr().out
    assert "warning  Horovod: not installed; PyTorch trains with torchrun, Keras needs it" in out
    assert "repair it by: hvd-hetero build-horovod --install" in out
    assert "warning  compiler: this is missing if Horovod is to be built here: make" in out
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


# Which Horovod is installed, by its files.

RECORD = "".join(patch.line for patch in series())


def tree(root, record):
    """Write as much of an installed Horovod as is looked at."""
    (root / "horovod").mkdir()
    (root / "horovod" / "metadata.json").write_text('{"pytorch": "2.13.0", "dummy": "none"}')
    for folder, name in (("torch", "mpi_lib_v2.cpython-311.so"), ("tensorflow", "mpi_lib.cpython-311.so")):
        (root / "horovod" / folder).mkdir()
        (root / "horovod" / folder / name).write_bytes(b"\0N7horovod6common13GlooAllreduceE\0")
    return horovod_in(root, "0.28.1", record)


def test_a_horovod_with_all_patches_is_known_by_its_record(tmp_path):
    found = tree(tmp_path, RECORD)
    assert found == HorovodFacts("0.28.1", {"torch": "2.13.0", "tensorflow": ""}, ("Gloo",), is_patched=True, lacks=())


def test_a_stock_horovod_is_known_and_what_it_lacks_is_told(tmp_path):
    found = tree(tmp_path, "")
    assert not found.is_patched
    assert found.lacks == tuple(dict.fromkeys(patch.purpose for patch in series()))
    assert "CVE-2024-10190" in " ".join(found.lacks)


@pytest.mark.parametrize("text", ["", "another text"])
def test_a_horovod_of_an_earlier_build_lacks_what_is_new_and_what_has_changed(tmp_path, text):
    patch = next(patch for patch in series() if patch.name == "cheap-discovery.patch")
    earlier = patch.line.replace(patch.line[:64], "0" * 64) if text else ""
    found = tree(tmp_path, RECORD.replace(patch.line, earlier))
    assert found.is_patched
    assert found.lacks == (patch.purpose,)


def test_without_the_builder_a_horovod_is_known_as_stock_or_not(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod_build", None)
    for folder, record, lacks in (("stock", "", ("the patches of hvd-hetero",)), ("ours", RECORD, ())):
        (tmp_path / folder).mkdir()
        assert tree(tmp_path / folder, record).lacks == lacks


def test_the_horovod_of_this_environment_is_the_built_one():
    pytest.importorskip("horovod")
    found = read_horovod()
    assert found.lacks == ()
    assert "Gloo" in found.operations
