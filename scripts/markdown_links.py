"""The links and headings of a Markdown text, outside of code: for the site and for the gate of the docs."""

import re
from collections.abc import Callable, Iterator

# A fence and all up to its end, inline code, or the target of a link or picture: the first of them from the left.
_PART = re.compile(
    r"^(?P<fence> *(?P<mark>`{3,}|~{3,})).*?^ *(?P=mark)[`~]* *$"
    r"|(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)"
    r"|(?P<begin>\]\()(?P<target>[^)\s]+)(?=[)\s])"
    r'|(?P<begin_html>\b(?:src|href)=")(?P<target_html>[^"]+)',
    re.MULTILINE | re.DOTALL,
)
_HEADING = re.compile(r"^#{1,6} +(.*?)[ #]*$", re.MULTILINE)
_FENCE = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1[`~]* *$", re.MULTILINE | re.DOTALL)


def relinked(text: str, change: Callable[[str], str]) -> str:
    """Return the text with each link's target changed."""

    def part(match: re.Match[str]) -> str:
        if target := match["target"] or match["target_html"]:
            return (match["begin"] or match["begin_html"]) + change(target)
        return match[0]

    return _PART.sub(part, text)


def each_link(text: str) -> Iterator[str]:
    """Yield the targets of all links and pictures."""
    for match in _PART.finditer(text):
        if target := match["target"] or match["target_html"]:
            yield target


def anchors(text: str) -> set[str]:
    """Return the anchors inside a page, as GitHub makes them of headings."""
    found: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        number, name = 0, slug
        while name in found:
            number += 1
            name = f"{slug}-{number}"
        found.add(name)
    return found
