"""Links of the documentation: found where a reader finds them, checked by the gate, and followed by the site."""

import pytest
from script_modules import load

links = load("markdown_links", "scripts")
gate = load("docs", "scripts/gates")
site = load("site_pages", "scripts")

TEXT = """# A page

See [one](a.md#b), ![two](b.png) and <img src="c.png" width="9">, not `[x](no.md)` nor ``a ` [x](no.md)``.

```python
f(x)[0](no.md)
# no heading
```

## What it costs, in *ms*: `a_b`
## Twice
## Twice
"""


def test_links_are_those_outside_of_code():
    assert list(links.each_link(TEXT)) == ["a.md#b", "b.png", "c.png"]


def test_changing_links_changes_nothing_else():
    changed = links.relinked(TEXT, lambda target: target.upper())
    assert list(links.each_link(changed)) == ["A.MD#B", "B.PNG", "C.PNG"]
    assert changed.lower() == TEXT.lower()
    assert links.relinked(TEXT, lambda target: target) == TEXT


def test_anchors_are_those_that_github_makes_of_headings():
    assert links.anchors(TEXT) == {"a-page", "what-it-costs-in-ms-a_b", "twice", "twice-1"}


@pytest.fixture
def checkout(tmp_path):
    """A repository of two pages, a picture and a module, all in order."""
    for name, text in {
        "docs/a.md": "# A\n[to b](b.md#the-end), [code](../core/x.py), [elsewhere](https://a.b/c), [here](#a)\n",
        "docs/b.md": "# B\n## The end\n![picture](p.png)\n",
        "docs/p.png": "",
        "docs/api/core.md": "# Core\n\n::: core.x\n",
        "core/x.py": "",
        "README.md": "# Us\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


NAVIGATION = """site_name: us
nav:
  - Us: index.md
  - More:
      - A: a.md
      - B: b.md
      - Core: api/core.md
x: 1
"""


def problems(root, navigation=NAVIGATION):
    pages = sorted(root.rglob("*.md"))
    found = [problem for page in pages for problem in gate.broken_links(page, root)]
    return [*found, *gate.wrong_navigation(navigation, root), *gate.missing_modules(root)]


def test_a_documentation_in_order_has_no_problem(checkout):
    assert problems(checkout) == []


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("docs/a.md", "[x](c.md)", "docs/a.md: c.md leads nowhere"),
        ("docs/a.md", "[x](b.md#no)", "docs/a.md: b.md#no leads to a page that has no such heading"),
        ("docs/a.md", "[x](#no)", "docs/a.md: #no leads to a page that has no such heading"),
        ("docs/a.md", "[x](../../../../etc/passwd)", "docs/a.md: ../../../../etc/passwd leads nowhere"),
        ("docs/b.md", '<img src="q.png">', "docs/b.md: q.png leads nowhere"),
        ("docs/c.md", "# C", "mkdocs.yml: docs/c.md is not in the navigation"),
        ("docs/api/core.md", "::: core.y", "docs/api/core.md: there is no module core.y"),
    ],
)
def test_each_problem_is_found(checkout, name, text, problem):
    path = checkout / name
    path.write_text((path.read_text() if path.exists() else "") + f"{text}\n")
    assert problems(checkout) == [problem]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("  - D: d.md\n", "mkdocs.yml: d.md in the navigation does not exist"),
        ("  - A again: a.md\n", "mkdocs.yml: a.md is in the navigation more than once"),
        ("  - Changes: changelog.md\n", "mkdocs.yml: changelog.md in the navigation does not exist"),
    ],
)
def test_a_wrong_navigation_is_found(checkout, line, problem):
    assert problems(checkout, NAVIGATION.replace("x: 1\n", f"{line}x: 1\n")) == [problem]


@pytest.mark.parametrize(
    ("path", "link", "expected"),
    [
        ("README.md", "docs/report.md#limits", "report.md#limits"),
        ("README.md", "benchmarks/results", "tables/index.md"),
        ("docs/report.md", "telemetry.md#causes", "telemetry.md#causes"),
        ("docs/report.md", "../CONTRIBUTING.md", "contributing.md"),
        ("docs/report.md", "../hvd_hetero/rounds.py", "source/hvd_hetero/rounds.py.md"),
        ("docs/api/index.md", "../../benchmarks/results/papers/scale.md", "../tables/papers/scale.md"),
        ("benchmarks/results/papers/scale.md", "a.png", "a.png"),
        ("docs/report.md", "https://a.b/c", "https://a.b/c"),
        ("docs/report.md", "#limits", "#limits"),
    ],
)
def test_the_site_follows_links_that_are_written_for_the_repository(path, link, expected):
    assert site.moved(f"[x]({link})", path) == f"[x]({expected})"
