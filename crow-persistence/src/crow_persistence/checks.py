"""How much is in a database, what must be true of it, and where it is not."""

import hashlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import msgspec
from crow_core.errors import StoreError
from crow_core.messages import Message
from sqlalchemy import Column, Connection, Row, Select, exists, func, select, text
from sqlalchemy.exc import DBAPIError

from crow_persistence import audit, search
from crow_persistence import blobs as kept
from crow_persistence.database import Database, journal
from crow_persistence.entries import BLOB, decode, kind_of, mapped, plain, swapped
from crow_persistence.prompts import digest
from crow_persistence.tables import blobs, calls, drafts, links, messages, metadata, prompts, renders, sessions

SOME = 200
"""Rows that are looked at together."""
JSON: tuple[tuple[Column[Any], type], ...] = (
    (sessions.c.roots, list),
    (sessions.c.options, dict),
    (drafts.c.body, dict),
    (prompts.c.variables, list),
    (renders.c.variables, dict),
    (calls.c.sampling, dict),
    (calls.c.usage, dict),
)
"""Columns that hold JSON, and of what kind, beside those that are looked at more closely."""
BROKEN = (ValueError, TypeError, RecursionError)
"""What a damaged value raises when it is read."""


def check(database: Database) -> list[str]:
    """What is wrong with a database, a sentence each; nothing when it is well."""
    wrong: list[str] = []
    for find in (pages, references, paths, entries, values, requests, digests, index):
        try:
            with database.reading() as connection:
                wrong += find(connection)
        except StoreError as error:
            wrong.append(str(error))
    try:
        wrong += audit.verify(database)
    except StoreError as error:
        wrong.append(str(error))
    return list(dict.fromkeys(wrong))


def counts(connection: Connection) -> dict[str, int]:
    """How many rows each table has."""
    tables = metadata.tables.items()
    return {name: connection.scalar(select(func.count()).select_from(table)) or 0 for name, table in tables}


def size(connection: Connection, database: Database) -> int:
    """Bytes that all of it takes on its disk."""
    if not database.file:
        return connection.scalar(text("SELECT pg_database_size(current_database())")) or 0
    return sum(file.stat().st_size for file in (database.file, journal(database.file)) if file.exists())


def pages(connection: Connection) -> Iterator[str]:
    """The file is whole; PostgreSQL looks after its own."""
    if connection.dialect.name != "sqlite":
        return
    try:
        for line in connection.scalars(text("PRAGMA integrity_check")).all():
            if line != "ok":
                yield f"The file is damaged: {line}."
    except DBAPIError:  # so badly that it cannot be looked at as a whole
        for name in connection.scalars(text("SELECT name FROM sqlite_master WHERE type = 'table'")).all():
            try:
                connection.execute(text(f"PRAGMA integrity_check('{name}')")).all()
            except DBAPIError as error:
                yield f"The file is damaged where {name} is: {error.orig}."


def references(connection: Connection) -> Iterator[str]:
    """What a row names is there."""
    for table in metadata.sorted_tables:
        for key in sorted(table.foreign_keys, key=lambda key: key.parent.name):
            other = key.column.table.alias()
            lost = ~exists().where(other.c[key.column.name] == key.parent)
            for *own, value in connection.execute(
                select(*table.primary_key, key.parent).where(key.parent.is_not(None), lost)
            ):
                yield f"Row {'/'.join(map(str, own))} of {table.name}: its {key.parent.name} {value} is not there."


def paths(connection: Connection) -> Iterator[str]:
    """Who goes from a session's tip back to what came before arrives at the beginning."""
    lost = ~exists().where(messages.c.id == sessions.c.head)
    for id, head in connection.execute(
        select(sessions.c.id, sessions.c.head).where(sessions.c.head.is_not(None), lost)
    ):
        yield f"Session {id}: its tip, row {head} of messages, is not there."
    younger = messages.c.parent >= messages.c.id
    for id, parent in connection.execute(select(messages.c.id, messages.c.parent).where(younger)):
        yield f"Row {id} of messages: it follows row {parent}, which is not older."


def entries(connection: Connection) -> Iterator[str]:
    """Every entry can be read, with what is kept apart from it."""
    every = select(messages.c.id, messages.c.kind, messages.c.body, sessions.c.id.label("of")).outerjoin(sessions)
    for rows in some(connection, every.order_by(messages.c.id)):
        ids = [row.id for row in rows]
        rendered = set(connection.scalars(select(renders.c.message).where(renders.c.message.in_(ids))))
        linked = {tuple(row) for row in connection.execute(select(links).where(links.c.message.in_(ids)))}
        named = {row.id: named_by(row.body) for row in rows}
        there = those_of(connection, blobs.c.hash, (hash for hashes in named.values() for hash in hashes or ()))
        for row in rows:
            begin, hashes = f"Row {row.id} of messages (session {row.of}):", named[row.id]
            if hashes is None or plain(kind_of(decode(row.body))[:16]) != row.kind:
                yield f"{begin} its body is not the {row.kind} entry that was written."
                continue
            for hash in hashes - there:
                yield f"{begin} blob {hash} of its body is not there."
            for hash in hashes & there:
                if (row.id, hash) not in linked:
                    yield f"{begin} blob {hash} of its body is not in links."
            if row.kind == "render" and row.id not in rendered:
                yield f"{begin} its render is not there."


def named_by(body: Any) -> set[str] | None:
    """The blobs that an entry's body names; None when it is no entry."""
    found: set[str] = set()
    try:
        entry = decode(body)
        msgspec.convert(entry, Message)
        swapped(entry, lambda value: found.add(value) or value)
    except BROKEN:
        return None
    return {value.removeprefix(BLOB) for value in found if value.startswith(BLOB)}


def values(connection: Connection) -> Iterator[str]:
    """What is JSON can be read."""
    for column, kind in JSON:
        for *own, value in connection.execute(select(*column.table.primary_key, column).where(column.is_not(None))):
            try:
                right = isinstance(decode(value), kind)
            except BROKEN:
                right = False
            if not right:
                yield f"Row {own[0]} of {column.table.name}: the JSON of its {column.name} is damaged."


def requests(connection: Connection) -> Iterator[str]:
    """Every request can be made again."""
    earlier = calls.alias()
    lost = ~exists().where(earlier.c.id == calls.c.before)
    for id, before in connection.execute(select(calls.c.id, calls.c.before).where(calls.c.before.is_not(None), lost)):
        yield f"Row {id} of calls: it begins like call {before}, which is not there."
    for rows in some(connection, select(calls.c.id, calls.c.head, calls.c.messages)):
        heads = kept.fetch(connection, keys({row.head for row in rows}))
        named = {row.id: named_in(row.messages) for row in rows}
        found = [value for values in named.values() for value in values or ()]
        there = {
            *those_of(connection, messages.c.id, (value for value in found if isinstance(value, int))),
            *those_of(connection, blobs.c.hash, (value for value in found if isinstance(value, str))),
        }
        for row in rows:
            if row.head in heads and not is_head(heads[row.head]):
                yield f"Row {row.id} of calls: its head is not the request that was sent."
            if (values := named[row.id]) is None:
                yield f"Row {row.id} of calls: its list of messages is damaged."
            for value in (values or set()) - there:
                what = f"row {value} of messages" if isinstance(value, int) else f"blob {value}"
                yield f"Row {row.id} of calls: {what}, of which its request was made, is not there."


def is_head(data: bytes) -> bool:
    """Whether it is the JSON of a request without its messages."""
    try:
        return decode(str(data, "utf-8"))["messages"] == []
    except (*BROKEN, KeyError):
        return False


def named_in(references: Any) -> set[int | str] | None:
    """The `messages` rows and the hashes of the blobs that a call's messages are made of; None when they are none."""
    found: set[int | str] = set()

    def collect(value: str) -> str:
        kind, _, rest = value.partition(":")
        if kind == "row":
            found.add(int(rest))
        elif kind == "blob":
            found.add(rest)
        return value

    try:
        _, *own = decode(references)
        for reference in own:
            match reference:
                case int(row) | [int(row), str()]:
                    found.add(row)
                case _:
                    mapped(reference, collect)
    except BROKEN:
        return None
    return found


def digests(connection: Connection) -> Iterator[str]:
    """What is known by its hash is what it was."""
    for row in connection.execute(select(blobs).execution_options(yield_per=20)):
        if not isinstance(row.data, bytes) or hashlib.sha256(row.data).hexdigest() != row.hash:
            yield f"Row {row.hash} of blobs: it was changed after it was written."
    for row in connection.execute(select(prompts)):
        if not isinstance(row.template, str) or digest(plain(row.template)) != row.hash:
            yield f"Row {row.id} of prompts ({row.name}@{row.number}): its template was changed after it was written."


def index(connection: Connection) -> Iterator[str]:
    """Everything that was said is in the full-text index, and nothing else."""
    said = select(func.count()).select_from(messages).where(messages.c.kind.in_(search.KINDS))
    there, wanted = search.count(connection), connection.scalar(said)
    if there != wanted:
        yield f"The full-text index holds {there} messages, and {wanted} are there."


def some(connection: Connection, statement: "Select[*tuple[Any, ...]]") -> "Iterator[Collection[Row[Any]]]":
    """The rows of a query, some at a time."""
    yield from connection.execute(statement.execution_options(yield_per=SOME)).partitions()


def those_of(connection: Connection, column: Column[Any], wanted: Iterable[Any]) -> set[Any]:
    """Those of the values that are in a column."""
    parts = kept.parts(keys(set(wanted)))
    return {value for part in parts for value in connection.scalars(select(column).where(column.in_(part)))}


def keys(values: Iterable[Any]) -> list[Any]:
    """Those of the values that can be a row's number or a hash at all, and so be asked for."""
    return [
        value
        for value in values
        if (isinstance(value, str) and value.isascii() and value.isalnum())
        or (isinstance(value, int) and value.bit_length() < 64)
    ]
