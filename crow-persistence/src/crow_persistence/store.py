"""The store: the operations on stored sessions that the hooks need. Each method blocks, and runs one or two
transactions."""

from collections.abc import Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from crow_core.errors import SessionBusy, StoreError
from crow_core.session import Session
from crow_core.store import ArchiveFilter, Page, Record, SessionChange, Summary
from sqlalchemy import Connection, Row
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, InterfaceError, ProgrammingError

from crow_persistence import audit, forks, leases, loader, requests, search, writer
from crow_persistence.database import Database
from crow_persistence.progress import Progress
from crow_persistence.requests import RequestEncoder
from crow_persistence.writes import SessionWrite

ROW_FAULTS = (DataError, IntegrityError, InterfaceError, ProgrammingError)
"""Errors of a row, which leave the connection and the transaction of others usable."""
STATE_KEY = "persistence"
"""Key of `session.state` that holds a session's progress."""


class Store:
    """The stored sessions of one app. Methods that write must be called from one thread. Every method may raise
    StoreError."""

    def __init__(self, url: str, folder: Path | None = None) -> None:
        self.database = Database(url, folder)
        self.owner = leases.make_owner()
        self.open_ids: set[str] = set()
        """Ids of the sessions that this owner holds the lease of."""

    def write_sessions(self, writes: Sequence[SessionWrite], *, briefly: bool = False) -> dict[str, Exception]:
        """Write what sessions have gathered, in one transaction. Return the faults of single sessions by their ids.

        After a fault, the session's next write also writes the entries of this one. Raises StoreError if nothing could
        be written. `briefly` limits the wait for locks.
        """
        # In the order of their ids, so that two processes cannot wait for each other's rows.
        writes = sorted(filter(self.has_news, writes), key=lambda write: write.session.id)
        if not writes:
            return {}
        errors, decisions, head = dict[str, Exception](), list[audit.AuditRow](), None
        with self.database.begin_write(briefly=briefly) as connection:
            engine = connection.engine
            for write in writes:
                try:
                    with connection.begin_nested() if len(writes) > 1 else nullcontext():
                        decisions += self.write_session(connection, write)
                except Exception as error:
                    if len(writes) == 1 or (isinstance(error, DBAPIError) and not isinstance(error, ROW_FAULTS)):
                        raise
                    is_fault = isinstance(error, DBAPIError)
                    errors[write.session.id] = StoreError(self.database.explain(error)) if is_fault else error
            if decisions:
                head = audit.append_rows(connection, decisions)
                audit.announce(connection, self.database, head)
        for write in writes:
            if write.session.id not in errors and (progress := self.get_progress(write.session)).number:
                progress.engine = engine
                self.open_ids.add(write.session.id)
        if head:
            audit.anchor(self.database, head)
        return errors

    def has_news(self, write: SessionWrite) -> bool:
        """Test whether there is anything to write; a session is not stored before its first message."""
        progress = self.get_progress(write.session)
        if not progress.number and not any("role" in entry for entry in write.session.log[: write.entries]):
            progress.model_calls += write.model_calls
            return False
        return bool(len(progress.rows) < write.entries or write.parts or write.model_calls)

    def write_session(self, connection: Connection, write: SessionWrite) -> list[audit.AuditRow]:
        """Write what one session has gathered. Return its rows for the audit chain. Raises StoreError."""
        session, secrets, progress = write.session, write.secrets, self.get_progress(write.session)
        if progress.engine is not connection.engine:
            writer.resync(connection, progress, session)
        progress.engine = None  # until the transaction is committed
        decisions: list[audit.AuditRow] = []
        if entries := session.log[len(progress.rows) : write.entries]:
            decisions = writer.write_entries(connection, progress, session, entries, secrets)
        written = set(map(loader.entry_id, entries))
        if parts := [part for part in write.parts if loader.entry_id(part) not in written]:
            writer.write_parts(connection, progress, session, parts, secrets)
        write.model_calls[:0], progress.model_calls = progress.model_calls, []
        progress.encoder = progress.encoder or RequestEncoder(session.log, progress.rows)
        progress.encoder.secrets = secrets
        for model_call in write.model_calls:
            requests.write_model_call(connection, progress.number, model_call, progress.encoder)
        return decisions

    def get_progress(self, session: Session) -> Progress:
        """Return a session's progress; a new one for a new session."""
        if (progress := session.state.get(STATE_KEY)) is None:
            # Without the mode: an unchosen mode follows the settings, which may become stricter.
            options = {option.id: option.get() for option in session.options if option.category != "mode"}
            session.state[STATE_KEY] = progress = Progress(self.owner, options=options)
        return progress

    def acquire(self, id: str) -> "Row[Any] | None":
        """Acquire the lease of a stored session. Return its row, None when there is none. Raises SessionBusy."""
        if id in self.open_ids:
            raise SessionBusy(f"Session {id} is open in this process. Close it there, or fork it to go on in a copy.")
        with self.database.begin_write() as connection:
            row = loader.find_session_by_id(connection, id, lock=True)
            if row is not None:
                leases.acquire(connection, row, self.owner)
        if row is not None:
            self.open_ids.add(id)
        return row

    def load(self, row: "Row[Any]") -> Record:
        """Load a session whose lease was acquired."""
        with self.database.begin_read() as connection:
            return self.attach_progress(*loader.load_with_progress(connection, row))

    def fork(self, id: str, new_id: str, at: str) -> Record | None:
        """Fork a stored session and acquire the fork's lease."""
        with self.database.begin_write() as connection:
            found = forks.fork(connection, id, new_id, at, self.owner)
        if found is None:
            return None
        self.open_ids.add(new_id)
        return self.attach_progress(*found)

    def fork_without_lease(self, id: str, new_id: str) -> bool:
        """Fork a stored session at its end, without acquiring a lease. Return False when there is no such session."""
        with self.database.begin_write() as connection:
            return forks.fork(connection, id, new_id) is not None

    def export(self, id: str, format: Any, path: Path) -> int | None:
        """Write a session to a file, with likely secrets masked. Return the number of masks, None when there is no such
        session. Raises OSError."""
        from crow_persistence.export import export  # rarely needed
        from crow_persistence.export.redaction import MASK
        from crow_persistence.export.transcript import Transcript

        with self.database.begin_read() as connection:
            if (row := loader.find_session_by_id(connection, id)) is None:
                return None
            made = export(Transcript.load(connection, row).redact(), format)
        made.write(path)
        return made.text.count(MASK)

    def attach_progress(self, record: Record, progress: Progress) -> Record:
        """Put a session's progress into its record, under this owner."""
        progress.owner = self.owner
        record.state[STATE_KEY] = progress
        return record

    def list_sessions(self, cwd: str, cursor: str, limit: int, archived: ArchiveFilter) -> Page:
        """Return one page of the list of sessions. Raises ValueError for a cursor that no list returned."""
        with self.database.begin_read() as connection:
            return loader.list_sessions(connection, cwd, cursor, limit, archived=archived)

    def find_session(self, id: str) -> Summary | None:
        """Return a stored session, None when there is none."""
        with self.database.begin_read() as connection:
            row = loader.find_session_by_id(connection, id)
            return None if row is None else loader.to_summary(row)

    def change_session(self, id: str, change: SessionChange, progress: Progress | None) -> Summary | None:
        """Change a stored session; `progress` is its progress if it is open here. Return None when there is no such
        session. Raises SessionBusy."""
        with self.database.begin_write() as connection:
            if (row := loader.find_session_by_id(connection, id, lock=True)) is None:
                return None
            row = writer.change_session(connection, row, change, self.owner)
        if progress is not None:
            progress.is_archived = loader.is_archived(row)
        return loader.to_summary(row)

    def search(self, words: str, cwd: str, limit: int) -> list[dict[str, Any]]:
        """Return the best matches in a folder ("" for all), as results of `_crow/search`."""
        with self.database.begin_read() as connection:
            hits = search.search(connection, words, cwd=cwd, limit=limit)
        return [
            {
                "sessionId": hit.session,
                "title": hit.title,
                "cwd": hit.cwd,
                "at": datetime.fromtimestamp(hit.at / 1000, UTC).isoformat(timespec="milliseconds"),
                "role": hit.kind,
                "tool": hit.tool,
                "snippet": hit.snippet,
            }
            for hit in hits
        ]

    def delete(self, id: str) -> None:
        """Delete a session."""
        with self.database.begin_write() as connection:
            forks.delete(connection, id, self.owner)

    def release(self, id: str) -> None:
        """Release the lease of a session."""
        if id in self.open_ids:
            self.open_ids.discard(id)
            with self.database.begin_write() as connection:
                leases.release(connection, self.owner, id)

    def send_heartbeat(self) -> None:
        """Renew the leases of this owner's open sessions."""
        if self.open_ids:
            with self.database.begin_write(briefly=True) as connection:  # the next one is sent soon
                leases.send_heartbeat(connection, self.owner, self.open_ids)
