"""Prune a database: choose the sessions to delete, delete them, and free the space."""

from collections.abc import Iterator
from pathlib import Path

from crow_core.errors import SessionBusy
from crow_core.session.store import Summary
from sqlalchemy import Connection, func, or_, select

from crow_persistence import blobs, forks, tables
from crow_persistence.database import Database
from crow_persistence.entries import clean_text
from crow_persistence.loader import to_summary
from crow_persistence.tables import calls, links, messages, sessions


def choose_sessions(
    connection: Connection, *, before: int | None = None, folder: Path | None = None, max_bytes: int | None = None
) -> list[tuple[Summary, int]]:
    """Choose sessions to delete, the least recently used first. Return each with an estimate of its size in bytes.

    Chosen are sessions last used `before` a time in milliseconds since 1970, in this folder or below it. With
    `max_bytes`, only as many are chosen as have to go until the rest takes no more than this.
    """
    wanted = select(sessions).where(sessions.c.deleted.is_(None)).order_by(sessions.c.updated, sessions.c.number)
    if before is not None:
        wanted = wanted.where(sessions.c.updated < before)
    if folder is not None:
        cwd = clean_text(str(folder))
        below = sessions.c.cwd.startswith(cwd.rstrip("/") + "/", autoescape=True)
        wanted = wanted.where(or_(sessions.c.cwd == cwd, below))
    sizes = estimate_sizes(connection)
    excess = None if max_bytes is None else sum(sizes.values()) - max_bytes
    chosen: list[tuple[Summary, int]] = []
    for row in connection.execute(wanted):
        size = sizes.get(row.number, 0)
        if excess is not None:
            if excess <= 0:
                break
            excess -= size
        chosen.append((to_summary(row), size))
    return chosen


def estimate_sizes(connection: Connection) -> dict[int, int]:
    """Return the bytes that each session stores, by number. A blob that several sessions use counts for each."""
    sizes: dict[int, int] = {}
    own = select(messages.c.session, func.sum(func.length(messages.c.body))).group_by(messages.c.session)
    linked = (
        select(messages.c.session, links.c.blob).join(links, links.c.message == messages.c.id).distinct().subquery()
    )
    data = select(linked.c.session, func.sum(func.length(tables.blobs.c.data)))
    data = data.join(tables.blobs, tables.blobs.c.hash == linked.c.blob).group_by(linked.c.session)
    sent = select(calls.c.session, func.sum(func.length(calls.c.messages))).group_by(calls.c.session)
    for statement in (own, data, sent):
        for number, size in connection.execute(statement):
            sizes[number] = sizes.get(number, 0) + int(size or 0)
    return sizes


def delete_sessions(database: Database, ids: list[str]) -> Iterator[tuple[str, str]]:
    """Delete sessions, each in a transaction of its own, then the blobs that nothing refers to any more. Yield the id
    of each, with the reason if it stays because it is open. Raises StoreError."""
    for id in ids:
        try:
            with database.begin_write() as connection:
                forks.delete_rows(connection, id)
            yield id, ""
        except SessionBusy as busy:
            yield id, str(busy)
    with database.begin_write() as connection:
        blobs.lock(connection, shared=False)
        blobs.delete_unused(connection, connection.scalars(select(tables.blobs.c.hash)).all())


def measure_sessions(connection: Connection) -> int:
    """Estimate the bytes that all sessions store."""
    return sum(estimate_sizes(connection).values())
