"""Sphinx: a notebook is a page. Its text, code, printed lines and pictures become Markdown."""

from __future__ import annotations

import json
from typing import Any

from sphinx.application import Sphinx

FENCE = "`" * 6  # longer than any inside a cell


def setup(app: Sphinx) -> dict[str, Any]:
    """Read files ``.ipynb`` as Markdown, with what :func:`page` makes of them."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True}


def _read(app: Sphinx, name: str, source: list[str]) -> None:
    if str(app.env.doc2path(name)).endswith(".ipynb"):
        source[0] = page(json.loads(source[0]))


def page(notebook: dict[str, Any]) -> str:
    """Return the Markdown of a notebook with its outputs."""
    parts: list[str] = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            parts.append(f"{FENCE}python\n{text}\n{FENCE}")
            description = cell["metadata"].get("alt", "")
            parts += [_shown(output, description) for output in cell["outputs"]]
        else:
            parts.append(text)
    return "\n\n".join(parts) + "\n"


def _shown(output: dict[str, Any], description: str) -> str:
    """Return a picture as an image with its description, and anything else as its text."""
    data = output.get("data", {})
    if "image/png" in data:
        return f"![{description}](data:image/png;base64,{''.join(data['image/png']).strip()})"
    text = "".join(output.get("text", data.get("text/plain", ""))).rstrip()
    return f"{FENCE}{{code-block}} text\n:class: printed\n\n{text}\n{FENCE}"
