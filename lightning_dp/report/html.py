"""Pages as one HTML file: everything is inside, nothing is loaded, and no script runs."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import PurePath
from typing import TYPE_CHECKING

from lightning_dp.report.render import Block, Fact, Page, Table

if TYPE_CHECKING:
    from lightning_dp.report.facts import AbstractReport

__all__ = ["document"]

_MOST_DATA = 200_000  # characters of a report that are shown; a longer one is in its file

_STYLE = """\
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --soft: #f3f5f7; --line: #c9d1d9;
  --warn: #b00020; --warn-paper: #fdecee; --accent: #0b57a4; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --paper: #14171a; --soft: #1f2429;
  --line: #444c56; --warn: #ff9aa5; --warn-paper: #3a1a1f; --accent: #8ec2ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
main { max-width: 46rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.7rem; line-height: 1.2; } h2 { font-size: 1.2rem; margin: 1.8rem 0 .4rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; } h1, h2, h3 { color: var(--accent); break-after: avoid; }
.warning { border: 2px solid var(--warn); background: var(--warn-paper); color: var(--ink);
  border-radius: .4rem; padding: .7rem 1rem; font-weight: 600; }
table { border-collapse: collapse; width: 100%; margin: .6rem 0; }
th, td { border-bottom: 1px solid var(--line); padding: .4rem .5rem; text-align: left;
  vertical-align: top; } th { background: var(--soft); }
dl { margin: .4rem 0; } dt { font-weight: 600; } dd { margin: 0 0 .5rem 1rem; }
dd, li, code { overflow-wrap: anywhere; }
pre { background: var(--soft); padding: .7rem; overflow-x: auto; font-size: .85rem; }
details pre { white-space: pre-wrap; overflow-wrap: anywhere; }
figure { margin: 1rem 0; } figure img { max-width: 100%; height: auto; background: #fff; }
figcaption { font-size: .9rem; }
.annex { border-top: 3px double var(--line); margin-top: 2.5rem; padding-top: .5rem; }
@media print { :root { color-scheme: light; --ink: #000; --paper: #fff; --soft: #f3f5f7;
  --line: #999; --warn: #b00020; --warn-paper: #fff; --accent: #000; }
  body { font-size: 10pt; line-height: 1.35; } main { max-width: none; padding: 0; }
  p, ul, dl { margin: .35rem 0; } h2 { margin: .8rem 0 .2rem; } dd { margin-bottom: .1rem; }
  pre { white-space: pre-wrap; } .annex { break-before: page; }
  table, figure, .warning { break-inside: avoid; } }"""


def document(pages: Sequence[Page], head: Sequence[str] = ()) -> str:
    """Return a whole HTML document.

    Args:
        pages: one for each ledger.
        head: sentences about all of them, before the first.
    """
    lines = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        "<title>Privacy report</title>",
        f"<style>\n{_STYLE}\n</style>",
        "</head>",
        "<body>",
        "<main>",
        *(f"<p>{escape(sentence)}</p>" for sentence in head),
    ]
    for page in pages:
        lines += ["<article>", *_article(page), "</article>"]
    return "\n".join([*lines, "</main>", "</body>", "</html>", ""])


def _article(page: Page) -> Iterator[str]:
    yield f"<h1>{escape(page.title)}</h1>"
    yield from (f'<p class="warning">{escape(warning)}</p>' for warning in page.warnings)
    yield from _sections(page.sections, "h2")
    if page.annex and page.sections:
        yield '<div class="annex">\n<h2>Annex for engineers</h2>'
        yield from _annex(page, "h3")
        yield "</div>"
    elif page.annex:
        yield from _annex(page, "h2")


def _annex(page: Page, heading: str) -> Iterator[str]:
    yield from (f"<p><strong>{escape(statement)}</strong></p>" for statement in page.statements)
    yield _figure(page.report)
    yield from _sections(page.annex, heading)
    yield f"<section>\n<{heading}>Compute it again</{heading}>"
    yield f"<pre><code>{escape(page.code)}</code></pre>\n{_data(page.report)}\n</section>"


def _sections(sections: Mapping[str, Sequence[Block]], heading: str) -> Iterator[str]:
    for title, blocks in sections.items():
        yield f"<section>\n<{heading}>{escape(title)}</{heading}>"
        yield from _blocks(blocks)
        yield "</section>"


def _blocks(blocks: Sequence[Block]) -> Iterator[str]:
    """Yield the blocks; facts of a kind that follow each other are one list."""
    within = ""
    for block in blocks:
        kind = "" if not isinstance(block, Fact) else "dl" if block.name else "ul"
        if kind != within:
            yield from [f"</{within}>"] if within else []
            yield from [f"<{kind}>"] if kind else []
            within = kind
        yield _block(block)
    if within:
        yield f"</{within}>"


def _block(block: Block) -> str:
    if isinstance(block, Table):
        head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in block.head)
        rows = "\n".join(
            f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in block.rows
        )
        return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"
    if isinstance(block, str):
        return f"<p>{escape(block)}</p>"
    value = f"<code>{escape(block.value)}</code>" if block.is_code else escape(block.value)
    if block.name:
        return f"<dt>{escape(block.name)}</dt><dd>{value}</dd>"
    return f"<li>{value}</li>"


def _figure(report: AbstractReport) -> str:
    """Return the picture as a data URI, or a sentence that says why there is none."""
    if not report.events:
        return "<p>There is no picture: nothing was charged.</p>"
    try:
        picture = _svg(report)
    except ImportError as error:
        return f"<p>There is no picture: {escape(str(error))}</p>"
    content = base64.b64encode(picture).decode("ascii")
    words = "ε after each step (against the budget, if there is one), and the noise of each step"
    return (
        f'<figure>\n<img alt="Two curves: {words}." src="data:image/svg+xml;base64,{content}">\n'
        f"<figcaption>{words}.</figcaption>\n</figure>"
    )


def _svg(report: AbstractReport) -> bytes:
    """Return the report's picture, the same bytes each time."""
    from lightning_dp.plotting import svg

    return svg(report.plot)


def _data(report: AbstractReport) -> str:
    """Return the report as data, closed until somebody opens it; of the journal its name alone."""
    journal = None if report.journal is None else PurePath(report.journal).name
    content = json.dumps({**report.to_dict(), "journal": journal}, ensure_ascii=False, indent=1)
    if len(content) > _MOST_DATA:
        return "<p>The report as data is too long for this page: it is in its .json file.</p>"
    return (
        "<details>\n<summary>The report as data, with all events</summary>\n"
        f"<pre>{escape(content)}</pre>\n</details>"
    )
