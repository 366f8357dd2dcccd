"""Further pages of the documentation's site besides docs/: a hook of MkDocs (``mkdocs.yml``).

Files in docs/ are written for GitHub, where ``../hvd_hetero/balancer.py`` is a link into the repository. A site has no
repository around it. So each file that a page links to becomes a page of the site, and links follow:

    README.md                                the front page
    CONTRIBUTING.md, CHANGELOG.md            pages
    benchmarks/results                       pages, and a list of them
    any other file that a page links to      a page with its text
"""

import posixpath
from pathlib import Path
from typing import Any

from markdown_links import each_link, relinked

ROOT = Path(__file__).resolve().parent.parent
TABLES = "benchmarks/results"
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "sh", ".txt": "text", ".patch": "diff"}


def site_path(path: str) -> str:
    """Return where the site has a file of the repository; both with "/", from their roots."""
    if path in PAGES:
        return PAGES[path]
    if path == TABLES:
        return "tables/index.md"
    if path.startswith(f"{TABLES}/"):
        return "tables/" + path.removeprefix(f"{TABLES}/")
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}.md"


def linked(text: str, path: str) -> set[str]:
    """Return the files of the repository that a text in this file links to."""
    return {target for link in each_link(text) if (target := _resolved(link, path)[0])}


def moved(text: str, path: str) -> str:
    """Return the text of a file of the repository with links as the site has them."""
    here = posixpath.dirname(site_path(path))

    def change(link: str) -> str:
        target, anchor = _resolved(link, path)
        return posixpath.relpath(site_path(target), here or ".") + anchor if target else link

    return relinked(text, change)


def _resolved(link: str, path: str) -> tuple[str, str]:
    """Return the file that a link leads to, from the repository's root, and its anchor; "" for links elsewhere."""
    target, mark, anchor = link.partition("#")
    if not target or ":" in target:
        return "", ""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), target)), mark + anchor


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made of files outside of docs/."""
    from mkdocs.structure.files import File

    tables = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / TABLES).rglob("*") if path.is_file())
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in [*PAGES, *tables] if path.endswith(".md")}
    here = {file.src_uri: Path(file.abs_src_path).read_text(encoding="utf-8") for file in files.documentation_pages()}
    everywhere = texts | {f"docs/{uri}": text for uri, text in here.items()}
    sources = set().union(*(linked(text, path) for path, text in everywhere.items()))
    for path, text in texts.items():
        files.append(File.generated(config, site_path(path), content=moved(text, path)))
    for path in tables:
        if not path.endswith(".md"):
            files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, site_path(TABLES), content=_list_of_tables(list(texts))))
    for path in sorted(sources):
        if site_path(path).startswith("source/"):
            files.append(File.generated(config, site_path(path), content=_source(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change the links of a page of docs/."""
    return markdown if page.file.generated_by else moved(markdown, f"docs/{page.file.src_uri}")


def _source(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    return f"# {path}\n\n~~~~~~{LANGUAGES.get(Path(path).suffix, 'text')}\n{text}\n~~~~~~\n"


def _list_of_tables(paths: list[str]) -> str:
    tables = [path for path in paths if path.startswith(TABLES)]
    lines = "\n".join(f"- [{Path(path).stem}]({posixpath.relpath(path, TABLES)})" for path in tables)
    return (
        "# Measured tables\n\nWhat the benchmarks wrote. Each table ends with the machine, the versions, the date and "
        f"the command.\n\n{lines}\n"
    )
