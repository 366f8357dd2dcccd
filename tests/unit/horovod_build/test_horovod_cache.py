"""Built wheels that are kept, and builds that meet at the cache."""

import os
import re
import threading

import pytest
from fake_builds import FAKE_FILES, SILENT, TENSORFLOW, TOOLS, TORCH, make_sdist, make_wheel, torch_wheel
from rich.console import Console

from horovod_build import HorovodBuildError, command, progress
from horovod_build.cache import WheelCache, cache_root
from horovod_build.plan import make_plan
from hvd_hetero.tools import cli


def test_a_hit_needs_no_tools(bare, cache, torch_plan, tmp_path):
    """What is cached is returned on a machine that could not build it."""
    wheel = cache.store(torch_plan, torch_wheel(tmp_path / "horovod-0.28.1-x.whl"))
    assert command.ensure_wheel(torch_plan, cache, {"PATH": str(bare)}, SILENT, jobs=1) == wheel


def test_a_wheel_is_a_hit_only_as_it_was_stored(cache, tmp_path):
    """Not one that was cut short, nor one with other content, nor one of which it is not known what it was."""
    both = make_plan((TORCH, TENSORFLOW), {})
    names = ("horovod/torch/mpi_lib_v2.so", "horovod/tensorflow/mpi_lib.so")
    path = cache.store(both, make_wheel(tmp_path / "horovod-0.28.1-x.whl", *names))
    assert cache.find(both) == path
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    assert cache.find(both) is None
    make_wheel(path, *names, "horovod/another.py")
    assert cache.find(both) is None, "all names are there"
    path.write_bytes(whole)
    assert cache.find(both) == path
    path.with_name(path.name + ".sha256").unlink()
    assert cache.find(both) is None


def test_a_wheel_without_its_extension_is_not_stored(cache, torch_plan, tmp_path):
    """Horovod may build without what it did not find; that is an error that names the framework and the log."""
    built = make_wheel(tmp_path / "horovod-0.28.1-x.whl", "horovod/__init__.py")
    with pytest.raises(HorovodBuildError, match=r"no extension for torch.*build\.log"):
        cache.store(torch_plan, built)
    assert cache.find(torch_plan) is None


def test_an_interrupted_build_leaves_nothing(cache, small, torch_plan, tmp_path, monkeypatch):
    """Interrupted while compiling: no wheel, no work directory, and the next build starts from scratch and succeeds."""
    sdist = make_sdist(tmp_path / "sdist", FAKE_FILES, monkeypatch)
    monkeypatch.setattr(command, "find_toolchain", lambda environ: TOOLS)
    with monkeypatch.context() as patch:
        patch.setattr(command, "compile_wheel", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            command.ensure_wheel(torch_plan, cache, {}, SILENT, jobs=1, sdist=sdist)
    assert cache.find(torch_plan) is None
    assert list(cache.root.glob("work-*")) == []
    assert command.ensure_wheel(torch_plan, cache, os.environ, SILENT, jobs=1, sdist=sdist).exists()


def _interrupt(*_):
    raise KeyboardInterrupt


def test_what_a_killed_build_left_is_swept(cache):
    """The next build removes work directories that nobody is left to own."""
    (cache.root / "work-killed" / "deep").mkdir(parents=True)
    with cache.locked(pytest.fail), cache.workspace() as work:
        assert [path.name for path in cache.root.glob("work-*")] == [work.name]


def test_a_second_build_waits_and_takes_the_first_ones_wheel(cache, torch_plan, tmp_path, monkeypatch):
    """While the lock is held, another build says so and waits; then it finds the wheel and does not build."""
    monkeypatch.setattr(command, "find_toolchain", lambda environ: TOOLS)
    monkeypatch.setattr(command, "fetch", lambda *_: pytest.fail("the second build must not build"))
    waiting, found = threading.Event(), []

    class Reporter(progress.Reporter):
        def note(self, text):
            if f"process {os.getpid()}" in text:
                waiting.set()

    def second():
        found.append(command.ensure_wheel(torch_plan, cache, {}, Reporter(Console(quiet=True)), jobs=1))

    thread = threading.Thread(target=second)
    with cache.locked(pytest.fail):
        thread.start()
        assert waiting.wait(10)
        assert found == []
        wheel = cache.store(torch_plan, torch_wheel(cache.root / "horovod-0.28.1-x.whl"))
    thread.join(10)
    assert found == [wheel]


def _answer(cache_home, monkeypatch, torch_plan):
    """What the command makes of a cache that holds the wanted wheel."""
    monkeypatch.setattr(command, "make_plan", lambda *_: torch_plan)
    monkeypatch.setattr(command, "find_frameworks", lambda *_: ())
    return cli.main(["build-horovod", "--print-path", "--quiet"])


@pytest.fixture
def cached(tmp_path, monkeypatch, torch_plan):
    """A cache directory of the user's own, which holds a wheel; returns the folder of XDG_CACHE_HOME."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    old = os.umask(0)
    try:
        cache = WheelCache(cache_root(os.environ))
        with cache.locked(lambda _: None):
            cache.store(torch_plan, torch_wheel(tmp_path / "horovod-0.28.1-x.whl"))
        (tmp_path / "home").chmod(0o755)
    finally:
        os.umask(old)
    return tmp_path / "home"


@pytest.mark.parametrize(
    "what", ["hvd-hetero", "hvd-hetero/horovod", "hvd-hetero/horovod/*", "hvd-hetero/horovod/*/*.whl", "."]
)
def test_a_cache_that_others_can_write_to_is_refused(cached, what, monkeypatch, torch_plan, capsys):
    """Also by root, whose installation would run what they have put there."""
    path = cached if what == "." else next(each for each in cached.glob(what) if each.name != "lock")
    path.chmod(0o777)
    assert _answer(cached, monkeypatch, torch_plan) == 1
    said = capsys.readouterr()
    assert ".whl" not in said.out
    assert re.search(
        rf"not yours alone: {path} has the owner \d+ and mode 777.*XDG_CACHE_HOME", " ".join(said.err.split())
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_cache_of_somebody_else_is_refused(cached, monkeypatch, torch_plan, capsys):
    os.chown(cached / "hvd-hetero", 65534, 65534)
    assert _answer(cached, monkeypatch, torch_plan) == 1
    assert "not yours alone" in capsys.readouterr().err


def test_a_folder_where_everybody_may_make_files_of_their_own_may_hold_the_cache(cached, monkeypatch, torch_plan):
    """As /tmp does."""
    cached.chmod(0o1777)
    assert _answer(cached, monkeypatch, torch_plan) == 0
