"""Fork sessions, and delete them without losing what their forks use.

Sessions form trees: a fork is one row that points to a message of another session. Messages on a fork's path stay when
the other session is deleted.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from crow_core.errors import SessionBusy
from crow_core.session.store import Record
from sqlalchemy import Connection, Row, Select, bindparam, insert, literal, or_, select, union, update
from sqlalchemy import delete as deletion

from crow_persistence import blobs, leases, search
from crow_persistence.entries import decode, find_blobs
from crow_persistence.loader import encode_options, find_session_by_id, load_with_progress
from crow_persistence.progress import Progress
from crow_persistence.tables import calls, draft_parts, drafts, links, messages, renders, sessions


def fork(
    connection: Connection, id: str, new_id: str, at: str = "", owner: str | None = None
) -> tuple[Record, Progress] | None:
    """Fork a session at its head, or at the entry with the id `at`. Return None when there is no such session.

    With `owner`, the fork is open for that owner; otherwise it has no lease. Raises StoreError when there is no such
    entry.
    """
    source = find_session_by_id(connection, id, lock=True)  # keeps it from being deleted meanwhile
    if source is None:
        return None
    record, progress = load_with_progress(connection, source, at)
    time = leases.now()
    same = {name: getattr(source, name) for name in ("cwd", "roots", "title")}
    same["options"] = encode_options(progress.options, is_archived=False)
    progress.is_archived = False
    lease = {"owner": owner, "beat": leases.DatabaseClock() if owner else None}
    row = {**same, **lease, "id": new_id, "created": time, "updated": time, "head": progress.head, "origin": id}
    key = connection.execute(insert(sessions).values(row)).inserted_primary_key
    assert key is not None
    record.id, progress.number = new_id, key[0]
    if len(record.log) > len(progress.rows):  # it ends with a draft
        same = select(literal(progress.number), drafts.c.at, drafts.c.body).where(drafts.c.session == source.number)
        connection.execute(insert(drafts).from_select(["session", "at", "body"], same))
        parts = select(literal(progress.number), draft_parts.c.number, draft_parts.c.body)
        its = parts.where(draft_parts.c.session == source.number)
        connection.execute(insert(draft_parts).from_select(["session", "number", "body"], its))
    return record, progress


def delete(connection: Connection, id: str, owner: str = "") -> None:
    """Delete a session and those of its sub-agents, except for rows that forks use and for its decisions. An unknown id
    is ignored. Raises SessionBusy when an owner other than `owner` has it open."""
    blobs.delete_unused(connection, delete_rows(connection, id, owner))


def delete_rows(connection: Connection, id: str, owner: str = "") -> set[str]:
    """Delete a session as `delete` does, but not its blobs; return their hashes."""
    row = find_session_by_id(connection, id, lock=True)
    if row is None:
        return set()
    if not leases.is_free(connection, row, owner):
        raise SessionBusy(
            f"Session {id} is open in {leases.describe_owner(row.owner)}. Close it there, then delete it."
        )
    children = list_children(connection, row.number)
    blobs.lock(connection, shared=False)
    model_calls = connection.execute(select(calls.c.head, calls.c.messages).where(calls.c.session == row.number)).all()
    connection.execute(deletion(calls).where(calls.c.session == row.number))
    connection.execute(deletion(drafts).where(drafts.c.session == row.number))
    named = prune(connection, row.number).union(
        {model_call.head for model_call in model_calls},
        *(find_blobs(model_call.messages) for model_call in model_calls),
    )
    if row.cwd:
        search.move_entries(connection, row.number, row.cwd, "")  # those that remain
    nothing = {"title": None, "cwd": "", "roots": "[]", "options": "{}", "head": None, "owner": None, "beat": None}
    its = sessions.c.number == row.number
    connection.execute(update(sessions).where(its).values(**nothing, deleted=leases.now()))
    for origin in list_origins(connection, row):
        if origin.deleted is not None:
            named |= prune(connection, origin.number)
    for child in children:
        named |= delete_rows(connection, child, owner)
    return named


def list_children(connection: Connection, number: int) -> list[str]:
    """Return the ids of the sessions of a session's sub-agents."""
    found: list[str] = []
    marks = select(messages.c.body).where(messages.c.session == number, messages.c.kind == "child")
    for body in connection.scalars(marks):
        with suppress(ValueError, LookupError, TypeError):  # damaged
            found.append(str(decode(body)["crow"]["session"]))
    return found


def list_origins(connection: Connection, row: "Row[Any]") -> "Iterator[Row[Any]]":
    """Yield the session that this one was forked from, then the one that session was forked from, and so on."""
    older = select(sessions).where(sessions.c.number < bindparam("number"), sessions.c.id == bindparam("id"))
    while found := connection.execute(older, {"number": row.number, "id": row.origin}).one_or_none():
        row = found
        yield row


def prune(connection: Connection, number: int) -> set[str]:
    """Delete the rows of a deleted session that are on no other session's path. Return the hashes of the blobs they
    used."""
    doomed = select(messages.c.id).where(messages.c.session == number, messages.c.id.not_in(select_shared_rows(number)))
    linked = select(links.c.blob).where(links.c.message.in_(doomed))
    rendered = select(renders.c.text).where(renders.c.message.in_(doomed))
    named = set(connection.scalars(union(linked, rendered)))
    search.remove_entries(connection, connection.scalars(doomed).all())
    connection.execute(deletion(messages).where(messages.c.id.in_(doomed)))
    return named


def select_shared_rows(number: int) -> Select[int]:
    """Select the ids of a session's rows that are on the path of another session."""
    later = messages.alias()
    elsewhere = select(later.c.id).where(later.c.parent == messages.c.id, later.c.session != number).exists()
    heads = select(sessions.c.head).where(sessions.c.head.is_not(None), sessions.c.number != number)
    its = select(messages.c.id, messages.c.parent).where(messages.c.session == number)
    shared = its.where(or_(elsewhere, messages.c.id.in_(heads))).cte("shared", recursive=True)
    shared = shared.union(its.join(shared, messages.c.id == shared.c.parent))
    return select(shared.c.id)
