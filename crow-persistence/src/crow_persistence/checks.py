"""Checks of a database, for `crow db check`, and its size."""

import hashlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import msgspec
from crow_core.errors import StoreError
from sqlalchemy import Column, Connection, Row, Select, exists, func, select, text
from sqlalchemy.exc import DBAPIError

from crow_persistence import audit, search
from crow_persistence.blobs import fetch as fetch_blobs
from crow_persistence.blobs import split_batches
from crow_persistence.database import Database
from crow_persistence.entries import (
    BLOB_PREFIX,
    StoredEntry,
    clean_text,
    decode,
    entry_kind,
    map_strings,
    replace_strings,
)
from crow_persistence.prompt_versions import digest
from crow_persistence.sqlite_files import wal_file
from crow_persistence.tables import (
    blobs,
    calls,
    draft_parts,
    drafts,
    links,
    messages,
    metadata,
    prompts,
    renders,
    sessions,
)

BATCH_SIZE = 200
"""Maximum number of rows fetched together."""
JSON_COLUMNS: tuple[tuple[Column[Any], type], ...] = (
    (sessions.c.roots, list),
    (sessions.c.options, dict),
    (drafts.c.body, dict),
    (draft_parts.c.body, dict),
    (prompts.c.variables, list),
    (renders.c.variables, dict),
    (calls.c.sampling, dict),
    (calls.c.usage, dict),
)
"""Columns that hold JSON, and the type of the value. Columns with a check of their own are not listed."""
DAMAGE_ERRORS = (ValueError, TypeError, RecursionError)
"""Exceptions that reading a damaged value may raise."""


def check(database: Database) -> list[str]:
    """Run all checks. Return one sentence for each fault."""
    wrong: list[str] = []
    for find in (
        check_pages,
        check_references,
        check_paths,
        check_entries,
        check_json,
        check_requests,
        check_replies,
        check_digests,
        check_index,
    ):
        try:
            with database.begin_read() as connection:
                wrong += find(connection)
        except StoreError as error:
            wrong.append(str(error))
    try:
        wrong += audit.verify(database)
    except StoreError as error:
        wrong.append(str(error))
    return list(dict.fromkeys(wrong))


def count_rows(connection: Connection) -> dict[str, int]:
    """Return the number of rows in each table."""
    tables = metadata.tables.items()
    return {name: connection.scalar(select(func.count()).select_from(table)) or 0 for name, table in tables}


def measure_size(connection: Connection, database: Database) -> int:
    """Return the size of the database on disk, in bytes."""
    if not database.file:
        return connection.scalar(text("SELECT pg_database_size(current_database())")) or 0
    return sum(file.stat().st_size for file in (database.file, wal_file(database.file)) if file.exists())


def check_pages(connection: Connection) -> Iterator[str]:
    """Check that the SQLite file is intact. PostgreSQL checks its own files."""
    if connection.dialect.name != "sqlite":
        return
    try:
        for line in connection.scalars(text("PRAGMA integrity_check")).all():
            if line != "ok":
                yield f"The file is damaged: {line}."
    except DBAPIError:  # too damaged to be checked as a whole
        for name in connection.scalars(text("SELECT name FROM sqlite_master WHERE type = 'table'")).all():
            try:
                connection.execute(text(f"PRAGMA integrity_check('{name}')")).all()
            except DBAPIError as error:
                yield f"The file is damaged where {name} is: {error.orig}."


def check_references(connection: Connection) -> Iterator[str]:
    """Check that every foreign key refers to an existing row."""
    for table in metadata.sorted_tables:
        for key in sorted(table.foreign_keys, key=lambda key: key.parent.name):
            other = key.column.table.alias()
            lost = ~exists().where(other.c[key.column.name] == key.parent)
            for *own, value in connection.execute(
                select(*table.primary_key, key.parent).where(key.parent.is_not(None), lost)
            ):
                yield f"Row {'/'.join(map(str, own))} of {table.name}: its {key.parent.name} {value} is not there."


def check_paths(connection: Connection) -> Iterator[str]:
    """Check that every session's head exists, and that every message is newer than its parent."""
    lost = ~exists().where(messages.c.id == sessions.c.head)
    for id, head in connection.execute(
        select(sessions.c.id, sessions.c.head).where(sessions.c.head.is_not(None), lost)
    ):
        yield f"Session {id}: its head, row {head} of messages, is not there."
    younger = messages.c.parent >= messages.c.id
    for id, parent in connection.execute(select(messages.c.id, messages.c.parent).where(younger)):
        yield f"Row {id} of messages: it follows row {parent}, which is not older."


def check_entries(connection: Connection) -> Iterator[str]:
    """Check that every log entry can be decoded, with its blobs and renders."""
    every = select(messages.c.id, messages.c.kind, messages.c.body, sessions.c.id.label("of")).outerjoin(sessions)
    for rows in fetch_batches(connection, every.order_by(messages.c.id)):
        ids = [row.id for row in rows]
        rendered = set(connection.scalars(select(renders.c.message).where(renders.c.message.in_(ids))))
        linked = {tuple(row) for row in connection.execute(select(links).where(links.c.message.in_(ids)))}
        named = {row.id: find_entry_blobs(row.body) for row in rows}
        there = find_existing(connection, blobs.c.hash, (hash for hashes in named.values() for hash in hashes or ()))
        for row in rows:
            begin, hashes = f"Row {row.id} of messages (session {row.of}):", named[row.id]
            if hashes is None or clean_text(entry_kind(decode(row.body))[:16]) != row.kind:
                yield f"{begin} its body is not the {row.kind} entry that was written."
                continue
            for hash in hashes - there:
                yield f"{begin} blob {hash} of its body is not there."
            for hash in hashes & there:
                if (row.id, hash) not in linked:
                    yield f"{begin} blob {hash} of its body is not in links."
            if row.kind == "render" and row.id not in rendered:
                yield f"{begin} its render is not there."


def find_entry_blobs(body: Any) -> set[str] | None:
    """Return the hashes of the blobs that a body refers to; None when it is not an entry."""
    found: set[str] = set()
    try:
        entry = decode(body)
        msgspec.convert(entry, StoredEntry)
        replace_strings(entry, lambda value: found.add(value) or value)
    except DAMAGE_ERRORS:
        return None
    return {value.removeprefix(BLOB_PREFIX) for value in found if value.startswith(BLOB_PREFIX)}


def check_json(connection: Connection) -> Iterator[str]:
    """Check that the JSON columns can be decoded."""
    for column, kind in JSON_COLUMNS:
        for *own, value in connection.execute(select(*column.table.primary_key, column).where(column.is_not(None))):
            try:
                right = isinstance(decode(value), kind)
            except DAMAGE_ERRORS:
                right = False
            if not right:
                row = "/".join(map(str, own))
                yield f"Row {row} of {column.table.name}: the JSON of its {column.name} is damaged."


def check_requests(connection: Connection) -> Iterator[str]:
    """Check that every request can be rebuilt."""
    earlier = calls.alias()
    lost = ~exists().where(earlier.c.id == calls.c.before)
    for id, before in connection.execute(select(calls.c.id, calls.c.before).where(calls.c.before.is_not(None), lost)):
        yield f"Row {id} of calls: it begins like model call {before}, which is not there."
    for rows in fetch_batches(connection, select(calls.c.id, calls.c.head, calls.c.messages)):
        heads = fetch_blobs(connection, drop_impossible_keys({row.head for row in rows}))
        named = {row.id: find_request_parts(row.messages) for row in rows}
        found = [value for values in named.values() for value in values or ()]
        there = {
            *find_existing(connection, messages.c.id, (value for value in found if isinstance(value, int))),
            *find_existing(connection, blobs.c.hash, (value for value in found if isinstance(value, str))),
        }
        for row in rows:
            if row.head in heads and not is_request_head(heads[row.head]):
                yield f"Row {row.id} of calls: its head is not the request that was sent."
            if (values := named[row.id]) is None:
                yield f"Row {row.id} of calls: its list of messages is damaged."
            for value in (values or set()) - there:
                what = f"row {value} of messages" if isinstance(value, int) else f"blob {value}"
                yield f"Row {row.id} of calls: {what}, of which its request was made, is not there."


def check_replies(connection: Connection) -> Iterator[str]:
    """Check that every model call has its reply, and every reply its model call: unless its session was deleted, or
    written again after its database was lost."""
    lost = ~exists().where(messages.c.id == calls.c.reply)
    for id, reply in connection.execute(select(calls.c.id, calls.c.reply).where(calls.c.reply.is_not(None), lost)):
        yield f"Row {id} of calls: its reply, row {reply} of messages, is not there."
    every = select(messages.c.id, messages.c.body, sessions.c.id.label("of")).join(sessions)
    kept = sessions.c.deleted.is_(None) & (messages.c.at > func.coalesce(sessions.c.copied, 0))
    for rows in fetch_batches(connection, every.where(messages.c.kind == "assistant", kept).order_by(messages.c.id)):
        named = {row: find_entry_id(row.body) for row in rows}
        there = find_existing(connection, calls.c.id, named.values())
        for row, id in named.items():
            if id and id not in there:
                yield f"Row {row.id} of messages (session {row.of}): its model call {id} is not there."


def find_entry_id(body: Any) -> str:
    """Return the id of an entry; "" if its body is damaged."""
    try:
        return str(decode(body)["crow"]["id"])
    except (*DAMAGE_ERRORS, LookupError):
        return ""


def is_request_head(data: bytes) -> bool:
    """Test whether data is the JSON of a request with an empty list of messages."""
    try:
        return decode(str(data, "utf-8"))["messages"] == []
    except (*DAMAGE_ERRORS, KeyError):
        return False


def find_request_parts(references: Any) -> set[int | str] | None:
    """Return the `messages` rows and the blob hashes that a request refers to; None when the references are damaged."""
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
                    map_strings(reference, collect)
    except DAMAGE_ERRORS:
        return None
    return found


def check_digests(connection: Connection) -> Iterator[str]:
    """Check that blobs and templates still match their hashes."""
    for row in connection.execute(select(blobs).execution_options(yield_per=20)):
        if not isinstance(row.data, bytes) or hashlib.sha256(row.data).hexdigest() != row.hash:
            yield f"Row {row.hash} of blobs: it was changed after it was written."
    for row in connection.execute(select(prompts)):
        if not isinstance(row.template, str) or digest(clean_text(row.template)) != row.hash:
            yield f"Row {row.id} of prompts ({row.name}@{row.number}): its template was changed after it was written."


def check_index(connection: Connection) -> Iterator[str]:
    """Check that the full-text index holds as many messages as the table."""
    said = select(func.count()).select_from(messages).where(messages.c.kind.in_(search.INDEXED_KINDS))
    there, wanted = search.count_indexed(connection), connection.scalar(said)
    if there != wanted:
        yield f"The full-text index holds {there} messages, and {wanted} are there."


def fetch_batches(connection: Connection, statement: "Select[*tuple[Any, ...]]") -> "Iterator[Collection[Row[Any]]]":
    """Yield the rows of a query in batches."""
    yield from connection.execute(statement.execution_options(yield_per=BATCH_SIZE)).partitions()


def find_existing(connection: Connection, column: Column[Any], wanted: Iterable[Any]) -> set[Any]:
    """Return those of the values that exist in a column."""
    parts = split_batches(drop_impossible_keys(set(wanted)))
    return {value for part in parts for value in connection.scalars(select(column).where(column.in_(part)))}


def drop_impossible_keys(values: Iterable[Any]) -> list[Any]:
    """Return the values that can be a row number or a hash; the database would refuse others as parameters."""
    return [
        value
        for value in values
        if (isinstance(value, str) and value.isascii() and value.isalnum())
        or (isinstance(value, int) and value.bit_length() < 64)
    ]
