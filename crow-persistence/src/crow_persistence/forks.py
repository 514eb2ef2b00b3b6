"""Sessions as trees: a fork is one row that points into another path; what it uses stays when the other is deleted."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from crow_core.errors import SessionBusy
from crow_core.store import Record
from sqlalchemy import Connection, Row, Select, bindparam, insert, literal, or_, select, union, update
from sqlalchemy import delete as deletion

from crow_persistence import blobs, leases, search
from crow_persistence.entries import decode, names
from crow_persistence.loader import find_exactly, recall
from crow_persistence.progress import Track
from crow_persistence.tables import calls, drafts, links, messages, renders, sessions


def fork(
    connection: Connection, id: str, new_id: str, at: str = "", owner: str | None = None
) -> tuple[Record, Track] | None:
    """A new session that goes on from another's tip, or from its entry with the id `at`; None when there is no such
    session. It is open for `owner`, if there is one. Raises StoreError when there is no such entry."""
    source = find_exactly(connection, id, lock=True)  # so that it is not deleted meanwhile
    if source is None:
        return None
    record, track = recall(connection, source, at)
    time = leases.now()
    same = {name: getattr(source, name) for name in ("cwd", "roots", "title", "options")}
    lease = {"owner": owner, "beat": leases.Clock() if owner else None}
    row = {**same, **lease, "id": new_id, "created": time, "updated": time, "head": track.head, "origin": id}
    key = connection.execute(insert(sessions).values(row)).inserted_primary_key
    assert key is not None
    record.id, track.number = new_id, key[0]
    if len(record.log) > len(track.rows):  # it ends with a reply that never came to its end
        same = select(literal(track.number), drafts.c.at, drafts.c.body).where(drafts.c.session == source.number)
        connection.execute(insert(drafts).from_select(["session", "at", "body"], same))
    return record, track


def delete(connection: Connection, id: str, owner: str = "") -> None:
    """Delete a session and those of its sub-agents, but for the rows that forks of it still use; its decisions stay,
    too. An unknown id is fine. Raises SessionBusy when somebody other than `owner` has it open."""
    row = find_exactly(connection, id, lock=True)
    if row is None:
        return
    if not leases.is_free(connection, row, owner):
        raise SessionBusy(f"Session {id} is open in {leases.in_words(row.owner)}. Close it there, then delete it.")
    children = children_of(connection, row.number)
    blobs.lock(connection, shared=False)
    asked = connection.execute(select(calls.c.head, calls.c.messages).where(calls.c.session == row.number)).all()
    connection.execute(deletion(calls).where(calls.c.session == row.number))
    connection.execute(deletion(drafts).where(drafts.c.session == row.number))
    named = prune(connection, row.number).union(
        {call.head for call in asked}, *(names(call.messages) for call in asked)
    )
    search.index(connection, row.number, "", [])  # what is left goes by the row as it will be
    nothing = {"title": None, "cwd": "", "roots": "[]", "options": "{}", "head": None, "owner": None, "beat": None}
    its = sessions.c.number == row.number
    connection.execute(update(sessions).where(its).values(**nothing, deleted=leases.now()))
    for origin in origins(connection, row):
        if origin.deleted is not None:
            named |= prune(connection, origin.number)
    blobs.sweep(connection, named)
    for child in children:
        delete(connection, child, owner)


def children_of(connection: Connection, number: int) -> list[str]:
    """The ids of the sessions of a session's sub-agents."""
    found: list[str] = []
    marks = select(messages.c.body).where(messages.c.session == number, messages.c.kind == "child")
    for body in connection.scalars(marks):
        with suppress(ValueError, LookupError, TypeError):  # damaged
            found.append(str(decode(body)["crow"]["session"]))
    return found


def origins(connection: Connection, row: "Row[Any]") -> "Iterator[Row[Any]]":
    """The session this one was forked from, that from which that one was, and so on."""
    older = select(sessions).where(sessions.c.number < bindparam("number"), sessions.c.id == bindparam("id"))
    while found := connection.execute(older, {"number": row.number, "id": row.origin}).one_or_none():
        row = found
        yield row


def prune(connection: Connection, number: int) -> set[str]:
    """Delete those rows of a deleted session that are on no other's path; gives the blobs they named."""
    doomed = select(messages.c.id).where(messages.c.session == number, messages.c.id.not_in(used(number)))
    linked = select(links.c.blob).where(links.c.message.in_(doomed))
    rendered = select(renders.c.text).where(renders.c.message.in_(doomed))
    named = set(connection.scalars(union(linked, rendered)))
    search.forget(connection, connection.scalars(doomed).all())
    connection.execute(deletion(messages).where(messages.c.id.in_(doomed)))
    return named


def used(number: int) -> Select[int]:
    """The ids of a session's rows that are on the path of another session."""
    later = messages.alias()
    elsewhere = select(later.c.id).where(later.c.parent == messages.c.id, later.c.session != number).exists()
    heads = select(sessions.c.head).where(sessions.c.head.is_not(None), sessions.c.number != number)
    its = select(messages.c.id, messages.c.parent).where(messages.c.session == number)
    kept = its.where(or_(elsewhere, messages.c.id.in_(heads))).cte("kept", recursive=True)
    kept = kept.union(its.join(kept, messages.c.id == kept.c.parent))
    return select(kept.c.id)
