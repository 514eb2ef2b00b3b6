"""Sessions, out of their rows: found by the beginning of an id, listed, and read along the path to their tip."""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as NoBase64
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from crow_core.errors import StoreError
from crow_core.messages import Message, settle
from crow_core.store import Page, Record, Summary
from sqlalchemy import Connection, Row, func, select, tuple_

from crow_persistence import blobs, tables
from crow_persistence.entries import Damaged, decode, names, plain, unpack
from crow_persistence.progress import Track
from crow_persistence.tables import drafts, messages, prompts, renders, sessions

CHECK = "crow db check says what is wrong"


def find(connection: Connection, prefix: str) -> "Row[Any]":
    """The session whose id begins so. Raises StoreError when there is none, or more than one."""
    if row := find_exactly(connection, prefix):
        return row
    living = select(sessions).where(sessions.c.deleted.is_(None))
    begins = sessions.c.id.startswith(plain(prefix), autoescape=True)
    found = connection.execute(living.where(begins).order_by(sessions.c.updated.desc()).limit(6)).all()
    if not found or not prefix:
        raise StoreError(f"There is no session {prefix!r}. `crow sessions list --all` shows those there are.")
    if len(found) > 1:
        listed = ", ".join(f"{row.id} ({row.title or 'no title'})" for row in found[:5]) + " …" * (len(found) > 5)
        raise StoreError(f"More than one session begins with {prefix!r}: {listed}. Give more of its id.")
    return found[0]


def find_exactly(connection: Connection, id: str, *, lock: bool = False) -> "Row[Any] | None":
    """The session of that id; a deleted one is none. `lock` keeps others from changing it meanwhile."""
    wanted = select(sessions).where(sessions.c.id == plain(id), sessions.c.deleted.is_(None))
    return connection.execute(wanted.with_for_update() if lock else wanted).one_or_none()


FIRST = select(messages.c.kind).where(messages.c.session == sessions.c.number).order_by(messages.c.id).limit(1)
"""What a session begins with: a sub-agent's with whom it works for."""


def listing(connection: Connection, cwd: str, cursor: str, limit: int, *, agents: bool = False) -> Page:
    """A part of the sessions of a folder ("" for all), the latest first; those of sub-agents only if asked for. Raises
    ValueError for a foreign cursor."""
    wanted = select(sessions).where(sessions.c.deleted.is_(None))
    if not agents:
        wanted = wanted.where(func.coalesce(FIRST.scalar_subquery(), "") != "parent")
    if cwd:
        wanted = wanted.where(sessions.c.cwd == plain(cwd))
    if cursor:
        wanted = wanted.where(tuple_(sessions.c.updated, sessions.c.number) < tuple_(*place_of(cursor)))
    latest = wanted.order_by(sessions.c.updated.desc(), sessions.c.number.desc())
    rows = connection.execute(latest.limit(limit + 1)).all()
    more = cursor_at(rows[limit - 1]) if len(rows) > limit else None
    return Page([summary(row) for row in rows[:limit]], more)


def cursor_at(row: "Row[Any]") -> str:
    return urlsafe_b64encode(f"{row.updated} {row.number}".encode()).decode()


def place_of(cursor: str) -> list[int]:
    """What `cursor_at` was given. Raises ValueError."""
    try:
        updated, number = map(int, urlsafe_b64decode(cursor.encode("ascii")).split())
    except (ValueError, NoBase64) as error:
        raise ValueError("not a cursor of this list") from error
    if not max(updated, number) < 2**63:
        raise ValueError("not a cursor of this list")
    return [updated, number]


def summary(row: "Row[Any]") -> Summary:
    """A `sessions` row as a list shows it."""
    return Summary(row.id, row.cwd, roots_of(row), row.title or "", row.created, row.updated)


def roots_of(row: "Row[Any]") -> list[str]:
    found = lenient(row.roots, [])
    return [str(root) for root in found] or [row.cwd]


def options_of(row: "Row[Any]") -> dict[str, str]:
    return {str(option): str(value) for option, value in lenient(row.options, {}).items()}


def lenient(text: str, instead: Any) -> Any:
    """A JSON value; another in its place where it was damaged."""
    try:
        found = decode(text)
    except ValueError:
        return instead
    return found if isinstance(found, type(instead)) else instead


def load(connection: Connection, row: "Row[Any]") -> Record:
    """A session as it was stored."""
    return recall(connection, row)[0]


def recall(connection: Connection, row: "Row[Any]", at: str = "") -> tuple[Record, Track]:
    """A session as it was stored, and where: to its tip, or up to the entry with the id `at`. Raises StoreError when it
    has none."""
    path, missing, astray = follow(connection, row)
    rendered = renders_of(connection, [found.id for found in path if found.kind == "render"])
    data = blobs.fetch(connection, {hash for found in path for hash in names(found.body)})
    track = Track(number=row.number, options=options_of(row), engine=connection.engine)
    record = Record(row.id, [], title=row.title or "", options=dict(track.options))
    damaged = missing + astray
    for found in path:
        entry, whole = restored(found, data, rendered)
        damaged += not whole
        track.head = found.id
        if entry is not None:
            track.rows.append(found.id)
            record.log.append(entry)
            if at and id_of(entry) == at:
                break
    else:
        if reply := draft_of(connection, row.number):
            record.log.append(reply)
        if at and (reply is None or id_of(reply) != at):
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
    return record, track


def id_of(entry: Message) -> str:
    return str(entry.get("crow", {}).get("id", ""))


def follow(connection: Connection, row: "Row[Any]") -> tuple[list["Row[Any]"], int, int]:
    """The `messages` rows from the first to the tip, each the parent of the next; how many were missing, and how many
    named a parent that cannot be theirs."""
    known: dict[int, Row[Any]] = {}
    path: list[Row[Any]] = []
    at, missing, astray = row.head, 0, 0
    while at is not None:
        if at not in known:
            known |= {found.id: found for found in connection.execute(session_up_to(at))}
        if (found := known.get(at)) is None:
            missing += 1
            at = before(connection, row, path)
            continue
        path.append(found)
        at = found.parent
        if at is not None and not (isinstance(at, int) and at < found.id):  # a parent is always older
            astray += 1
            at = before(connection, row, path)
    return path[::-1], missing, astray


COLUMNS = (messages.c.id, messages.c.session, messages.c.parent, messages.c.kind, messages.c.body)


def session_up_to(id: int) -> Any:
    """All rows of the session to which this one belongs, up to it."""
    its = select(messages.c.session).where(messages.c.id == id).scalar_subquery()
    return select(*COLUMNS).where(messages.c.session == its, messages.c.id <= id)


def rows_by_entry(connection: Connection, row: "Row[Any]") -> dict[str, int]:
    """The rows of all entries that a session can know of, also of those it has rewound, by the entries' ids."""
    its = connection.execute(select(*COLUMNS).where(messages.c.session == row.number))
    found: dict[str, int] = {}
    for stored in (*follow(connection, row)[0], *its):
        with suppress(ValueError, LookupError, TypeError):
            found[decode(stored.body)["crow"]["id"]] = stored.id
    return found


def before(connection: Connection, row: "Row[Any]", path: "Sequence[Row[Any]]") -> int | None:
    """Where to go on when a row's parent is not to be found: the newest one before it of its session or, failing that,
    of the session this was forked from."""
    origin = select(sessions.c.number).where(sessions.c.id == row.origin).scalar_subquery()
    for session in (path[-1].session if path else row.number, origin):
        older = select(func.max(messages.c.id)).where(messages.c.session == session)
        if found := connection.scalar(older.where(messages.c.id < path[-1].id) if path else older):
            return found
    return None


def renders_of(connection: Connection, ids: Sequence[int]) -> dict[int, dict[str, Any]]:
    """What belongs to `render` markers beside their bodies, by their rows."""
    every = select(renders.c.message, renders.c.variables, prompts.c.template, tables.blobs).join(prompts)
    joined = every.join(tables.blobs, tables.blobs.c.hash == renders.c.text)
    found: dict[int, dict[str, Any]] = {}
    for part in blobs.parts(ids):
        for row in connection.execute(joined.where(renders.c.message.in_(part))):
            if not blobs.is_whole(row.hash, row.data):
                continue
            text = row.data.decode("utf-8", "surrogatepass")
            found[row.message] = {"template": row.template, "variables": lenient(row.variables, {}), "text": text}
    return found


def restored(
    row: "Row[Any]", data: Mapping[str, bytes], rendered: Mapping[int, dict[str, Any]]
) -> tuple[Message | None, bool]:
    """The entry of a row, or what is left of it, and whether that is all."""
    try:
        entry = unpack(row.kind, row.body, data)
    except Damaged as damage:
        return damage.rest, False
    if row.kind != "render":
        return entry, True
    entry["crow"] = entry.get("crow", {}) | rendered.get(row.id, {})
    return entry, row.id in rendered


def draft_of(connection: Connection, number: int) -> Message | None:
    """What was written of a reply that never came to its end."""
    body = connection.scalar(select(drafts.c.body).where(drafts.c.session == number))
    try:
        reply = settle(unpack("assistant", body or "", {}), used=set(), whole=False)
    except Damaged:
        return None
    if not any(reply.get(key) for key in ("content", "reasoning_content")):
        return None
    reply["crow"] = {**reply.get("crow", {}), "cut": "interrupted"}
    return reply
