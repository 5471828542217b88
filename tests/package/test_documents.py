"""Every file and every name of the package that a document mentions exists."""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from lightning_dp import Checks
from lightning_dp.callbacks import DifferentialPrivacy

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/papers/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FOLDERS = r"\.ci|lightning_dp|callbacks|tests|examples|benchmarks|docs"


def paths_in(text: str) -> Iterator[str]:
    """Paths from the root of the checkout, and names of Python files alone."""
    yield from re.findall(rf"(?<![\w./-])(?:\.\./)?((?:{FOLDERS})/[\w./*-]*[\w*])", text)
    yield from re.findall(r"`(\w+\.py)`", text)


def exists(path: str) -> bool:
    parts = Path(path).parts
    return any(ROOT.glob(path if len(parts) > 1 else f"*/**/{path}"))


def is_there(dotted: str) -> bool:
    """Return True if a dotted name is a module, or an attribute of one."""
    name, attributes = dotted, list[str]()
    while True:
        try:
            thing = importlib.import_module(name)
            break
        except ModuleNotFoundError as error:
            if not name.startswith(error.name or "-"):  # an extra that is not installed
                return True
            name, _, attribute = name.rpartition(".")
            attributes.insert(0, attribute)
    for attribute in attributes:
        if not hasattr(thing, attribute):
            return False
        thing = getattr(thing, attribute)
    return True


def test_every_path_and_every_dotted_name_of_a_document_is_there():
    made_by_a_command = {"docs/_build"}
    for document in DOCUMENTS:
        text = document.read_text("utf-8")
        missing = {path for path in paths_in(text) if not exists(path)} - made_by_a_command
        names = set(re.findall(r"\blightning_dp(?:\.\w+)+\b(?!\.py)", text))
        missing |= {name for name in names if not name.endswith(".py") and not is_there(name)}
        assert missing == set(), document


# -- the prose of the project is plain: summaries name the thing, and a few turns of phrase a ----


ROOT = Path(__file__).parents[2]
CODE = sorted(
    [
        *(*ROOT.glob("lightning_dp/**/*.py"), *ROOT.glob("callbacks/*.py")),
        *(*ROOT.glob("examples/papers/*.py"), *ROOT.glob("examples/recipes/*.py")),
    ]
)
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "lightning_dp/troubleshooting.md")),
    *sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/papers/**/*.md")]),
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
        assert [*questions(code), *types_by_mistake(code), *vanishing(code)] == [], path
        if TURNS.search(" ".join(re.sub('["#]', " ", code).split())):  # or in none of its texts
            assert turns(texts(code)) == [], path


def test_every_page_is_written_plainly():
    for path in PAGES:
        paragraphs = re.split(r"\n\s*\n", path.read_text("utf-8"))
        assert turns(enumerate(paragraphs, 1)) == [], path


# -- the README's commands and the table of arguments are those of the project ------------------


def arguments_in(text: str) -> list[str]:
    """The arguments that a table explains."""
    return re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)


def test_the_table_of_arguments_is_of_the_constructor(root):
    named = arguments_in((root / "docs/runs.md").read_text("utf-8"))

    all_of_it = list(inspect.signature(DifferentialPrivacy).parameters)
    now = all_of_it[: all_of_it.index("isolation_probe")]  # from there on, earlier names of Checks'
    assert named == [*now, *inspect.signature(Checks).parameters]


def test_the_commands_are_those_that_ci_runs(root, blocks):
    first, second, *_ = (command.strip() for command in blocks("README.md", "sh"))
    ci = (root / ".ci/run").read_text("utf-8")

    example, tests = (command.split(" && ")[1] for command in (first, second))
    assert example in ci
    assert ci.rstrip().endswith(tests)


def test_what_is_not_covered_is_the_same_everywhere(root):
    def items(document: str) -> int:
        (part,) = re.findall(
            r"^## What [^\n]*not cover.*?(?=^## )",
            (root / document).read_text("utf-8"),
            re.DOTALL | re.MULTILINE,
        )
        return len(re.findall(r"^- ", part, re.MULTILINE))

    privacy = DifferentialPrivacy(3.0, target_delta=1e-6)
    of_report = len(privacy.report().not_covered)
    assert items("README.md") == items("docs/epsilon.md") == of_report == 6
