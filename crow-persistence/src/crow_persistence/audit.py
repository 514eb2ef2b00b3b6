"""The audit log: permission decisions and tool results, as a chain of rows that each hold the hash of the row before.

Rows are only added. Because whoever can write the database can also write a new chain, the head of the chain is also
stored in a separate file, `audit.head`, which only moves forward along the chain. A row that was changed, moved or
removed no longer fits the rows after it or the file. The next head is announced in the file before the commit, so that
a process killed at any moment leaves nothing that looks like tampering.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from crow_core.errors import StoreError
from crow_core.messages import Message
from sqlalchemy import URL, Connection, bindparam, func, insert, select

from crow_persistence import leases
from crow_persistence.database import Database
from crow_persistence.tables import decisions

AuditRow = dict[str, Any]
"""A row of the table `decisions`, by column."""

HEAD_FILE = "audit.head"
"""Name of the file with the chain heads, in crow's data folder."""
HASHED_COLUMNS = (
    *("number", "at", "session", "call", "tool", "kind", "verdict"),
    *("by", "scope", "arguments", "result", "files", "previous"),
)
"""Columns that a row's hash covers. This list must never change: a column added later is not in the hashes of old
rows."""
REPAIR = "repair"
"""Kind of a row that `repair` added. Its `by` says what was wrong, its `arguments` is the digest of all rows before."""
CHAIN_LOCK = 0x63726F77
"""PostgreSQL advisory lock, held by the one transaction that appends to the chain."""
SELECT_HEAD = select(decisions.c.number, decisions.c.hash).order_by(decisions.c.number.desc()).limit(1)
SELECT_HASH = select(decisions.c.hash).where(decisions.c.number == bindparam("count"))
SELECT_DECISION = (
    select(decisions)
    .where(decisions.c.session == bindparam("of"), decisions.c.kind == "decision")
    .where(decisions.c.call == bindparam("call_id"))
    .order_by(decisions.c.number.desc())
    .limit(1)
)
INSERT_DECISIONS = insert(decisions)


def make_rows(
    connection: Connection,
    session_id: str,
    entries: Sequence[Message],
    at: int,
    decided: dict[str, AuditRow] | None = None,
) -> list[AuditRow]:
    """Make the rows for the decisions and their tool results among a session's new entries; see `append_rows`.

    `decided` holds earlier decisions by tool call id, and gets new ones; those that are not in it are looked up.
    """
    decided = {} if decided is None else decided
    rows: list[AuditRow] = []
    for entry in entries:
        notes = entry.get("crow", {})
        if "role" not in entry and notes.get("kind") == "decision":
            row = to_decision_row(notes)
            decided[row["call"]] = row
            rows.append(row)
        elif entry.get("role") == "tool":
            id = escape_text(entry.get("tool_call_id", ""))
            if row := decided.pop(id, None) or find_decision(connection, session_id, id):
                rows.append(to_result_row(row, entry))
    return [{**row, "session": session_id, "at": at} for row in rows]


def find_decision(connection: Connection, session_id: str, call: str) -> AuditRow | None:
    """Return the stored decision on a tool call of a session; the last one if there are several."""
    found = connection.execute(SELECT_DECISION, {"of": session_id, "call_id": call}).mappings().first()
    return dict(found) if found else None


def to_decision_row(notes: Mapping[str, Any]) -> AuditRow:
    """Convert a marker of kind `decision` to a row."""
    named = {name: escape_text(notes.get(name, "")) for name in ("call", "tool", "by", "scope", "arguments")}
    return {**named, "kind": "decision", "verdict": escape_text(notes.get("is", "")), "result": "", "files": "[]"}


def to_result_row(decision: AuditRow, answer: Message) -> AuditRow:
    """Build the row for the result of a decided tool call."""
    notes = answer.get("crow", {})
    files = [{name: change.get(name) for name in ("path", "before", "after")} for change in notes.get("changes", [])]
    verdict = "failed" if notes.get("failed") else "completed"
    outcome = {
        "kind": "result",
        "verdict": verdict,
        "result": digest(answer.get("content")),
        "files": to_canonical_json(files),
    }
    return {**decision, **outcome}


def append_rows(connection: Connection, rows: Sequence[AuditRow]) -> "AnchoredHead":
    """Append rows to the chain. Return the head before, with the new head as `next`, to `announce`.

    Call it last in a transaction: on PostgreSQL it holds a lock that other writers of decisions wait for.
    """
    lock_chain(connection)
    end = read_head(connection)
    previous = end.hash
    for number, row in enumerate(rows, end.count + 1):
        row.update(number=number, previous=previous)
        previous = row["hash"] = hash_row(row)
    connection.execute(INSERT_DECISIONS, rows)
    return AnchoredHead(end.count, end.hash, ChainHead(end.count + len(rows), previous))


def lock_chain(connection: Connection) -> None:
    """Keep others from appending to the chain until the transaction ends. SQLite allows one writer at a time."""
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(CHAIN_LOCK)))


def list_repairs(connection: Connection) -> list[tuple[int, int, str]]:
    """Return the number and the time of each repair of the chain, and what was wrong before it."""
    wanted = select(decisions.c.number, decisions.c.at, decisions.c.by).where(decisions.c.kind == REPAIR)
    return [(row.number, row.at, row.by) for row in connection.execute(wanted.order_by(decisions.c.number))]


def hash_row(row: Mapping[str, Any]) -> str:
    """Return the hash of a row's HASHED_COLUMNS."""
    return digest({name: row[name] for name in HASHED_COLUMNS})


def digest(value: Any) -> str:
    """Return the SHA-256 digest of a value as canonical JSON, in hexadecimal."""
    return hashlib.sha256(to_canonical_json(value).encode()).hexdigest()


def to_canonical_json(value: Any) -> str:
    """Encode a value as ASCII JSON with sorted keys and no white space. Bytes, as in a damaged row, become their
    `repr`."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=repr)


def escape_text(value: Any) -> str:
    """Return text that every database accepts: unpaired surrogates and NUL characters become backslash escapes."""
    return str(value).encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


class ChainHead(msgspec.Struct, frozen=True):
    """The last row of a chain; `count` is its number, 0 for an empty chain."""

    count: int = 0
    hash: str = ""


class AnchoredHead(ChainHead, frozen=True, omit_defaults=True):
    """The head of a chain as the file records it."""

    next: ChainHead | None = None
    """The head after a transaction that was announced; it may be in progress, or may never have been committed."""


def read_head(connection: Connection) -> ChainHead:
    """Return the head of the chain in the database."""
    row = connection.execute(SELECT_HEAD).first()
    return ChainHead(row.number, row.hash) if row else ChainHead()


def announce(connection: Connection, database: Database, coming: AnchoredHead) -> None:
    """Write the coming head to the file, beside the current one. Call it last in the transaction. Raises StoreError."""

    def advance(anchored: AnchoredHead) -> AnchoredHead | None:
        before = (anchored.count, anchored.hash) == (coming.count, coming.hash)
        return coming if before or is_in_chain(connection, anchored) else None

    update_file(database, advance)


def anchor(database: Database, announced: AnchoredHead | None = None) -> None:
    """Write the current head to the file, after the commit. The database is not queried if the file still holds what
    was `announced`. Raises StoreError."""
    if announced and (end := announced.next):
        ended = AnchoredHead(end.count, end.hash)
        if update_file(database, lambda anchored: ended if anchored == announced else None):
            return

    def advance(anchored: AnchoredHead) -> AnchoredHead | None:
        if not is_in_chain(connection, anchored):
            return None
        end = read_head(connection)
        others = anchored.next if anchored.next and anchored.next.count > end.count else None
        return AnchoredHead(end.count, end.hash, others)

    with database.begin_read() as connection:
        update_file(database, advance)


def update_file(database: Database, change: Callable[[AnchoredHead], AnchoredHead | None]) -> bool:
    """Change a database's head in the file; `change` returns None to leave it. Return whether it was changed. A damaged
    file is left for `verify` to report. Raises StoreError."""
    file = database.folder / HEAD_FILE
    try:
        with lock_file(file):
            heads, name = read_file(file), database_key(database.url)
            if changed := change(heads.get(name, AnchoredHead())):
                write_file(file, {**heads, name: changed}, is_durable=database.is_durable)
            return changed is not None
    except msgspec.DecodeError:
        return False
    except OSError as error:
        raise StoreError(f"{file} cannot be written ({error.strerror}). Make it writable, or make room.") from error


def is_in_chain(connection: Connection, anchored: AnchoredHead) -> bool:
    """Test whether the chain in the database has the head that the file records. If not, the file is left for `verify`
    to report."""
    return (connection.scalar(SELECT_HASH, {"count": anchored.count}) or "") == anchored.hash


@cache
def database_key(url: URL) -> str:
    """Return the key of a database in the file; one folder may serve several databases."""
    return url.render_as_string(hide_password=True)


def read_file(file: Path) -> dict[str, AnchoredHead]:
    """Return the recorded heads by database. Raises OSError, msgspec.DecodeError."""
    return msgspec.json.decode(file.read_bytes(), type=dict[str, AnchoredHead]) if file.exists() else {}


def write_file(file: Path, heads: Mapping[str, AnchoredHead], *, is_durable: bool = False) -> None:
    """Replace the contents of the file in one write, so that a killed process leaves the old or the new. With
    `is_durable`, wait until the disk has it. Raises OSError."""
    begun = file if file.exists() else file.with_suffix(".new")
    with open(os.open(begun, os.O_WRONLY | os.O_CREAT, 0o600), "wb", buffering=0) as opened:
        opened.write(msgspec.json.encode(heads).ljust(os.fstat(opened.fileno()).st_size))
        if is_durable:
            os.fsync(opened.fileno())
    if begun != file:
        begun.replace(file)


@contextmanager
def lock_file(file: Path, *, needed: bool = True) -> Generator[None]:
    """Hold a lock that keeps other processes from writing the file; no lock if it cannot be made and is not `needed`.
    Raises OSError."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        opened = os.open(file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        if needed:
            raise
        yield
        return
    with open(opened, "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def verify(database: Database) -> list[str]:
    """Check the chain against its hashes and the file. Return one sentence for each fault since the last repair. Raises
    StoreError when the database cannot be read."""
    file = database.folder / HEAD_FILE
    wrong: list[str] = []
    end, anchored, hashes, seal = ChainHead(), None, {0: ""}, ""
    every = select(decisions).order_by(decisions.c.number).execution_options(yield_per=1000)
    with database.begin_read() as connection:
        try:
            with lock_file(file, needed=False):  # so that the snapshot and the file belong together
                anchored = read_file(file).get(database_key(database.url))
                read_head(connection)
        except (OSError, msgspec.DecodeError) as error:
            return [f"{file} cannot be read ({error}). `crow audit repair` makes a new one."]
        marks = {head.count for head in (anchored, anchored and anchored.next) if head}
        for row in map(dict, connection.execute(every).mappings()):
            hash = hash_row(row)
            if row["kind"] == REPAIR and hash == row["hash"] and row["arguments"] == seal:
                wrong.clear()
            seal = extend_seal(seal, row)
            if row["number"] < 1:
                wrong.append(f"Decision {row['number']} was inserted by hand: decisions are numbered from 1.")
                continue
            if row["number"] > end.count + 1:
                wrong.append(f"{describe_range(end.count + 1, row['number'] - 1)} removed.")
            elif row["previous"] != end.hash:
                wrong.append(f"Decision {row['number']} does not follow the one before: one of the two was replaced.")
            if hash != row["hash"]:
                wrong.append(f"Decision {row['number']} was changed or moved after it was written.")
            end = ChainHead(row["number"], row["hash"])
            if end.count in marks:
                hashes[end.count] = end.hash
    if anchored is None:
        unknown = f"whether decisions after {end.count} were removed is unknown"
        return [*wrong, f"{file} has no record of {database_key(database.url)}: {unknown}."] if end.count else wrong
    if end.count < anchored.count:
        why = "a power failure or an older copy of the database has the same effect"
        wrong.append(f"{describe_range(end.count + 1, anchored.count)} removed from the end, as {file} shows ({why}).")
    elif hashes.get(anchored.count) != anchored.hash:
        wrong.append(f"Decision {anchored.count} is not the one recorded in {file}: the chain was rewritten.")
    known = anchored.next if anchored.next and hashes.get(anchored.next.count) == anchored.next.hash else anchored
    if end.count > known.count:
        why = "a process with another such file wrote them, or they were inserted by hand"
        wrong.append(f"{describe_range(known.count + 1, end.count)} not in {file}: {why}.")
    return wrong


def extend_seal(seal: str, row: Mapping[str, Any]) -> str:
    """Return the digest of the rows before, which is `seal`, and of a row as it is now, whatever its hash says."""
    return digest([seal, hash_row(row), row["hash"]])


def repair(database: Database) -> list[str]:
    """Go on after a break of the chain: add a record that says where and why it was broken, and record the new head in
    the file. Return the faults that were found, none if the chain is unbroken. Raises StoreError.

    The record seals the rows before it as they are now: a later change of one of them is found.
    """
    faults = verify(database)
    if not faults:
        return []
    with database.begin_write() as connection:
        lock_chain(connection)
        seal = ""
        for row in map(dict, connection.execute(select(decisions).order_by(decisions.c.number)).mappings()):
            seal = extend_seal(seal, row)
        row = dict.fromkeys(("session", "call", "scope", "result"), "")
        row |= {"tool": "crow audit repair", "kind": REPAIR, "verdict": "repaired", "files": "[]"}
        row |= {"at": leases.now(), "by": escape_text(" ".join(faults)), "arguments": seal}
        head = append_rows(connection, [row]).next
    assert head is not None
    replace_head(database, AnchoredHead(head.count, head.hash))
    return faults


def replace_head(database: Database, head: AnchoredHead) -> None:
    """Write a database's head to the file, whatever it holds; a damaged file is kept under another name. Raises
    StoreError."""
    file = database.folder / HEAD_FILE
    try:
        with lock_file(file):
            try:
                heads = read_file(file)
            except msgspec.DecodeError:
                file.replace(file.with_suffix(".damaged"))
                heads = {}
            write_file(file, {**heads, database_key(database.url): head})
    except OSError as error:
        raise StoreError(f"{file} cannot be written ({error.strerror}). Make it writable, or make room.") from error


def describe_range(first: int, last: int) -> str:
    """Return the beginning of a sentence about these decisions: "Decision 3 was" or "Decisions 3 to 5 were"."""
    return f"Decision {first} was" if first == last else f"Decisions {first} to {last} were"


def list_decisions(connection: Connection, session: str = "", limit: int = 50) -> list[AuditRow]:
    """Return the latest rows, newest first; `session` is the beginning of a session id, "" for all."""
    wanted = select(decisions).where(decisions.c.session.startswith(session, autoescape=True))
    found = connection.execute(wanted.order_by(decisions.c.number.desc()).limit(limit)).mappings()
    return [dict(row) for row in found]
