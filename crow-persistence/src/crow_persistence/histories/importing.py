"""Write sessions of other agents to the database."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crow_core.session import Folders, Hooks, Session
from sqlalchemy import bindparam, select, update

from crow_persistence.entries import clean_text
from crow_persistence.histories import claude_code, codex, llm, opencode, pi
from crow_persistence.histories.history import ForeignSession
from crow_persistence.store import Store
from crow_persistence.tables import messages, sessions
from crow_persistence.writes import SessionWrite

READERS: dict[str, tuple[Callable[[Path], Iterator[ForeignSession]], str]] = {
    "claude-code": (claude_code.read, claude_code.DEFAULT),
    "codex": (codex.read, codex.DEFAULT),
    "opencode": (opencode.read, opencode.DEFAULT),
    "pi": (pi.read, pi.DEFAULT),
    "llm": (llm.read, llm.DEFAULT),
}
"""For each agent, what reads its history, and its place in the home folder."""
KIND = "imported"
"""Kind of the marker at the beginning of an imported session: which session of which agent it was, and what is lost."""
SET_TIME = update(messages).where(messages.c.id == bindparam("row")).values(at=bindparam("time"))


@dataclass
class Imported:
    """What came of an import."""

    sessions: list[str] = field(default_factory=list[str])
    """The ids of the new sessions."""
    known: int = 0
    """The number of sessions that were imported before."""
    messages: int = 0
    left_out: Counter[str] = field(default_factory=Counter[str])
    """What has no place in a message, and what was broken, with its number."""


def import_history(store: Store, agent: str, path: Path) -> Imported:
    """Import the sessions of an agent, each in a transaction; those that were imported before, by their ids, are left
    as they are. Raises StoreError, OSError."""
    imported = Imported()
    for found in READERS[agent][0](path):
        found.settle()
        if found.entries:
            import_session(store, found, imported)
        else:
            imported.left_out += found.left_out
            imported.left_out["sessions without messages"] += 1
    return imported


def import_session(store: Store, found: ForeignSession, imported: Imported) -> None:
    """Import a session that has messages, unless it was imported before, and count it. Raises StoreError."""
    with store.database.begin_read() as connection:
        known = connection.scalar(select(sessions.c.number).where(sessions.c.id == found.own_id))
    if known is not None:  # also a deleted one: it is not brought back
        imported.known += 1
        return
    write_session(store, found)
    imported.sessions.append(found.own_id)
    imported.messages += len(found.entries)
    imported.left_out += found.left_out


def write_session(store: Store, found: ForeignSession) -> None:
    """Write a session with the times of its messages. Raises StoreError."""
    nobody: Any = None
    cwd = found.cwd or "/"
    session = Session(Hooks(), nobody, found.own_id, Folders(cwd, [cwd]), {"": nobody}, {})
    origin = {"agent": found.agent, "session": found.id, "file": str(found.source), "model": found.model}
    session.log.append({"crow": {"kind": KIND, **origin, "left_out": dict(found.left_out)}})
    if found.title:
        session.log.append({"crow": {"kind": "title", "title": clean_text(found.title)}})
    before = len(session.log)
    for _, message in found.entries:
        session.log.append(message)
    store.get_progress(session).is_copy = True  # its messages have no model calls
    write = SessionWrite(session, entries=len(session.log))
    if errors := store.write_sessions([write]):
        raise errors[session.id]
    rows = store.get_progress(session).rows[before:]
    times = [{"row": row, "time": at} for row, (at, _) in zip(rows, found.entries, strict=True) if at]
    with store.database.begin_write() as connection:
        if times:
            connection.execute(SET_TIME, times)
            known = {"created": times[0]["time"], "updated": times[-1]["time"]}
            connection.execute(update(sessions).where(sessions.c.id == session.id).values(**known))
    store.release(session.id)
