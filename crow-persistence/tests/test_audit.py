"""Every decision is recorded, and `verify` reports every change of the records."""

import asyncio
import codecs
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import crow_mcp_server
import pytest
from crow_core.app import Crow
from crow_core.errors import StoreError
from crow_core.mcp.server import Server
from crow_core.messages.message import Message
from crow_core.testing import Reply, ScriptedCall, ScriptedModel, connect
from crow_permissions.extension import permissions
from crow_persistence import audit
from crow_persistence.audit import anchor, announce, append_rows, list_decisions, make_rows, record_decision, verify
from crow_persistence.audited_calls import describe_arguments, describe_calls
from crow_persistence.database import Database
from crow_persistence.extension import persistence
from crow_persistence.heads import AnchoredHead
from crow_persistence.tables import decisions
from sqlalchemy import Connection, delete, insert, select, text, update

FORGED = "not signed by this machine, as it says: somebody without this machine's key wrote it."
UNSIGNED = (
    "not signed, although one before is: inserted by hand, or written while the key could not be read, "
    "or by an earlier crow."
)


def decision(call: str, tool: str = "terminal", verdict: str = "allow") -> Message:
    notes = {"kind": "decision", "call": call, "tool": tool, "is": verdict, "by": "the user", "scope": "once"}
    return {"crow": {**notes, "arguments": hashlib.sha256(b"{}").hexdigest()}}


def answer(call: str, content: Any = "done", **notes: Any) -> Message:
    return {"role": "tool", "tool_call_id": call, "content": content, "crow": notes}


def record(
    connection: Connection, database: Database, session: str, entries: list[Message], at: int
) -> AnchoredHead | None:
    """Append the decisions and results among a session's entries to the chain."""
    rows = make_rows(connection, session, entries, at)
    return append_rows(connection, database, rows) if rows else None


def write(database: Database, entries: list[Message], session: str = "s" * 32, at: int = 1000) -> bool:
    """Store a session's entries as the store does."""
    wrote = begin(database, entries, session, at)
    anchor(database)
    return wrote


def begin(database: Database, entries: list[Message], session: str = "s" * 32, at: int = 1000) -> bool:
    """Store a session's entries as a process that is killed right after the commit."""
    with database.begin_write() as connection:
        before = record(connection, database, session, entries, at)
        if before:
            announce(connection, database, before)
    return before is not None


def rows(database: Database) -> list[dict[str, Any]]:
    with database.begin_read() as connection:
        return list_decisions(connection)[::-1]


def change_row(database: Database, number: int, **values: Any) -> None:
    """Change a row, and its hash to match."""
    here = decisions.c.number == number
    with database.begin_write() as connection:
        row = {**connection.execute(select(decisions).where(here)).mappings().one(), **values}
        connection.execute(update(decisions).where(here).values({**row, "hash": audit.hash_row(row)}))


def append_by_hand(database: Database, **values: Any) -> None:
    """Append a row whose hash fits, as somebody does who can write the database alone."""
    with database.begin_write() as connection:
        last = connection.execute(select(decisions).order_by(decisions.c.number.desc()).limit(1)).mappings().one()
        row = {**last, "number": last["number"] + 1, "call": "forged", "previous": last["hash"], **values}
        connection.execute(insert(decisions), {**row, "hash": audit.hash_row(row)})


@pytest.fixture
def chain(database: Database) -> Database:
    """Return a database with six rows: three tool calls, each allowed and answered."""
    for n in range(3):
        write(database, [decision(f"call_{n}")])
        write(database, [answer(f"call_{n}", f"output {n}")])
    assert verify(database) == []
    return database


def test_decision_and_result_record_who_allowed_what_and_the_outcome(database: Database):
    change = {"path": "/p/a.py", "old": "1\n", "new": "2\n", "before": "b" * 64, "after": "a" * 64}
    write(database, [decision("call_1", "file_editor")], at=1000)
    write(database, [answer("call_1", "Edited.", changes=[change])], at=2000)
    made, came = rows(database)
    assert (made["number"], made["at"], made["kind"], made["verdict"]) == (1, 1000, "decision", "allow")
    assert (made["tool"], made["by"], made["scope"], made["result"]) == ("file_editor", "the user", "once", "")
    assert made["arguments"] == hashlib.sha256(b"{}").hexdigest()
    assert (came["number"], came["at"], came["kind"], came["verdict"]) == (2, 2000, "result", "completed")
    assert {name: came[name] for name in ("call", "tool", "by", "scope", "arguments")} == {
        name: made[name] for name in ("call", "tool", "by", "scope", "arguments")
    }
    assert came["result"] == hashlib.sha256(b'"Edited."').hexdigest()
    assert json.loads(came["files"]) == [{"path": "/p/a.py", "before": "b" * 64, "after": "a" * 64}]
    assert came["previous"] == made["hash"]
    assert verify(database) == []


def test_decision_about_no_tool_call_is_in_the_chain(chain: Database):
    before = len(rows(chain))
    record_decision(
        chain, session="r" * 80, call="r/1", tool="approve", allowed=False, by="the user: no", arguments=[1]
    )
    assert [(row["session"], row["verdict"], row["by"], row["scope"]) for row in rows(chain)[before:]] == [
        ("r" * 64, "deny", "the user: no", "once")
    ]
    assert verify(chain) == []


def test_failed_and_denied_tool_calls_have_results(database: Database):
    write(database, [decision("a"), decision("b", verdict="deny"), answer("b", "no", failed=True), answer("a")])
    assert [(row["call"], row["kind"], row["verdict"]) for row in rows(database)] == [
        ("a", "decision", "allow"),
        ("b", "decision", "deny"),
        ("b", "result", "failed"),
        ("a", "result", "completed"),
    ]


def test_tool_calls_without_a_decision_are_not_recorded(database: Database):
    others: list[Message] = [{"role": "user", "content": "hi"}, {"crow": {"kind": "title", "title": "Hi"}}]
    assert not write(database, [*others, answer("call_1")])
    assert write(database, [decision("call_1")], session="another")
    assert not write(database, [answer("call_1")])  # a tool call of another session
    assert len(rows(database)) == 1


def test_images_and_invalid_text_are_recorded(database: Database):
    wild = "a\0b\ud83dc" + "\N{OK HAND SIGN}"
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, {"type": "text", "text": wild}]
    write(database, [decision(wild, wild, wild[:4]), answer(wild, image, changes=[{"path": wild, "old": None}])])
    made, came = rows(database)
    assert made["call"] == came["call"] == "a\\x00b\\ud83dc\N{OK HAND SIGN}"
    assert json.loads(came["files"]) == [{"path": wild, "before": None, "after": None}]
    assert verify(database) == []


def test_head_file_is_readable_by_its_owner_only(chain: Database, tmp_path: Path):
    file = tmp_path / "audit.head"
    assert file.stat().st_mode & 0o777 == 0o600
    (noted,) = json.loads(file.read_text()).values()
    assert (noted["count"], noted["hash"]) == (6, rows(chain)[-1]["hash"])
    assert set(noted) == {"count", "hash", "key", "mac"}


def test_databases_in_one_folder_have_separate_heads(chain: Database, tmp_path: Path):
    other = Database(f"sqlite:///{tmp_path / 'other.db'}", tmp_path)
    write(other, [decision("call_1")])
    assert verify(other) == verify(chain) == []
    other.close()


@pytest.mark.parametrize("column", [*audit.HASHED_COLUMNS[1:], "hash"])
def test_changed_value_is_found_in_every_column(chain: Database, column: str):
    with chain.begin_write() as connection:
        changed: Any = 1 if column == "at" else "0"
        connection.execute(update(decisions).where(decisions.c.number == 3).values({column: changed}))
    assert "Decision 3 was changed or moved after it was written." in verify(chain)


def test_changed_row_with_a_new_hash_fits_neither_the_next_row_nor_its_signature(chain: Database):
    change_row(chain, 3, verdict="deny")
    assert verify(chain) == [
        "Decision 4 does not follow the one before: one of the two was replaced.",
        f"Decision 3 was {FORGED}",
    ]


def test_changed_last_row_with_a_new_hash_does_not_fit_the_file(chain: Database, tmp_path: Path):
    change_row(chain, 6, verdict="failed")
    assert verify(chain) == [
        f"Decision 6 was {FORGED}",
        f"Decision 6 is not the one recorded in {tmp_path / 'audit.head'}: the chain was rewritten.",
    ]


def test_rewritten_chain_does_not_fit_the_file(chain: Database):
    old = rows(chain)
    with chain.begin_write() as connection:
        connection.execute(delete(decisions))
        audit.append_rows(connection, chain, [{**row, "by": "nobody"} for row in old])
    (complaint,) = verify(chain)  # the key was at hand
    assert complaint.startswith("Decision 6 is not the one recorded in")
    write(chain, [decision("more")])  # does not hide the damage
    assert complaint in verify(chain)


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ([1], "Decision 1 was removed."),
        ([3], "Decision 3 was removed."),
        ([2, 3, 4], "Decisions 2 to 4 were removed."),
    ],
)
def test_removed_rows_are_reported(chain: Database, gone: list[int], said: str):
    with chain.begin_write() as connection:
        connection.execute(delete(decisions).where(decisions.c.number.in_(gone)))
    assert verify(chain) == [said]


@pytest.mark.parametrize(
    ("left", "said"), [(5, "Decision 6 was"), (4, "Decisions 5 to 6 were"), (0, "Decisions 1 to 6 were")]
)
def test_rows_removed_from_the_end_are_found_by_the_file(chain: Database, tmp_path: Path, left: int, said: str):
    with chain.begin_write() as connection:
        connection.execute(delete(decisions).where(decisions.c.number > left))
    why = "a power failure or an older copy of the database has the same effect"
    complaint = f"{said} removed from the end, as {tmp_path / 'audit.head'} shows ({why})."
    assert verify(chain) == [complaint]
    anchor(chain)  # does not hide the damage
    assert verify(chain) == [complaint]


def test_removed_row_is_found_when_later_rows_are_renumbered(chain: Database):
    with chain.begin_write() as connection:
        connection.execute(delete(decisions).where(decisions.c.number == 3))
        for number in (4, 5, 6):
            connection.execute(update(decisions).where(decisions.c.number == number).values(number=number - 1))
    found = verify(chain)
    assert [f"Decision {n} was changed or moved after it was written." in found for n in (2, 3, 4, 5)] == [0, 1, 1, 1]
    assert any(complaint.startswith("Decision 6 was removed from the end") for complaint in found)


def test_reordered_rows_are_found(chain: Database):
    with chain.begin_write() as connection:
        for old, new in ((2, 100), (5, 2), (100, 5)):
            connection.execute(update(decisions).where(decisions.c.number == old).values(number=new))
    found = verify(chain)
    assert [f"Decision {n} was changed or moved after it was written." in found for n in (1, 2, 5)] == [0, 1, 1]


def test_inserted_row_is_found(chain: Database):
    with chain.begin_write() as connection:
        for number in (6, 5, 4):
            connection.execute(update(decisions).where(decisions.c.number == number).values(number=number + 1))
        row = dict(connection.execute(select(decisions).where(decisions.c.number == 3)).mappings().one())
        row |= {"number": 4, "call": "forged", "previous": row["hash"]}
        connection.execute(insert(decisions), {**row, "hash": audit.hash_row(row)})
    found = verify(chain)
    assert "Decision 5 does not follow the one before: one of the two was replaced." in found
    assert "Decision 5 was changed or moved after it was written." in found


def test_row_inserted_before_the_first_is_found(chain: Database):
    with chain.begin_write() as connection:
        row = dict(connection.execute(select(decisions).where(decisions.c.number == 1)).mappings().one()) | {
            "number": 0
        }
        connection.execute(insert(decisions), {**row, "hash": audit.hash_row(row)})
    assert verify(chain) == ["Decision 0 was inserted by hand: decisions are numbered from 1."]


def test_row_appended_by_hand_is_found(chain: Database):
    append_by_hand(chain, key_id=None, mac=None)
    assert verify(chain) == [f"Decision 7 was {UNSIGNED}"]
    write(chain, [decision("call_8")])  # does not hide it
    assert verify(chain) == [f"Decision 7 was {UNSIGNED}"]


def test_row_that_the_file_does_not_know_is_believed_if_it_is_signed(chain: Database):
    with chain.begin_write() as connection:
        record(connection, chain, "s" * 32, [decision("call_8")], 3000)  # by a process with a copy of the folder
    assert verify(chain) == []
    write(chain, [answer("call_8")])
    assert verify(chain) == []


def test_process_killed_after_the_commit_leaves_a_valid_chain(chain: Database):
    begin(chain, [decision("call_8")])
    assert verify(chain) == []
    begin(chain, [answer("call_8")])  # by another process, also killed
    assert verify(chain) == []
    with chain.begin_write() as connection:
        connection.execute(delete(decisions).where(decisions.c.number > 6))
    assert len(verify(chain)) == 1


def test_process_killed_before_the_commit_leaves_a_valid_chain(chain: Database):
    def kill_before_commit() -> None:
        with chain.begin_write() as connection:
            before = record(connection, chain, "s" * 32, [decision("call_8")], 3000)
            assert before
            announce(connection, chain, before)
            raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            kill_before_commit()
        assert verify(chain) == []
    write(chain, [decision("call_9")])
    assert verify(chain) == []


def test_unannounced_row_is_found_after_an_announced_one(chain: Database):
    begin(chain, [decision("call_8")])
    change_row(chain, 7, verdict="deny")
    assert verify(chain) == [f"Decision 7 was {FORGED}"]


def test_anchoring_keeps_the_head_that_another_process_announced(chain: Database):
    with chain.begin_write() as connection:
        before = record(connection, chain, "s" * 32, [decision("call_8")], 3000)
        assert before
        announce(connection, chain, before)
        anchor(chain)  # by the process that wrote the row before
    assert verify(chain) == []


def test_missing_file_is_reported_and_recreated_by_the_next_decision(chain: Database, tmp_path: Path):
    (tmp_path / "audit.head").unlink()
    (complaint,) = verify(chain)
    assert complaint.startswith(f"{tmp_path / 'audit.head'} has no record of ")
    assert complaint.endswith("whether decisions after 6 were removed is unknown.")
    write(chain, [decision("call_9")])
    assert verify(chain) == []


def test_empty_database_without_a_file_is_valid(database: Database):
    assert verify(database) == []
    with database.begin_read() as connection:
        assert list_decisions(connection) == []


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff", b"[1]", b'{"a": {"count": "x"}}'])
def test_damaged_file_is_reported_and_does_not_block_decisions(chain: Database, tmp_path: Path, damage: bytes):
    file = tmp_path / "audit.head"
    file.write_bytes(damage)
    write(chain, [decision("call_9")])
    assert file.read_bytes() == damage
    (complaint,) = verify(chain)
    assert complaint.startswith(f"{file} cannot be read")


def test_unwritable_file_raises_a_clear_error(database: Database, tmp_path: Path):
    (tmp_path / "audit.head").mkdir()
    with pytest.raises(StoreError, match=r"audit.head cannot be written \(Is a directory\)"):
        write(database, [decision("call_1")])
    (complaint,) = verify(database)
    assert "cannot be read" in complaint


def test_bytes_in_a_text_column_are_reported_as_a_change(tmp_path: Path):
    database = Database(f"sqlite:///{tmp_path / 'crow.db'}", tmp_path)  # PostgreSQL enforces column types
    write(database, [decision("call_1"), decision("call_2")])
    with database.begin_write() as connection:
        connection.execute(text("UPDATE decisions SET by = x'ff00', at = 'noon' WHERE number = 1"))
    assert verify(database) == ["Decision 1 was changed or moved after it was written."]
    database.close()


def test_list_is_newest_first_and_filtered_by_session(database: Database):
    for n in range(4):
        write(database, [decision(f"call_{n}")], session=f"{n % 2}_session")
    with database.begin_read() as connection:
        assert [row["call"] for row in list_decisions(connection, limit=3)] == ["call_3", "call_2", "call_1"]
        assert [row["call"] for row in list_decisions(connection, "1")] == ["call_3", "call_1"]
        assert list_decisions(connection, "%") == list_decisions(connection, "1session") == []


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        ('{"command": "make\\n -j"}', "make -j"),
        ('{"command": "create", "path": "a b.txt"}', "a b.txt"),
        ('{"url": "https://example.org:81/a?b"}', "example.org:81"),
        *((text, "") for text in ("", "{", "[1]", '{"command": 1}', '{"url": "http://["}', '{"query": "x"}')),
    ],
)
def test_list_tells_the_command_the_path_or_the_host(arguments: str, about: str):
    assert describe_arguments(arguments) == about


@pytest.mark.anyio
async def test_edit_is_recorded_with_its_decision_and_file_digests(database: Database, tmp_path: Path):
    file = tmp_path / "project" / "a.txt"
    file.parent.mkdir()
    file.write_bytes(codecs.BOM_UTF16_LE + "one\r\n".encode("utf-16-le"))
    before = hashlib.sha256(file.read_bytes()).hexdigest()
    arguments = {"command": "str_replace", "path": "a.txt", "old_str": "one", "new_str": "two"}
    uses = [
        ScriptedCall(name="file_editor", arguments=arguments),
        ScriptedCall(name="terminal", arguments={"command": "true"}),
    ]
    model = ScriptedModel([Reply(tool_calls=uses), Reply("Done.")])
    tools = Server(
        "crow", crow_mcp_server.create_server, definitions=crow_mcp_server.tools(), built_in=True, shared=True
    )
    crow = Crow(model, servers=[tools]).use(permissions, allow=["terminal:true"])
    crow.use(persistence, url=database.url.render_as_string(hide_password=False), folder=tmp_path)
    async with connect(crow) as editor:
        session = await editor.new_session(str(file.parent))
        await editor.prompt(session.session_id, "go")
    assert verify(database) == []
    written = rows(database)
    with database.begin_read() as connection:
        abouts = {row["tool"]: about for row, about in zip(written, describe_calls(connection, written), strict=True)}
        changed = [{**row, "arguments": "0" * 64} for row in written]
        assert describe_calls(connection, changed) == [""] * 4
    assert abouts == {"file_editor": "a.txt", "terminal": "true"}
    assert {row["session"] for row in written} == {session.session_id}
    told = [(row["tool"], row["kind"], row["verdict"], row["by"]) for row in written]
    assert sorted(told) == [
        ("file_editor", "decision", "allow", "the user"),
        ("file_editor", "result", "completed", "the user"),
        ("terminal", "decision", "allow", "the rule 'terminal:true'"),
        ("terminal", "result", "completed", "the rule 'terminal:true'"),
    ]
    (edited,) = (row for row in written if row["tool"] == "file_editor" and row["kind"] == "result")
    assert edited["arguments"] == hashlib.sha256(json.dumps(arguments).encode()).hexdigest()
    after = hashlib.sha256(file.read_bytes()).hexdigest()
    assert json.loads(edited["files"]) == [{"path": str(file), "before": before, "after": after}]


PROCESS = """
import sys
from pathlib import Path
from crow_persistence.audit import anchor, announce, append_rows, make_rows
from crow_persistence.database import Database
from crow_persistence.extension import persistence

url, folder, name, times = sys.argv[1:]
database = Database(url, Path(folder))
for n in range(int(times)):
    call = f"{name}_{n}"
    notes = {"kind": "decision", "call": call, "tool": "terminal", "is": "allow", "by": "the user", "scope": "once"}
    for entry in ({"crow": notes}, {"role": "tool", "tool_call_id": call, "content": "done"}):
        with database.begin_write() as connection:
            announce(connection, database, append_rows(connection, database, make_rows(connection, name, [entry], n)))
        anchor(database)
database.close()
"""


@pytest.mark.anyio
async def test_four_processes_append_to_one_chain(database: Database, tmp_path: Path):
    write(database, [decision("first")])
    url = database.url.render_as_string(hide_password=False)
    commands = [[sys.executable, "-c", PROCESS, url, str(tmp_path), f"process_{n}", "15"] for n in range(4)]
    processes = [await asyncio.create_subprocess_exec(*command, env=os.environ) for command in commands]
    assert [await process.wait() for process in processes] == [0] * 4
    with database.begin_read() as connection:
        found = list_decisions(connection, limit=1000)
    assert [row["number"] for row in found] == list(range(121, 0, -1))
    for n in range(4):
        kinds = [(row["call"], row["kind"]) for row in found[::-1] if row["session"] == f"process_{n}"]
        assert kinds == [(f"process_{n}_{i}", kind) for i in range(15) for kind in ("decision", "result")]
    assert verify(database) == []
