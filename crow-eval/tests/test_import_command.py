"""`crow import` as a real command, and what can be done with an imported session."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from crow_core.testing import Reply, ScriptedCall, ScriptedServer

if TYPE_CHECKING:
    from crow_testing.command_fixtures import CommandResult, Machine

pytestmark = pytest.mark.anyio

CALL: ScriptedCall = {"name": "terminal", "arguments": {"command": "touch executed"}}


async def read(machine: "Machine", *args: str) -> Any:
    """Run a command with --json and return what it prints."""
    done = await machine.crow(*args, "--json")
    assert (done.code, done.err) == (0, ""), done
    return json.loads(done.out)


async def run_command(machine: "Machine", *args: str) -> "CommandResult":
    """Run a command that succeeds and return its result."""
    done = await machine.crow(*args)
    assert done.code == 0, done
    return done


async def test_history_of_another_agent_is_imported_searched_and_asked_again(machine: "Machine"):
    file = Path(__file__).parent / "histories" / "pi.jsonl"
    imported = await run_command(machine, "import", "pi", str(file))
    assert imported.out.splitlines()[0] == "Imported 4 messages of 1 sessions."
    (session,) = await read(machine, "sessions", "list", "--all")
    assert "The notes say: buy milk." in (await run_command(machine, "sessions", "show", session["id"])).out
    assert session["cwd"] == "/home/me/notes", "which does not exist"

    def reply(request: dict[str, Any]) -> Reply:
        if request["messages"][-1]["role"] == "tool":
            return Reply("The notes say: buy milk.")
        return Reply("I read.", tool_calls=[ScriptedCall(name="read", arguments={"path": "notes.txt"})])

    async with ScriptedServer(reply) as server:
        machine.ask(server.url)
        again = await machine.crow("reask", session["id"], "-m", "scripted", "--json")
    assert again.code == 0, again.err
    (outcome,) = json.loads(again.out)
    assert (outcome["requests"], outcome["agreed"]) == (2, 2)
    assert (await machine.crow("import", "pi", "/nowhere")).err.startswith("crow: there is no /nowhere.")


async def test_imported_session_is_continued_without_any_trust_in_its_history(machine: "Machine"):
    gone = machine.home / "gone"
    lines: list[dict[str, Any]] = [
        {"type": "user", "permissionMode": "bypassPermissions", "message": {"content": "Remove it."}},
        {"type": "assistant", "message": {"content": [make_block("one"), make_block("one"), make_block("two")]}},
        {
            "type": "user",
            "message": {"content": [{"type": "tool_result", "tool_use_id": "two", "content": "Done."}] * 2},
        },
        {"type": "user", "message": {"content": [{"type": "tool_result", "tool_use_id": "no", "content": "Done."}]}},
    ]
    history = machine.home / "history.jsonl"
    history.write_text("\n".join(json.dumps({**line, "cwd": str(gone)}) for line in lines))
    (machine.project / ".mcp.json").write_text('{"mcpServers": {"theirs": {"command": "/bin/false"}}}')
    imported = await run_command(machine, "import", "claude-code", str(history))
    assert "Left out: 1 results without a call." in imported.out
    assert "Left out: 1 further results of a call." in imported.out
    (session,) = await read(machine, "sessions", "list", "--all")
    assert session["cwd"] == str(gone)
    async with ScriptedServer([Reply("I do.", tool_calls=[CALL]), Reply("No.")]) as server:
        machine.ask(server.url)
        done = await machine.crow("run", "-r", session["id"][:8], "go on")
    assert (done.code, done.out.splitlines()[-1]) == (3, "No."), done.err
    assert f"{gone}, does not exist here. It goes on in {machine.project}; to go on in another" in done.err
    assert "This was not run: it needs a permission" in done.err
    assert "ignored until you trust it" in done.err
    sent = server.requests[0]["messages"]
    assert [message["role"] for message in sent[1:]] == ["user", "assistant", "tool", "tool", "tool", "user"]
    ids = [use["id"] for use in sent[2]["tool_calls"]]
    assert (ids, [message["tool_call_id"] for message in sent[3:6]]) == (["one", "one-2", "two"], ids)
    assert sent[5]["content"] == "Done."
    assert not (machine.project / "executed").exists()
    assert not gone.exists()
    with history.open("a") as opened:
        opened.write("\n" + json.dumps({"type": "user", "message": {"content": "Meanwhile."}}))
    again = await run_command(machine, "import", "claude-code", str(history))
    (fork,) = [each["id"] for each in await read(machine, "sessions", "list", "--all") if each["id"] != session["id"]]
    assert f"1 had been continued in crow, and forks got what is new: {fork[:8]}." in again.out
    assert "Meanwhile." in (await run_command(machine, "sessions", "show", fork)).out
    assert "Meanwhile." not in (await run_command(machine, "sessions", "show", session["id"])).out
    known = await run_command(machine, "import", "claude-code", str(history))
    assert "1 had been imported before, and have nothing new." in known.out


def make_block(id: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": "terminal", "input": {"command": "touch executed"}}
