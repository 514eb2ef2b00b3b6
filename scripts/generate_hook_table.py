"""Write the table of hooks in docs/hooks.md from the contracts of class `Hooks`."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crow_core.hooks import Collect, First, Hook, Observe, Pipe, Unwind
from crow_core.session.session import Hooks

TARGET = Path(__file__).parent.parent / "docs/hooks.md"
BEGIN = "<!-- The hooks: generated from class Hooks by scripts/generate_hook_table.py. -->\n"
END = "<!-- The end of the hooks. -->"


def iterate_hooks() -> Iterator[tuple[Hook[..., Any], list[str], str]]:
    """Iterate over the hooks in order of declaration: each with what it receives, and what it may return or ""."""
    (declarations,) = ast.parse(inspect.getsource(Hooks)).body
    for node in ast.walk(declarations):
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Subscript(slice=types)):
                hook = getattr(Hooks, name)
            case _:
                continue
        match hook, types:
            case Observe() | Unwind(), ast.List(elts=received):
                yield hook, [*map(ast.unparse, received)], ""
            case Pipe(), ast.Tuple(elts=[value, ast.List(elts=received)]):
                yield hook, [*map(ast.unparse, [value, *received])], ast.unparse(value)
            case Collect() | First(), ast.Tuple(elts=[ast.List(elts=received), answer]):
                yield hook, [*map(ast.unparse, received)], ast.unparse(answer)
            case _:
                raise TypeError(f"{name} has an annotation that is not understood: {ast.unparse(types)}")


def to_cell(annotation: str) -> str:
    """Convert a type to a cell of a Markdown table, in which `|` would end the cell."""
    return " or ".join(f"`{part}`" for part in annotation.split(" | "))


def render() -> str:
    """Render the kinds of hooks as a list, and the hooks as a table."""
    kinds = [f"- **{kind.__name__}**: {kind.kind}\n" for kind in (Observe, Unwind, Collect, First, Pipe)]
    rows = ["| hook | kind | receives | may return | contract |\n", "|---|---|---|---|---|\n"]
    for hook, received, answer in iterate_hooks():
        sentence = " ".join(hook.contract.partition("\n\n")[0].split())
        cells = [f"`{hook.name}`", type(hook).__name__, ", ".join(map(to_cell, received)), answer and to_cell(answer)]
        rows.append(f"| {' | '.join(cells)} | {sentence} |\n".replace("  ", " "))
    return f"{''.join(kinds)}\n{''.join(rows)}"


def insert(text: str, table: str) -> str:
    """Put the table between its two markers."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


if __name__ == "__main__":
    TARGET.write_text(insert(TARGET.read_text("utf-8"), render()), encoding="utf-8")
