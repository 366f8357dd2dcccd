"""What the documentation shows as commands and as Python, taken from its pages."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))

_BLOCK = re.compile(r"^( *)(`{3,})(\w*)\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
_SETTING = r"(?:\w+=\S+ )*"  # variables of the environment, before a command
_PROGRAM = re.compile(
    rf"^(?:export |{_SETTING}(?:hvd-hetero|make|pip|\S*python\S*|horovodrun|torchrun|kubectl|docker) )"
)
_SHELL = ("sh", "bash", "console", "shell")


class Block(NamedTuple):
    """A fenced block: its page, its first line's number, its language, its text."""

    page: str
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page."""
    text, name = page.read_text(encoding="utf-8"), page.relative_to(ROOT).as_posix()
    return [Block(name, text[: m.start()].count("\n") + 2, m[3], _dedented(m[4], m[1])) for m in _BLOCK.finditer(text)]


def _dedented(text: str, indent: str) -> str:
    return "".join(line.removeprefix(indent) for line in text.splitlines(keepends=True))


def is_python(block: Block) -> bool:
    return block.language in ("python", "py", "pycon")


def holds_commands(block: Block) -> bool:
    """Whether a block is for a shell: by its language or, without one, by a line that begins with a program."""
    if block.language:
        return block.language in _SHELL
    return any(_PROGRAM.match(line) for line in block.text.splitlines())


def commands(page: Path) -> Iterator[tuple[str, str]]:
    """Yield (where, command) for each command of a page, in its order: those of blocks, and ``hvd-hetero …`` in text.

    Comments are left out, and a line that ends with a backslash goes on in the next one.
    """
    text = page.read_text(encoding="utf-8")
    for block in filter(holds_commands, blocks(page)):
        for line in block.text.replace("\\\n", " ").splitlines():
            if command := _without_comment(line):
                yield block.where, command
    for span in spans(text):
        if re.match(r"hvd-hetero \S+ \S", span):
            yield page.relative_to(ROOT).as_posix(), span


def spans(text: str) -> list[str]:
    """All code that stands within a line's text."""
    return [" ".join(match[2].split()) for match in _CODE.finditer(_BLOCK.sub("", text))]


def _without_comment(line: str) -> str:
    """The line up to a # that begins a word, outside of quotes."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # a quote goes on in the next line
        return line.strip()
    if not words:
        return ""
    for at in (match.start() for match in re.finditer(r"(?:^|\s)#", line)):
        try:
            if shlex.split(line[:at]) == words:
                return line[:at].strip()
        except ValueError:
            continue  # inside of quotes
    return line.strip()
