"""What is built, for which frameworks, and the key by which a cache knows it."""

import importlib.util
import subprocess
from functools import partial
from pathlib import Path

import pytest
from fake_builds import COMPILED, PYTHON, TENSORFLOW, TORCH, add_package, use_patches

from horovod_build import HorovodBuildError, command, plan, series, source
from horovod_build.plan import Framework, make_plan


def test_key_changes_with_whatever_changes_the_binary():
    """Every framework, version, interpreter, C library and build variable makes another key."""
    one = make_plan((TORCH, TENSORFLOW), {})
    others = [
        make_plan((TORCH,), {}),
        make_plan((TENSORFLOW,), {}),
        make_plan((Framework("torch", "PYTORCH", "2.13.0+cpu"), TENSORFLOW), {}),
        make_plan((TORCH, TENSORFLOW), {"HOROVOD_WITH_MPI": "1"}),
        make_plan((TORCH, TENSORFLOW), {"CXXFLAGS": "-O0"}),
        plan.BuildPlan(one.frameworks, "cpython-312", one.libc, one.variables),
        plan.BuildPlan(one.frameworks, one.python, "glibc2.17", one.variables),
    ]
    assert len({one.key, *(other.key for other in others)}) == 1 + len(others)


def test_key_changes_with_the_patches(monkeypatch, torch_plan):
    """A wheel of an older recipe is not taken for one of the new."""
    keys = []
    for patches in ((COMPILED, PYTHON), (COMPILED,), (PYTHON,)):
        use_patches(monkeypatch, *patches)
        keys.append((torch_plan.key, torch_plan.parts[0].key))
    (key, compiled), (without_python, same), (without_compiled, other) = keys
    assert len({key, without_python, without_compiled}) == 3
    assert compiled == same, "a change in a Python file compiles nothing again"
    assert other != compiled


@pytest.fixture
def set_up(monkeypatch):
    """The script behind every target of the Makefile."""
    scripts = Path(__file__).parents[3] / "scripts"
    monkeypatch.syspath_prepend(scripts)
    spec = importlib.util.spec_from_file_location("set_up", scripts / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_set_up_of_a_checkout_builds_anew_when_any_part_of_the_recipe_changes(set_up):
    """Its stamps are hashes of all files of the recipe, the patches included."""
    contents = [stage.content for stage in set_up.stages() if stage.name in ("horovod", "tensorflow")]
    assert len(contents) == 2
    texts = [Path(part.__file__ or "").read_text() for part in (command, source)]
    for text in (*texts, *(patch.text for patch in series())):
        assert all(text in content for content in contents)


def test_the_demo_waits_for_torch_alone(set_up, tmp_path, monkeypatch):
    """Its stages are the first of all, so that what comes later goes on from there and does nothing again."""
    monkeypatch.setattr(set_up, "VENV", tmp_path / "venv")
    monkeypatch.setattr(set_up, "STAMPS", tmp_path / "stamps")
    monkeypatch.setattr(set_up, "INSTALLED", tmp_path / "installed")
    monkeypatch.setattr(set_up, "STATE", tmp_path)
    monkeypatch.setattr(set_up, "listed", lambda: subprocess.CompletedProcess([], 0, "", ""))
    ran: list[str] = []
    whole = [stage._replace(action=partial(_note, ran, stage.name)) for stage in set_up.stages()]
    monkeypatch.setattr(set_up, "stages", lambda: whole)
    assert set_up.main(["torch"]) == 0
    assert ran == ["venv", "tools", "project", "check", "torch", "horovod"]
    assert set_up.main([]) == 0
    assert ran[6:] == ["development", "tensorflow"]
    assert set_up.main(["torch"]) == set_up.main([]) == 0
    assert len(ran) == 8
    assert set_up.main(["jax"]) == 2
    before = whole[4]
    for pinned in (before._replace(content="another torch"), before):
        whole[4] = pinned
        assert set_up.main(["torch"]) == 0
    del ran[:]
    assert set_up.main([]) == 0
    assert ran == ["development", "tensorflow"], "Horovod is for torch alone now, though all pins are the old ones"


def test_horovod_for_torch_is_built_without_a_tensorflow_from_before(set_up, monkeypatch):
    """A pin may have changed: the old TensorFlow's part would be compiled for nothing. The last stage has both."""
    monkeypatch.setattr(set_up.subprocess, "run", lambda *_, env, **__: subprocess.CompletedProcess([], len(env)))
    without = {stage.name: stage.action() for stage in set_up.stages() if stage.name in ("horovod", "tensorflow")}
    assert without["horovod"] == without["tensorflow"] + 1


def _note(ran, name):
    ran.append(name)
    return 0


def test_key_is_the_same_inside_a_job(torch_plan):
    """Horovod's run-time variables do not enter the key, and the key is one path component."""
    inside = make_plan((TORCH,), {"HOROVOD_RANK": "1", "HOROVOD_CYCLE_TIME": "2", "PATH": "/bin"})
    assert inside.key == torch_plan.key
    assert "/" not in torch_plan.key


def test_absent_frameworks_are_switched_off(torch_plan):
    """A build for torch alone says so to Horovod, and is by Gloo, without MPI."""
    variables = dict(torch_plan.variables)
    assert variables["HOROVOD_WITH_PYTORCH"] == variables["HOROVOD_WITHOUT_TENSORFLOW"] == "1"
    assert variables["HOROVOD_WITH_GLOO"] == variables["HOROVOD_WITHOUT_MPI"] == "1"
    assert "HOROVOD_WITH_TENSORFLOW" not in variables


def test_users_build_variables_win():
    """Who asks for MPI gets it, and no contradiction beside it; own compiler flags stay."""
    variables = dict(make_plan((TORCH,), {"HOROVOD_WITH_MPI": "1", "CXXFLAGS": "-O1"}).variables)
    assert variables["HOROVOD_WITH_MPI"] == "1"
    assert "HOROVOD_WITHOUT_MPI" not in variables
    assert variables["CXXFLAGS"].startswith("-O1 ")


def test_frameworks_are_found_without_importing_them(site):
    """Both frameworks are named with the versions of their distributions; one that is switched off is left out."""
    add_package(site, "torch", "9.1")
    add_package(site, "tensorflow", "8.2", distribution="tensorflow_cpu")
    assert [(f.module, f.version) for f in plan.find_frameworks({})] == [("torch", "9.1"), ("tensorflow", "8.2")]
    assert [f.module for f in plan.find_frameworks({"HOROVOD_WITHOUT_PYTORCH": "1"})] == ["tensorflow"]


def test_a_framework_whose_version_is_not_known_is_named(site):
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").touch()
    with pytest.raises(HorovodBuildError, match="version of torch"):
        plan.find_frameworks({})


def test_no_framework_is_an_error_with_a_remedy(site):
    """A mere directory called torch is not torch, and the error says what to install."""
    (site / "torch").mkdir()
    with pytest.raises(HorovodBuildError, match=r"torch.*tensorflow.*pip install torch"):
        plan.find_frameworks({})
