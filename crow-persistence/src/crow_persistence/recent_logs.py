"""Read the stored entries of many sessions at once, without opening each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from crow_core.messages.message import Message
from crow_core.messages.notes import Notes
from sqlalchemy import Connection, func, select

from crow_persistence.entries import DamagedEntry, clean_text, unpack
from crow_persistence.loader import SELECT_FIRST_KIND, decode_or
from crow_persistence.tables import cells, messages, renders, sessions

BATCH = 2_000
"""Rows that are fetched at a time."""


@dataclass
class RecentLog:
    """The entries of a session in the order in which they were written, undone ones included."""

    id: str
    cwd: str
    title: str
    entries: list[Message] = field(default_factory=list[Message])


def load_recent_logs(
    connection: Connection, since: int = 0, cwd: str = "", ids: Sequence[str] = ()
) -> Iterator[RecentLog]:
    """Yield the sessions in a folder ("" for all) that were used after a time, in milliseconds since 1970; with `ids`,
    only those.

    Each has its entries, undone ones included, those of a session that it was forked from not. A `render`
    entry has its variables. Large values are left as references to their blobs, and damaged entries out. Sessions of
    sub-agents, of `crow reask` and of evaluations are not among them.
    """
    first = func.coalesce(SELECT_FIRST_KIND.scalar_subquery(), "")
    wanted = select(sessions.c.number).where(
        sessions.c.deleted.is_(None),
        sessions.c.updated >= since,
        first.not_in(("parent", "reask")),
        sessions.c.id.not_in(select(cells.c.session)),
    )
    if cwd:
        wanted = wanted.where(sessions.c.cwd == clean_text(cwd))
    if ids:
        wanted = wanted.where(sessions.c.id.in_(ids))
    columns = sessions.c.id, sessions.c.cwd, sessions.c.title, messages.c.kind, messages.c.body, renders.c.variables
    joined = messages.join(sessions, messages.c.session == sessions.c.number)
    joined = joined.outerjoin(renders, renders.c.message == messages.c.id)
    found: Any = select(*columns).select_from(joined).where(messages.c.session.in_(wanted))
    found = found.order_by(messages.c.session, messages.c.id).execution_options(yield_per=BATCH)
    log: RecentLog | None = None
    for row in connection.execute(found):
        if log is None or log.id != row.id:
            if log is not None:
                yield log
            log = RecentLog(row.id, row.cwd, row.title or "")
        if (entry := read_entry(row)) is not None:
            log.entries.append(entry)
    if log is not None:
        yield log


def read_entry(row: Any) -> Message | None:
    """Return the entry of a row, with references in place of its large values; None if it is damaged."""
    try:
        entry = unpack(row.kind, row.body, {})
    except DamagedEntry as damage:
        entry = damage.rest
    if entry is not None and row.variables is not None:
        entry["crow"] = cast(Notes, {**entry.get("crow", {}), "variables": decode_or(row.variables, {})})
    return entry
