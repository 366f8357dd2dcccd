"""The source of Horovod: download, hash, edits."""

from pathlib import Path

import pytest
from fake_builds import FAKE_FILES, make_sdist

from hvd_hetero.horovod_build import source
from hvd_hetero.horovod_build.edits import PACKAGE_EDITS, SOURCE_EDITS, Edit
from hvd_hetero.horovod_build.errors import HorovodBuildError


def test_edits_change_what_they_name(tmp_path: Path) -> None:
    """After the edits, both standards are 17, and the XLA source is gone; other files stay."""
    for name, text in FAKE_FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    source.apply_edits(tmp_path, SOURCE_EDITS)
    assert "set(CMAKE_CXX_STANDARD 17)" in (tmp_path / "CMakeLists.txt").read_text()
    assert "set(CMAKE_CXX_STANDARD 17)" in (tmp_path / "horovod/torch/CMakeLists.txt").read_text()
    assert "xla" not in (tmp_path / "horovod/tensorflow/CMakeLists.txt").read_text()
    assert (tmp_path / "setup.py").read_text() == FAKE_FILES["setup.py"]


@pytest.mark.parametrize("edit", [SOURCE_EDITS[0], PACKAGE_EDITS[0]], ids=lambda edit: edit.path)
@pytest.mark.parametrize("places", [0, 2, None], ids=["nothing to change", "two places", "no such file"])
def test_an_edit_that_does_not_fit_names_its_file(tmp_path: Path, edit: Edit, places: int | None) -> None:
    """Zero or two places to change, or no file, are errors that name the file, and the file stays as it was."""
    path = tmp_path / edit.path
    path.parent.mkdir(parents=True, exist_ok=True)
    if places is not None:
        path.write_text(edit.old * places)
    with pytest.raises(HorovodBuildError, match=f"^{edit.path}.*exactly once.*found {places or 0} times"):
        source.apply_edits(tmp_path, (edit,))
    assert places is None or path.read_text() == edit.old * places


def test_download_with_another_hash_is_refused(tmp_path: Path) -> None:
    """A wrong file is an error with both hashes, and is not kept."""

    def download(into: Path, log: Path) -> None:
        (into / source.SDIST_NAME).write_text("something else")

    kept, work = tmp_path / "kept", tmp_path / "work"
    kept.mkdir()
    work.mkdir()
    with pytest.raises(HorovodBuildError, match=f"{source.SDIST_SHA256}.*but it is [0-9a-f]{{64}}"):
        source.fetch(kept, work, tmp_path / "log", download)
    assert list(kept.iterdir()) == []


def test_source_is_downloaded_once_and_again_if_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kept copy is used while it is intact; a damaged one is replaced."""
    original = make_sdist(tmp_path / "original", FAKE_FILES, monkeypatch)
    kept, work, calls = tmp_path / "kept", tmp_path / "work", []
    kept.mkdir()
    work.mkdir()

    def download(into: Path, log: Path) -> None:
        calls.append(into)
        (into / source.SDIST_NAME).write_bytes(original.read_bytes())

    for damage, downloads in ((False, 1), (False, 1), (True, 2)):
        if damage:
            (kept / source.SDIST_NAME).write_bytes(original.read_bytes()[:100])
        found = source.fetch(kept, work, tmp_path / "log", download)
        assert found.read_bytes() == original.read_bytes()
        assert len(calls) == downloads
