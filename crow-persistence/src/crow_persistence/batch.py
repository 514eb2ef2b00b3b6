"""The rows that a transaction writes for any number of sessions: each statement runs once, for all its rows."""

from collections.abc import Mapping, Sequence
from typing import Any

from crow_core.errors import StoreError
from sqlalchemy import Connection, Update, text

from crow_persistence import blobs

SELECT_LAST_ID = text(
    "SELECT max(coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'messages'), 0),"
    " coalesce((SELECT max(id) FROM messages), 0))"
)
SELECT_NEXT_IDS = text("SELECT nextval(pg_get_serial_sequence('messages', 'id')) FROM generate_series(1, :count)")


class OutOfStep(StoreError):
    """A row that a session is known to have does not exist, or belongs to another owner."""

    is_lost = True


class Batch:
    """Rows to write, by statement."""

    def __init__(self, connection: Connection, order: Sequence[Any], entries: int) -> None:
        self.connection = connection
        self.ids = iter(reserve_ids(connection, entries) if entries > 1 else ())
        """Ids for the rows of several entries. The database makes the id of a single one, which saves a statement."""
        self.blobs: dict[str, bytes] = {}
        self._rows: dict[Any, list[dict[str, Any]]] = {statement: [] for statement in order}

    def add(self, statement: Any, *rows: Mapping[str, Any]) -> None:
        """Add rows for a statement of the order."""
        self._rows[statement] += map(dict, rows)

    def execute(self) -> None:
        """Run the statements that have rows, in order. Raises OutOfStep if a row to update does not exist."""
        blobs.store(self.connection, self.blobs)
        for statement, rows in self._rows.items():
            if rows:
                result = self.connection.execute(statement, rows)
                if isinstance(statement, Update) and result.rowcount != len(rows):
                    raise OutOfStep("The database does not hold what this process has written to it.")


def reserve_ids(connection: Connection, count: int) -> Sequence[int]:
    """Return ids for new rows of `messages`, in ascending order. No other process uses them."""
    if connection.dialect.name == "postgresql":
        return connection.scalars(SELECT_NEXT_IDS, {"count": count}).all()
    last: int = connection.execute(SELECT_LAST_ID).scalar_one()  # SQLite allows one writer at a time
    return range(last + 1, last + 1 + count)
