"""Gate: all links of the documentation resolve, and the site's navigation has all pages.

Looks at docs/, README.md, CONTRIBUTING.md, CHANGELOG.md and the measured tables, as they lie in the checkout: a link
must lead to a file, and its anchor to a heading. Every page of docs/ stands once in the navigation of ``mkdocs.yml``,
and what stands there exists. Each module that an API page names exists. Needs no MkDocs, and takes a fraction of a
second. Exit code 0 or 1.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from markdown_links import anchors, each_link  # noqa: E402

BESIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
# Pages that the site makes of files outside of docs/ (scripts/site_pages.py).
MADE = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
MADE |= {"tables/index.md": "benchmarks/results"}


def main() -> int:
    """Run the gate."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    pages = [ROOT / name for name in BESIDE]
    pages += sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks" / "results").rglob("*.md")])
    problems = [problem for page in pages for problem in broken_links(page)]
    problems += wrong_navigation((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    problems += missing_modules()
    print(*problems, sep="\n", end="\n" if problems else "")
    print(f"{len(pages)} pages, {len(problems)} links or pages that are wrong")
    return 1 if problems else 0


def broken_links(page: Path, root: Path = ROOT) -> Iterator[str]:
    """Yield what is wrong with the links of a page."""
    for link in each_link(page.read_text(encoding="utf-8")):
        target, _, anchor = link.partition("#")
        if ":" in target:
            continue  # elsewhere
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or not file.is_relative_to(root):
            yield f"{page.relative_to(root)}: {link} leads nowhere"
        elif anchor and anchor not in anchors(file.read_text(encoding="utf-8")):
            yield f"{page.relative_to(root)}: {link} leads to a page that has no such heading"


def wrong_navigation(settings: str, root: Path = ROOT) -> Iterator[str]:
    """Yield pages that are not in the navigation exactly once, and entries that do not exist."""
    navigation = re.search(r"^nav:\n((?: .*\n)+)", settings, re.MULTILINE)
    listed = re.findall(r": (\S+\.md)$", navigation[1], re.MULTILINE) if navigation else []
    pages = {path.relative_to(root / "docs").as_posix() for path in (root / "docs").rglob("*.md")}
    for name in sorted(pages - set(listed)):
        yield f"mkdocs.yml: docs/{name} is not in the navigation"
    for name in sorted(set(listed) - pages):
        if name not in MADE or not (root / MADE[name]).exists():
            yield f"mkdocs.yml: {name} in the navigation does not exist"
    for name in sorted({name for name in listed if listed.count(name) > 1}):
        yield f"mkdocs.yml: {name} is in the navigation more than once"


def missing_modules(root: Path = ROOT) -> Iterator[str]:
    """Yield modules that the API pages name and that do not exist."""
    for page in sorted((root / "docs" / "api").glob("*.md")):
        for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            path = root / name.replace(".", "/")
            if not path.with_suffix(".py").exists() and not (path / "__init__.py").exists():
                yield f"{page.relative_to(root)}: there is no module {name}"


if __name__ == "__main__":
    sys.exit(main())
