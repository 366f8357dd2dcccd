"""Gate: no word that docs/glossary.md retires is in code, docs or messages.

    python scripts/gates/glossary.py [--all]        # --all: each place; else the first of each word and file

The last table of the glossary is what this gate goes by. A word of prose is looked for everywhere: in names, also as a
part of one, in comments, texts and pages. One in ``code`` is looked for as a whole name in Python's code, but
for tests. The changelog, measured tables and what made them keep their words. Exit code 0 or 1.
"""

import argparse
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
GLOSSARY = "docs/glossary.md"
# Programs after the papers say "scheme" as the papers do. A changelog tells what things were called.
KEPT = re.compile(
    r"CHANGELOG\.md|docs/glossary\.md|(tests/unit/)?benchmarks/|packaging/|scripts/gates/glossary\.py|tests/.*test_glossary"
)


def retired(text: str) -> tuple[list[str], set[str]]:
    """Return the words of prose, and the names, that the glossary's last table retires."""
    table = text.partition("\n## Retired\n")[2]
    words: list[str] = []
    names: set[str] = set()
    for row in re.findall(r"^\| (?!retired |---)(.+?) \| .+ \|$", table, re.MULTILINE):
        for word in row.split(", "):
            if word.startswith("`"):
                names.add(word.strip("`"))
            else:
                words.append(word)
    return words, names


def pattern_of(words: list[str]) -> re.Pattern[str]:
    """Return what finds the words, in prose and as parts of names: ``way out`` is in ``_ways_out`` and ``wayOut``."""
    each = "|".join(re.sub(r" ", r"[ _-]?", word) for word in words)
    # A name's part begins at its start, after an underscore, or with a capital. CSS has a "color-scheme" of its own.
    return re.compile(
        rf"(?:(?<![A-Za-z])(?<!color-)|(?-i:(?<=[a-z])(?=[A-Z])))(?:{each})(?:s|es|d|ed)?(?-i:(?![a-z]))", re.IGNORECASE
    )


def found_in(path: str, text: str, words: re.Pattern[str], names: set[str]) -> Iterator[tuple[int, str]]:
    """Yield line and word of each retired word in a file's text."""
    for number, line in enumerate(text.splitlines(), 1):
        for match in words.finditer(line):
            yield number, match[0]
    if path.endswith(".py") and not path.startswith("tests/"):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME and token.string in names:
                yield token.start[0], token.string


def main() -> int:
    """Run the gate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="show each place")
    options = parser.parse_args()
    words, names = retired((ROOT / GLOSSARY).read_text(encoding="utf-8"))
    if not words or not names:
        print(f"{GLOSSARY} has no table of retired words")
        return 1
    listed = subprocess.run(["git", "ls-files", "*.py", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True)
    pattern, problems, files = pattern_of(words), 0, 0
    for path in sorted(name for name in listed.stdout.split() if not KEPT.match(name) and (ROOT / name).exists()):
        files, seen = files + 1, set[str]()
        for number, word in found_in(path, (ROOT / path).read_text(encoding="utf-8"), pattern, names):
            problems += 1
            if options.all or word not in seen:
                print(f"{path}:{number}: {word!r} is retired; {GLOSSARY} says what to write")
            seen.add(word)
    print(f"{files} files, {problems} retired words")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
