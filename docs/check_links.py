"""Checks that the built documentation can be read: links lead somewhere, pages are whole and reached.

    python docs/check_links.py FOLDER

Links to other sites are left to ``sphinx-build -b linkcheck docs FOLDER``, which needs a network.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

OF_SPHINX = {"genindex.html", "py-modindex.html", "search.html"}
LEFT_OVER = re.compile(r"```|\]\(|\{(?:include|toctree|eval-rst|code-block)\}|^\(\S+\)=")


class Page(HTMLParser):
    """The links and the anchors of a page, and what is wrong with it alone."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.links: list[str] = []
        self.anchors = {""}
        self.ids: Counter[str] = Counter()
        self.titles = 0
        self.faults: list[str] = []
        self._code = 0  # how deep in code, where marks of Markdown may stand
        self.feed(path.read_text("utf-8"))
        self.faults += [f"id {each!r} is there twice" for each, n in self.ids.items() if n > 1]
        if self.titles != 1:
            self.faults.append(f"{self.titles} titles <h1>, not 1")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.titles += tag == "h1"
        self._code += tag in ("pre", "code", "script", "style")
        if tag == "img" and not dict(attrs).get("alt"):
            self.faults.append(f"a picture without description: {(dict(attrs)['src'] or '')[:60]}")
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
                self.ids[value] += 1
            elif value and ((tag == "a" and name == "href") or (tag == "img" and name == "src")):
                self.links.append(value)

    def handle_endtag(self, tag: str) -> None:
        self._code -= tag in ("pre", "code", "script", "style")

    def handle_data(self, data: str) -> None:
        if not self._code and (mark := LEFT_OVER.search(data)):
            self.faults.append(f"a mark of Markdown is shown: {mark[0]!r} in {data.strip()[:60]!r}")


def site(folder: Path) -> dict[Path, Page]:
    """Return all pages of a folder by their paths."""
    return {path.resolve(): Page(path) for path in folder.rglob("*.html")}


def broken_links(folder: Path) -> list[str]:
    """``page: link`` for each link that leads nowhere."""
    pages = site(folder)
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            found = pages[target].anchors if target in pages else {""} if target.exists() else ()
            if unquote(parts.fragment) not in found:
                broken.append(f"{path.relative_to(folder.resolve())}: {link}")
    return broken


def faulty_pages(folder: Path) -> list[str]:
    """``page: fault`` for pages that cannot be read as they are meant, or that nothing leads to."""
    pages, root = site(folder), folder.resolve()
    reached, waiting = set(), [root / "index.html"]
    while waiting:
        path = waiting.pop()
        if path in pages and path not in reached:
            reached.add(path)
            links = (urlsplit(link) for link in pages[path].links)
            inside = (link for link in links if not link.scheme and link.path)
            waiting += [(path.parent / unquote(link.path)).resolve() for link in inside]
    faults = [
        f"{path.relative_to(root)}: {fault}"
        for path, page in pages.items()
        if path.name not in OF_SPHINX
        for fault in page.faults
    ]
    lost = [path for path in pages if path not in reached and path.name not in OF_SPHINX]
    return faults + [
        f"{path.relative_to(root)}: no link from index.html leads here" for path in lost
    ]


if __name__ == "__main__":
    found = broken_links(Path(sys.argv[1])) + faulty_pages(Path(sys.argv[1]))
    sys.exit("\n".join(["Not as it should be:", *found]) if found else None)
