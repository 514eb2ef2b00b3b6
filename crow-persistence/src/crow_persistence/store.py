"""The store: the operations on stored sessions that the hooks need. Each method blocks, and runs one or two
transactions."""

from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from crow_core.errors import SessionBusy
from crow_core.messages import Message
from crow_core.models.chat import ModelCall
from crow_core.session import Session
from crow_core.store import Page, Record
from sqlalchemy import Row

from crow_persistence import audit, forks, leases, loader, requests, search, writer
from crow_persistence.database import Database
from crow_persistence.progress import Progress
from crow_persistence.requests import RequestEncoder

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

    def write_entries(self, session: Session, secrets: Collection[str] = ()) -> None:
        """Write the new entries of a session's log, once there is a message in it. After a failure, the next call
        writes them."""
        progress = self.get_progress(session)
        has_message = progress.number or any("role" in entry for entry in session.log)
        if len(progress.rows) == len(session.log) or not has_message:
            return
        with self.database.begin_write() as connection:
            engine = connection.engine
            if progress.engine is not engine:
                writer.resync(connection, progress, session)
            progress.engine = None
            committed = writer.write_entries(connection, progress, session, session.log[len(progress.rows) :], secrets)
            if committed.decisions:
                audit.announce(connection, self.database, committed.decisions)
        committed.apply_to(progress)
        progress.engine = engine
        self.open_ids.add(session.id)
        if committed.decisions:
            audit.anchor(self.database, committed.decisions)

    def write_draft(self, session: Session, reply: Message, secrets: Collection[str] = ()) -> None:
        """Write a reply that is still streaming."""
        if (progress := self.get_progress(session)).number:
            with self.database.begin_write() as connection:
                writer.write_draft(connection, progress, session, reply, secrets)

    def write_model_call(self, session: Session, model_call: ModelCall, secrets: Collection[str] = ()) -> None:
        """Write a model call."""
        progress = self.get_progress(session)
        progress.encoder = progress.encoder or RequestEncoder(session.log, progress.rows)
        progress.encoder.secrets = secrets
        if progress.number:
            with self.database.begin_write() as connection:
                if progress.engine in (None, connection.engine):  # a replaced database gets the session's entries first
                    requests.write_model_call(connection, progress.number, model_call, progress.encoder)

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

    def list_sessions(self, cwd: str, cursor: str, limit: int) -> Page:
        """Return one page of the list of sessions. Raises ValueError for a cursor that no list returned."""
        with self.database.begin_read() as connection:
            return loader.list_sessions(connection, cwd, cursor, limit)

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

    def close_session(self, session: Session, secrets: Collection[str] = ()) -> None:
        """Write the rest of a session, then release its lease."""
        try:
            self.write_entries(session, secrets)
        finally:
            self.release(session.id)

    def release(self, id: str) -> None:
        """Release the lease of a session."""
        if id in self.open_ids:
            self.open_ids.discard(id)
            with self.database.begin_write() as connection:
                leases.release(connection, self.owner, id)

    def send_heartbeat(self) -> None:
        """Renew the leases of this owner's open sessions."""
        if self.open_ids:
            with self.database.begin_write() as connection:
                leases.send_heartbeat(connection, self.owner, self.open_ids)
