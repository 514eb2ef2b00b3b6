"""The operations on stored sessions that `SqlStore` needs. Each method blocks, and runs one or two transactions."""

from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from crow_core.errors import StoreError
from crow_core.messages.message import get_id
from crow_core.models.token_usage import SESSION_TOTALS
from crow_core.session.session import Session
from crow_core.session.store import ArchiveFilter, Page, Record, SessionChange, Summary
from crow_core.session_state import StateKey
from sqlalchemy import Connection, Row
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, InterfaceError, ProgrammingError

from crow_persistence import audit, forks, leases, loader, requests, search, writer
from crow_persistence.batch import Batch, OutOfStep
from crow_persistence.database import RECONNECT_TIMEOUT, SHORT_TIMEOUT, Database, DatabaseLost, retry_lost
from crow_persistence.heads import AnchoredHead, read_secrets
from crow_persistence.progress import Progress
from crow_persistence.requests import RequestEncoder
from crow_persistence.writes import SessionWrite, is_stored

ROW_FAULTS = (DataError, IntegrityError, InterfaceError, ProgrammingError)
"""Errors of a row, which leave the connection and the transaction of others usable."""
PROGRESS = StateKey[Progress | None]("persistence", lambda: None)


class BlockingStore:
    """The stored sessions of one app. Methods that write must be called from one thread. Every method may raise
    StoreError."""

    def __init__(self, url: str, folder: Path | None = None) -> None:
        self.database = Database(url, folder)
        self.owner = leases.make_owner()
        self.open_ids: set[str] = set()
        """Ids of the sessions that this owner holds the lease of."""

    def open(self) -> None:
        with self.database.begin_read():
            pass

    def write_sessions(self, writes: Sequence[SessionWrite], *, briefly: bool = False) -> dict[str, Exception]:
        """Write what sessions have gathered, in one transaction. Return the faults of single sessions by their ids.

        After a fault, the session's next write also writes the entries of this one. Raises StoreError if nothing could
        be written. `briefly` limits the wait for locks.
        """
        for attempt in retry_lost(DatabaseLost, SHORT_TIMEOUT if briefly else RECONNECT_TIMEOUT):
            with attempt:
                return self._write_sessions(writes, briefly=briefly)
        raise AssertionError  # unreachable: the last attempt raises

    def _write_sessions(self, writes: Sequence[SessionWrite], *, briefly: bool) -> dict[str, Exception]:
        # In the order of their ids, so that two processes cannot wait for each other's rows.
        writes = sorted(filter(self.has_news, writes), key=lambda write: write.session.id)
        if not writes:
            return {}
        for write in writes:
            write.secrets = {*write.secrets, *read_secrets(self.database)}
        errors: dict[str, Exception] = {}
        try:
            head = self.write_transaction(self.write_together, writes, errors, briefly=briefly)
        except Exception as error:  # of the driver, or of our own code: see is_fault_of_session
            if not is_fault_of_session(error):
                raise
            head = self.write_transaction(partial(self.write_apart, errors=errors), writes, errors, briefly=briefly)
        if head:
            audit.anchor(self.database, head)
        return errors

    def write_transaction(
        self,
        write_all: Callable[[Connection, Sequence[SessionWrite]], list[audit.AuditRow]],
        writes: Sequence[SessionWrite],
        errors: Collection[str],
        *,
        briefly: bool,
    ) -> AnchoredHead | None:
        """Run a function in a transaction, and append the rows that it returns to the audit chain. Return the chain's
        head if it grows. Raises StoreError.

        The sessions in `errors` are not written.
        """
        head = None
        with self.database.begin_write(briefly=briefly) as connection:
            engine = connection.engine
            if rows := write_all(connection, writes):
                head = audit.append_rows(connection, self.database, rows)
                audit.announce(connection, self.database, head)
        for write in writes:
            if write.session.id not in errors and (progress := self.get_progress(write.session)).number:
                progress.engine = engine
                self.open_ids.add(write.session.id)
        return head

    def write_together(self, connection: Connection, writes: Sequence[SessionWrite]) -> list[audit.AuditRow]:
        """Write what sessions have gathered: each statement once, for all of them. Return the rows for the audit
        chain."""
        for write in writes:
            progress = self.get_progress(write.session)
            if progress.engine is not connection.engine:
                was_stored = progress.number > 0
                writer.resync(connection, progress, write.session)
                write.is_copy = write.is_copy or (was_stored and not progress.number)
            progress.engine = None  # until the transaction is committed
            write.model_calls[:0], progress.model_calls = progress.model_calls, []
            write.drop_model_calls(progress.lost_calls)
        entries = [write.session.log[len(self.get_progress(write.session).rows) : write.entries] for write in writes]
        batch = Batch(connection, writer.WRITE_ORDER, sum(map(len, entries)))
        decisions: list[audit.AuditRow] = []
        for write, new in zip(writes, entries, strict=True):
            progress = self.get_progress(write.session)
            if new:
                decisions += writer.write_entries(batch, progress, write.session, new, write.secrets, write.times)
            for model_call in write.model_calls:
                requests.add_model_call(batch, progress.number, model_call, self.get_encoder(write))
        batch.execute()
        for write, new in zip(writes, entries, strict=True):
            written = set(map(get_id, new))
            if parts := [part for part in write.parts if get_id(part) not in written]:
                progress = self.get_progress(write.session)
                writer.write_parts(connection, progress, write.session, parts, write.secrets)
        return decisions

    def write_apart(
        self, connection: Connection, writes: Sequence[SessionWrite], errors: dict[str, Exception]
    ) -> list[audit.AuditRow]:
        """Like `write_together`, but one session after the other, with its fault in `errors`. A model call that cannot
        be stored is left out, and the reason added to `SessionWrite.lost_calls`."""
        decisions: list[audit.AuditRow] = []
        for write in writes:
            model_calls, write.model_calls = write.model_calls, []
            progress = self.get_progress(write.session)
            try:
                with connection.begin_nested():
                    decisions += self.write_together(connection, [write])
            except Exception as error:
                if not is_fault_of_session(error):
                    raise
                write.model_calls += model_calls
                errors[write.session.id] = self.to_sentence(error)
                continue
            write.model_calls += model_calls
            write.drop_model_calls(progress.lost_calls)
            for model_call in write.model_calls:
                try:
                    with connection.begin_nested():
                        batch = Batch(connection, writer.WRITE_ORDER, 0)
                        requests.add_model_call(batch, progress.number, model_call, self.get_encoder(write))
                        batch.execute()
                except Exception as error:
                    if not is_fault_of_session(error):
                        raise
                    self.get_encoder(write).forget(model_call)
                    progress.lost_calls.add(model_call.id)
                    write.lost_calls[model_call.id] = str(self.to_sentence(error))
        return decisions

    def to_sentence(self, error: Exception) -> Exception:
        """Convert an error of the driver to a StoreError; return any other unchanged."""
        return StoreError(self.database.explain(error)) if isinstance(error, DBAPIError) else error

    def get_encoder(self, write: SessionWrite) -> RequestEncoder:
        """Return the encoder of a session's model requests."""
        progress = self.get_progress(write.session)
        progress.encoder = progress.encoder or RequestEncoder(write.session.log, progress.rows)
        progress.encoder.secrets = write.secrets
        return progress.encoder

    def has_news(self, write: SessionWrite) -> bool:
        """Test whether there is anything to write; a session is not stored before its first message."""
        progress = self.get_progress(write.session)
        if not progress.number and not is_stored(write.session.log[: write.entries]):
            progress.model_calls += write.model_calls
            return False
        return bool(len(progress.rows) < write.entries or write.parts or write.model_calls)

    def get_progress(self, session: Session) -> Progress:
        """Return a session's progress; a new one for a new session."""
        if (progress := session.state[PROGRESS]) is None:
            # Without the mode: an unchosen mode follows the settings, which may become stricter.
            options = {option.id: option.get() for option in session.options if option.category != "mode"}
            session.state[PROGRESS] = progress = Progress(self.owner, options=options)
        return progress

    def acquire(self, id: str) -> "Row[Any] | None":
        """Acquire the lease of a stored session. Return its row, None when there is none. Raises SessionBusy."""
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
            record = self.attach_progress(*loader.load_with_progress(connection, row))
            record.state[SESSION_TOTALS] = requests.load_totals(connection, row.number)
            return record

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
        from crow_core.redaction import MASK

        from crow_persistence.export import export  # rarely needed
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
        record.state[PROGRESS] = progress
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
        with self.database.begin_write() as connection:
            forks.delete(connection, id, self.owner)
        self.database.erase_deleted()

    def release(self, ids: Collection[str]) -> None:
        """Release the leases of sessions."""
        if ids := self.open_ids.intersection(ids):
            self.open_ids -= ids
            with self.database.begin_write() as connection:
                leases.release(connection, self.owner, ids)

    def send_heartbeat(self) -> None:
        """Renew the leases of this owner's open sessions."""
        if self.open_ids:
            with self.database.begin_write(briefly=True) as connection:  # the next one is sent soon
                leases.send_heartbeat(connection, self.owner, self.open_ids)


def is_fault_of_session(error: Exception) -> bool:
    """Test whether an error is about the rows of one session, so that those of other sessions can be written."""
    cause = error.__cause__ if isinstance(error.__cause__, DBAPIError) else error
    return isinstance(cause, (OutOfStep, *ROW_FAULTS)) or not isinstance(cause, (DBAPIError, StoreError))
