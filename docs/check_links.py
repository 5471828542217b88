"""Checks that every link inside the built documentation leads to a page and an anchor that exist.

    python docs/check_links.py FOLDER

Links to other sites are left to ``sphinx-build -b linkcheck docs FOLDER``, which needs a network.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.links: list[str] = []
        self.anchors = {""}
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif value and ((tag == "a" and name == "href") or (tag == "img" and name == "src")):
                self.links.append(value)


def broken_links(folder: Path) -> list[str]:
    """``page: link`` for each link that leads nowhere."""
    pages = {path.resolve(): Page(path) for path in folder.rglob("*.html")}
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


if __name__ == "__main__":
    found = broken_links(Path(sys.argv[1]))
    sys.exit("\n".join(["Links that lead nowhere:", *found]) if found else None)
