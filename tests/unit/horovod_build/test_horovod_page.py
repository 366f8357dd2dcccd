"""The page of the patches has them all, and names tests that exist."""

import re
from pathlib import Path

import pytest

from horovod_build import series

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "horovod.md").read_text(encoding="utf-8")


def test_the_page_has_each_patch_below_its_purpose_in_the_order_of_the_series():
    rows = re.findall(r"^\| \[([\w-]+)\]\(\.\./packaging/horovod/horovod_build/patches/([\w.-]+)\)", PAGE, re.MULTILINE)
    assert [file for _, file in rows] == [f"{name}.patch" for name, _ in rows] == [patch.name for patch in series()]
    headings = [line.removeprefix("## ").lower() for line in PAGE.splitlines() if line.startswith("## ")]
    assert headings[:-1] == list(dict.fromkeys(patch.purpose.lower() for patch in series()))


@pytest.mark.parametrize("test", sorted(set(re.findall(r"`(tests/[^`]+)`", PAGE))))
def test_the_tests_that_the_page_names_exist(test):
    file, _, name = test.partition("::")
    assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")
