"""Write sessions of other agents to the database, and what has been added to them since."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from crow_core.content import make_title
from crow_core.errors import SessionBusy
from crow_core.messages.message import Message, get_id
from crow_core.messages.notes import ImportedNotes
from crow_core.session.folders import Folders
from crow_core.session.session import Hooks, Session
from crow_persistence import forks, leases
from crow_persistence.entries import clean_text
from crow_persistence.heads import read_secrets
from crow_persistence.loader import decode_or, load_with_progress, read_roots
from crow_persistence.progress import Progress
from crow_persistence.sql_store import PROGRESS, BlockingStore
from crow_persistence.tables import messages, sessions
from crow_persistence.writes import SessionWrite
from sqlalchemy import Connection, Row, select, update

from crow_eval.histories import claude_code, codex, goose, kimi_code, llm, opencode, pi, vibe, zed
from crow_eval.histories.history import ForeignSession

READERS: dict[str, tuple[Callable[[Path], Iterator[ForeignSession]], str]] = {
    "claude-code": (claude_code.read, claude_code.DEFAULT),
    "codex": (codex.read, codex.DEFAULT),
    "opencode": (opencode.read, opencode.DEFAULT),
    "pi": (pi.read, pi.DEFAULT),
    "llm": (llm.read, llm.DEFAULT),
    "vibe": (vibe.read, vibe.DEFAULT),
    "kimi-code": (kimi_code.read, kimi_code.DEFAULT),
    "goose": (goose.read, goose.DEFAULT),
    "zed": (zed.read, zed.DEFAULT),
}
"""For each agent, what reads its history, and its place in the home folder."""
KIND = "imported"
"""Kind of the marker before imported entries: their agent and session, the id of the last one, and the losses."""


@dataclass
class Imported:
    """The result of an import."""

    sessions: list[str] = field(default_factory=list[str])
    """The ids of the new sessions."""
    grown: list[str] = field(default_factory=list[str])
    """The ids of sessions that were imported before, and have new messages now."""
    forks: list[str] = field(default_factory=list[str])
    """The ids of new sessions that go on with one that had been imported before and was continued in crow."""
    known: int = 0
    """The number of sessions that were imported before, and have nothing new."""
    messages: int = 0
    left_out: Counter[str] = field(default_factory=Counter[str])
    """Content without a place in a message, and broken parts, with their number."""


def import_history(store: BlockingStore, agent: str, path: Path) -> Imported:
    """Import the sessions of an agent, each in a transaction. Raises StoreError, OSError.

    New messages of a session that was imported before are appended. If its earlier messages have changed, those are
    rewound. If it was continued in crow, it is left as it is, and a fork gets the new messages. A deleted one is not
    brought back.
    """
    imported = Imported()
    seen: set[str] = set()
    for found in READERS[agent][0](path):
        found.settle()
        if not found.entries:
            imported.left_out += found.left_out
            imported.left_out["sessions without messages"] += 1
            continue
        try:
            import_session(store, found, imported, is_copy=found.own_id in seen)
        except SessionBusy:
            imported.left_out["sessions that have grown and are open in crow"] += 1
        seen.add(found.own_id)
    return imported


def import_session(store: BlockingStore, found: ForeignSession, imported: Imported, *, is_copy: bool = False) -> None:
    """Write what is new in a session, in one transaction. Of a copy of one that was just read, only what follows its
    end is new. Raises StoreError, also SessionBusy."""
    ids = found.make_entry_ids()
    with store.database.begin_read() as connection:
        row, _ = find_latest(connection, found.own_id)
        is_known = row is not None and (row.deleted is not None or read_notes(connection, row).get("last") == ids[-1])
    if is_known:
        imported.known += 1
        return
    with store.database.begin_write() as connection:
        row, next_id = find_latest(connection, found.own_id)
        log: list[Message] = []
        progress, start, notes = Progress(store.owner), 0, dict[str, Any]()
        into, id = imported.sessions, next_id
        if row is not None:
            notes = read_notes(connection, row)
            record, progress = load_with_progress(connection, row)
            log = record.log
            stored = [get_id(entry) for entry in log if "role" in entry]
            start = sum(takewhile(bool, (one == other for one, other in zip(stored, ids, strict=False))))
            has_changed, is_continued = start < len(stored), get_id(log[-1]) != notes.get("last") if log else True
            if start == len(ids) or (is_copy and (has_changed or is_continued)):
                imported.known += 1
                return
            if not is_continued:
                leases.acquire(connection, row, store.owner)
                into, id = imported.grown, row.id
                if has_changed:
                    log.append({"crow": {"kind": "rewind", "to": ids[start - 1] if start else get_id(log[0])}})
            elif start and (fork := forks.fork(connection, row.id, next_id, ids[start - 1], store.owner)):
                into, (record, progress) = imported.forks, fork
                log = record.log
            else:
                log, progress = [], Progress(store.owner)
        session = open_session(id, found, row if log else None, progress, log)
        progress.owner = store.owner
        add_entries(session, found, ids, start, has_title=bool(row is not None and row.title))
        write = SessionWrite(session, entries=len(session.log), secrets=read_secrets(store.database))
        times = make_times(found)[start:]
        write.times = [times[0]] * (len(session.log) - len(progress.rows) - len(times)) + times
        store.write_together(connection, [write])
        connection.execute(
            update(sessions).where(sessions.c.id == id).values(copied=leases.now(), owner=None, beat=None)
        )
    into.append(id)
    imported.messages += len(ids) - start
    imported.left_out += found.left_out - Counter(notes.get("left_out", {}))


def find_latest(connection: Connection, own_id: str) -> tuple["Row[Any] | None", str]:
    """Find the session that was written last of those that hold a session of another agent, deleted ones included.
    Return it, and the id of the next one."""
    latest, id = None, own_id
    for number in count(2):
        found = connection.execute(select(sessions).where(sessions.c.id == id)).one_or_none()
        if found is None:
            break
        latest, id = found, sha256(f"{own_id}\0{number}".encode()).hexdigest()[:32]
    return latest, id


def read_notes(connection: Connection, row: "Row[Any]") -> dict[str, Any]:
    """Return the notes of the last marker of an import in a session; none if it is damaged."""
    its = (messages.c.session == row.number) & (messages.c.kind == KIND)
    body = connection.scalar(select(messages.c.body).where(its).order_by(messages.c.id.desc()).limit(1))
    notes: Any = decode_or(body or "", {}).get("crow")
    return notes if isinstance(notes, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def open_session(
    id: str, found: ForeignSession, row: "Row[Any] | None", progress: Progress, log: Sequence[Message]
) -> Session:
    """Make a session that can be written: a new one, or the stored one of a row with its progress and its log."""
    nobody: Any = None
    cwd = found.cwd or "/"
    folders = Folders(row.cwd, read_roots(row)) if row is not None else Folders(cwd, [cwd])
    session = Session(Hooks(), nobody, id, folders, {"": nobody}, {})
    session.state[PROGRESS] = progress
    for entry in log:
        session.log.append(entry)
    return session


def add_entries(session: Session, found: ForeignSession, ids: Sequence[str], start: int, *, has_title: bool) -> None:
    """Append the entries from a number on to the log, behind a marker."""
    origin: ImportedNotes = {"agent": found.agent, "session": found.id, "file": str(found.source), "model": found.model}
    session.log.append({"crow": {"kind": KIND, **origin, "last": ids[-1], "left_out": dict(found.left_out)}})
    if not has_title and (title := found.title or make_title(message for _, message in found.entries)):
        session.log.append({"crow": {"kind": "title", "title": clean_text(title)}})
    for id, (_, message) in zip(ids[start:], found.entries[start:], strict=True):
        message["crow"] = {**message.get("crow", {}), "id": id}
        session.log.append(message)


def make_times(found: ForeignSession) -> list[int]:
    """Return the times of the entries. One that is not known is that of the entry before; none is in the future."""
    now = leases.now()
    known = next((at for at, _ in found.entries if at), now)
    times: list[int] = []
    for at, _ in found.entries:
        known = at or known
        times.append(min(known, now))
    return times
