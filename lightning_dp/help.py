"""The entries of the troubleshooting page in a terminal: ``python -m lightning_dp.help TOPIC``.

Error messages name their topic. The page is part of the package, so that it can be read where the
documentation is not at hand; ``docs/troubleshooting.md`` is the same file.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Mapping
from pathlib import Path

__all__ = ["entries", "main"]

_PAGE = Path(__file__).with_name("troubleshooting.md")
_ANCHOR = re.compile(r"^\(([a-z0-9-]+)\)=\n(?=#)", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\((?:([\w./-]+\.md)|#)[^)]*\)")


def entries() -> Mapping[str, str]:
    """Return the entries of the troubleshooting page by their anchors, as plain text.

    Example:
        >>> print(entries()["batch-norm"].splitlines()[0])
        BatchNorm and other layers that normalise over the batch
    """
    _, *parts = _ANCHOR.split(_PAGE.read_text(encoding="utf-8"))
    texts = (re.split(r"^## ", part, flags=re.MULTILINE)[0] for part in parts[1::2])
    return dict(zip(parts[::2], map(_plain, texts), strict=True))


def _plain(text: str) -> str:
    """Return the text without marks of headings; a link becomes its words and its file."""
    words = _LINK.sub(lambda link: _said(link[1], link[2]), text)
    return re.sub(r"^#+ ", "", words, flags=re.MULTILINE).strip()


def _said(words: str, page: str | None) -> str:
    return words if page is None else f"{words} (docs/{page})"


def main(arguments: list[str] | None = None) -> None:
    """Print one entry, or the list of topics."""
    parser = argparse.ArgumentParser(
        prog="python -m lightning_dp.help",
        description="Say more about an error or a warning of lightning-dp.",
    )
    parser.add_argument("topic", nargs="?", help="as the message names it; none: list them all")
    topic, known = parser.parse_args(arguments).topic, entries()
    if topic is None:
        width = max(map(len, known))
        print("\n".join(f"{name:{width}}  {text.splitlines()[0]}" for name, text in known.items()))
    elif topic in known:
        print(known[topic])
    else:
        near = difflib.get_close_matches(topic, known, cutoff=0.3) or known
        parser.exit(2, f"There is no topic {topic!r}. Did you mean: {', '.join(near)}?\n")


if __name__ == "__main__":
    main()
