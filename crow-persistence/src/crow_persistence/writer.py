"""Write a session's entries to rows: each entry once, after its parent, and only under the session's lease."""

from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import Any

from crow_core.errors import SessionBusy
from crow_core.masking import mask
from crow_core.messages.message import Message, get_id
from crow_core.session.session import Session
from crow_core.session.store import SessionChange
from sqlalchemy import Connection, Row, Text, bindparam, delete, func, insert, select, text, update

from crow_persistence import audit, leases, loader, requests, search
from crow_persistence import prompt_versions as prompts
from crow_persistence.batch import Batch, OutOfStep
from crow_persistence.entries import clean_text, encode, pack
from crow_persistence.progress import Progress
from crow_persistence.tables import drafts, links, messages, sessions

INSERT_SESSION = insert(sessions).values(beat=leases.DatabaseClock())
INSERT_MESSAGE = insert(messages)
INSERT_LINKS = insert(links)
UPDATE_SESSION = (
    update(sessions)
    .where(sessions.c.number == bindparam("session"), sessions.c.owner == bindparam("by"))
    .values(
        head=bindparam("new_head"),
        updated=bindparam("at"),
        beat=leases.DatabaseClock(),
        cwd=bindparam("folder"),
        roots=bindparam("folders"),
        options=bindparam("chosen"),
        title=func.coalesce(bindparam("name", type_=Text), sessions.c.title),
    )
)
SELECT_OWNER = select(sessions.c.owner).where(sessions.c.number == bindparam("session")).with_for_update()
INSERT_DRAFT = insert(drafts)
INSERT_PART = text(
    "INSERT INTO draft_parts (session, number, body) VALUES (:of, :part, :body) "
    "ON CONFLICT (session, number) DO UPDATE SET body = excluded.body"  # it may be there, although its commit failed
)
DELETE_DRAFT = delete(drafts).where(drafts.c.session == bindparam("of"))
WRITE_ORDER = (
    INSERT_MESSAGE,
    UPDATE_SESSION,
    INSERT_LINKS,
    prompts.INSERT_RENDER,
    *search.ADD.values(),
    DELETE_DRAFT,
    requests.UPSERT_CALL,
    requests.UPDATE_CALL,
)
"""The statements of a batch, in an order in which each row comes after those that it refers to."""


MAX_SPELLING = 12
"""The most characters for which one of a secret may stand in the spellings that `mask` finds."""


def write_entries(
    batch: Batch,
    progress: Progress,
    session: Session,
    entries: Sequence[Message],
    secrets: Collection[str] = (),
    times: Sequence[int] = (),
) -> list[audit.AuditRow]:
    """Add new entries of a session to a batch, and advance its progress. Return the rows for the audit chain.

    `times` are those of the entries, if they are not new, in milliseconds since 1970.

    Executing the batch raises OutOfStep when this owner has lost the session's lease. If the transaction fails,
    `resync` restores the progress.
    """
    now, connection = leases.now(), batch.connection
    times = times or [now] * len(entries)
    number = progress.number or insert_session(connection, progress, session, now, created=times[0])
    cwd = clean_text(session.cwd)
    if cwd != progress.cwd:
        search.move_entries(connection, number, progress.cwd, cwd)
    head, rows, title, options = progress.head, list[int](), None, progress.options
    clean: list[Message] = mask(list(entries), secrets)
    for entry, at in zip(clean, times, strict=True):
        parent = head
        match entry.get("crow"):
            case {"kind": "rewind", "to": str(to)} if "role" not in entry:
                parent = find_row(session.log, [*progress.rows, *rows], to, head)
            case {"kind": "title", "title": str(name)} if "role" not in entry:
                title = clean_text(name)
            case {"kind": "option", "option": str(option), "value": str(value)} if "role" not in entry:
                options = {**options, option: value}
            case _:
                pass
        head = add_entry(batch, number, parent, entry, at)
        rows.append(head)
    documents = search.make_documents(number, cwd, zip(rows, clean, strict=True))
    batch.add(search.ADD[connection.dialect.name], *documents)
    changes = {
        "session": number,
        "by": progress.owner,
        "new_head": head,
        "at": times[-1],
        "folder": cwd,
        "folders": encode(session.folders.roots),
        "chosen": loader.encode_options(options, is_archived=progress.is_archived),
        "name": title,
    }
    batch.add(UPDATE_SESSION, changes)
    if progress.has_draft and any("role" in entry for entry in clean):
        batch.add(DELETE_DRAFT, {"of": number})
        progress.has_draft = False
    progress.number, progress.head, progress.options, progress.cwd = number, head, options, cwd
    progress.rows += rows
    return audit.make_rows(connection, session.id, clean, now, progress.decisions)


def change_session(connection: Connection, row: "Row[Any]", change: SessionChange, owner: str) -> "Row[Any]":
    """Change a stored session's title or whether it is archived; the row must have been selected for update. Return the
    new row. Raises SessionBusy when an owner other than `owner` has it open and would undo the change."""
    values: dict[str, Any] = {}
    if change.title is not None:
        values["title"] = clean_text(change.title)
    if change.archived is not None and change.archived != loader.is_archived(row):
        if not leases.is_free(connection, row, owner):
            raise SessionBusy(
                f"Session {row.id} is open in {leases.describe_owner(row.owner)}. Close it there, then try again."
            )
        values["options"] = loader.encode_options(loader.read_options(row), is_archived=change.archived)
    its = sessions.c.number == row.number
    if values:
        connection.execute(update(sessions).where(its).values(**values))
    return connection.execute(select(sessions).where(its)).one()


def insert_session(connection: Connection, progress: Progress, session: Session, now: int, *, created: int) -> int:
    """Insert the row of a new session, and its prompts. Return the session's number."""
    progress.has_draft, progress.cwd = False, clean_text(session.cwd)
    prompts.store_versions(connection, [*session.prompts.templates.values()], now)
    row = {
        "id": clean_text(session.id),
        "cwd": progress.cwd,
        "roots": encode(session.folders.roots),
        "options": encode(progress.options),
        "created": created,
        "updated": created,
        "owner": progress.owner,
        "copied": now if progress.is_copy else None,
    }
    return insert_row(connection, INSERT_SESSION, row)


def add_entry(batch: Batch, number: int, parent: int | None, entry: Message, at: int) -> int:
    """Add the row of an entry to a batch, and its rows in other tables. Return the row's id."""
    packed = pack(entry)
    row = {"session": number, "parent": parent, "at": at, "kind": clean_text(packed.kind), "body": packed.body}
    if id := next(batch.ids, 0):
        batch.add(INSERT_MESSAGE, {"id": id, **row})
    else:
        id = insert_row(batch.connection, INSERT_MESSAGE, row)
    batch.blobs |= packed.blobs
    batch.add(INSERT_LINKS, *({"message": id, "blob": hash} for hash in packed.blobs))
    if packed.kind == "render":
        prompts.add_render(batch, id, number, entry, at)
    return id


def insert_row(connection: Connection, statement: Any, row: dict[str, Any]) -> int:
    """Insert a row. Return the key that the database generated."""
    key = connection.execute(statement, row).inserted_primary_key
    assert key is not None
    return key[0]


def find_row(log: Sequence[Message], rows: Sequence[int], id: str, default: int | None) -> int | None:
    """Return the row of the entry with this id; None for "", which means before the first entry."""
    ids = {get_id(entry): row for entry, row in zip(log, rows, strict=False)}
    return ids.get(id, default) if id else None


def write_parts(
    connection: Connection,
    progress: Progress,
    session: Session,
    parts: Sequence[Message],
    secrets: Collection[str] = (),
) -> None:
    """Write new parts of a reply that is still streaming. Raises StoreError, as `write_entries` does."""
    hold_lease(connection, progress, session)
    longest = MAX_SPELLING * max(map(len, secrets), default=0)
    for part in parts:
        number, texts = part.get("crow", {}).get("part", 0), loader.get_texts(part)
        if is_first := number == 0 or not progress.has_draft:
            progress.draft_ends = loader.get_texts({})
        ends = progress.draft_ends or loader.read_draft_texts(connection, progress.number)
        longer = join_texts(ends, texts)
        progress.draft_ends = {key: text[max(0, len(text) - longest) :] for key, text in longer.items()}
        if is_first:
            write_draft(connection, progress, get_id(part), mask(texts, secrets))
        elif mask(longer, secrets) != join_texts(mask(ends, secrets), masked := mask(texts, secrets)):
            whole = join_texts(loader.read_draft_texts(connection, progress.number), texts)
            write_draft(connection, progress, get_id(part), mask(whole, secrets))  # a secret spans two parts
        else:
            body = encode({key: text for key, text in masked.items() if text})
            connection.execute(INSERT_PART, {"of": progress.number, "part": number, "body": body})


def join_texts(texts: dict[str, str], more: dict[str, str]) -> dict[str, str]:
    """Join two texts for each key."""
    return {key: text + more[key] for key, text in texts.items()}


def write_draft(connection: Connection, progress: Progress, id: str, texts: dict[str, str]) -> None:
    """Write the beginning of a draft, in place of an earlier draft and its parts."""
    if progress.has_draft:
        connection.execute(DELETE_DRAFT, {"of": progress.number})
    progress.has_draft = True
    body = encode({"role": "assistant", **{key: value for key, value in texts.items() if value}, "crow": {"id": id}})
    connection.execute(INSERT_DRAFT, {"session": progress.number, "at": leases.now(), "body": body})


def hold_lease(connection: Connection, progress: Progress, session: Session) -> None:
    """Keep the session's lease until the transaction ends. Raises StoreError when this owner has lost it."""
    if connection.scalar(SELECT_OWNER, {"session": progress.number}) != progress.owner:
        raise explain_lost_lease(connection, session.id, progress)


def explain_lost_lease(connection: Connection, id: str, progress: Progress) -> OutOfStep:
    """Return the error that says why this owner may not write the session any more."""
    row = connection.execute(select(sessions).where(sessions.c.id == clean_text(id))).one_or_none()
    if row is None:
        return OutOfStep(f"Session {id} is not in the database any more. It is written again with its next message.")
    if row.deleted is not None:
        return OutOfStep(f"Session {id} was deleted; nothing can be added to it. Begin a new one.")
    by = leases.describe_owner(row.owner) if row.owner and row.owner != progress.owner else "another process"
    return OutOfStep(
        f"Session {id} was taken over by {by} because this process sent no heartbeat, and nothing was written. "
        "Open it again to go on from there, or fork it."
    )


def resync(connection: Connection, progress: Progress, session: Session) -> None:
    """Compare a session's progress with the database, after a failed write or in another database than before.

    A commit may have succeeded although its result was lost; a new database is empty. Raises StoreError when this owner
    has lost the session's lease.
    """
    row = connection.execute(select(sessions).where(sessions.c.id == clean_text(session.id))).one_or_none()
    if row is None:
        progress.is_copy = progress.is_copy or progress.number > 0
        progress.number, progress.head, progress.rows[:], progress.encoder = 0, None, [], None
        return
    progress.has_draft, progress.draft_ends, progress.cwd = True, None, row.cwd
    if row.deleted is not None or row.owner != progress.owner:
        raise explain_lost_lease(connection, session.id, progress)
    known = loader.map_rows(connection, row)
    stored = takewhile(bool, (known.get(get_id(entry), 0) for entry in session.log))
    progress.number, progress.head, progress.options = row.number, row.head, loader.read_options(row)
    progress.is_archived = loader.is_archived(row)
    progress.rows[:], progress.encoder = stored, None
