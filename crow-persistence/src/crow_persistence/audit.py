"""Who allowed what, and what came of it: rows that only grow, each with the hash of the one before.

Whoever can write the database can also write a new chain; so its head is noted in a file of its own, `audit.head`,
which only moves forward along the chain. What was changed, moved or removed no longer fits the rows behind it, or the
file. The next head is announced there before the commit, so that a process that is killed leaves nothing that looks
like a forgery.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from crow_core.errors import StoreError
from crow_core.messages import Message
from sqlalchemy import Connection, bindparam, func, insert, select

from crow_persistence.database import Database
from crow_persistence.tables import decisions

Row = dict[str, Any]

HEAD = "audit.head"
"""In crow's data folder."""
HASHED = (
    *("number", "at", "session", "call", "tool", "kind", "verdict"),
    *("by", "scope", "arguments", "result", "files", "previous"),
)
"""The columns that a hash covers. For ever: what is added to the table later cannot be in the hashes of old rows."""
LOCK = 0x63726F77
"""Of PostgreSQL's advisory locks: held by the one transaction that lengthens the chain."""
LAST = select(decisions.c.number, decisions.c.hash).order_by(decisions.c.number.desc()).limit(1)
HASH = select(decisions.c.hash).where(decisions.c.number == bindparam("count"))
DECIDED = (
    select(decisions)
    .where(decisions.c.session == bindparam("of"), decisions.c.kind == "decision")
    .where(decisions.c.call.in_(bindparam("calls", expanding=True)))
    .order_by(decisions.c.number)
)
ADD = insert(decisions)


def record(connection: Connection, session_id: str, entries: Sequence[Message], at: int) -> "Noted | None":
    """Write down the decisions among a session's new entries and what came of them; gives what to announce of it, None
    when there were none.

    To be called last in a transaction: on PostgreSQL, who else has something to record waits for its end.
    """
    answers = [plain(entry.get("tool_call_id", "")) for entry in entries if entry.get("role") == "tool"]
    made = decided(connection, session_id, answers) if answers else {}
    rows: list[Row] = []
    for entry in entries:
        notes = entry.get("crow", {})
        if "role" not in entry and notes.get("kind") == "decision":
            row = decision(notes)
            made[row["call"]] = row
            rows.append(row)
        elif entry.get("role") == "tool" and (row := made.get(plain(entry.get("tool_call_id", "")))):
            rows.append(result(row, entry))
    return lengthen(connection, [{**row, "session": session_id, "at": at} for row in rows]) if rows else None


def decided(connection: Connection, session_id: str, calls: Sequence[str]) -> dict[str, Row]:
    """The decisions on these calls of a session that are in the table."""
    found = connection.execute(DECIDED, {"of": session_id, "calls": calls}).mappings()
    return {row["call"]: dict(row) for row in found}


def decision(notes: Mapping[str, Any]) -> Row:
    """What a marker of kind `decision` says, as a row."""
    named = {name: plain(notes.get(name, "")) for name in ("call", "tool", "by", "scope", "arguments")}
    return {**named, "kind": "decision", "verdict": plain(notes.get("is", "")), "result": "", "files": "[]"}


def result(made: Row, answer: Message) -> Row:
    """What came of a decision, as a row."""
    notes = answer.get("crow", {})
    files = [{name: change.get(name) for name in ("path", "before", "after")} for change in notes.get("changes", [])]
    verdict = "failed" if notes.get("failed") else "completed"
    outcome = {"kind": "result", "verdict": verdict, "result": digest(answer.get("content")), "files": canonical(files)}
    return {**made, **outcome}


def lengthen(connection: Connection, rows: Sequence[Row]) -> "Noted":
    """Put rows at the end of the chain; gives where it ended before, and how it ends then."""
    if connection.dialect.name == "postgresql":  # SQLite lets one transaction write at a time anyway
        connection.execute(select(func.pg_advisory_xact_lock(LOCK)))
    end = last(connection)
    previous = end.hash
    for number, row in enumerate(rows, end.count + 1):
        row.update(number=number, previous=previous)
        previous = row["hash"] = hash_of(row)
    connection.execute(ADD, rows)
    return Noted(end.count, end.hash, Head(end.count + len(rows), previous))


def hash_of(row: Mapping[str, Any]) -> str:
    return digest({name: row[name] for name in HASHED})


def digest(value: Any) -> str:
    """SHA-256 of a value as JSON."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def canonical(value: Any) -> str:
    """JSON in one spelling: keys sorted, no white space, ASCII alone; a damaged row's bytes are spelled, too."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=repr)


def plain(value: Any) -> str:
    """Text that every database takes; what a model wrote may hold half a character, or a NUL."""
    return str(value).encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


class Head(msgspec.Struct, frozen=True):
    """The end of a chain."""

    count: int = 0
    hash: str = ""


class Noted(Head, frozen=True, omit_defaults=True):
    """What the file says of a chain."""

    next: Head | None = None
    """Its end once a transaction is committed that may still be under way, or may never have come to its end."""


def last(connection: Connection) -> Head:
    """The end of the chain in the database."""
    row = connection.execute(LAST).first()
    return Head(row.number, row.hash) if row else Head()


def announce(connection: Connection, database: Database, coming: Noted) -> None:
    """Note in the file how the chain will end, beside how it ended before this transaction; to be called last in it.
    Raises StoreError."""

    def say(noted: Noted) -> Noted | None:
        before = (noted.count, noted.hash) == (coming.count, coming.hash)
        return coming if before or fits(connection, noted) else None

    note(database, say)


def anchor(database: Database, announced: Noted | None = None) -> None:
    """Note the end of the chain in the file, to be called after the commit; nobody is asked for it where the file still
    says what was `announced`. Raises StoreError."""
    if announced and (end := announced.next):
        ended = Noted(end.count, end.hash)
        if note(database, lambda noted: ended if noted == announced else None):
            return

    def say(noted: Noted) -> Noted | None:
        if not fits(connection, noted):
            return None
        end = last(connection)
        others = noted.next if noted.next and noted.next.count > end.count else None
        return Noted(end.count, end.hash, others)

    with database.reading() as connection:
        note(database, say)


def note(database: Database, say: Callable[[Noted], Noted | None]) -> bool:
    """Change what the file says of a chain; gives whether there was something to say. A file that cannot be read is
    left as it is, for `verify` to tell. Raises StoreError."""
    file = database.folder / HEAD
    try:
        with locked(file):
            heads, name = heads_in(file), name_of(database)
            if said := say(heads.get(name, Noted())):
                write(file, {**heads, name: said})
            return said is not None
    except msgspec.DecodeError:
        return False
    except OSError as error:
        raise StoreError(f"{file} cannot be written ({error.strerror}). Make it writable, or make room.") from error


def fits(connection: Connection, noted: Noted) -> bool:
    """Whether what the file says is so in the chain; if not, it is left as it is, for `verify` to tell."""
    return (connection.scalar(HASH, {"count": noted.count}) or "") == noted.hash


def name_of(database: Database) -> str:
    """What a database is called in the file: one folder may serve several."""
    return database.url.render_as_string(hide_password=True)


def heads_in(file: Path) -> dict[str, Noted]:
    """The noted heads, by database. Raises OSError, msgspec.DecodeError."""
    return msgspec.json.decode(file.read_bytes(), type=dict[str, Noted]) if file.exists() else {}


def write(file: Path, heads: Mapping[str, Noted]) -> None:
    """Write over what the file says, all at once: who is killed leaves the old or the new. Raises OSError."""
    begun = file if file.exists() else file.with_suffix(".new")
    with open(os.open(begun, os.O_WRONLY | os.O_CREAT, 0o600), "wb", buffering=0) as opened:
        opened.write(msgspec.json.encode(heads).ljust(os.fstat(opened.fileno()).st_size))
    if begun != file:
        begun.replace(file)


@contextmanager
def locked(file: Path) -> Generator[None]:
    """Keep other processes from writing the file meanwhile. Raises OSError."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(os.open(file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600), "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def verify(database: Database) -> list[str]:
    """What is wrong with the chain, a sentence each. Raises StoreError when the database cannot be read."""
    file = database.folder / HEAD
    wrong: list[str] = []
    end, noted, hashes = Head(), None, {0: ""}
    every = select(decisions).order_by(decisions.c.number).execution_options(yield_per=1000)
    with database.reading() as connection:
        try:
            with locked(file):  # so that what is committed is announced, and nothing is noted that is not committed
                noted = heads_in(file).get(name_of(database))
                last(connection)
        except (OSError, msgspec.DecodeError) as error:
            return [f"{file} cannot be read ({error}). Put it right, or remove it; the next decision begins it anew."]
        marks = {head.count for head in (noted, noted and noted.next) if head}
        for row in map(dict, connection.execute(every).mappings()):
            if row["number"] < 1:
                wrong.append(f"Decision {row['number']} was put in by hand: they count from 1.")
                continue
            if row["number"] > end.count + 1:
                wrong.append(f"{named(end.count + 1, row['number'] - 1)} removed.")
            elif row["previous"] != end.hash:
                wrong.append(f"Decision {row['number']} does not follow the one before: one of the two was replaced.")
            if hash_of(row) != row["hash"]:
                wrong.append(f"Decision {row['number']} was changed or moved after it was written.")
            end = Head(row["number"], row["hash"])
            if end.count in marks:
                hashes[end.count] = end.hash
    if noted is None:
        removed = (
            f"{file} does not know {name_of(database)}: whether decisions after {end.count} were removed is unknown."
        )
        return [*wrong, *([removed] if end.count else [])]
    if end.count < noted.count:
        why = "a power cut or an older copy of the database does that, too"
        wrong.append(f"{named(end.count + 1, noted.count)} removed from the end, as {file} tells ({why}).")
    elif hashes.get(noted.count) != noted.hash:
        wrong.append(f"Decision {noted.count} is not the one that {file} tells of: the chain was written anew.")
    known = noted.next if noted.next and hashes.get(noted.next.count) == noted.next.hash else noted
    if end.count > known.count:
        why = "a crow that keeps another such file wrote them, or somebody put them in"
        wrong.append(f"{named(known.count + 1, end.count)} not in {file}: {why}.")
    return wrong


def named(first: int, last: int) -> str:
    """The subject and verb of a sentence about these decisions."""
    return f"Decision {first} was" if first == last else f"Decisions {first} to {last} were"


def listing(connection: Connection, session: str = "", limit: int = 50) -> list[Row]:
    """The latest rows, newest first: of the sessions whose id begins so, or of all."""
    wanted = select(decisions).where(decisions.c.session.startswith(session, autoescape=True))
    found = connection.execute(wanted.order_by(decisions.c.number.desc()).limit(limit)).mappings()
    return [dict(row) for row in found]
