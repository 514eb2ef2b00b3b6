"""Load sessions from their rows: find them by id, list them, and read the path of messages up to the head."""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as NoBase64
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import msgspec
from crow_core.errors import StoreError
from crow_core.messages.message import Message, get_id, settle
from crow_core.messages.notes import Notes
from crow_core.session.store import ArchiveFilter, Page, Record, Summary
from sqlalchemy import Connection, Row, bindparam, func, not_, select, tuple_

from crow_persistence import blobs, tables
from crow_persistence.entries import DamagedEntry, StoredEntry, clean_text, decode, encode, find_blobs, unpack
from crow_persistence.progress import Progress
from crow_persistence.same_folders import find_same_folders
from crow_persistence.tables import draft_parts, drafts, messages, prompts, renders, sessions

CHECK = "crow db check says what is wrong"
ARCHIVED = "_archived"
"""Key among a session's stored options if it is archived; no option has this id."""


def find_session(connection: Connection, prefix: str) -> "Row[Any]":
    """Return the session whose id begins with `prefix`. Raises StoreError when there is none, or more than one."""
    if row := find_session_by_id(connection, prefix):
        return row
    living = select(sessions).where(sessions.c.deleted.is_(None))
    begins = sessions.c.id.startswith(clean_text(prefix), autoescape=True)
    found = connection.execute(living.where(begins).order_by(sessions.c.updated.desc()).limit(6)).all()
    if not found or not prefix:
        raise StoreError(f"There is no session {prefix!r}. `crow sessions list --all` shows all sessions.")
    if len(found) > 1:
        listed = ", ".join(f"{row.id} ({row.title or 'no title'})" for row in found[:5])
        listed = f"{listed} …" if len(found) > 5 else listed
        raise StoreError(f"More than one session begins with {prefix!r}: {listed}. Give more of its id.")
    return found[0]


def find_session_by_id(connection: Connection, id: str, *, lock: bool = False) -> "Row[Any] | None":
    """Return the session with this id, None if there is none or it was deleted. `lock` keeps others from changing it
    until the transaction ends."""
    wanted = select(sessions).where(sessions.c.id == clean_text(id), sessions.c.deleted.is_(None))
    return connection.execute(wanted.with_for_update() if lock else wanted).one_or_none()


SELECT_FIRST_KIND = (
    select(messages.c.kind).where(messages.c.session == sessions.c.number).order_by(messages.c.id).limit(1)
)
"""Kind of a session's first entry; "parent" for a sub-agent's session, "reask" for one that asks another again."""


def list_sessions(
    connection: Connection,
    cwd: str,
    cursor: str,
    limit: int,
    *,
    archived: ArchiveFilter = "include",
    agents: bool = False,
) -> Page:
    """Return one page of the sessions in a folder ("" for all), in all work trees of its repository, latest first.

    Sessions of sub-agents, and those that ask another one again, are listed only if `agents` is true.

    Raises ValueError for a cursor that no list returned.
    """
    wanted = select(sessions).where(sessions.c.deleted.is_(None))
    if archived != "include":
        is_archived = sessions.c.options.contains(f'"{ARCHIVED}":', autoescape=True)
        wanted = wanted.where(is_archived if archived == "only" else not_(is_archived))
    if not agents:
        wanted = wanted.where(func.coalesce(SELECT_FIRST_KIND.scalar_subquery(), "").not_in(("parent", "reask")))
    if cwd:
        wanted = wanted.where(sessions.c.cwd.in_(find_same_folders(connection, cwd)))
    if cursor:
        wanted = wanted.where(tuple_(sessions.c.updated, sessions.c.number) < tuple_(*decode_cursor(cursor)))
    latest = wanted.order_by(sessions.c.updated.desc(), sessions.c.number.desc())
    rows = connection.execute(latest.limit(limit + 1)).all()
    more = encode_cursor(rows[limit - 1]) if len(rows) > limit else None
    return Page([to_summary(row) for row in rows[:limit]], more)


def encode_cursor(row: "Row[Any]") -> str:
    """Return the cursor of the page after this row."""
    return urlsafe_b64encode(f"{row.updated} {row.number}".encode()).decode()


def decode_cursor(cursor: str) -> list[int]:
    """Return the update time and number of the row that a cursor encodes. Raises ValueError."""
    try:
        updated, number = map(int, urlsafe_b64decode(cursor.encode("ascii")).split())
    except (ValueError, NoBase64) as error:
        raise ValueError("not a cursor of this list") from error
    if not max(updated, number) < 2**63:
        raise ValueError("not a cursor of this list")
    return [updated, number]


def to_summary(row: "Row[Any]") -> Summary:
    """Convert a `sessions` row to the summary of a session."""
    return Summary(row.id, row.cwd, read_roots(row), row.title or "", row.created, row.updated, is_archived(row))


def read_roots(row: "Row[Any]") -> list[str]:
    """Return a session's folders; only its working folder if the value is damaged."""
    found = decode_or(row.roots, [])
    return [str(root) for root in found] or [row.cwd]


def read_options(row: "Row[Any]") -> dict[str, str]:
    """Return a session's chosen options; none if the value is damaged."""
    return {str(option): str(value) for option, value in decode_or(row.options, {}).items() if option != ARCHIVED}


def is_archived(row: "Row[Any]") -> bool:
    """Test whether lists leave a session out."""
    return ARCHIVED in decode_or(row.options, {})


def encode_options(options: Mapping[str, str], *, is_archived: bool) -> str:
    """Encode a session's chosen options, and whether it is archived, as `read_options` and `is_archived` read them."""
    return encode({**options, ARCHIVED: True} if is_archived else options)


def decode_or(text: str, default: Any) -> Any:
    """Decode JSON text. Return the default if the text is damaged or its value has another type."""
    try:
        found = decode(text)
    except ValueError:
        return default
    return found if isinstance(found, type(default)) else default


def load_session(connection: Connection, row: "Row[Any]") -> Record:
    """Load a session as it was stored."""
    return load_with_progress(connection, row)[0]


def load_with_progress(connection: Connection, row: "Row[Any]", at: str = "") -> tuple[Record, Progress]:
    """Load a session up to its head, or up to the entry with the id `at`, with the rows its entries came from. Raises
    StoreError when there is no such entry."""
    path, missing, astray = follow_path(connection, row)
    rendered = load_renders(connection, [found.id for found in path if found.kind == "render"])
    data = blobs.fetch(connection, {hash for found in path for hash in find_blobs(found.body)})
    progress = Progress(number=row.number, options=read_options(row), cwd=row.cwd, engine=connection.engine)
    progress.is_archived = is_archived(row)
    record = Record(row.id, [], title=row.title or "", options=dict(progress.options))
    damaged = missing + astray
    for found in path:
        entry, whole = restore_entry(found, data, rendered)
        damaged += not whole
        progress.head = found.id
        if entry is not None:
            progress.rows.append(found.id)
            record.log.append(entry)
            if at and get_id(entry) == at:
                break
    else:
        if reply := load_draft(connection, row.number):
            record.log.append(reply)
        if at and (reply is None or get_id(reply) != at):
            raise StoreError(f"Session {row.id} has no entry {at!r}, or it was rewound.")
    for entry in record.log:
        match entry.get("crow"):
            case {"kind": "render", "purpose": "system", "text": str(text)}:
                record.system = text
            case {"kind": "tools", "schemas": [*schemas]}:
                record.tools = schemas
            case _:
                pass
    if damaged:
        total = len(path) + missing
        record.damage = f"{total - damaged} of {total} messages of session {row.id} could be restored; {CHECK}."
    return record, progress


def follow_path(connection: Connection, row: "Row[Any]") -> tuple[list["Row[Any]"], int, int]:
    """Follow the parents of a session's head. Return the `messages` rows oldest first, the number of missing rows, and
    the number of rows whose parent is impossible."""
    known: dict[int, Row[Any]] = {}
    path: list[Row[Any]] = []
    at, missing, astray = row.head, 0, 0
    while at is not None:
        if at not in known:
            known |= {found.id: found for found in connection.execute(select_rows_up_to(at))}
        if (found := known.get(at)) is None:
            missing += 1
            at = find_previous_row(connection, row, path)
            continue
        path.append(found)
        at = found.parent
        if at is not None and not (isinstance(at, int) and at < found.id):  # a parent is always older than its child
            astray += 1
            at = find_previous_row(connection, row, path)
    return path[::-1], missing, astray


COLUMNS = (messages.c.id, messages.c.session, messages.c.parent, messages.c.kind, messages.c.body)
"""Columns of `messages` that loading needs."""


def select_rows_up_to(id: int) -> Any:
    """Select the rows of the session that this row belongs to, up to this row."""
    its = select(messages.c.session).where(messages.c.id == id).scalar_subquery()
    return select(*COLUMNS).where(messages.c.session == its, messages.c.id <= id)


def map_rows(connection: Connection, row: "Row[Any]") -> dict[str, int]:
    """Return the rows of all entries of a session and of its path, also rewound ones, by entry id."""
    its = connection.execute(select(*COLUMNS).where(messages.c.session == row.number))
    found: dict[str, int] = {}
    for stored in (*follow_path(connection, row)[0], *its):
        with suppress(ValueError, LookupError, TypeError):
            found[decode(stored.body)["crow"]["id"]] = stored.id
    return found


def find_previous_row(connection: Connection, row: "Row[Any]", path: "Sequence[Row[Any]]") -> int | None:
    """Return the row to continue with when a parent is missing. This is the newest earlier row of the same session or,
    failing that, of the session from which it was forked."""
    origin = select(sessions.c.number).where(sessions.c.id == row.origin).scalar_subquery()
    for session in (path[-1].session if path else row.number, origin):
        older = select(func.max(messages.c.id)).where(messages.c.session == session)
        if found := connection.scalar(older.where(messages.c.id < path[-1].id) if path else older):
            return found
    return None


def load_renders(connection: Connection, ids: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Return the template, variables and text of `render` markers, by row."""
    every = select(renders.c.message, renders.c.variables, prompts.c.template, tables.blobs).join(prompts)
    joined = every.join(tables.blobs, tables.blobs.c.hash == renders.c.text)
    found: dict[int, dict[str, Any]] = {}
    for part in blobs.split_batches(ids):
        for row in connection.execute(joined.where(renders.c.message.in_(part))):
            if not blobs.is_intact(row.hash, row.data):
                continue
            text = row.data.decode("utf-8", "surrogatepass")
            found[row.message] = {"template": row.template, "variables": decode_or(row.variables, {}), "text": text}
    return found


def restore_entry(
    row: "Row[Any]", data: Mapping[str, bytes], rendered: Mapping[int, dict[str, Any]]
) -> tuple[Message | None, bool]:
    """Return a row's entry, or what can be read of it, and whether it is complete."""
    try:
        entry = unpack(row.kind, row.body, data)
    except DamagedEntry as damage:
        return damage.rest, False
    if row.kind != "render":
        return entry, True
    entry["crow"] = cast(Notes, {**entry.get("crow", {}), **rendered.get(row.id, {})})
    return entry, row.id in rendered


SELECT_PARTS = select(draft_parts.c.body).where(draft_parts.c.session == bindparam("of")).order_by(draft_parts.c.number)


def load_draft(connection: Connection, number: int) -> Message | None:
    """Return the stored part of a reply that did not end, marked as interrupted."""
    reply = settle(read_draft(connection, number), used=set(), whole=False)
    if not (reply.get("content") or reply.get("reasoning_content")):
        return None
    reply["crow"] = {**reply.get("crow", {}), "cut": "interrupted"}
    return reply


def read_draft(connection: Connection, number: int) -> Message:
    """Return a session's draft, its parts joined; without texts if there is none, or its beginning is damaged."""
    body = connection.scalar(select(drafts.c.body).where(drafts.c.session == number))
    try:
        reply = unpack("assistant", body or "", {})
    except DamagedEntry:
        return Message(role="assistant")
    parts = [get_texts(reply)]
    for part in connection.scalars(SELECT_PARTS, {"of": number}):
        with suppress(ValueError, TypeError, RecursionError):  # damaged
            parts.append(get_texts(cast(Message, msgspec.convert(decode(part), StoredEntry))))
    joined = {key: text for key in parts[0] if (text := "".join(part[key] for part in parts))}
    return {**reply, **cast(Message, joined)}


def read_draft_texts(connection: Connection, number: int) -> dict[str, str]:
    """Return the texts of a session's draft."""
    return get_texts(read_draft(connection, number))


def get_texts(reply: Message) -> dict[str, str]:
    """Return the texts of a reply that its draft holds, by their keys."""
    return {key: str(reply.get(key) or "") for key in ("reasoning_content", "content")}
