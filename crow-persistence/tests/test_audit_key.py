"""The audit chain is signed with a key outside the database: who has the database alone cannot rewrite it."""

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from crow_core.errors import StoreError
from crow_core.messages.message import Message
from crow_persistence import audit, audit_key
from crow_persistence.audit import Examination, examine, verify
from crow_persistence.database import Database
from crow_persistence.heads import AnchoredHead
from crow_persistence.tables import decisions
from sqlalchemy import Connection, delete, insert, select, update


def decision(call: str) -> Message:
    notes = {"kind": "decision", "call": call, "tool": "terminal", "is": "allow", "by": "the user", "scope": "once"}
    return {"crow": {**notes, "arguments": "0" * 64}}


def answer(call: str, content: str = "done") -> Message:
    return {"role": "tool", "tool_call_id": call, "content": content, "crow": {}}


def begin(database: Database, entries: list[Message]) -> AnchoredHead:
    """Store decisions and results as a process that is killed right after the commit."""
    with database.begin_write() as connection:
        head = audit.append_rows(connection, database, audit.make_rows(connection, "s" * 32, entries, 1000))
        audit.announce(connection, database, head)
    return head


def write(database: Database, entries: list[Message]) -> None:
    """Store decisions and results as the store does."""
    audit.anchor(database, begin(database, entries))


def rows(database: Database) -> list[dict[str, Any]]:
    with database.begin_read() as connection:
        return audit.list_decisions(connection)[::-1]


@pytest.fixture
def chain(database: Database) -> Database:
    """Return a database with four rows of this machine: two tool calls, each allowed and answered."""
    for n in range(2):
        write(database, [decision(f"call_{n}")])
        write(database, [answer(f"call_{n}", f"output {n}")])
    assert verify(database) == []
    return database


@pytest.fixture
def other(chain: Database, tmp_path: Path) -> Iterator[Database]:
    """Yield the same database, as another machine opens it that has stored two rows after the four."""
    other = Database(chain.url.render_as_string(hide_password=False), tmp_path / "other")
    write(other, [decision("there"), answer("there")])
    yield other
    other.close()


def get_key(database: Database) -> audit_key.AuditKey:
    key = audit_key.load(database.folder)
    assert key is not None
    return key


def rewrite(database: Database, start: int, **values: Any) -> None:
    """Change the rows from a number on, with hashes that fit, as somebody does who can write the database alone."""
    with database.begin_write() as connection:
        chain_up(connection, start, **values)


def chain_up(connection: Connection, start: int, **values: Any) -> None:
    previous = connection.scalar(select(decisions.c.hash).where(decisions.c.number == start - 1)) or ""
    for found in connection.execute(select(decisions).where(decisions.c.number >= start).order_by("number")).all():
        row = {**found._mapping, "previous": previous, **values}
        row["hash"] = previous = audit.hash_row(row)
        connection.execute(update(decisions).where(decisions.c.number == row["number"]).values(row))


def rewrite_head(database: Database, **values: Any) -> None:
    """Record the end of the chain as it is now in the file, as somebody does who can write the file, too."""
    file = database.folder / "audit.head"
    end = rows(database)[-1]
    (name,) = (heads := json.loads(file.read_text()))
    file.write_text(json.dumps({name: {**heads[name], "count": end["number"], "hash": end["hash"], **values}}))


def test_each_row_and_the_head_are_signed(chain: Database):
    key = get_key(chain)
    assert all(row["key_id"] == key.id and row["mac"] == key.sign("row", row["hash"]) for row in rows(chain))
    assert examine(chain) == Examination(signed=4, key=key.id)
    assert key.key not in str(rows(chain))
    assert key.key not in (chain.folder / "audit.head").read_text()


def test_key_is_made_with_the_first_decision_for_its_owner_alone(database: Database, tmp_path: Path):
    file = tmp_path / "audit.key"
    before = os.umask(0)
    try:
        assert examine(database) == Examination()
        assert not file.exists()
        write(database, [decision("call_1")])
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert sorted(found.name for found in tmp_path.glob("audit.*")) == ["audit.head", "audit.key", "audit.lock"]
    content = file.read_bytes()
    write(database, [answer("call_1")])
    assert file.read_bytes() == content


def test_processes_that_begin_together_have_one_key(tmp_path: Path):
    code = "import sys; from crow_persistence.heads import get_key; from crow_persistence.database import Database; "
    code += "print(get_key(Database(sys.argv[1])).id)"
    command = [sys.executable, "-c", code, f"sqlite:///{tmp_path / 'crow.db'}"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(4)]
    assert len({process.communicate()[0] for process in processes}) == 1


@pytest.mark.parametrize("start", [1, 3, 4])
@pytest.mark.parametrize("signature", ["kept", "removed", "made up", "of another key"])
def test_rewritten_chain_is_found(chain: Database, start: int, signature: str):
    changes: dict[str, Any] = {"by": "nobody"}
    changes |= {"removed": {"key_id": None, "mac": None}, "made up": {"mac": "0" * 64}}.get(signature, {})
    changes |= {"key_id": "f" * 16, "mac": "0" * 64} if signature == "of another key" else {}
    rewrite(chain, start, **changes)
    assert verify(chain)
    rewrite_head(chain)
    assert verify(chain)
    rewrite_head(chain, key="", mac="")
    assert verify(chain)
    write(chain, [decision("more")])  # does not hide it
    assert verify(chain)


def test_rewritten_rows_are_named(chain: Database):
    rewrite(chain, 2, by="nobody")
    why = "somebody without this machine's key wrote it"
    said, rewritten = verify(chain)
    assert said == f"Decisions 2 to 4 were not signed by this machine, as it says: {why}."
    assert rewritten.startswith("Decision 4 is not the one recorded in")


@pytest.mark.parametrize("left", [3, 1, 0])
def test_rows_removed_from_the_end_are_found_although_the_file_was_changed(chain: Database, left: int):
    with chain.begin_write() as connection:
        connection.execute(delete(decisions).where(decisions.c.number > left))
    (complaint,) = verify(chain)
    assert "removed from the end" in complaint
    if left:
        rewrite_head(chain)
        file = chain.folder / "audit.head"
        assert [fault for fault in verify(chain) if fault.endswith(f"in {file} was changed by hand.")]


def test_repair_that_somebody_without_the_key_wrote_is_not_believed(chain: Database):
    rewrite(chain, 2, by="nobody")
    complaints = verify(chain)
    for signature in ({}, {"key_id": None, "mac": None}, {"key_id": "f" * 16, "mac": "0" * 64}):
        with chain.begin_write() as connection:
            seal = ""
            for row in connection.execute(select(decisions).order_by("number")).mappings():
                seal = audit.extend_seal(seal, dict(row))
            repair = {**rows(chain)[-1], "number": 5, "kind": "repair", "arguments": seal, **signature}
            connection.execute(insert(decisions), repair)
            chain_up(connection, 5)
        assert any(fault.startswith("Decisions 2 to ") for fault in verify(chain))
        with chain.begin_write() as connection:
            connection.execute(delete(decisions).where(decisions.c.number == 5))
    assert audit.repair(chain) == complaints
    assert verify(chain) == []


def test_rows_of_another_machine_are_counted_and_chained(chain: Database, other: Database):
    write(chain, [decision("call_8")])
    ours, theirs = get_key(chain), get_key(other)
    assert ours.id != theirs.id
    assert examine(chain) == Examination(signed=5, elsewhere={theirs.id: 2}, key=ours.id)
    assert examine(other) == Examination(signed=2, elsewhere={ours.id: 5}, key=theirs.id)


@pytest.mark.parametrize("number", [1, 4, 5, 6])
def test_each_machine_finds_changes_of_any_row_before_one_of_its_own(chain: Database, other: Database, number: int):
    write(chain, [decision("call_8")])
    with chain.begin_write() as connection:
        connection.execute(update(decisions).where(decisions.c.number == number).values(by="nobody"))
        chain_up(connection, number)
    assert verify(chain)
    assert bool(verify(other)) is (number <= 6)


@pytest.mark.parametrize("number", [2, 5, 7])
def test_row_inserted_between_those_of_two_machines_is_found(chain: Database, other: Database, number: int):
    write(chain, [decision("call_8")])
    with chain.begin_write() as connection:
        for row in connection.execute(select(decisions).order_by(decisions.c.number.desc())).all():
            if row.number >= number:
                here = decisions.c.number == row.number
                connection.execute(update(decisions).where(here).values(number=row.number + 1))
        row = connection.execute(select(decisions).where(decisions.c.number == number - 1)).mappings().one()
        made_up = {**row, "number": number, "call": "forged", "key_id": "f" * 16}
        connection.execute(insert(decisions), made_up)
        chain_up(connection, number)
    assert verify(chain)


def test_two_machines_with_rows_removed_from_the_end(chain: Database, other: Database):
    with chain.begin_write() as connection:
        connection.execute(delete(decisions).where(decisions.c.number > 4))
    assert verify(chain) == []  # it has not seen the rows of the other
    assert "removed from the end" in verify(other)[0]


def test_rows_from_before_the_key_stay_valid(database: Database, earlier: Callable[[str], None], tmp_path: Path):
    earlier("0003")
    with database.begin_read() as connection:
        end = audit.read_head(connection)
    name = database.url.render_as_string(hide_password=True)
    (tmp_path / "audit.head").write_text(json.dumps({name: {"count": end.count, "hash": end.hash}}))
    assert examine(database) == Examination(unsigned=end.count)
    assert not (tmp_path / "audit.key").exists()
    write(database, [decision("call_1")])
    key = get_key(database)
    assert examine(database) == Examination(signed=1, unsigned=end.count, key=key.id)
    rewrite(database, 1, by="nobody")
    assert verify(database)


def test_process_killed_after_it_made_the_key_leaves_a_valid_chain(
    database: Database, earlier: Callable[[str], None], tmp_path: Path
):
    earlier("0003")
    audit.anchor(database)
    begin_and_die = "import os; from crow_persistence import audit_key, heads; from crow_persistence.database import "
    begin_and_die += "Database; import sys; heads.get_key(Database(sys.argv[1], audit_key.Path(sys.argv[2]))); "
    begin_and_die += "os.kill(os.getpid(), 9)"
    url = database.url.render_as_string(hide_password=False)
    ended = subprocess.run([sys.executable, "-c", begin_and_die, url, str(tmp_path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert (tmp_path / "audit.key").exists()
    assert verify(database) == []
    begin(database, [decision("call_1")])  # killed after the commit
    assert verify(database) == []
    write(database, [answer("call_1")])
    assert verify(database) == []


def test_missing_key_is_one_sentence_and_a_new_one_another(chain: Database, tmp_path: Path):
    file, old = tmp_path / "audit.key", get_key(chain).id
    file.rename(tmp_path / "kept")
    go_on = "put that back, or go on with a new one by `crow audit repair`"
    found = examine(chain)
    assert found.faults == [f"{file} is missing, and what its key {old} signed cannot be checked: {go_on}."]
    assert found.elsewhere == {old: 4}
    assert not file.exists()
    write(chain, [decision("call_8")])
    new = get_key(chain).id
    said = f"{file} was replaced: it holds the key {new}, and the key was {old} before; {go_on}."
    assert verify(chain) == [said]
    (tmp_path / "kept").replace(file)
    assert examine(chain) == Examination(signed=4, elsewhere={new: 1}, key=old)


def test_chain_goes_on_with_a_new_key_after_a_repair(chain: Database, tmp_path: Path):
    old = get_key(chain).id
    (tmp_path / "audit.key").unlink()
    (said,) = audit.repair(chain)
    assert said.startswith(f"{tmp_path / 'audit.key'} is missing")
    assert examine(chain) == Examination(signed=1, elsewhere={old: 4}, key=get_key(chain).id)
    write(chain, [decision("call_8")])
    assert verify(chain) == []
    rewrite(chain, 2, by="nobody")
    assert verify(chain)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o666, 0o604])
def test_key_that_others_may_read_is_one_sentence(chain: Database, tmp_path: Path, mode: int):
    file = tmp_path / "audit.key"
    file.chmod(mode)
    why = f"as its mode is {mode:o}: who copied it can forge records"
    said = f"{file} is open to other users, {why}. Close it with `chmod 600 {file}`."
    assert verify(chain) == [said]
    write(chain, [decision("call_8")])  # is signed
    assert verify(chain) == [said]
    assert audit.repair(chain) == [said]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert verify(chain) == []


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"\xff" * 100,
        b"[1]",
        b'{"key": ""}',
        b'{"key": "zz"}',
        b'{"key": "' + b"00" * 31 + b'"}',
        b"x" * 2**21,
    ],
)
def test_damaged_key_is_one_sentence_and_does_not_block_decisions(chain: Database, tmp_path: Path, damage: bytes):
    file = tmp_path / "audit.key"
    file.write_bytes(damage)
    (said,) = verify(chain)
    assert said.startswith(f"{file} does not hold a key")
    write(chain, [decision("call_8")])
    assert file.read_bytes() == damage
    assert verify(chain)[0] == said
    assert audit.repair(chain)[0] == said
    assert (tmp_path / "audit.key.damaged").read_bytes() == damage
    assert verify(chain) == []


def test_key_that_is_a_folder_or_a_pipe_is_one_sentence(chain: Database, tmp_path: Path):
    file = tmp_path / "audit.key"
    file.unlink()
    os.mkfifo(file, 0o600)
    assert len(verify(chain)) == 1
    file.unlink()
    file.mkdir(0o700)
    (said,) = verify(chain)
    assert said.startswith(f"{file} cannot be read (Is a directory)")
    with pytest.raises(StoreError, match=r"audit\.key cannot be read"):
        audit.repair(chain)


def test_signing_takes_no_further_statement(database: Database, monkeypatch: pytest.MonkeyPatch):
    from sqlalchemy import event

    write(database, [decision("first")])
    statements: list[str] = []
    with database.begin_read() as connection:
        engine = connection.engine

    def note(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    with database.begin_write() as connection:
        made = audit.make_rows(connection, "s" * 32, [decision("call_1")], 1000)
        head = audit.append_rows(connection, database, made)
        audit.announce(connection, database, head)
    audit.anchor(database, head)
    changes = [statement for statement in statements if not statement.startswith(("PRAGMA", "BEGIN"))]
    assert len(changes) == (2 if database.file else 3)  # the head, the row; PostgreSQL's lock
