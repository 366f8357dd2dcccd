"""Each message that the page on troubleshooting quotes is still printed by the packages' sources."""

import ast
import re
from functools import cache

import doc_blocks
import pytest

PAGE = doc_blocks.ROOT / "docs" / "troubleshooting.md"
NOT_OURS = "## Messages of other programs"
PATCHES = doc_blocks.ROOT / "packaging" / "horovod" / "horovod_build" / "patches"
PACKAGES = ("hvd_hetero", "torch_hooks", "keras_callbacks", "packaging/horovod/horovod_build")


def quoted(text):
    """The messages: what stands as code in the first cell of a table's row."""
    ours = text.partition(NOT_OURS)[0]
    return re.findall(r"^\| `([^`]+)` \|", ours, re.MULTILINE)


MESSAGES = quoted(PAGE.read_text(encoding="utf-8"))


@cache
def sources():
    """The strings of each module but docstrings, and what patches add; what is filled in later is an …."""
    files = [path for package in PACKAGES for path in (doc_blocks.ROOT / package).rglob("*.py")]
    found = {path: list(texts(ast.parse(path.read_text(encoding="utf-8")))) for path in files}
    return found | {path: [added(path.read_text(encoding="utf-8"))] for path in PATCHES.glob("*.patch")}


def added(patch):
    """The lines that a patch adds, with strings over several lines as one."""
    lines = "\n".join(line[1:] for line in patch.splitlines() if line.startswith("+"))
    return re.sub(r"\{\w*[^{}]*\}", "…", re.sub(r"""['"]\s*\n\s*f?['"]""", "", lines))


def texts(tree):
    """Yield each string of a module; of an f-string, its fixed parts with an … between them."""
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in told:
            continue
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[sdrgf]|\{\w*[^{}]*\}", "…", node.value)


def printed_by(message):
    """The modules in which each part of a message stands in a string: some messages are put together."""
    parts = [part for piece in message.split("…") if (part := piece.strip(" ().:;,'\""))]
    assert max(map(len, parts)) >= 8, "a message needs a part that is found by searching"
    return [path for path, told in sources().items() if all(any(part in text for text in told) for part in parts)]


def test_the_page_quotes_messages():
    assert len(MESSAGES) >= 60
    assert len(set(MESSAGES)) == len(MESSAGES)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_page_is_still_printed(message):
    assert printed_by(message), "no module has this text any more"


@pytest.mark.parametrize(
    "message", ["policy … is wholly unknown to us", "global_batch must be at least the number of gods"]
)
def test_a_message_that_nobody_prints_is_found(message):
    assert not printed_by(message)
