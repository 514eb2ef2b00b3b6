"""Sessions in a database, as the hooks ask for them: each method is a transaction or two, and blocks."""

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

from crow_persistence import audit, leases, reading, requests, search, trees, writing
from crow_persistence.database import Database
from crow_persistence.reading import Track
from crow_persistence.requests import Trail

STATE = "persistence"
"""Under which a session's state holds its track."""


class Store:
    """One app's sessions. What writes is called from one thread alone. Every method raises StoreError."""

    def __init__(self, url: str, folder: Path | None = None) -> None:
        self.database = Database(url, folder)
        self.owner = leases.new_owner()
        self.open: set[str] = set()
        """The ids of the sessions whose lease is this owner's."""

    def append(self, session: Session, secrets: Collection[str] = ()) -> None:
        """Write down what was added to a session's log, once there is a message in it. What fails to be written is
        written the next time."""
        track = self.track(session)
        if len(track.rows) == len(session.log) or not (track.number or any("role" in entry for entry in session.log)):
            return
        with self.database.writing() as connection:
            engine = connection.engine
            if track.engine is not engine:
                writing.catch_up(connection, track, session)
            track.engine = None
            tip = writing.extend(connection, track, session, session.log[len(track.rows) :], secrets)
            if tip.decided:
                audit.announce(connection, self.database, tip.decided)
        tip.reach(track)
        track.engine = engine
        self.open.add(session.id)
        if tip.decided:
            audit.anchor(self.database, tip.decided)

    def draft(self, session: Session, reply: Message, secrets: Collection[str] = ()) -> None:
        """Write down what has come of a reply so far."""
        if (track := self.track(session)).number:
            with self.database.writing() as connection:
                writing.draft(connection, track, session, reply, secrets)

    def call(self, session: Session, model_call: ModelCall, secrets: Collection[str] = ()) -> None:
        """Write down a request to a model."""
        track = self.track(session)
        track.trail = track.trail or Trail(session.log, track.rows)
        track.trail.secrets = secrets
        if track.number:
            with self.database.writing() as connection:
                if track.engine in (None, connection.engine):  # in another database, its next message comes first
                    requests.write(connection, track.number, model_call, track.trail)

    def track(self, session: Session) -> Track:
        """How far a session is written."""
        if (track := session.state.get(STATE)) is None:
            # Not the mode: one that was never chosen is what the settings say, and they may become stricter.
            options = {option.id: option.get() for option in session.options if option.category != "mode"}
            session.state[STATE] = track = Track(self.owner, options=options)
        return track

    def take(self, id: str) -> "Row[Any] | None":
        """Make a stored session this owner's; None when there is none. Raises SessionBusy."""
        if id in self.open:
            raise SessionBusy(f"Session {id} is open in this process. Close it there, or fork it to go on in a copy.")
        with self.database.writing() as connection:
            row = reading.find_exactly(connection, id, lock=True)
            if row is not None:
                leases.take(connection, row, self.owner)
        if row is not None:
            self.open.add(id)
        return row

    def load(self, row: "Row[Any]") -> Record:
        """A session that was taken."""
        with self.database.reading() as connection:
            return self.tracked(*reading.recall(connection, row))

    def fork(self, id: str, new_id: str, at: str) -> Record | None:
        """A new session, of this owner's, that goes on from a stored one."""
        with self.database.writing() as connection:
            found = trees.fork(connection, id, new_id, at, self.owner)
        if found is None:
            return None
        self.open.add(new_id)
        return self.tracked(*found)

    def copy(self, id: str, new_id: str) -> bool:
        """A new session, nobody's yet, that goes on from the end of a stored one; False when there is none."""
        with self.database.writing() as connection:
            return trees.fork(connection, id, new_id) is not None

    def export(self, id: str, format: Any, path: Path) -> int | None:
        """Write a session to a file, with what looks like a secret masked; gives how often something was, None when
        there is no such session. Raises OSError."""
        from crow_persistence.export import export  # not above: few give sessions away
        from crow_persistence.export.redaction import MASK
        from crow_persistence.export.story import Story

        with self.database.reading() as connection:
            if (row := reading.find_exactly(connection, id)) is None:
                return None
            made = export(Story.of(connection, row).redacted(), format)
        made.write(path)
        return made.text.count(MASK)

    def tracked(self, record: Record, track: Track) -> Record:
        track.owner = self.owner
        record.state[STATE] = track
        return record

    def listing(self, cwd: str, cursor: str, limit: int) -> Page:
        """A part of the list of sessions. Raises ValueError for a foreign cursor."""
        with self.database.reading() as connection:
            return reading.listing(connection, cwd, cursor, limit)

    def search(self, words: str, cwd: str, limit: int) -> list[dict[str, Any]]:
        """The best matches among what was said in a folder ("" for all), as a client is told them."""
        with self.database.reading() as connection:
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
        """Forget a session."""
        with self.database.writing() as connection:
            trees.delete(connection, id, self.owner)

    def end(self, session: Session, secrets: Collection[str] = ()) -> None:
        """Write what is left of a session to be written, and let others open it."""
        try:
            self.append(session, secrets)
        finally:
            self.release(session.id)

    def release(self, id: str) -> None:
        """Let others open a session."""
        if id in self.open:
            self.open.discard(id)
            with self.database.writing() as connection:
                leases.release(connection, self.owner, id)

    def beat(self) -> None:
        """Tell others that the sessions of this owner are still open."""
        if self.open:
            with self.database.writing() as connection:
                leases.beat(connection, self.owner, self.open)
