"""`crow audit`, as a person and as a script use it."""

import json
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from crow_core.testing import Reply, ScriptedServer
from crow_persistence.audit import hash_row
from crow_persistence.audit_key import load

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine, Prefork

pytestmark = pytest.mark.anyio


async def decide(machine: "Machine") -> None:
    """Run a turn in which a rule allows a command, and an edit is denied because no user can be asked."""
    edit = {"command": "create", "path": "a.txt", "file_text": "1"}
    uses = [
        {"name": "terminal", "arguments": {"command": "true"}},
        {"name": "file_editor", "arguments": edit},
    ]
    machine.configure('[permissions]\nallow = ["terminal:true"]\n')
    async with ScriptedServer([*(Reply(tool_calls=[use]) for use in uses), Reply("Done.")]) as server:
        machine.ask(server.url)
        assert (await machine.crow("run", "go")).code == 3


@pytest.fixture(scope="module")
def after_decisions(prepared: Callable[..., Callable[..., "Machine"]]) -> Callable[..., "Machine"]:
    return prepared(decide)


@pytest.fixture
def decided(after_decisions: Callable[..., "Machine"], prefork: "Prefork | None") -> "Machine":
    """A machine on which a command was allowed and an edit denied."""
    return after_decisions(prefork)


def tamper(machine: "Machine", statement: str) -> None:
    with closing(sqlite3.connect(machine.home / "crow" / "crow.db")) as connection, connection:
        connection.execute(statement)


def signed(machine: "Machine", number: int) -> str:
    """Return the sentence about the records that a machine has signed."""
    key = load(machine.home / "crow")
    assert key is not None
    return f"{number} are signed with the key {key.id} of this machine."


async def test_list_shows_decisions_with_their_reasons(decided: "Machine"):
    decided.env["COLUMNS"] = "200"
    listed = await decided.crow("audit", "list")
    assert listed.code == 0, listed.err
    heads, *lines = listed.out.splitlines()
    assert heads.split() == ["#", "WHEN", "SESSION", "WHAT", "TOOL", "ABOUT", "BY"]
    told = [re.sub(r"^(\d) +\S+ \S+ +[0-9a-f]{8} +", r"\1 ", " ".join(line.split())) for line in lines]
    assert told == [
        "4 failed file_editor a.txt",
        "3 deny file_editor a.txt it needs a permission, and nobody is there to give it (once)",
        "2 completed terminal true",
        "1 allow terminal true the rule 'terminal:true' (once)",
    ]


async def test_json_list_is_complete_and_can_be_filtered(decided: "Machine"):
    async def listed(*options: str) -> list[dict[str, Any]]:
        return json.loads((await decided.crow("audit", "list", "--json", *options)).out)

    rows = await listed()
    assert [(row["number"], row["kind"], row["files"]) for row in rows] == [
        (4, "result", []),
        (3, "decision", []),
        (2, "result", []),
        (1, "decision", []),
    ]
    assert await listed("--limit", "3") == rows[:3]
    assert await listed("--session", rows[0]["session"][:6]) == rows
    assert await listed("--session", "x") == []


async def test_verify_accepts_unchanged_records(decided: "Machine"):
    verified = await decided.crow("audit", "verify")
    assert (verified.code, verified.err) == (0, "")
    assert verified.out == f"All 4 records are as they were written.\n{signed(decided, 4)}\n"


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("UPDATE decisions SET verdict = 'allow' WHERE number = 3", "Decision 3 was changed or moved"),
        ("DELETE FROM decisions WHERE number = 2", "Decision 2 was removed."),
        ("DELETE FROM decisions WHERE number > 1", "Decisions 2 to 4 were removed from the end"),
    ],
)
async def test_verify_names_changed_and_removed_records(decided: "Machine", statement: str, said: str):
    tamper(decided, statement)
    verified = await decided.crow("audit", "verify")
    assert verified.code == 1
    assert verified.out.startswith(said)


async def test_verify_finds_that_all_records_and_their_head_are_gone(decided: "Machine"):
    tamper(decided, "DELETE FROM decisions")
    (decided.home / "crow" / "audit.head").unlink()
    verified = await decided.crow("audit", "verify")
    assert verified.code == 1
    assert f"{decided.home}/crow/audit.key was made with the first record, but there is no record in " in verified.out
    assert "they were removed, or they are in another database." in verified.out


async def test_records_stay_after_their_session_is_deleted(decided: "Machine"):
    session = json.loads((await decided.crow("audit", "list", "--json")).out)[0]["session"]
    deleted = await decided.crow("sessions", "delete", "--yes", session)
    assert deleted.code == 0, deleted.err
    assert (await decided.crow("audit", "verify")).out.startswith("All 4 records are as they were written.\n")


@pytest.mark.parametrize("command", ["verify", "repair"])
async def test_missing_database_is_reported(machine: "Machine", command: str):
    said = await machine.crow("audit", command)
    assert said.code == 2
    assert said.err.startswith("crow: Nothing has been stored yet")
    assert "Traceback" not in said.err


@pytest.mark.parametrize("command", ["list", "verify", "repair"])
async def test_file_that_is_not_a_database_is_one_sentence(machine: "Machine", command: str):
    machine.configure("").with_name("crow.db").write_text("not a database, " * 100)
    said = await machine.crow("audit", command)
    assert said.code == 2
    assert said.err.startswith("crow: ")
    assert "crow.db" in said.err
    assert len(said.err.splitlines()) == 1


async def test_stored_text_does_not_control_the_terminal(decided: "Machine"):
    tamper(decided, "UPDATE decisions SET tool = char(27) || ']0;x' || char(7) WHERE number = 1")
    for command in ("list", "verify"):
        said = await decided.crow("audit", command)
        assert "\x1b" not in said.out + said.err
        assert "\x07" not in said.out + said.err


BREAKS = [
    "UPDATE decisions SET verdict = 'allow' WHERE number = 3",
    "DELETE FROM decisions WHERE number = 2",
    "DELETE FROM decisions WHERE number > 1",
    "DELETE FROM decisions",
    "UPDATE decisions SET number = -1 WHERE number = 4",
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("statement", BREAKS)
async def test_repaired_chain_goes_on_and_says_where_it_was_broken(decided: "Machine", statement: str):
    tamper(decided, statement)
    complaints = (await decided.crow("audit", "verify")).out
    refused = await decided.crow("audit", "repair", stdin="n\n")
    assert (refused.code, refused.out) == (1, complaints)
    assert (await decided.crow("audit", "verify")).out == complaints
    repaired = await decided.crow("audit", "repair", "--yes")
    assert (repaired.code, repaired.out) == (0, complaints)
    verified = await decided.crow("audit", "verify")
    assert verified.code == 0
    said, end, *_ = verified.out.splitlines()
    assert re.match(r"Record \d is a repair of .*\. Before it: ", said)
    assert said.endswith(" ".join(complaints.splitlines()))
    assert end.endswith("records are as they were written, or sealed by a repair.")
    await decide(decided)
    assert (await decided.crow("audit", "verify")).out.startswith(said)
    assert (await decided.crow("audit", "repair")).err == "The chain is not broken.\n"
    assert "crow audit repair" in (await decided.crow("audit", "list")).out


@pytest.mark.parametrize("statement", BREAKS)
async def test_change_after_a_repair_is_found(decided: "Machine", statement: str):
    tamper(decided, "UPDATE decisions SET verdict = 'allow' WHERE number = 3")
    assert (await decided.crow("audit", "repair", "--yes")).code == 0
    tamper(decided, "UPDATE decisions SET tool = 'other' WHERE number = 3" if "= 3" in statement else statement)
    assert (await decided.crow("audit", "verify")).code == 1


async def test_chain_of_a_database_that_was_deleted_can_be_made_well_again(decided: "Machine"):
    for file in (decided.home / "crow").glob("crow.db*"):
        file.unlink()
    await decide(decided)
    assert (await decided.crow("audit", "verify")).code == 1
    assert (await decided.crow("audit", "repair", "--yes")).code == 0
    assert (await decided.crow("audit", "verify")).code == 0


async def test_damaged_head_file_is_kept_and_replaced(decided: "Machine"):
    head = decided.home / "crow" / "audit.head"
    head.write_text("{")
    assert (await decided.crow("audit", "verify")).code == 1
    assert (await decided.crow("audit", "repair", "--yes")).code == 0
    assert head.with_suffix(".damaged").read_text() == "{"
    assert (await decided.crow("audit", "verify")).code == 0


async def test_missing_replaced_and_open_key_are_a_sentence_each(decided: "Machine"):
    file = decided.home / "crow" / "audit.key"
    file.chmod(0o644)
    verified = await decided.crow("audit", "verify")
    assert (verified.code, len(verified.out.splitlines())) == (1, 1)
    assert "is open to other users, as its mode is 644" in verified.out
    file.unlink()
    verified = await decided.crow("audit", "verify")
    assert verified.code == 1
    said, elsewhere = verified.out.splitlines()
    assert said.startswith(f"{file} is missing, and what its key ")
    assert re.match(r"Cannot be checked here \(key [0-9a-f]{16}\): 4 records; ", elsewhere)
    assert not file.exists()
    await decide(decided)
    verified = await decided.crow("audit", "verify")
    assert verified.code == 1
    assert verified.out.startswith(f"{file} was replaced: it holds the key ")
    assert (await decided.crow("audit", "repair", "--yes")).code == 0
    verified = await decided.crow("audit", "verify")
    assert verified.code == 0
    assert signed(decided, 5) in verified.out
    assert "All 5 other records are as they were written, or sealed by a repair." in verified.out


async def test_rewritten_records_are_found(decided: "Machine"):
    """Whoever can write the database makes all hashes fit, and records the new end in the file."""
    file = decided.home / "crow" / "crow.db"
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.row_factory = sqlite3.Row
        previous = ""
        for found in connection.execute("SELECT * FROM decisions ORDER BY number").fetchall():
            row = {**dict(found), "verdict": "deny", "previous": previous}
            row["hash"] = previous = hash_row(row)
            connection.execute(
                "UPDATE decisions SET verdict = :verdict, previous = :previous, hash = :hash WHERE number = :number",
                row,
            )
    head = file.with_name("audit.head")
    ((name, noted),) = json.loads(head.read_text()).items()
    head.write_text(json.dumps({name: {**noted, "hash": previous}}))
    verified = await decided.crow("audit", "verify")
    assert verified.code == 1
    assert "Decisions 1 to 4 were not signed by this machine, as it says" in verified.out
    assert "audit.head was changed by hand" in verified.out


async def test_key_is_not_stored_when_a_command_prints_it(decided: "Machine"):
    key = load(decided.home / "crow")
    assert key is not None
    uses = [{"name": "terminal", "arguments": {"command": "cat ../*/crow/audit.key"}}]
    decided.configure('[permissions]\nmode = "yolo"\n')
    async with ScriptedServer([Reply(tool_calls=uses), Reply("Done.")]) as server:
        decided.ask(server.url)
        assert (await decided.crow("run", "go")).code == 0
    assert key.key.encode() not in b"".join(file.read_bytes() for file in (decided.home / "crow").glob("crow.db*"))
