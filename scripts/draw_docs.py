"""Write the pictures of the documentation, docs/images/prompt.svg and docs/images/schema.svg, and docs/schema.md.

The tables come from crow_persistence/tables.py; the meaning of a column is its comment there.
"""

import ast
import tokenize
from collections.abc import Iterable
from html import escape
from pathlib import Path

from crow_persistence import tables
from crow_persistence.tables import metadata
from sqlalchemy import Column, Table

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
STYLE = """
text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1f2328; }
.name { font-weight: bold; }
.note { fill: #59636e; }
.box { fill: #ffffff; stroke: #8c959f; }
.head { fill: #eaeef2; stroke: #8c959f; }
.line { fill: none; stroke: #0969da; stroke-width: 1.2; }
.lane { stroke: #d1d9e0; stroke-dasharray: 3 4; }
.loop { fill: none; stroke: #8250df; stroke-dasharray: 6 4; }
.hook { fill: #8250df; }
.tip { fill: #0969da; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .note { fill: #9198a1; }
  .box { fill: #0d1117; stroke: #656c76; }
  .head { fill: #212830; stroke: #656c76; }
  .line { stroke: #4493f8; }
  .tip { fill: #4493f8; }
  .lane { stroke: #3d444d; }
  .loop { stroke: #ab7df8; }
  .hook { fill: #ab7df8; }
}
"""
ROW = 17
"""Pixels of a line of text."""


def draw(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    return "\n".join([head, f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", *parts, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def rectangle(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="{kind}"/>'


def arrow(x: float, y: float, to: float) -> list[str]:
    """Draw a horizontal arrow."""
    back = -6 if to > x else 6
    tip = f"M{to:g} {y:g} l{back} -4 v8 z"
    return [f'<path d="M{x:g} {y:g} H{to + back:g}" class="line"/>', f'<path d="{tip}" class="tip"/>']


# The life of a prompt

LANES = {"client": 90, "crow": 330, "model": 620, "tools": 800}
"""The middle of each lane, in pixels."""
STEPS: list[tuple[str, str, str, str]] = [
    ("client", "crow", "session/prompt", ""),
    ("crow", "", "before_prompt", "hook"),
    ("crow", "", "log: the user's message, stored", ""),
    ("crow", "", "instructions (first turn)", "hook"),
    ("loop", "", "ask", ""),
    ("crow", "", "request: a view of the log", ""),
    ("crow", "", "before_model", "hook"),
    ("crow", "model", "POST /chat/completions", ""),
    ("model", "crow", "text, thoughts, tool calls", ""),
    ("crow", "client", "session/update, as it streams", ""),
    ("crow", "", "log: the reply, stored", ""),
    ("loop", "", "act: all tool calls at once", ""),
    ("crow", "", "before_tool", "hook"),
    ("crow", "client", "session/request_permission", ""),
    ("client", "crow", "allow, or not", ""),
    ("crow", "tools", "tools/call", ""),
    ("tools", "crow", "result", ""),
    ("crow", "", "after_tool", "hook"),
    ("crow", "", "log: the answer, stored", ""),
    ("crow", "client", "session/update: done or failed", ""),
    ("crow", "", "after_model", "hook"),
    ("end", "", "repeat while the model calls tools", ""),
    ("crow", "", "before_end", "hook"),
    ("crow", "", "turn_end", "hook"),
    ("crow", "client", "stop reason", ""),
]
"""From, to (empty: it happens there), the words, and "hook" for a hook; `loop` and `end` begin and end the frame."""


def draw_prompt() -> str:
    """Draw who does what between a prompt and its stop reason."""
    y, step, parts, frame = 70, 24, list[str](), 0
    for words, x in (("editor or terminal", 90), ("crow", 330), ("model", 620), ("MCP servers", 800)):
        parts += [rectangle(x - 76, 16, 152, 26, "head"), text(x, 33, words, "name", "middle")]
    for source, target, words, kind in STEPS:
        if source == "loop":
            frame = frame or y - 14
            parts.append(text(176, y + 2, words, "name"))
        elif source == "end":
            parts += [rectangle(164, frame, 706, y + 8 - frame, "loop"), text(176, y, words, "note")]
        elif target:
            middle = (LANES[source] + LANES[target]) / 2
            gap = 8 if LANES[target] > LANES[source] else -8
            parts += arrow(LANES[source] + gap, y, LANES[target] - gap)
            parts.append(text(middle, y - 5, words, "", "middle"))
        else:
            parts += [text(LANES["crow"] + 12, y, words, kind)]
            parts.append(f'<circle cx="{LANES["crow"]}" cy="{y - 4}" r="3.5" class="{kind or "tip"}"/>')
        y += step
    lanes = [f'<path d="M{x} 44 V{y - 8}" class="lane"/>' for x in LANES.values()]
    legend = [text(16, y + 14, "purple: hooks, which extensions use", "hook")]
    return draw(880, y + 30, "The life of a prompt", [*lanes, *parts, *legend])


# The tables

PLACES = [
    ("sessions", "drafts", "draft_parts"),
    ("messages", "links", "prompts", "evaluations"),
    ("blobs", "renders", "cells"),
    ("calls",),
    ("decisions",),
]
"""The tables in each column of the picture, from its top."""
BOX, GAP = 200, 40
SCHEMA_HEAD = """\
# Database schema

<!-- Generated by scripts/draw_docs.py from crow_persistence/tables.py. -->

crow stores everything in one database, SQLite or PostgreSQL. Rows are not changed once written, except those of
sessions, drafts and searches, and those of model calls and evaluations that end. Times are milliseconds since 1970
(UTC). Digests are SHA-256 in hexadecimal. [crow-persistence](../crow-persistence/README.md) has the promises.

[![The tables and their references](images/schema.svg)](images/schema.svg)

A table `search` has the words of all messages, for the full-text search.

"""


def refer(column: Column[object]) -> str:
    """Return the table that a column refers to, or an empty text."""
    return next((key.column.table.name for key in column.foreign_keys), "")


def place_tables() -> dict[str, tuple[float, float]]:
    """Return the upper left corner of each table."""
    corners: dict[str, tuple[float, float]] = {}
    for number, names in enumerate(PLACES):
        y = 20.0
        for name in names:
            corners[name] = (GAP + number * (BOX + GAP), y)
            y += (len(metadata.tables[name].columns) + 1) * ROW + 36
    return corners


def draw_table(table: Table, x: float, y: float) -> list[str]:
    height = (len(table.columns) + 1) * ROW + 12
    parts = [rectangle(x, y, BOX, height, "box"), rectangle(x, y, BOX, ROW + 6, "head")]
    parts.append(text(x + 8, y + 16, table.name, "name"))
    for row, column in enumerate(table.columns, 1):
        base = y + row * ROW + 20
        parts.append(text(x + 8, base, column.name, "name" if column.primary_key else ""))
        target = refer(column)
        parts.append(text(x + BOX - 8, base, f"→ {target}" if target else str(column.type).lower(), "note", "end"))
    return parts


def draw_references(corners: dict[str, tuple[float, float]]) -> list[str]:
    """Draw a curve from each foreign key to the table that it names."""
    parts: list[str] = []
    for name, (x, y) in corners.items():
        for row, column in enumerate(metadata.tables[name].columns, 1):
            if target := refer(column):
                to_x, to_y = corners[target]
                start, end = (x, to_x + BOX) if to_x < x else (x + BOX, to_x) if to_x > x else (x, to_x)
                bend = -GAP if to_x <= x else GAP
                from_y, end_y = y + row * ROW + 16, to_y + 12
                stop = end - bend if to_x != x else end + bend
                parts.append(
                    f'<path d="M{start:g} {from_y:g} C{start + bend:g} {from_y:g} {stop:g} {end_y:g} {end:g} {end_y:g}"'
                    ' class="line"/>'
                )
    return parts


def draw_schema() -> str:
    corners = place_tables()
    boxes = [part for name, corner in corners.items() for part in draw_table(metadata.tables[name], *corner)]
    bottom = max(y + (len(metadata.tables[name].columns) + 1) * ROW for name, (_, y) in corners.items())
    width = GAP + len(PLACES) * (BOX + GAP)
    return draw(width, int(bottom) + 40, "The tables of crow's database", [*draw_references(corners), *boxes])


def read_comments() -> dict[tuple[str, str], str]:
    """Return the comments of `tables.py` by table and column; those on a table have an empty column."""
    source = Path(tables.__file__)
    with source.open("rb") as stream:
        found = {
            token.start[0]: token.string.lstrip("# ")
            for token in tokenize.tokenize(stream.readline)
            if token.type == tokenize.COMMENT
        }
    comments: dict[tuple[str, str], str] = {}
    for node in ast.walk(ast.parse(source.read_text("utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Table":
            name, _, *columns = node.args
            comments[ast.literal_eval(name), ""] = found.get(name.lineno, "")
            for column in columns:
                if isinstance(column, ast.Call) and getattr(column.func, "id", "") == "Column":
                    key = ast.literal_eval(name), ast.literal_eval(column.args[0])
                    comments[key] = found.get(column.end_lineno or 0, "")
    return comments


def render_schema_page() -> str:
    """Return the page on the tables: the picture, and each column with its type and meaning."""
    parts = [SCHEMA_HEAD]
    comments = read_comments()
    for name in (name for column in PLACES for name in column):
        table = metadata.tables[name]
        about = comments[name, ""]
        parts.append(f"## {name}\n\n" + (f"{about[:1].upper()}{about[1:]}.\n\n" if about else ""))
        parts.append("| column | type | meaning |\n|---|---|---|\n")
        for column in table.columns:
            target = refer(column)
            words = [f"refers to [`{target}`](#{target})"] if target else []
            words += ["the key"] if column.primary_key else []
            words += [comments[name, column.name].replace("|", "\\|")] if comments.get((name, column.name)) else []
            kind = str(column.type).lower() + ("" if not column.nullable else ", or null")
            parts.append(f"| `{column.name}` | {kind} | {'; '.join(words)} |\n")
        parts.append("\n")
    return "".join(parts).rstrip() + "\n"


def render() -> dict[Path, str]:
    """Return the content of each generated file."""
    return {
        DOCS / "images" / "prompt.svg": draw_prompt(),
        DOCS / "images" / "schema.svg": draw_schema(),
        DOCS / "schema.md": render_schema_page(),
    }


def main() -> None:
    for file, content in render().items():
        file.write_text(content, "utf-8")


if __name__ == "__main__":
    main()
