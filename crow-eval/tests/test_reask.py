"""`crow reask`: stored sessions are asked again with what was changed; nothing is run."""

import asyncio
import json
import os
import re
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from crow_core.testing import Failure, Reply, ScriptedCall, ScriptedServer

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

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


def edit(path: object, text: str) -> ScriptedCall:
    return {"name": "file_editor", "arguments": {"command": "create", "path": str(path), "file_text": text}}


async def commit(machine: "Machine", **files: str) -> None:
    """Commit files to the project's repository, which is made if there is none."""
    for name, text in files.items():
        (machine.project / name).write_text(text)
    git = ["git", "-C", str(machine.project), "-c", "user.name=me", "-c", "user.email=me@here"]
    for words in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "A commit"]):
        await asyncio.to_thread(subprocess.run, [*git, *words], check=True)


def is_gone(path: str) -> bool:
    return not os.path.lexists(path)


def list_contents(folder: Path) -> dict[str, bytes]:
    """Return all files below a folder, those of git, too."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


async def test_live_tools_run_in_a_copy_of_the_folder_at_its_start_and_the_session_goes_on(machine: "Machine"):
    await commit(machine, notes="buy milk\n")
    (machine.project / "notes").write_text("buy bread\n")
    (machine.project / "more").write_text("not in git\n")
    notes, list_all = machine.project / "notes", command("cat notes more; git branch --show-current")
    replies = [
        Reply("I look.", tool_calls=[list_all]),
        Reply("I write.", tool_calls=[edit(machine.project / "new", "new\n"), command(f"echo x > {notes}")]),
        Reply("Done."),
    ]
    await talk(machine, *replies, prompt=f"Look into {notes}")
    (id,) = await list_ids(machine)
    await commit(machine, notes="committed later\n", new="of the user\n", more="later\n")
    before = list_contents(machine.project)

    async def answer(request: dict[str, Any]) -> Reply:
        """Do the same as the stored session in the copy, then something else, then end."""
        steps = sum(message["role"] == "assistant" for message in request["messages"])
        copy = Path(str(request["messages"][1]["content"]).split()[-1]).parent
        return [
            Reply("I look.", tool_calls=[list_all]),
            Reply("I write.", tool_calls=[command(f"echo x > {copy}/notes"), edit(copy / "new", "new\n")]),
            Reply("More.", tool_calls=[command("cat new notes"), command(f"echo x > {notes}")]),
            Reply("Really done."),
        ][steps]

    async with ScriptedServer(answer) as server:
        (outcome,) = await reask(machine, server, id, "--tools", "live", "--mode", "yolo")
        asked = len(server.requests)
        assert await reask(machine, server, id, "--tools", "live", "--mode", "yolo") == [outcome]
        assert len(server.requests) == asked == 4, "a second start prints what is stored"
        machine.ask(server.url)
        text = (await machine.crow("reask", id, "--tools", "live", "--mode", "yolo")).out
    results = [message["content"] for message in server.requests[-1]["messages"] if message["role"] == "tool"]
    assert results[0].startswith("buy bread\nnot in git\nmain"), results[0]
    assert results[3].startswith("new\nx\n"), results
    assert results[4].startswith(f"Not run: {machine.project} is the folder of the session that is asked again")
    assert list_contents(machine.project) == before, "the folder itself is not touched"
    assert (outcome["requests"], outcome["agreed"], outcome["not_asked"], outcome["went_on"]) == (3, 2, 0, 1)
    assert (outcome["departure"]["request"], outcome["departure"]["was"]["content"]) == (3, "Done.")
    assert outcome["departure"]["now"]["content"] == "More."
    assert "2 requests agreed, 1 departed, 0 not asked, 1 behind a departure." in text
    copy = json.loads((await machine.crow("sessions", "show", outcome["session"], "--json")).out)[0]["crow"]["cwd"]
    assert is_gone(copy), "the copy is removed"
    assert f"Look into {copy}/notes" in json.dumps(server.requests[0]["messages"])
    assert await list_ids(machine) == [id]


async def test_live_tools_send_every_prompt_again_with_limits_and_the_permissions_of_eval(machine: "Machine"):
    await commit(machine, notes="buy milk\n")
    await talk(machine, Reply("One."), prompt="First")
    (id,) = await list_ids(machine)
    async with ScriptedServer([Reply("Two.", tool_calls=[command("touch made")]), Reply("Three.")]) as server:
        machine.ask(server.url)
        assert (await machine.crow("run", "--yolo", "-r", id, "Second")).code == 0
    template = machine.project / "new.md.j2"
    template.write_text("Be brief in {{ cwd }}.")
    replies = [Reply("One."), Reply("Two.", tool_calls=[command("touch made")]), Reply("Three.")]
    async with ScriptedServer(replies) as server:
        args = ("--tools", "live", "--prompt", str(template), "-s", "temperature=0")
        (outcome,) = await reask(machine, server, id, *args)
    users = [[m["content"] for m in body["messages"] if m["role"] == "user"] for body in server.requests]
    assert users == [["First"], ["First", "Second"], ["First", "Second"]]
    assert (outcome["agreed"], outcome["departure"], outcome["denied"]) == (3, None, 1), outcome
    assert server.requests[0]["messages"][0]["content"].startswith("Be brief in /")
    assert server.requests[0]["temperature"] == 0
    async with ScriptedServer([Reply("One."), Reply("Two.")]) as server:
        (outcome,) = await reask(machine, server, id, "--tools", "live", "--max-requests", "1", "-s", "seed=1")
    assert (outcome["agreed"], outcome["stopped"]) == (1, "The limit of 1 requests is reached.")
    async with ScriptedServer([Reply("One."), Failure(401, "no")]) as server:
        (failed,) = await reask(machine, server, id, "--tools", "live", "-s", "seed=2", code=1)
    assert failed["error"]
    async with ScriptedServer([Reply("One."), Reply("Over.")]) as server:
        (again,) = await reask(machine, server, id, "--tools", "live", "-s", "seed=2")
    assert (again["error"], again["session"] != failed["session"], again["agreed"]) == ("", True, 1)
    for words in (["--mode", "yolo"], ["--tools", "live", "--from-request", "2"]):
        assert (await machine.crow("reask", id, *words)).code == 2


async def test_sessions_that_cannot_be_restored_are_named_before_anything_runs(machine: "Machine"):
    await talk(machine, Reply("No repository."))
    await commit(machine, notes="buy milk\n")
    (machine.project / "large").write_bytes(b"x" * 5_000_001)
    await talk(machine, Reply("Too large."))
    (machine.project / "large").unlink()
    await talk(machine, Reply("The commit goes."))
    git = ["git", "-C", str(machine.project), "-c", "user.name=me", "-c", "user.email=me@here"]
    for words in (
        ["commit", "-q", "--amend", "-m", "Other"],
        ["reflog", "expire", "--expire=now", "--all"],
        ["gc", "-q", "--prune=now"],
    ):
        await asyncio.to_thread(subprocess.run, [*git, *words], check=True)
    await talk(machine, Reply("This one can be."))
    file = Path(__file__).parent / "histories" / "pi.jsonl"
    assert (await machine.crow("import", "pi", str(file))).code == 0
    listed = json.loads((await machine.crow("sessions", "list", "--all", "--json")).out)
    async with ScriptedServer([]) as server:
        machine.ask(server.url)
        done = await machine.crow("reask", *(one["id"] for one in listed), "--tools", "live", "-m", "scripted")
    assert (done.code, len(server.requests)) == (2, 0)
    whys = sorted(line.partition(" cannot be restored: ")[2] for line in done.err.splitlines())
    assert [why[:60] for why in whys] == [
        "it is imported from another agent, so its start is not known"[:60],
        "its changes were not recorded: the changed files have more t"[:60],
        "its start was not recorded, as it was in no git work tree, o"[:60],
        f"the commit {whys[3].split()[2]} is not in {machine.project} any more."[:60],
    ]


@pytest.fixture(params=["sqlite", "postgresql"])
def stored(request: pytest.FixtureRequest, machine: "Machine") -> "Machine":
    """A machine whose sessions are stored in each kind of database."""
    if request.param == "postgresql":
        machine.configure(f'[database]\nurl = "{request.getfixturevalue("postgres")}"\n')
    return machine


async def go_on(machine: "Machine", id: str, *turns: tuple[str, list[Reply]]) -> list[dict[str, Any]]:
    """Continue a session with prompts, and return the bodies of its requests."""
    bodies: list[dict[str, Any]] = []
    for prompt, replies in turns:
        async with ScriptedServer(replies) as server:
            machine.ask(server.url)
            done = await machine.crow("run", "--yolo", "-r", id, prompt)
        assert done.code == 0, done
        bodies += server.requests
    return bodies


async def test_a_fork_is_asked_again_with_the_requests_of_its_origin(stored: "Machine"):
    replies = [Reply("I look.", tool_calls=[command("echo x >> ran")]), Reply("Done.")]
    first = await talk(stored, *replies)
    (origin,) = await list_ids(stored)
    fork = (await stored.crow("sessions", "fork", origin)).out.strip()
    await go_on(stored, origin, ("Elsewhere", [Reply("Not of the fork.")]))
    bodies = await go_on(stored, fork, ("More", [Reply("More.")]))
    async with ScriptedServer([*replies, Reply("More.")]) as server:
        (outcome,) = await reask(stored, server, fork)
        assert await reask(stored, server, fork) == [outcome]
    assert server.requests == [*first.requests, *bodies]
    assert (outcome["requests"], outcome["agreed"], outcome["reworded"]) == (3, 3, 0)
    assert outcome["totals"]["calls"] == outcome["before"]["calls"] == 3
    assert (stored.project / "ran").read_text() == "x\n"


async def test_a_turn_that_was_undone_is_not_asked_again(stored: "Machine"):
    await commit(stored, notes="buy milk\n")
    first = await talk(stored, Reply("One."))
    (id,) = await list_ids(stored)
    wrong = [Reply(tool_calls=[edit(stored.project / "made", "x\n")]), Reply("Wrong.")]
    bodies = await go_on(stored, id, ("Make it", wrong), ("/undo yes", []), ("Make it well", [Reply("Right.")]))
    assert is_gone(f"{stored.project}/made")
    async with ScriptedServer([Reply("One."), Reply("Right.")]) as server:
        (outcome,) = await reask(stored, server, id)
    assert server.requests == [*first.requests, bodies[-1]]
    assert (outcome["requests"], outcome["agreed"], outcome["reworded"]) == (2, 2, 0)
    async with ScriptedServer([Reply("One."), Reply("Other.", tool_calls=[command("ls")])]) as server:
        (outcome,) = await reask(stored, server, id, "-s", "temperature=0")
    assert (outcome["departure"]["request"], outcome["departure"]["was"]["content"]) == (2, "Right.")
    async with ScriptedServer([Reply("One."), Reply("Right.")]) as server:
        (outcome,) = await reask(stored, server, id, "--tools", "live")
    assert [body["messages"][1:] for body in server.requests] == [
        body["messages"][1:] for body in [*first.requests, bodies[-1]]
    ]
    assert (outcome["requests"], outcome["agreed"], outcome["reworded"]) == (2, 2, 0)


async def test_a_compacted_session_is_asked_again_with_the_stored_summary(stored: "Machine"):
    long = Reply("I look.", tool_calls=[command("seq 3000")])
    first = await talk(stored, long, Reply("Seen."))
    (id,) = await list_ids(stored)
    bodies = await go_on(
        stored,
        id,
        ("Again", [long, Reply("Seen again.")]),
        ("/compact", [Reply("A summary of it all.")]),
        ("And now?", [Reply("Now this.")]),
    )
    assert "A summary of it all." in json.dumps(bodies[-1])
    old = json.dumps([*first.requests, *bodies[:2], bodies[-1]])
    assert ('"Seen."' in json.dumps(bodies[1]), '"Seen."' in json.dumps(bodies[-1])) == (True, False)
    async with ScriptedServer([long, Reply("SEEN."), long, Reply("SEEN again."), Reply("Now this.")]) as server:
        (outcome,) = await reask(stored, server, id)
    new = json.dumps(server.requests)
    assert new == old.replace('"Seen."', '"SEEN."').replace('"Seen again."', '"SEEN again."')
    assert "A summary of it all." in new, "the summary is not asked for again"
    assert (outcome["requests"], outcome["agreed"], outcome["reworded"]) == (5, 5, 2)


async def test_live_tools_keep_out_of_the_folder_by_a_link_that_led_to_it(machine: "Machine"):
    (real := machine.home / "real" / "inner").mkdir(parents=True)
    machine.project.rmdir()
    machine.project.symlink_to(real.parent)
    await commit(machine, notes="buy milk\n")
    (real / "a").write_text("a\n")
    machine.project /= "inner"
    replies = [Reply(tool_calls=[edit(machine.project / "made", "x\n")]), Reply("Done.")]
    await talk(machine, *replies)
    (id,) = await list_ids(machine)
    (real / "made").unlink()

    async def answer(request: dict[str, Any]) -> Reply:
        copy = Path(re.findall(r"/\S*crow-reask-\S*?/real/inner", json.dumps(request["messages"][0]))[0])
        calls = [edit(copy / "made", "x\n")], [edit(machine.project / "made", "y\n"), edit(real / "made", "z\n")]
        steps = sum(message["role"] == "assistant" for message in request["messages"])
        return Reply(tool_calls=calls[steps]) if steps < 2 else Reply("Done.")

    async with ScriptedServer(answer) as server:
        (outcome,) = await reask(machine, server, id, "--tools", "live", "--mode", "yolo")
    results = [message["content"] for message in server.requests[-1]["messages"] if message["role"] == "tool"]
    assert ["Not run" in result for result in results] == [False, True, True], results
    assert is_gone(f"{real}/made")
    assert outcome["went_on"] == 2


async def test_cost_that_is_unknown_cannot_be_limited(machine: "Machine"):
    await commit(machine, notes="buy milk\n")
    await talk(machine, Reply("One."))
    (id,) = await list_ids(machine)
    async with ScriptedServer([]) as server:
        machine.ask(server.url)
        done = await machine.crow("reask", id, "--tools", "live", "--max-cost", "1")
        assert not server.requests
    assert (done.code, "--max-cost needs the prices of scripted" in done.err) == (2, True), done.err


async def test_live_sessions_have_a_limit_of_their_cost_together(machine: "Machine"):
    await commit(machine, notes="buy milk\n")
    await talk(machine, Reply("One."))
    await talk(machine, Reply("Two."))
    ids = await list_ids(machine)
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "CROW_MODEL"):
        del machine.env[name]
    async with ScriptedServer([Reply("One."), Reply("Two.")]) as server:
        prices = "prices = { input = 1000, output = 10000, currency = 'EUR' }"
        machine.configure(f'[models.scripted]\nbase_url = "{server.url}"\nmodel = "scripted"\n{prices}\n')
        args = (*ids, "--tools", "live", "--at-once", "1", "--json")
        limited = await machine.crow("reask", *args, "--max-cost", "0.001")
        assert (limited.code, len(server.requests)) == (1, 1)
        done = await machine.crow("reask", *args)
        assert (done.code, len(server.requests)) == (0, 2), "what has ended is not asked again"
    first, second = json.loads(limited.out)
    assert (first["error"], "of 0.001 money" in second["error"]) == ("", True)
