"""Evaluations: runs of tasks by prompts and models, and the outcome of each, a cell."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from crow_core.errors import StoreError
from crow_persistence.entries import clean_text
from crow_persistence.tables import cells, evaluations
from sqlalchemy import Connection, Row, delete, func, insert, select, update

CELL_KEY = ("task", "variant", "repetition")
"""The identity of a cell within its evaluation."""


def store_evaluation(connection: Connection, id: str, dataset: str, settings: str, at: int) -> int:
    """Store an evaluation that begins; return its number. `settings` is a JSON object."""
    row = {"id": id, "dataset": clean_text(dataset), "settings": clean_text(settings), "created": at}
    number = connection.execute(insert(evaluations).values(row)).inserted_primary_key
    assert number is not None
    return number[0]


def replace_settings(connection: Connection, number: int, settings: str) -> None:
    """Replace the settings of a search, which grow with its candidates. `settings` is a JSON object."""
    connection.execute(update(evaluations).where(evaluations.c.number == number).values(settings=clean_text(settings)))


def end_evaluation(connection: Connection, number: int, at: int) -> None:
    """Note that every cell of an evaluation has its outcome."""
    connection.execute(update(evaluations).where(evaluations.c.number == number).values(ended=at))


def store_cells(connection: Connection, number: int, rows: Iterable[Mapping[str, Any]]) -> None:
    """Store outcomes of cells, in place of errors that earlier runs of them ended with. Other outcomes stay."""
    clean = [
        {name: clean_text(value) if isinstance(value, str) else value for name, value in row.items()} for row in rows
    ]
    new: dict[Any, dict[str, Any]] = {
        tuple(row[name] for name in CELL_KEY): {"evaluation": number, **row} for row in clean
    }
    stored = select(cells.c.number, cells.c.state, *(cells.c[name] for name in CELL_KEY)).where(
        cells.c.evaluation == number, cells.c.task.in_({row["task"] for row in clean})
    )
    errors: list[int] = []
    for row in connection.execute(stored).all():
        key = tuple(getattr(row, name) for name in CELL_KEY)
        if key in new and row.state == "error":
            errors.append(row.number)
        elif key in new:
            del new[key]
    if errors:
        connection.execute(delete(cells).where(cells.c.number.in_(errors)))
    if new:
        connection.execute(insert(cells), [*new.values()])


def find_evaluation(connection: Connection, prefix: str) -> Row[Any]:
    """Return the one evaluation whose id begins with `prefix`. Raises StoreError."""
    found = connection.execute(
        select(evaluations).where(evaluations.c.id.startswith(prefix, autoescape=True)).limit(2)
    ).all()
    if not prefix or not found:
        raise StoreError(f"There is no evaluation {prefix!r}. `crow eval list` shows those that are stored.")
    if len(found) > 1:
        raise StoreError(f"Several evaluations begin with {prefix!r}: give more letters of the id.")
    return found[0]


def list_evaluations(connection: Connection, limit: int) -> Sequence[Row[Any]]:
    """Return the latest evaluations, newest first, each with the number of its cells by their state."""
    counts = [func.count().filter(cells.c.state == state).label(state) for state in ("passed", "failed", "error")]
    found = select(evaluations, *counts).outerjoin(cells).group_by(evaluations.c.number)
    return connection.execute(found.order_by(evaluations.c.number.desc()).limit(limit)).all()


def load_cells(connection: Connection, number: int) -> Sequence[Row[Any]]:
    """Return the cells of an evaluation that have an outcome, in the order in which they ended."""
    return connection.execute(select(cells).where(cells.c.evaluation == number).order_by(cells.c.number)).all()
