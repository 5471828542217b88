"""The prose of the project is plain: summaries name the thing, and a few turns of phrase are left out."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = sorted([*ROOT.glob("lightning_dp/**/*.py"), *ROOT.glob("callbacks/*.py")])
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "lightning_dp/troubleshooting.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
]

QUESTION = re.compile(r"(What|Whether|How|Who|Which|Where|When|Why)\b")
AVOIDED = {
    "anew": "again",
    "of (its|their) own": "its, their, separate",
    "but for": "except",
    "beside": "next to, besides, alongside",
    "under ?way": "current, running",
    "can ?not be had": "cannot be computed",
    "puts? aside": "sets aside, keeps",
}
TURNS = re.compile(rf"\b({'|'.join(AVOIDED)})\b", re.IGNORECASE)


@cache
def nodes(code: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(code)))


def docstrings(code: str) -> Iterator[tuple[int, str]]:
    """Line and text of each string that stands alone: of modules, classes, functions, attributes."""
    alone = (node.value for node in nodes(code) if isinstance(node, ast.Expr))
    yield from (
        (each.lineno, each.value)
        for each in alone
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    )


def texts(code: str) -> Iterator[tuple[int, str]]:
    """Line and text of each string and comment."""
    for node in nodes(code):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def questions(code: str) -> list[str]:
    """Summaries that ask instead of naming the thing or saying what it does."""
    return [
        f"line {line}: {text.strip().splitlines()[0]}"
        for line, text in docstrings(code)
        if QUESTION.match(text.strip())
    ]


def types_by_mistake(code: str) -> list[str]:
    """Summaries of properties with a colon: Sphinx would print what stands before it as the type."""
    return [
        f"line {node.lineno}: {summary}"
        for node in nodes(code)
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(d, ast.Name) and "property" in d.id for d in node.decorator_list)
        and ": " in (summary := (ast.get_docstring(node) or "").partition("\n")[0])
    ]


def vanishing(code: str) -> list[str]:
    """Descriptions of one letter: "q." begins a list for Sphinx, which then prints nothing."""
    return [
        f"line {line}: {each}"
        for line, text in docstrings(code)
        for each in re.findall(r"^(?: +\w+(?:, \w+)*: )?[A-Za-z]\.$", text, re.MULTILINE)
    ]


def turns(found: Iterator[tuple[int, str]]) -> list[str]:
    """Turns of phrase that a reader stumbles over."""
    return [
        f"line {line}: {hit[0]!r} in {' '.join(text.split())[:150]!r}"
        for line, text in found
        if (hit := TURNS.search(" ".join(text.replace("#", " ").split())))
    ]


def test_every_module_is_written_plainly():
    for path in CODE:
        code = path.read_text("utf-8")
        found = [*questions(code), *types_by_mistake(code), *vanishing(code), *turns(texts(code))]
        assert found == [], path


def test_every_page_is_written_plainly():
    for path in PAGES:
        paragraphs = re.split(r"\n\s*\n", path.read_text("utf-8"))
        assert turns(enumerate(paragraphs, 1)) == [], path


def test_what_is_avoided_is_found():
    code = (
        '"""What it is."""\nx = 1\n"""Whether it is."""\nraise E("cannot be\\nhad")  # made anew\n'
    )
    assert [each.split()[2] for each in questions(code)] == ["What", "Whether"]
    assert sorted(each.split("'")[1] for each in turns(texts(code))) == ["anew", "cannot be had"]
    assert types_by_mistake('@property\ndef f(self):\n    """A number: 1."""\n') != []
    assert vanishing('"""T."""\n"""A plan.\n\n    Args:\n        rate: q.\n    """\n')[1:] != []
    assert questions('"""Somewhat plain."""\nname = "What is said"\n') == []
