"""What a session says, into rows: each entry once, behind the one it follows, and nothing under a lost lease."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from crow_core.errors import StoreError
from crow_core.masking import mask
from crow_core.messages import Message
from crow_core.session import Session
from sqlalchemy import Connection, Text, bindparam, delete, func, insert, select, update

from crow_persistence import audit, blobs, leases, prompts, reading, search
from crow_persistence.entries import encode, pack, plain
from crow_persistence.reading import Track, id_of
from crow_persistence.tables import drafts, links, messages, sessions

BEGIN = insert(sessions).values(beat=leases.Clock())
ADD = insert(messages)
LINK = insert(links)
MOVE = (
    update(sessions)
    .where(sessions.c.number == bindparam("session"))
    .values(
        head=bindparam("tip"),
        updated=bindparam("at"),
        beat=leases.Clock(),
        cwd=bindparam("folder"),
        roots=bindparam("folders"),
        options=bindparam("chosen"),
        title=func.coalesce(bindparam("name", type_=Text), sessions.c.title),
    )
)
OWNER = select(sessions.c.owner).where(sessions.c.number == bindparam("session")).with_for_update()
DRAW = update(drafts).where(drafts.c.session == bindparam("of")).values(at=bindparam("time"), body=bindparam("reply"))
BEGIN_DRAFT = insert(drafts)
END_DRAFT = delete(drafts).where(drafts.c.session == bindparam("of"))


@dataclass(frozen=True)
class Tip:
    """Where a session stands once the transaction is committed: then `reach` takes a track there."""

    number: int
    head: int
    rows: list[int]
    options: dict[str, str]
    decided: audit.Noted | None
    """What to announce of the chain of decisions; None when none is among it. See `audit`."""

    def reach(self, track: Track) -> None:
        track.number, track.head, track.options = self.number, self.head, self.options
        track.rows += self.rows


def extend(
    connection: Connection, track: Track, session: Session, entries: Sequence[Message], secrets: Collection[str] = ()
) -> Tip:
    """Store entries behind those of a session that are stored. Raises StoreError when it is not this process's to
    write any more."""
    at = leases.now()
    if track.number:
        hold(connection, track, session)
    number = track.number or begin(connection, track, session, at)
    head, rows, title, options = track.head, list[int](), None, track.options
    clean: list[Message] = mask(list(entries), secrets)
    for entry in clean:
        parent = head
        match entry.get("crow"):
            case {"kind": "rewind", "to": str(to)} if "role" not in entry:
                parent = row_of(session.log, [*track.rows, *rows], to, head)
            case {"kind": "title", "title": str(name)} if "role" not in entry:
                title = plain(name)
            case {"kind": "option", "option": str(option), "value": str(value)} if "role" not in entry:
                options = {**options, option: value}
            case _:
                pass
        head = add(connection, number, parent, entry, at)
        rows.append(head)
    assert head is not None
    search.index(connection, number, session.cwd, list(zip(rows, clean, strict=True)))
    moved = {
        "session": number,
        "tip": head,
        "at": at,
        "folder": plain(session.cwd),
        "folders": encode(session.folders.roots),
        "chosen": encode(options),
        "name": title,
    }
    connection.execute(MOVE, moved)
    if any("role" in entry for entry in clean):
        connection.execute(END_DRAFT, {"of": number})
    return Tip(number, head, rows, options, audit.record(connection, session.id, clean, at))


def begin(connection: Connection, track: Track, session: Session, at: int) -> int:
    """A row for a new session, and the prompts it has; gives its number."""
    for prompt in session.prompts.templates.values():
        prompts.note(connection, prompt.name, prompt.template, at)
    row = {
        "id": plain(session.id),
        "cwd": plain(session.cwd),
        "roots": encode(session.folders.roots),
        "options": encode(track.options),
        "created": at,
        "updated": at,
        "owner": track.owner,
    }
    return inserted(connection, BEGIN, row)


def add(connection: Connection, number: int, parent: int | None, entry: Message, at: int) -> int:
    """A row for an entry, and what belongs to it in other tables; gives its id."""
    packed = pack(entry)
    row = {"session": number, "parent": parent, "at": at, "kind": plain(packed.kind), "body": packed.body}
    id = inserted(connection, ADD, row)
    if packed.blobs:
        blobs.keep(connection, packed.blobs)
        connection.execute(LINK, [{"message": id, "blob": hash} for hash in packed.blobs])
    if packed.kind == "render":
        prompts.record(connection, id, number, entry, at)
    return id


def inserted(connection: Connection, statement: Any, row: dict[str, Any]) -> int:
    """The key that the database gave to a new row."""
    key = connection.execute(statement, row).inserted_primary_key
    assert key is not None
    return key[0]


def row_of(log: Sequence[Message], rows: Sequence[int], id: str, otherwise: int | None) -> int | None:
    """The row of the entry with this id; of "", which is before the first, none."""
    ids = {id_of(entry): row for entry, row in zip(log, rows, strict=False)}
    return ids.get(id, otherwise) if id else None


def draft(
    connection: Connection, track: Track, session: Session, reply: Message, secrets: Collection[str] = ()
) -> None:
    """Store what has come of a reply so far. Raises StoreError, as `extend` does."""
    hold(connection, track, session)
    at = leases.now()
    body = pack(mask(reply, secrets)).body
    if not connection.execute(DRAW, {"of": track.number, "time": at, "reply": body}).rowcount:
        connection.execute(BEGIN_DRAFT, {"session": track.number, "at": at, "body": body})


def hold(connection: Connection, track: Track, session: Session) -> None:
    """See to it that the session stays this owner's until the transaction ends. Raises StoreError when it is not."""
    if connection.scalar(OWNER, {"session": track.number}) != track.owner:
        raise lost(connection, session.id, track)


def lost(connection: Connection, id: str, track: Track) -> StoreError:
    """Why a session is not this process's to write any more."""
    row = connection.execute(select(sessions).where(sessions.c.id == plain(id))).one_or_none()
    if row is None:
        return StoreError(f"Session {id} is not in the database any more. It is written anew with its next message.")
    if row.deleted is not None:
        return StoreError(f"Session {id} was deleted; nothing can be added to it. Begin a new one.")
    by = leases.in_words(row.owner) if row.owner and row.owner != track.owner else "another process"
    return StoreError(
        f"Session {id} was taken over by {by} while this one was not heard of, and nothing was written. "
        "Open it again to go on from there, or fork it."
    )


def catch_up(connection: Connection, track: Track, session: Session) -> None:
    """Look at what is there after a write that failed, or in a database that is not the one it was.

    A commit may have been done although its answer was lost; a new database holds nothing. Raises StoreError when the
    session is not this process's to write any more.
    """
    row = connection.execute(select(sessions).where(sessions.c.id == plain(session.id))).one_or_none()
    if row is None:
        track.number, track.head, track.rows[:], track.trail = 0, None, [], None
        return
    if row.deleted is not None or row.owner != track.owner:
        raise lost(connection, session.id, track)
    known = reading.rows_by_entry(connection, row)
    stored = takewhile(bool, (known.get(id_of(entry), 0) for entry in session.log))
    track.number, track.head, track.options = row.number, row.head, reading.options_of(row)
    track.rows[:], track.trail = stored, None
