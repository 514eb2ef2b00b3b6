"""Blobs: large values, each stored once under its SHA-256 hash however many rows refer to it."""

from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any, TypeVar

from sqlalchemy import Connection, bindparam, delete, exists, func, select, text

from crow_persistence.entries import find_blobs
from crow_persistence.tables import blobs, calls, links, renders

T = TypeVar("T")

BLOBS_LOCK = 0x63726F77_626C
"""PostgreSQL advisory lock: shared by transactions that store blobs, exclusive for those that delete unused ones."""
MAX_PARAMETERS = 500
"""Maximum number of values in one statement."""
INSERT_BLOB = text("INSERT INTO blobs (hash, data) VALUES (:hash, :data) ON CONFLICT DO NOTHING")
SELECT_BLOBS = select(blobs.c.hash, blobs.c.data).where(blobs.c.hash.in_(bindparam("wanted", expanding=True)))
REFERENCING_COLUMNS = (links.c.blob, renders.c.text, calls.c.head)
"""Columns that hold blob hashes; the JSON of model calls holds more."""


def store(connection: Connection, data: Mapping[str, bytes]) -> None:
    """Store blobs, given by hash. Existing ones are not changed."""
    if data:
        lock(connection, shared=True)  # in the order of their hashes, so that two processes cannot wait for each other
        connection.execute(INSERT_BLOB, [{"hash": hash, "data": blob} for hash, blob in sorted(data.items())])


def fetch(connection: Connection, hashes: Iterable[str]) -> dict[str, bytes]:
    """Return the blobs that exist and are intact, by hash."""
    found: dict[str, bytes] = {}
    for part in split_batches(hashes):
        rows = connection.execute(SELECT_BLOBS, {"wanted": part})
        found |= {row.hash: row.data for row in rows if is_intact(row.hash, row.data)}
    return found


def is_intact(hash: str, data: Any) -> bool:
    """Test whether data matches the hash it is stored under."""
    return isinstance(data, bytes) and sha256(data).hexdigest() == hash


def delete_unused(connection: Connection, hashes: Iterable[str]) -> None:
    """Delete those of the given blobs that no row refers to."""
    lock(connection, shared=False)
    bodies = connection.scalars(select(calls.c.messages).where(calls.c.messages.contains('"blob:')))
    named = {hash for body in bodies for hash in find_blobs(body)}
    unnamed = [~exists().where(column == blobs.c.hash) for column in REFERENCING_COLUMNS]
    for part in split_batches(set(hashes) - named):
        connection.execute(delete(blobs).where(blobs.c.hash.in_(part), *unnamed))


def lock(connection: Connection, *, shared: bool) -> None:
    """Hold the blobs lock until the transaction ends. SQLite needs none: it allows one writer at a time."""
    if connection.dialect.name == "postgresql":
        held = func.pg_advisory_xact_lock_shared if shared else func.pg_advisory_xact_lock
        connection.execute(select(held(BLOBS_LOCK)))


def split_batches(values: "Iterable[T]") -> "list[list[T]]":
    """Split values into lists of at most MAX_PARAMETERS."""
    listed = list(values)
    return [listed[start : start + MAX_PARAMETERS] for start in range(0, len(listed), MAX_PARAMETERS)]
