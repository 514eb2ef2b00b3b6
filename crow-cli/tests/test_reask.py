"""`crow reask`: stored sessions are asked again with what was changed; nothing is run."""

import json
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from crow_core.testing import Failure, Reply, ScriptedCall, ScriptedServer

if TYPE_CHECKING:
    from conftest import Machine

pytestmark = pytest.mark.anyio


def command(line: str) -> ScriptedCall:
    return {"name": "terminal", "arguments": {"command": line}}


async def talk(machine: "Machine", *replies: Reply, prompt: str = "Say hello") -> ScriptedServer:
    """Run a session in the project and return the model's server."""
    async with ScriptedServer([*replies]) as server:
        machine.ask(server.url)
        done = await machine.crow("run", "--yolo", prompt)
    assert done.code == 0, done.err
    return server


async def list_ids(machine: "Machine") -> list[str]:
    """Return the ids of the listed sessions, the latest first."""
    return [one["id"] for one in json.loads((await machine.crow("sessions", "list", "--json")).out)]


async def reask(machine: "Machine", server: ScriptedServer, *args: str, code: int = 0) -> list[dict[str, Any]]:
    """Run `crow reask --json` at a server, and return the outcomes."""
    machine.ask(server.url)
    done = await machine.crow("reask", *args, "--json")
    assert done.code == code, done
    return json.loads(done.out)


async def test_a_session_asked_again_unchanged_sends_the_stored_bytes_and_runs_nothing(machine: "Machine"):
    replies = [Reply("I look.", tool_calls=[command("echo x >> ran")]), Reply("Done.")]
    first = await talk(machine, *replies)
    (id,) = await list_ids(machine)
    async with ScriptedServer(replies) as server:
        (outcome,) = await reask(machine, server, id[:6])
    assert server.bodies == first.bodies
    assert (machine.project / "ran").read_text() == "x\n"
    assert (outcome["requests"], outcome["agreed"], outcome["reworded"], outcome["departure"]) == (2, 2, 0, None)
    assert outcome["totals"]["calls"] == outcome["before"]["calls"] == 2
    assert await list_ids(machine) == [id], "the new session is not among those of a person"
    shown = await machine.crow("sessions", "show", outcome["session"], "--json")
    markers = [entry["crow"] for entry in json.loads(shown.out) if "role" not in entry]
    assert [one["origin"] for one in markers if one.get("kind") == "reask"] == [id]


async def test_a_departure_ends_a_session_and_is_shown_side_by_side(machine: "Machine"):
    one, two = command("echo one"), command("echo two")
    await talk(machine, Reply("First.", tool_calls=[one]), Reply("Second.", tool_calls=[two]), Reply("Done."))
    (id,) = await list_ids(machine)
    replies = [Reply("In other words.", tool_calls=[one]), Reply("Elsewhere.", tool_calls=[command("echo three")])]
    async with ScriptedServer(replies) as server:
        machine.ask(server.url)
        done = await machine.crow("reask", id)
        (outcome,) = await reask(machine, server, id)
        assert len(server.requests) == 2, "a second start asks nothing again"
    assert done.code == 0, done
    line = next(line for line in done.out.splitlines() if "Second." in line)
    assert "Elsewhere." in line
    assert "1 requests agreed, 1 departed, 1 not asked." in done.out
    assert outcome["departure"]["request"] == 2
    assert outcome["departure"]["now"]["content"] == "Elsewhere."
    assert (outcome["agreed"], outcome["reworded"], outcome["not_asked"]) == (1, 1, 1)
    assert [message["content"] for message in server.requests[1]["messages"] if message["role"] == "assistant"] == [
        "In other words."
    ]


async def test_prompt_and_sampling_change_and_the_version_is_stored_with_the_calls(machine: "Machine"):
    await talk(machine, Reply("Hello."))
    (id,) = await list_ids(machine)
    template = machine.project / "new.md.j2"
    template.write_text("Be brief in {{ cwd }}.")
    async with ScriptedServer([Reply("Hi."), Reply("Hello.")]) as server:
        (outcome,) = await reask(machine, server, id, "--prompt", "new.md.j2", "-s", "temperature=0")
        await reask(machine, server, id, "--prompt", "system@1", "-s", "temperature=0")
    new, old = server.requests
    assert new["messages"][0]["content"] == f"Be brief in {machine.project}."
    assert old["messages"][0]["content"].startswith("You are crow")
    assert new["temperature"] == 0
    assert outcome["reworded"] == 1
    (stored,) = json.loads((await machine.crow("calls", "list", outcome["session"], "--json")).out)
    assert stored["prompt"] == {"name": "system", "version": 2} or (stored["prompt"], stored["version"]) == (
        "system",
        2,
    )
    template.write_text("{{ nothing_of_this_name }}")
    async with ScriptedServer([]) as server:
        machine.ask(server.url)
        done = await machine.crow("reask", id, "--prompt", "new.md.j2")
    assert done.code == 2
    assert "nothing_of_this_name" in done.err
    assert not server.requests


async def test_a_failed_run_goes_on_where_it_stopped(machine: "Machine"):
    replies = [Reply("I look.", tool_calls=[command("true")]), Reply("Done.")]
    await talk(machine, *replies)
    (id,) = await list_ids(machine)
    async with ScriptedServer([replies[0], Failure(401, "no")]) as server:
        (outcome,) = await reask(machine, server, id, code=1)
    assert outcome["agreed"] == 1
    assert outcome["error"]
    async with ScriptedServer([Reply("Now."), Reply("Never asked.")]) as server:
        machine.ask(server.url)
        (outcome,) = await reask(machine, server, id)
        assert len(server.requests) == 1
    assert (outcome["agreed"], outcome["reworded"], outcome["error"]) == (2, 1, "")


async def test_replies_before_the_first_request_asked_are_kept(machine: "Machine"):
    await talk(machine, Reply("First.", tool_calls=[command("true")]), Reply("Done."))
    (id,) = await list_ids(machine)
    async with ScriptedServer([Reply("Over.")]) as server:
        (outcome,) = await reask(machine, server, id, "--from-request", "2")
        machine.ask(server.url)
        done = await machine.crow("reask", id, "--from-request", "3")
    assert "First." in json.dumps(server.requests[0]["messages"])
    assert (outcome["agreed"], outcome["reworded"], outcome["not_asked"]) == (1, 1, 1)
    assert (done.code, done.err) == (2, f"crow: Session {id} has 2 requests, no request 3.\n")


async def test_a_session_without_stored_calls_is_asked_from_its_log(machine: "Machine"):
    replies = [Reply("I look.", tool_calls=[command("echo x >> ran")]), Reply("Done.")]
    first = await talk(machine, *replies)
    (id,) = await list_ids(machine)
    (file,) = machine.home.rglob("crow.db")
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("DELETE FROM calls")
        connection.commit()
    async with ScriptedServer(replies) as server:
        (outcome,) = await reask(machine, server, id, "--model", "scripted")
    assert [body["messages"] for body in server.requests] == [body["messages"] for body in first.requests]
    assert (machine.project / "ran").read_text() == "x\n"
    assert (outcome["agreed"], outcome["before"]["calls"]) == (2, 0)


async def test_fifty_sessions_depart_exactly_where_the_script_departs(machine: "Machine"):
    async def act(request: dict[str, Any]) -> Reply:
        """Call one tool after the other, three times, for the task that the prompt names."""
        steps = sum(message["role"] == "assistant" for message in request["messages"])
        task = request["messages"][1]["content"]
        return Reply("Done.") if steps == 3 else Reply(tool_calls=[command(f": {task} {steps}")])

    async def depart(request: dict[str, Any]) -> Reply:
        """Like `act`, but task N calls another tool at step N % 5; N % 5 = 4 never comes."""
        steps = sum(message["role"] == "assistant" for message in request["messages"])
        task = str(request["messages"][1]["content"]).split()[-1]
        return Reply(tool_calls=[command("ls")]) if int(task) % 5 == steps else await act(request)

    tasks = machine.project / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"prompt": f"Task {n}"}) + "\n" for n in range(50)))
    async with ScriptedServer(act) as server:
        machine.ask(server.url)
        done = await machine.crow("batch", str(tasks), "--out", "out.jsonl", "--mode", "yolo", "--at-once", "10")
        assert done.code == 0, done
    results = [json.loads(line) for line in (machine.project / "out.jsonl").read_text().splitlines()]
    tasks_by_session = {one["session_id"]: one["id"] - 1 for one in results}
    async with ScriptedServer(depart) as server:
        outcomes = await reask(machine, server, *tasks_by_session)
        asked = len(server.requests)
        assert await reask(machine, server, *tasks_by_session) == outcomes
        assert len(server.requests) == asked
    found = {tasks_by_session[one["origin"]]: one["departure"] and one["departure"]["request"] for one in outcomes}
    assert found == {n: n % 5 + 1 if n % 5 < 4 else None for n in range(50)}
    assert asked == sum(min(n % 5 + 1, 4) for n in range(50))


async def test_ratings_count_for_the_prompt_version_of_the_rated_answer(machine: "Machine"):
    await talk(machine, Reply("Hello."))
    (id,) = await list_ids(machine)
    for words in ("/bad too short", "/good after all"):
        done = await machine.crow("run", "-r", id, words)
        assert "The last answer is rated" in done.out, done
    (machine.project / "new.md.j2").write_text("Be brief in {{ cwd }}.")
    async with ScriptedServer([Reply("Hi.")]) as server:
        await reask(machine, server, id, "--prompt", "new.md.j2")
    old, new = json.loads((await machine.crow("prompts", "stats", "system", "--json")).out)
    assert [(one["number"], one["sessions"], one["calls"], one["good"], one["bad"]) for one in (old, new)] == [
        (1, 1, 1, 1, 0),
        (2, 1, 1, 0, 0),
    ]
    assert "system@1" in (await machine.crow("prompts", "stats")).out
    shown = await machine.crow("sessions", "show", id, "--json")
    whys = [entry["crow"]["why"] for entry in json.loads(shown.out) if entry["crow"].get("kind") == "rating"]
    assert whys == ["too short", "after all"]
    diff = await machine.crow("prompts", "diff", "system@1", "system@2", "--rendered")
    assert f"+Be brief in {machine.project}." in diff.out
