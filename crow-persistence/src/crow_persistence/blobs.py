"""What is large, and the same in many rows, is kept once, under its hash."""

from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any, TypeVar

from sqlalchemy import Connection, bindparam, delete, exists, func, select, text

from crow_persistence.entries import names
from crow_persistence.tables import blobs, calls, links, renders

T = TypeVar("T")

LOCK = 0x63726F77_626C
"""Of PostgreSQL's advisory locks: shared by who keeps blobs, and alone with who sweeps them away."""
MANY = 500
"""Parameters to a statement."""
KEEP = text("INSERT INTO blobs (hash, data) VALUES (:hash, :data) ON CONFLICT DO NOTHING")
FETCH = select(blobs.c.hash, blobs.c.data).where(blobs.c.hash.in_(bindparam("wanted", expanding=True)))
NAMED = (links.c.blob, renders.c.text, calls.c.head)
"""Where blobs are named, beside the JSON of calls."""


def keep(connection: Connection, data: Mapping[str, bytes]) -> None:
    """Store blobs, by hash; those that are there stay as they are."""
    if data:
        lock(connection, shared=True)
        connection.execute(KEEP, [{"hash": hash, "data": blob} for hash, blob in data.items()])


def fetch(connection: Connection, hashes: Iterable[str]) -> dict[str, bytes]:
    """Those of the blobs that are there and whole, by hash."""
    found: dict[str, bytes] = {}
    for part in parts(hashes):
        rows = connection.execute(FETCH, {"wanted": part})
        found |= {row.hash: row.data for row in rows if is_whole(row.hash, row.data)}
    return found


def is_whole(hash: str, data: Any) -> bool:
    """Whether a blob is what was stored under its hash."""
    return isinstance(data, bytes) and sha256(data).hexdigest() == hash


def sweep(connection: Connection, hashes: Iterable[str]) -> None:
    """Delete those of the blobs that nothing names any more."""
    lock(connection, shared=False)
    bodies = connection.scalars(select(calls.c.messages).where(calls.c.messages.contains('"blob:')))
    named = {hash for body in bodies for hash in names(body)}
    unnamed = [~exists().where(column == blobs.c.hash) for column in NAMED]
    for part in parts(set(hashes) - named):
        connection.execute(delete(blobs).where(blobs.c.hash.in_(part), *unnamed))


def lock(connection: Connection, *, shared: bool) -> None:
    """Until the transaction ends. SQLite lets one write at a time anyway."""
    if connection.dialect.name == "postgresql":
        held = func.pg_advisory_xact_lock_shared if shared else func.pg_advisory_xact_lock
        connection.execute(select(held(LOCK)))


def parts(values: "Iterable[T]") -> "list[list[T]]":
    """Values in lists that are not too long for one statement."""
    listed = list(values)
    return [listed[start : start + MANY] for start in range(0, len(listed), MANY)]
