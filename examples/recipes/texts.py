"""Text that every Python brings: its documentation, and the source code of its standard library.

Both are public. The recipes take the source code for private text, so that anybody can run them offline.
What is there differs a little from one version of Python to the next.
"""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

PACKAGES = ("asyncio", "email", "http", "logging", "multiprocessing", "unittest", "urllib", "xml")


def documentation() -> str:
    """The pages that ``help`` shows about keywords and topics."""
    return "\n".join(topics[name] for name in sorted(topics))


def source_lines(package: str) -> list[str]:
    """All lines of a package of the standard library that are not empty."""
    folder = Path(sysconfig.get_path("stdlib"), package)
    files = sorted(path for path in folder.rglob("*.py") if "test" not in path.parts)
    texts = (path.read_text("utf-8", errors="replace") for path in files)
    return [line for text in texts for line in text.splitlines() if line.strip()]


def pieces(lines: list[str], size: int) -> list[str]:
    """Texts of ``size`` lines each."""
    return ["\n".join(lines[i : i + size]) for i in range(0, len(lines) - size + 1, size)]


def functions() -> Iterator[str]:
    """The functions of the standard library's modules and classes, each once, as they are written."""
    folder, seen = Path(sysconfig.get_path("stdlib")), set[str]()
    for path in sorted(folder.rglob("*.py")):
        if {"test", "tests", "site-packages"} & set(path.parts):
            continue
        text = path.read_text("utf-8", errors="replace")
        with warnings.catch_warnings():  # about escapes in old files
            warnings.simplefilter("ignore")
            try:
                module = ast.parse(text)
            except SyntaxError:
                continue
        lines = text.splitlines()
        for part in module.body:
            for each in part.body if isinstance(part, ast.ClassDef) else [part]:
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                    found = "\n".join(lines[each.lineno - 1 : each.end_lineno])
                    if found not in seen:
                        seen.add(found)
                        yield found
