"""Which Horovod is installed, by its files: one of ``hvd-hetero build-horovod``, an earlier one, or a stock one."""

from __future__ import annotations

import sys

import pytest

from horovod_build import series
from hvd_hetero.tools.cli.installed import HorovodFacts, horovod_in, read_horovod

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
