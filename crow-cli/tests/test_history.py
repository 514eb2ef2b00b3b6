"""`crow sessions`, `crow prompts` and `crow calls` as real commands, with text and JSON output."""

import asyncio
import json
import os
import re
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from crow_core.testing import Failure, Reply, ScriptedCall, ScriptedServer

if TYPE_CHECKING:
    from crow_testing.command_fixtures import CommandResult, Machine

pytestmark = pytest.mark.anyio

KEY = "sk-ant-api03-Zq3vT9xLm2Rk8WpYc5Hd7NbJ4sGf6Ua1"
STEERING = "up \x1b[31mred\x1b]0;title\x07 \x9b2J\x9d52;c;aGk=\x9c\x08\x7f\rdown \u202eback"


def command(line: str) -> ScriptedCall:
    return {"name": "terminal", "arguments": {"command": line}}


def controls(text: str) -> list[str]:
    """List the characters that control a terminal, except newlines, or change the direction of text."""
    return re.findall(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)


async def talk(machine: "Machine", *replies: Reply, prompt: str = "Say hello") -> ScriptedServer:
    """Run a session in the project and return the model's server."""
    async with ScriptedServer([*replies] or [Reply("Hello from crow.")]) as server:
        machine.ask(server.url)
        done = await machine.crow("run", "--yolo", prompt)
    assert done.code == 0, done.err
    return server


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


async def test_sessions_of_this_folder_are_listed_the_latest_first(machine: "Machine"):
    await talk(machine, prompt="The first question")
    await talk(machine, prompt="The second question")
    machine.project = machine.home
    await talk(machine, prompt="Elsewhere")
    (elsewhere,) = await read(machine, "sessions", "list")
    every = await read(machine, "sessions", "list", "--all")
    assert [one["title"] for one in every] == ["Elsewhere", "The second question", "The first question"]
    assert (elsewhere["title"], elsewhere["cwd"]) == ("Elsewhere", str(machine.home))
    table = (await run_command(machine, "sessions", "list", "--all", "--limit", "2")).out.splitlines()
    assert table[0].split() == ["ID", "UPDATED", "FOLDER", "TITLE"]
    assert [line.split()[0] for line in table[1:]] == [one["id"][:8] for one in every[:2]]
    assert all(len(line) <= 80 for line in table)


async def test_a_session_is_shown_as_it_happened_or_as_the_model_sees_it(machine: "Machine"):
    (machine.project / "a.txt").write_text("one\n")
    edit: ScriptedCall = {
        "name": "file_editor",
        "arguments": {"command": "str_replace", "path": "a.txt", "old_str": "one", "new_str": "two"},
    }
    look: ScriptedCall = {"name": "file_editor", "arguments": {"command": "view", "path": "a.txt"}}
    replies = [Reply("I edit.", reasoning="Hm.", tool_calls=[look]), Reply(tool_calls=[edit]), Reply("Done.")]
    server = await talk(machine, *replies, prompt="Change a.txt")
    id = (await read(machine, "sessions", "list"))[0]["id"]
    shown = (await run_command(machine, "sessions", "show", id[:5])).out
    for text in (
        "Change a.txt",
        "  Hm.",
        "  I edit.",
        "● str_replace a.txt",
        "  -one\n  +two\n",
        "  Done.",
        "mode yolo",
    ):
        assert text in shown
    seen = (await run_command(machine, "sessions", "show", id, "--view")).out
    assert "You are crow" in seen
    assert "Hm." not in seen
    assert (await read(machine, "sessions", "show", id, "--view"))[: len(server.requests[-1]["messages"])] == [
        {**message, **({"reasoning_content": "Hm."} if message["content"] == "I edit." else {})}
        for message in server.requests[-1]["messages"]
    ]
    head, *log = await read(machine, "sessions", "show", id)
    assert head["crow"]["id"] == id
    assert [entry["role"] for entry in log if "role" in entry] == [
        *["user", "assistant", "tool"],
        *["assistant", "tool"],
        "assistant",
    ]


async def test_search_finds_messages_of_this_folder_or_everywhere(machine: "Machine"):
    await talk(machine, Reply("Use docker compose."), prompt="How do I start it?")
    (hit,) = await read(machine, "sessions", "search", "docker", "compose")
    assert (hit["kind"], hit["title"]) == ("assistant", "How do I start it?")
    found = await run_command(machine, "sessions", "search", '"docker compose"')
    assert "Use docker compose." in found.out
    machine.project = machine.home
    nothing = await machine.crow("sessions", "search", "docker")
    assert (nothing.code, nothing.out, nothing.err) == (
        1,
        "",
        "Nothing was found in this folder's sessions; try --everywhere.\n",
    )
    assert "Use docker compose." in (await run_command(machine, "sessions", "search", "docker", "--everywhere")).out


@pytest.mark.parametrize("format", ["markdown", "jsonl", "html", "atif"])
async def test_export_masks_secrets_unless_no_redact_is_given(machine: "Machine", format: str):
    await talk(machine, Reply(f"Your key is {KEY}."))
    id = (await read(machine, "sessions", "list"))[0]["id"]
    masked = await run_command(machine, "sessions", "export", id, "--format", format)
    assert KEY not in masked.out
    assert "[redacted]" in masked.out
    assert masked.err.startswith("Secrets masked: 1.")
    whole = await run_command(machine, "sessions", "export", id, "--format", format, "--no-redact")
    assert KEY in whole.out
    assert whole.err == ""
    file = machine.project / "out"
    assert (await run_command(machine, "sessions", "export", id, "--format", format, "-o", str(file))).out == ""
    assert file.read_text() == masked.out
    wrong = await machine.crow("sessions", "export", id, "-o", "no/such/folder")
    assert (wrong.code, wrong.err.partition("(")[0]) == (2, "crow: no/such/folder cannot be written ")


async def test_fork_continues_from_an_entry(machine: "Machine"):
    await talk(machine, Reply("One.", tool_calls=[command("true")]), Reply("Two."))
    id = (await read(machine, "sessions", "list"))[0]["id"]
    _, *log = await read(machine, "sessions", "show", id)
    first = next(entry["crow"]["id"] for entry in log if entry.get("content") == "One.")
    fork = (await run_command(machine, "sessions", "fork", id[:6], "--at", first[:10])).out.strip()
    _, *forked = await read(machine, "sessions", "show", fork)
    assert forked == log[: log.index(forked[-1]) + 1]
    assert forked[-1]["content"] == "One."
    whole = (await run_command(machine, "sessions", "fork", id)).out.strip()
    assert [e for e in (await read(machine, "sessions", "show", whole))[1:] if "role" in e] == [
        e for e in log if "role" in e
    ]
    wrong = await machine.crow("sessions", "fork", id, "--at", "xyz")
    assert (wrong.code, wrong.out) == (2, "")
    assert "There is no entry that begins with 'xyz'" in wrong.err


async def test_sessions_are_deleted_after_confirmation(machine: "Machine"):
    for prompt in ("one", "two", "three"):
        await talk(machine, prompt=prompt)
    three, two, one = (each["id"] for each in await read(machine, "sessions", "list"))
    kept = await machine.crow("sessions", "delete", one, stdin="n\n")
    assert (kept.code, one[:8] in kept.out) == (1, True)
    assert (await machine.crow("sessions", "delete", one, "nothing", "--yes")).code == 2
    assert len(await read(machine, "sessions", "list")) == 3
    assert (await run_command(machine, "sessions", "delete", one[:8], two, "--yes")).err == "Deleted 2 sessions.\n"
    assert (await run_command(machine, "sessions", "delete", three, *["-y"])).out == ""
    nothing = await run_command(machine, "sessions", "list")
    assert (nothing.out, nothing.err) == ("", "There are no sessions of this folder; --all shows others.\n")
    assert await read(machine, "sessions", "list") == []


async def test_prompts_have_versions_that_can_be_compared(machine: "Machine"):
    template = machine.home / "system.md.j2"
    machine.configure(f'[prompts]\nsystem = "{template}"\n')
    for text in ("You are a crow in {{ cwd }}.\n", "You are a raven in {{ cwd }}.\n"):
        template.write_text(text)
        await talk(machine)
    listed = await read(machine, "prompts", "list")
    rows = [(one["name"], one["number"], one["variables"], one["renders"]) for one in listed]
    assert ("compaction", 1, ["instructions", "kept", "words"], 0) in rows
    assert rows[-2:] == [("system", 1, ["cwd"], 1), ("system", 2, ["cwd"], 1)]
    table = (await run_command(machine, "prompts", "list")).out.splitlines()
    names = [line.split()[0] for line in table]
    assert names == ["PROMPT", *(f"{one['name']}@{one['number']}" for one in listed)]
    assert (await run_command(machine, "prompts", "show", "system")).out.strip() == "You are a raven in {{ cwd }}."
    assert (await read(machine, "prompts", "show", "system@1"))["template"].strip() == "You are a crow in {{ cwd }}."
    changed = (await run_command(machine, "prompts", "diff", "system@1", "system@2")).out.splitlines()
    assert [line.strip() for line in changed[3:]] == ["-You are a crow in {{ cwd }}.", "+You are a raven in {{ cwd }}."]
    assert (
        await run_command(machine, "prompts", "diff", "system", "system@2")
    ).err == "The two versions are the same.\n"
    latest, first = await read(machine, "prompts", "history", "system", "--text")
    assert (latest["number"], first["number"]) == (2, 1)
    assert first["text"] == f"You are a crow in {machine.project}."
    assert first["variables"]["cwd"] == str(machine.project)
    assert (
        f"  You are a raven in {machine.project}."
        in (await run_command(machine, "prompts", "history", "system", "--text")).out
    )
    assert len((await run_command(machine, "prompts", "history", "system@2")).out.splitlines()) == 2


async def test_version_of_a_prompt_is_promoted_pinned_to_a_project_and_used_in_a_session(machine: "Machine"):
    own, pinned = Path(machine.env["CROW_HOME"], "prompts"), machine.project / ".crow" / "prompts"
    os.makedirs(own)
    for text in ("You are a crow in {{ cwd }}.\n", "You are a raven in {{ cwd }}.\n", "You are in {{ nowhere }}.\n"):
        (own / "system.md.j2").write_text(text)
        await machine.crow("run", "hi") if "nowhere" in text else await talk(machine)

    async def sent() -> str:
        return (await talk(machine)).requests[-1]["messages"][0]["content"]

    (own / "system.md.j2").write_text("Never used.\n")
    refused = await machine.crow("prompts", "promote", "system@1")
    assert (refused.code, "would be lost" in refused.err) == (2, True)
    (own / "system.md.j2").unlink()
    assert (await run_command(machine, "prompts", "promote", "system@2")).out.endswith("is system@2.\n")
    assert await sent() == f"You are a raven in {machine.project}."
    assert "in place of system@2" in (await run_command(machine, "prompts", "promote", "system@1")).out
    assert await sent() == f"You are a crow in {machine.project}."
    await run_command(machine, "prompts", "pin", "system@2")
    assert await sent() == f"You are a crow in {machine.project}.", "the folder is not trusted"
    await run_command(machine, "trust", "--yes")
    assert await sent() == f"You are a raven in {machine.project}."
    assert "which was system@2" in (await run_command(machine, "prompts", "unpin", "system")).err
    assert not (pinned / "system.md.j2").exists()
    assert "'nowhere' is undefined" in (await machine.crow("prompts", "promote", "system@3")).err

    server = ScriptedServer([Reply("One."), Reply("Two.")])
    async with server:
        machine.ask(server.url)
        async with machine.editor() as editor:
            id = (await editor.new_session(str(machine.project))).session_id
            await editor.prompt(id, "Hello.")
            await editor.prompt(id, "/prompts use system@7")
            assert "system has no version 7" in editor.text
            await editor.prompt(id, "/prompts use system@2")
            await editor.prompt(id, "Hello again.")
    said = [request["messages"][0]["content"].split()[3] for request in server.requests]
    assert said == ["crow", "raven"]


async def test_session_becomes_a_task_whose_checks_are_to_be_filled_in(machine: "Machine"):
    git = ["git", "-C", str(machine.project), "-c", "user.name=me", "-c", "user.email=me@here"]
    (machine.project / "notes.txt").write_text("buy milk\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "Begin"]):
        await asyncio.to_thread(subprocess.run, [*git, *words], check=True)
    await talk(machine, prompt="What do the notes say?")
    (session,) = await read(machine, "sessions", "list")
    made = await machine.crow("sessions", "to-task", session["id"][:8], "--into", "tasks")
    name = f"task-{session['id'][:8]}"
    assert (made.code, made.out) == (1, f"tasks/{name}\n"), "it has no checks"
    assert "as recorded" in made.err
    (machine.project / "tasks" / name).rename(machine.project / "task")
    assert (machine.project / "task" / "prompt.md").read_text() == "What do the notes say?\n"
    refused = await machine.crow("eval", "--validate", "task")
    assert (refused.code, "checks: there are none" in refused.err) == (2, True)
    with (machine.project / "task" / "task.toml").open("a") as task:
        task.write('[[checks]]\nkind = "answer"\ncontains = "milk"\n')
    async with ScriptedServer([Reply("Buy milk.")]) as server:
        machine.ask(server.url)
        done = await machine.crow("eval", "task", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["cells"][0]["state"] == "passed"
    (machine.project / name).mkdir()
    again = await machine.crow("sessions", "to-task", session["id"])
    assert (again.code, f"{name} exists" in again.err) == (2, True)
    assert "has 1 prompts" in (await machine.crow("sessions", "to-task", session["id"], "--turn", "2")).err


async def test_task_of_a_session_starts_from_the_changes_that_were_recorded_with_it(machine: "Machine"):
    git = ["git", "-C", str(machine.project), "-c", "user.name=me", "-c", "user.email=me@here"]
    for name in ("notes.txt", "old.txt"):
        (machine.project / name).write_text("committed\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "Begin"]):
        await asyncio.to_thread(subprocess.run, [*git, *words], check=True)
    (machine.project / "notes.txt").write_text("buy milk\n")
    (machine.project / "old.txt").unlink()
    (machine.project / "new").mkdir()
    (machine.project / "new" / "bytes").write_bytes(b"\xff\0")
    await talk(machine, prompt="What do the notes say?")
    for words in (["add", "."], ["commit", "-qm", "Later"]):
        await asyncio.to_thread(subprocess.run, [*git, *words], check=True)
    (session,) = await read(machine, "sessions", "list")
    assert ", with 3 changed files" in (await run_command(machine, "sessions", "show", session["id"])).out
    exported = await run_command(machine, "sessions", "export", session["id"], "--format", "jsonl")
    (marker,) = [line["crow"] for line in map(json.loads, exported.out.splitlines()) if "changes" in line["crow"]]
    assert [one["path"] for one in marker["changes"]] == ["notes.txt", "old.txt", "new/bytes"]
    made = await machine.crow("sessions", "to-task", session["id"][:8], "--into", "tasks")
    (machine.project / "tasks" / f"task-{session['id'][:8]}").rename(machine.project / "task")
    assert f"The task starts from {marker['commit'][:12]} and the 3 changes of then, as recorded." in made.err
    (machine.project / "task" / "check.py").write_text(
        "from pathlib import Path\n\ndef check(folder: Path, answer: str) -> bool:\n"
        "    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob('*')\n"
        "             if path.is_file() and '.git' not in path.parts}\n"
        "    assert files == {'notes.txt': b'buy milk\\n', 'new/bytes': b'\\xff\\0'}, files\n"
    )
    with (machine.project / "task" / "task.toml").open("a") as task:
        task.write('[[checks]]\nkind = "python"\nfunction = "check.py:check"\n')
    async with ScriptedServer([Reply("Buy milk.")]) as server:
        machine.ask(server.url)
        done = await machine.crow("eval", "task", "--json")
    assert done.code == 0, done
    assert json.loads(done.out)["cells"][0]["state"] == "passed", done
    assert (await machine.crow("run", "-r", session["id"], "/usage")).code == 0, "the session can be continued"
    await run_command(machine, "sessions", "delete", "-y", session["id"])
    (file,) = machine.home.rglob("crow.db")
    with closing(sqlite3.connect(file)) as database:
        left = database.execute("SELECT body FROM messages WHERE kind = 'worktree'").fetchall()
    assert not any(str(machine.project) in body for (body,) in left), "the state is deleted with its session"


async def test_printed_request_is_what_was_sent(machine: "Machine"):
    replies = [Reply("I look.", reasoning="Hm.", tool_calls=[command("echo ünïcödé")]), Reply("Done.")]
    server = await talk(machine, *replies)
    listed = await read(machine, "calls", "list")
    assert [call["purpose"] for call in listed] == ["turn", "turn"]
    bodies = [
        (await run_command(machine, "calls", "show", call["id"][:9], "--request")).out for call in reversed(listed)
    ]
    assert [body.encode() for body in bodies] == server.bodies
    shown = await read(machine, "calls", "show", listed[0]["id"])
    assert shown == listed[0]
    assert (shown["model"], shown["stop_reason"], shown["prompt"], shown["version"]) == (
        "scripted",
        "stop",
        "system",
        1,
    )
    facts = (await run_command(machine, "calls", "show", shown["id"])).out
    assert "system@1" in facts
    assert f"Body      sha256 {sha256(server.bodies[-1]).hexdigest()}" in facts
    assert server.url in facts
    id = (await read(machine, "sessions", "list"))[0]["id"]
    table = (await run_command(machine, "calls", "list", id[:4])).out.splitlines()
    assert [line.split()[0] for line in table[1:]] == [call["id"][:8] for call in listed]
    assert all(len(line) <= 80 for line in table)


async def test_failed_model_call_is_listed_with_its_error(machine: "Machine"):
    async with ScriptedServer([Failure(400, "No such model.")]) as server:
        machine.ask(server.url)
        assert (await machine.crow("run", "Hi")).code == 1
    (call,) = await read(machine, "calls", "list")
    assert call["error"]
    assert "FAILED" in (await run_command(machine, "calls", "list")).out
    assert call["error"][:30] in (await run_command(machine, "calls", "show", call["id"])).out


async def test_stored_text_does_not_control_the_terminal(machine: "Machine"):
    """This covers text of models, tools, prompts, titles and folders, and text that the user typed."""
    machine.project = machine.home / "folder \x1b[31m"
    machine.project.mkdir()
    line = f"printf '{STEERING.encode('unicode_escape').decode()}'".replace("\\u202e", "")
    await talk(
        machine,
        Reply(STEERING, reasoning=STEERING, tool_calls=[command(line)]),
        Reply(f"Done: {STEERING}"),
        prompt=STEERING,
    )
    id = (await read(machine, "sessions", "list"))[0]["id"]
    call = (await read(machine, "calls", "list"))[0]["id"]
    tried = (
        ("sessions", "list", "--all"),
        ("sessions", "list", "--all", "--json"),
        ("sessions", "show", id),
        ("sessions", "show", id, "--json"),
        ("sessions", "show", id, "--view"),
        ("sessions", "search", "red"),
        ("sessions", "search", "red", "--json"),
        *(("sessions", "export", id, "--format", format) for format in ("markdown", "jsonl", "html", "atif")),
        ("prompts", "history", "system", "--text"),
        ("calls", "list"),
        ("calls", "show", call),
        ("calls", "show", call, "--json"),
        ("sessions", "show", STEERING),
        ("prompts", "show", STEERING),
        ("calls", "show", STEERING),
        ("sessions", "delete", id),
    )
    for args, done in zip(tried, await asyncio.gather(*(machine.crow(*args) for args in tried)), strict=True):
        assert not controls(done.out), args
        assert not controls(done.err), args
        assert done.out or done.err


def no_file(machine: "Machine") -> str:
    database(machine).write_bytes(os.urandom(5000))
    return "is no SQLite database"


def foreign(machine: "Machine") -> str:
    with closing(sqlite3.connect(database(machine))) as connection, connection:
        connection.execute("CREATE TABLE other (x)")
    return "belongs to another program"


def wrong_setting(machine: "Machine") -> str:
    machine.configure("[database]\nurl = 5\n")
    return "database.url"


def no_server(machine: "Machine") -> str:
    machine.configure('[database]\nurl = "postgresql+psycopg://me:secret@127.0.0.1:1/x"\n')
    return "127.0.0.1:1"


def database(machine: "Machine") -> Path:
    file = Path(machine.env["CROW_HOME"], "crow.db")
    file.parent.mkdir(exist_ok=True)
    return file


@pytest.mark.parametrize("break_", [no_file, foreign, wrong_setting, no_server])
async def test_unreadable_database_is_one_sentence(machine: "Machine", break_: Callable[["Machine"], str]):
    words = break_(machine)
    tried = (("sessions", "list"), ("sessions", "search", "a"), ("sessions", "fork", "a"), ("calls", "list"))
    for done in await asyncio.gather(*(machine.crow(*args) for args in tried)):
        assert (done.code, done.out) == (2, ""), done
        assert done.err.startswith("crow: ")
        assert words in done.err
        assert "Traceback" not in done.err
        assert "secret" not in done.err


async def test_unknown_id_is_one_sentence(machine: "Machine"):
    await talk(machine)
    tried = [
        (("sessions", "show", "nothing"), "There is no session 'nothing'."),
        (("sessions", "show", ""), "There is no session ''."),
        (("sessions", "show", "%"), "There is no session '%'."),
        (("sessions", "export", "nothing"), "There is no session 'nothing'."),
        (("sessions", "fork", "nothing"), "There is no session 'nothing'."),
        (("sessions", "delete", "nothing", "-y"), "There is no session 'nothing'."),
        (
            ("prompts", "show", "nothing"),
            "Known prompts: agents, command, compaction, goal, nested, skill, skills, small, system.",
        ),
        (("prompts", "diff", "system", "system@7"), "has no version 7"),
        (
            ("prompts", "history", "nothing"),
            "Known prompts: agents, command, compaction, goal, nested, skill, skills, small, system.",
        ),
        (("calls", "show", "nothing"), "There is no model call 'nothing'."),
        (("calls", "list", "nothing"), "There is no session 'nothing'."),
    ]
    for done, words in [(await machine.crow(*args), words) for args, words in tried]:
        assert (done.code, done.out) == (2, ""), done
        assert words in done.err


async def test_damage_is_reported_and_the_rest_is_shown(machine: "Machine"):
    await talk(machine, Reply("One.", tool_calls=[command("true")]), Reply("Two."))
    id = (await read(machine, "sessions", "list"))[0]["id"]
    call = (await read(machine, "calls", "list"))[0]["id"]
    with closing(sqlite3.connect(database(machine))) as connection, connection:
        connection.execute("UPDATE messages SET body = '{' WHERE kind = 'tool'")
    shown = await run_command(machine, "sessions", "show", id)
    assert "Two." in shown.out
    assert re.search(r"\d+ of \d+ messages", shown.err)
    request = await machine.crow("calls", "show", call, "--request")
    assert request.code == 1
    assert json.loads(request.out)["model"] == "scripted"
    assert "This differs from what was sent" in request.err


async def test_image_of_an_exported_trajectory_is_a_file_beside_it(machine: "Machine"):
    from crow_core.acp.schema import ImageBlock, TextBlock

    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
    async with ScriptedServer([Reply("A pixel.")]) as server:
        machine.ask(server.url)
        async with machine.editor() as editor:
            session = await editor.new_session(str(machine.project))
            image = ImageBlock(data=pixel, mime_type="image/png")
            await editor.prompt(session.session_id, [TextBlock(text="What is this?"), image])
    file = machine.project / "trajectories" / "one.json"
    file.parent.mkdir()
    await run_command(machine, "sessions", "export", session.session_id, "--format", "atif", "-o", str(file))
    (image_path,) = (file.parent / "images").iterdir()
    assert image_path.read_bytes().startswith(b"\x89PNG")
    assert f"images/{image_path.name}" in file.read_text()
    piped = await run_command(machine, "sessions", "export", session.session_id, "--format", "atif")
    assert "It refers to 1 images" in piped.err
