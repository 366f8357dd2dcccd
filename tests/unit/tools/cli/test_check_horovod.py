"""Which Horovod is installed, by its files: one of ``hvd-hetero build-horovod``, an earlier one, or a stock one."""

from __future__ import annotations

import pytest

from hvd_hetero.horovod_build.edits import PACKAGE_EDITS, SOURCE_EDITS
from hvd_hetero.horovod_build.edits.rendezvous import RENDEZVOUS_EDITS
from hvd_hetero.tools.cli.installation.horovod_facts import HorovodFacts, horovod_in, read_horovod


def tree(root, *, edited, torch=True):
    """Write as much of an installed Horovod as is looked at."""
    texts = {}
    for edit in (*SOURCE_EDITS, *PACKAGE_EDITS):
        if edit.path.endswith(".py"):
            texts[edit.path] = texts.get(edit.path, "") + (edit.new if edited(edit) else edit.old)
    for path, text in texts.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "horovod" / "metadata.json").write_text('{"pytorch": "2.13.0", "dummy": "none"}')
    for folder, name in (("torch", "mpi_lib_v2.cpython-311.so"), ("tensorflow", "mpi_lib.cpython-311.so"))[not torch :]:
        (root / "horovod" / folder).mkdir(parents=True, exist_ok=True)
        content = b"\0N7horovod6common13GlooAllreduceE\0" + (b"HOROVOD_WAIT_SLEEP_US\0" if edited(None) else b"")
        (root / "horovod" / folder / name).write_bytes(content)
    return horovod_in(root, "0.28.1")


def test_a_horovod_with_all_edits_is_known_by_its_files(tmp_path):
    found = tree(tmp_path, edited=lambda edit: True)
    assert found == HorovodFacts("0.28.1", {"torch": "2.13.0", "tensorflow": ""}, ("Gloo",), has_edits=True, lacks=())


def test_a_stock_horovod_is_known_and_what_it_lacks_is_told(tmp_path):
    found = tree(tmp_path, edited=lambda edit: False)
    assert not found.has_edits
    assert len(found.lacks) == 7
    assert "CVE-2024-10190" in " ".join(found.lacks)


def test_a_horovod_of_an_earlier_build_lacks_one_thing(tmp_path):
    late = "horovod/runner/elastic/discovery.py"
    found = tree(tmp_path, edited=lambda edit: edit is None or edit.path != late)
    assert found.has_edits
    assert found.lacks == ("discovery scripts of elastic jobs that cost little and have a time limit",)


def test_a_launcher_of_an_earlier_build_is_not_taken_for_an_open_one(tmp_path):
    """Edits of two purposes change its server."""
    found = tree(tmp_path, edited=lambda edit: edit not in RENDEZVOUS_EDITS)
    assert found.lacks == ("ranks that find each other at once (16 of them otherwise in 22 s)",)


def test_a_horovod_for_tensorflow_alone_has_no_word_to_look_for(tmp_path):
    assert tree(tmp_path, edited=lambda edit: True, torch=False).lacks == ()


def test_the_horovod_of_this_environment_is_the_built_one():
    pytest.importorskip("horovod")
    found = read_horovod()
    assert found.lacks == ()
    assert "Gloo" in found.operations
