"""The audit log: permission decisions and tool results, as a chain of rows that each hold the hash of the row before.

Rows are only added. Anyone who can write the database can also write a new chain. So each row is signed with a key
outside the database. The head of the chain is also stored in a separate file, `audit.head`, which only moves forward
along the chain. A row that was changed, moved or removed no longer fits its signature, the rows after it or the file.
The next head is announced in the file before the commit, so that a process killed at any moment leaves nothing that
looks like tampering.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from crow_core.errors import StoreError
from crow_core.messages.message import Message, list_edits
from sqlalchemy import Connection, bindparam, func, insert, select

from crow_persistence import audit_key, leases
from crow_persistence.audit_key import AuditKey
from crow_persistence.database import Database
from crow_persistence.heads import (
    HEAD_FILE,
    AnchoredHead,
    ChainHead,
    SignedHead,
    digest,
    get_key,
    lock_file,
    read_file,
    replace_head,
    to_canonical_json,
    update_file,
)
from crow_persistence.tables import decisions

AuditRow = dict[str, Any]
"""A row of the table `decisions`, by column."""

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
    files = [{name: change.get(name) for name in ("path", "before", "after")} for change in list_edits(answer)]
    verdict = "failed" if notes.get("failed") else "completed"
    outcome = {
        "kind": "result",
        "verdict": verdict,
        "result": digest(answer.get("content")),
        "files": to_canonical_json(files),
    }
    return {**decision, **outcome}


def append_rows(connection: Connection, database: Database, rows: Sequence[AuditRow]) -> AnchoredHead:
    """Append rows to the chain, signed. Return the head before, with the new head as `next`, to `announce`.

    Call it last in a transaction: on PostgreSQL it holds a lock that other writers of decisions wait for.
    """
    key = get_key(database)
    lock_chain(connection)
    end = read_head(connection)
    previous = end.hash
    for number, row in enumerate(rows, end.count + 1):
        row.update(number=number, previous=previous)
        previous = row["hash"] = hash_row(row)
        row.update(key_id=key.id if key else None, mac=key.sign("row", previous) if key else None)
    connection.execute(INSERT_DECISIONS, rows)
    return AnchoredHead(end.count, end.hash, ChainHead(end.count + len(rows), previous))


def record_decision(
    database: Database, *, session: str, call: str, tool: str, allowed: bool, by: str, arguments: Any
) -> None:
    """Append a decision that is about no tool call of a session, in a transaction of its own. Raises StoreError."""
    notes = {"call": call, "tool": tool, "is": "allow" if allowed else "deny", "by": by, "scope": "once"}
    row = to_decision_row({**notes, "arguments": digest(arguments)})
    row |= {"session": escape_text(session)[:64], "at": leases.now()}
    with database.begin_write() as connection:
        announce(connection, database, head := append_rows(connection, database, [row]))
    anchor(database, head)


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


def escape_text(value: Any) -> str:
    """Return text that every database accepts: unpaired surrogates and NUL characters become backslash escapes."""
    return str(value).encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def read_head(connection: Connection) -> ChainHead:
    """Return the head of the chain in the database."""
    row = connection.execute(SELECT_HEAD).first()
    return ChainHead(row.number, row.hash) if row else ChainHead()


def announce(connection: Connection, database: Database, coming: AnchoredHead) -> None:
    """Write the coming head to the file, next to the current one. Call it last in the transaction. Raises
    StoreError."""

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


def is_in_chain(connection: Connection, anchored: AnchoredHead) -> bool:
    """Test whether the chain in the database has the head that the file records. If not, the file is left for `verify`
    to report."""
    return (connection.scalar(SELECT_HASH, {"count": anchored.count}) or "") == anchored.hash


class Examination(msgspec.Struct):
    """Findings about a chain."""

    faults: list[str] = []
    """A sentence for each fault since the last repair."""
    signed: int = 0
    """Number of rows whose signature with this machine's key fits."""
    unsigned: int = 0
    """Number of rows from before the first signed one."""
    elsewhere: dict[str, int] = {}
    """Number of rows by the id of a key that this machine does not have: their signatures cannot be checked here."""
    key: str = ""
    """Id of this machine's key; "" if there is none."""


def verify(database: Database) -> list[str]:
    """Return one sentence for each fault of the chain since its last repair; see `examine`."""
    return examine(database).faults


def examine(database: Database) -> Examination:
    """Check the chain against its hashes, its signatures and the file. Raises StoreError when the database cannot be
    read. No key is made.

    The signature of a row vouches for all rows before it, whoever wrote them. Rows at the end that another machine
    signed are believed; it can check them.
    """
    file, name = database.folder / HEAD_FILE, database.address
    key, faults = None, audit_key.find_faults_of_mode(database.folder)
    every = select(decisions).order_by(decisions.c.number).execution_options(yield_per=1000)
    with database.begin_read() as connection:
        try:
            with lock_file(file, needed=False):  # so that the snapshot and the file belong together
                heads = read_file(file)
                head = heads.get(name)
                try:
                    key = audit_key.load(database.folder)
                except StoreError as error:
                    faults.append(str(error))
                else:
                    faults += find_faults_of_key(database, head, key)
                read_head(connection)
        except (OSError, msgspec.DecodeError) as error:
            return Examination([f"{file} cannot be read ({error}). `crow audit repair` makes a new one."])
        check = ChainCheck(key, head)
        has_rows = False
        for row in map(dict, connection.execute(every).mappings()):
            check.add(row)
            has_rows = True
        if key is not None and not heads and not has_rows:
            faults.append(
                f"{database.folder / audit_key.KEY_FILE} was made with the first record, but there is no record in "
                f"{name}, and no head in {file}: they were removed, or they are in another database."
            )
    check.found.faults = [*faults, *check.list_faults(file, name)]
    return check.found


def find_faults_of_key(database: Database, head: SignedHead | None, key: AuditKey | None) -> list[str]:
    """Return a sentence if a head was not signed with this key."""
    if head is None or head.is_trusted(database, key):
        return []
    file, go_on = database.folder / audit_key.KEY_FILE, "put that back, or go on with a new one by `crow audit repair`"
    if key is None:
        return [f"{file} is missing, and what its key {head.key} signed cannot be checked: {go_on}."]
    if head.key not in ("", key.id):
        return [f"{file} was replaced: it holds the key {key.id}, and the key was {head.key} before; {go_on}."]
    return [f"The record of {database.address} in {database.folder / HEAD_FILE} was changed by hand."]


class ChainCheck:
    """The rows of a chain, checked one after the other."""

    def __init__(self, key: AuditKey | None, head: SignedHead | None) -> None:
        self.found = Examination(key=key.id if key else "")
        self._key, self._head = key, head
        self._end, self._seal = ChainHead(), ""
        self._hashes = {0: ""}
        """Hashes of the rows that the file names."""
        self._marks = {mark.count for mark in (head, head and head.next) if mark}
        self._wrong: list[str] = []
        self._forged: list[int] = []
        self._unsigned: list[int] = []
        """Rows without a signature that follow a signed one."""
        self._recent: list[int] = []
        """Other rows without a signature that follow the one in the file."""

    def add(self, row: Mapping[str, Any]) -> None:
        """Check the next row."""
        number, hash, id = row["number"], hash_row(row), row["key_id"]
        is_old = not id and not (self.found.signed or self.found.elsewhere or self._forged)
        is_ours = self._key is not None and id == self._key.id
        is_signed = self._key is not None and is_ours and row["mac"] == self._key.sign("row", row["hash"])
        if row["kind"] == REPAIR and hash == row["hash"] and row["arguments"] == self._seal and (is_old or is_signed):
            for faults in (self._wrong, self._forged, self._unsigned, self._recent):
                faults.clear()
        self._seal = extend_seal(self._seal, row)
        if number < 1:
            self._wrong.append(f"Decision {number} was inserted by hand: decisions are numbered from 1.")
            return
        if number > self._end.count + 1:
            self._wrong.append(f"{describe_range(self._end.count + 1, number - 1)} removed.")
        elif row["previous"] != self._end.hash:
            self._wrong.append(f"Decision {number} does not follow the one before: one of the two was replaced.")
        if hash != row["hash"]:
            self._wrong.append(f"Decision {number} was changed or moved after it was written.")
        self._end = ChainHead(number, row["hash"])
        if number in self._marks:
            self._hashes[number] = row["hash"]
        if is_signed:
            self.found.signed += 1
        elif is_ours:
            self._forged.append(number)
        elif id:
            self.found.elsewhere[str(id)] = self.found.elsewhere.get(str(id), 0) + 1
        elif is_old:
            self.found.unsigned += 1
            if self._head is not None and number > self._head.count:
                self._recent.append(number)
        else:
            self._unsigned.append(number)

    def list_faults(self, file: Path, name: str) -> list[str]:
        """Return a sentence for each fault of the rows, and of the head that the file records for them."""
        end, head, wrong = self._end, self._head, list(self._wrong)
        for first, last in to_ranges(self._forged):
            why = "somebody without this machine's key wrote it"
            wrong.append(f"{describe_range(first, last)} not signed by this machine, as it says: {why}.")
        for first, last in to_ranges(self._unsigned):
            why = "inserted by hand, or written while the key could not be read, or by an earlier crow"
            wrong.append(f"{describe_range(first, last)} not signed, although one before is: {why}.")
        if head is None:
            unknown = f"whether decisions after {end.count} were removed is unknown"
            return [*wrong, f"{file} has no record of {name}: {unknown}."] if end.count else wrong
        if end.count < head.count:
            why = "a power failure or an older copy of the database has the same effect"
            wrong.append(f"{describe_range(end.count + 1, head.count)} removed from the end, as {file} shows ({why}).")
        elif self._hashes.get(head.count) != head.hash:
            wrong.append(f"Decision {head.count} is not the one recorded in {file}: the chain was rewritten.")
        known = head.next if head.next and self._hashes.get(head.next.count) == head.next.hash else head
        for first, last in to_ranges([number for number in self._recent if number > known.count]):
            why = "a process with another such file wrote them, or they were inserted by hand"
            wrong.append(f"{describe_range(first, last)} not in {file}: {why}.")
        return wrong


def to_ranges(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Convert ascending numbers to ranges, each by its first and its last number."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = ranges[-1][0], number
        else:
            ranges.append((number, number))
    return ranges


def extend_seal(seal: str, row: Mapping[str, Any]) -> str:
    """Return the digest of the rows before, which is `seal`, and of a row as it is now, whatever its hash says."""
    return digest([seal, hash_row(row), row["hash"]])


def repair(database: Database) -> list[str]:
    """Go on after a break of the chain: add a record that says where and why it was broken, and record the new head in
    the file. Return the faults that were found, none if the chain is unbroken. Raises StoreError.

    The record seals the rows before it as they are now: an edit to one of them later is found.
    """
    faults = verify(database)
    if not faults:
        return []
    audit_key.mend(database.folder)
    with database.begin_write() as connection:
        lock_chain(connection)
        seal = ""
        for row in map(dict, connection.execute(select(decisions).order_by(decisions.c.number)).mappings()):
            seal = extend_seal(seal, row)
        row = dict.fromkeys(("session", "call", "scope", "result"), "")
        row |= {"tool": "crow audit repair", "kind": REPAIR, "verdict": "repaired", "files": "[]"}
        row |= {"at": leases.now(), "by": escape_text(" ".join(faults)), "arguments": seal}
        head = append_rows(connection, database, [row]).next
    assert head is not None
    replace_head(database, AnchoredHead(head.count, head.hash))
    return faults


def describe_range(first: int, last: int) -> str:
    """Return the beginning of a sentence about these decisions: "Decision 3 was" or "Decisions 3 to 5 were"."""
    return f"Decision {first} was" if first == last else f"Decisions {first} to {last} were"


def list_decisions(connection: Connection, session: str = "", limit: int = 50) -> list[AuditRow]:
    """Return the latest rows, newest first; `session` is the beginning of a session id, "" for all."""
    wanted = select(decisions).where(decisions.c.session.startswith(session, autoescape=True))
    found = connection.execute(wanted.order_by(decisions.c.number.desc()).limit(limit)).mappings()
    return [dict(row) for row in found]
