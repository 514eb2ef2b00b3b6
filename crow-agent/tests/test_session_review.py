"""Sessions of the terminal in the sandbox: the real terminal tool, real overlays, and a person who answers."""

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from crow_core.testing import Reply, ScriptedModel
from crow_core.testing.script import ScriptedCall as Use
from crow_permissions.review import REVIEW, ReviewSettings
from crow_testing.process_states import is_alive
from crow_testing.reviewed import (
    converse,
    get_diffs,
    get_text,
    in_turn,
    list_names,
    run,
)
from crow_testing.reviewed import project as project
from crow_testing.reviewed import sandbox as sandbox

pytestmark = [pytest.mark.anyio, pytest.mark.posix("there are no terminal sessions")]

KILL: Use = {"name": "terminal", "arguments": {"session": "one", "keys": "kill"}}
SERVE = "python3 -u -m http.server --bind 127.0.0.1 {port}"
LONG = f"4711.{os.getpid()}"
"""Seconds that no process of another test sleeps."""


def in_session(command: str, name: str = "one", **more: Any) -> Use:
    return run(command, session=name, **more)


def type_in(text: str, name: str = "one", **more: Any) -> Use:
    return {"name": "terminal", "arguments": {"session": name, "input": text, **more}}


def edit(path: Path, old: str, new: str) -> Use:
    return {
        "name": "file_editor",
        "arguments": {"command": "str_replace", "path": str(path), "old_str": old, "new_str": new},
    }


def list_layers(sandbox: ReviewSettings) -> list[str]:
    return [name for name in os.listdir(sandbox.folder) if name.startswith("run-")]


async def test_session_that_changes_nothing_is_not_asked_about(sandbox: ReviewSettings, project: Path) -> None:
    model = in_turn(in_session("cat notes.txt"), in_session("tty && echo $(pwd)"), KILL)
    async with converse(project, sandbox, model) as talk:
        assert await talk.prompt() == "one\n"
        assert await talk.prompt() == f"/dev/tty\n{project}\n"
        await talk.prompt()
        assert talk.questions == []
        assert list_layers(sandbox) == []


async def test_what_a_session_changed_is_asked_about_each_time_and_only_once(
    sandbox: ReviewSettings, project: Path
) -> None:
    model = in_turn(
        in_session("echo two >> notes.txt"), in_session("true"), in_session("echo three >> notes.txt; echo x > new.txt")
    )
    async with converse(project, sandbox, model) as talk:
        await talk.prompt()
        assert (project / "notes.txt").read_text() == "one\ntwo\n"
        (first,) = talk.questions
        assert "discarding ends the session" in get_text(first)
        assert [(diff.old_text, diff.new_text) for diff in get_diffs(first)] == [("one\n", "one\ntwo\n")]
        await talk.prompt()
        assert len(talk.questions) == 1
        await talk.prompt()
        assert (project / "notes.txt").read_text() == "one\ntwo\nthree\n"
        assert list_names(project) == ["new.txt", "notes.txt"]
        assert [diff.old_text for diff in get_diffs(talk.questions[1])] == [None, "one\ntwo\n"]
        assert len(talk.questions) == 2


async def test_input_of_a_session_in_the_sandbox_is_asked_about_afterwards(
    sandbox: ReviewSettings, project: Path
) -> None:
    model = in_turn(in_session("python3 -q"), type_in("1 + 1"), type_in("open('made.txt', 'w').write('by python\\n')"))
    async with converse(project, sandbox, model) as talk:
        await talk.prompt()
        assert "2" in await talk.prompt()
        assert talk.questions == []
        await talk.prompt()
        assert len(talk.questions) == 1
        assert (project / "made.txt").read_text() == "by python\n"


async def test_discarding_ends_the_session_and_the_model_is_told(sandbox: ReviewSettings, project: Path) -> None:
    model = in_turn(in_session("rm notes.txt"), in_session("cat notes.txt"))
    async with converse(project, sandbox, model, permit="reject_once") as talk:
        said = await talk.prompt()
        assert "The user discarded what this changed: notes.txt" in said
        assert "The session has ended" in said
        assert (project / "notes.txt").read_text() == "one\n"
        assert list_layers(sandbox) == []
        assert await talk.prompt() == "one\n"


async def test_mode_accept_edits_applies_what_a_session_changed_and_asks_about_protected_files(
    sandbox: ReviewSettings, project: Path
) -> None:
    model = in_turn(in_session("echo two >> notes.txt"), in_session("echo all: > Makefile; echo x > AGENTS.md"))
    async with converse(project, sandbox, model, mode="accept-edits") as talk:
        await talk.prompt()
        assert talk.questions == []
        assert (project / "notes.txt").read_text() == "one\ntwo\n"
        await talk.prompt()
        assert len(talk.questions) == 1
        assert "AGENTS.md" in get_text(talk.questions[0])


async def test_mode_plan_throws_away_what_a_session_changed_when_it_ends(
    sandbox: ReviewSettings, project: Path
) -> None:
    model = in_turn(in_session("echo two >> notes.txt"), in_session("cat notes.txt"), KILL)
    async with converse(project, sandbox, model, mode="plan") as talk:
        assert "what this session changes is discarded when it ends: notes.txt" in await talk.prompt()
        assert (await talk.prompt()).startswith("one\ntwo\n")
        await talk.prompt()
        assert talk.questions == []
        assert (project / "notes.txt").read_text() == "one\n"
        assert list_layers(sandbox) == []


async def test_commands_reach_the_server_of_a_session(sandbox: ReviewSettings, project: Path) -> None:
    fetch = (
        "python3 -c 'import urllib.request as r; print(r.urlopen(\"http://127.0.0.1:8765/notes.txt\").read().decode())'"
    )
    model = in_turn(
        in_session(SERVE.format(port=8765), wait=5), run(fetch), in_session("echo $(true)", name="two"), run(fetch)
    )
    async with converse(project, sandbox, model) as talk:
        assert "Serving HTTP" in await talk.prompt()
        assert (await talk.prompt()).startswith("one\n")
        replaced = project / ".notes"
        replaced.write_text("by the user\n")
        replaced.rename(project / "notes.txt")
        (project / "other.txt").write_text("new\n")
        await talk.prompt()
        assert (await talk.prompt()).startswith("by the user\n")
        assert talk.questions == []


async def test_programs_of_a_session_see_what_crow_and_the_user_change(sandbox: ReviewSettings, project: Path) -> None:
    look = "cat notes.txt new.txt gone.txt 2>&1 | tr '\\n' ' '"
    (project / "gone.txt").write_text("there\n")
    model = in_turn(
        in_session(look),
        edit(project / "notes.txt", "one", "by crow"),
        run("echo by a command > new.txt"),
        in_session(look),
        in_session(look),
    )
    async with converse(project, sandbox, model, mode="accept-edits") as talk:
        assert "one cat: new.txt: No such file or directory there" in await talk.prompt()
        await talk.prompt()
        await talk.prompt()
        (project / "gone.txt").unlink()
        assert await talk.prompt() == "by crow by a command cat: gone.txt: No such file or directory "
        for name in ("notes.txt", "new.txt", "gone.txt"):
            (project / "temporary").write_text(f"{name} of the user\n")
            (project / "temporary").rename(project / name)
        assert await talk.prompt() == "notes.txt of the user new.txt of the user gone.txt of the user "
        assert talk.questions == []
        assert (project / "notes.txt").read_text() == "notes.txt of the user\n"


async def test_file_that_the_session_and_somebody_else_changed_is_asked_about(
    sandbox: ReviewSettings, project: Path
) -> None:
    model = in_turn(in_session("echo two >> notes.txt; read line; echo $line >> notes.txt"), type_in("three"))
    async with converse(project, sandbox, model, mode="accept-edits") as talk:
        await talk.prompt()
        assert (project / "notes.txt").read_text() == "one\ntwo\n"
        assert talk.questions == []
        (project / "notes.txt").write_text("the user's\n")
        await talk.prompt()
        # The program saw the user's text when it wrote its line.
        assert (project / "notes.txt").read_text() == "the user's\nthree\n"
        assert talk.questions == []


async def test_change_of_somebody_else_between_two_of_the_session_is_a_conflict(
    sandbox: ReviewSettings, project: Path
) -> None:
    loop = "touch begun; until test -e go; do sleep 0.02; done; echo two >> notes.txt; cat"
    model = in_turn(in_session(loop), type_in("x"))
    async with converse(project, sandbox, model, permit="reject_once", mode="accept-edits") as talk:
        await talk.prompt()
        view = Path(f"/proc/{find_shell(talk.session)}/root{project}")
        (view / "go").touch()  # as a program of the session does
        async with asyncio.timeout(60):
            while "two" not in (view / "notes.txt").read_text():
                await asyncio.sleep(0.01)
        (project / "notes.txt").write_text("the user's\n")
        await talk.prompt()
        assert len(talk.questions) == 1
        assert "somebody else has changed it meanwhile" in get_text(talk.questions[0])
        assert (project / "notes.txt").read_text() == "the user's\n"


async def test_changes_of_a_session_can_be_undone(sandbox: ReviewSettings, project: Path) -> None:
    model = in_turn(in_session("echo two > notes.txt; echo new > new.txt"), in_session("cat notes.txt"))
    async with converse(project, sandbox, model) as talk:
        await talk.prompt()
        assert list_names(project) == ["new.txt", "notes.txt"]
        await talk.editor.prompt(talk.id, "/undo")
        await talk.editor.prompt(talk.id, "/undo yes")
        assert list_names(project) == ["notes.txt"]
        assert (project / "notes.txt").read_text() == "one\n"
        assert await talk.prompt() == "one\n"
        assert len(talk.questions) == 1


async def test_nothing_is_left_of_a_session_when_the_conversation_has_closed(
    sandbox: ReviewSettings, project: Path
) -> None:
    model = in_turn(in_session(f"sleep {LONG} & echo two >> notes.txt; echo $(true)"))
    async with converse(project, sandbox, model, mode="plan") as talk:
        await talk.prompt()
        pid = find_shell(talk.session)
        assert list_layers(sandbox) != []
    async with asyncio.timeout(60):
        while is_alive(pid):
            await asyncio.sleep(0.01)
    assert os.listdir(sandbox.folder) == []
    async with asyncio.timeout(60):
        while f"sleep\0{LONG}" in list_processes():
            await asyncio.sleep(0.01)


def list_processes() -> str:
    found: list[str] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found.append((folder / "cmdline").read_text(errors="replace"))
    return "\n".join(found)


async def test_cancelled_command_of_a_session_ends_it(sandbox: ReviewSettings, project: Path) -> None:
    model = in_turn(in_session(f"echo two >> notes.txt; sleep {LONG}", wait=100), in_session("cat notes.txt"))
    async with converse(project, sandbox, model) as talk:
        turn = asyncio.ensure_future(talk.editor.prompt(talk.id, "go"))
        async with asyncio.timeout(60):
            while f"sleep\0{LONG}" not in list_processes():
                await asyncio.sleep(0.01)
        await talk.editor.cancel(talk.id)
        await turn
        assert talk.questions == []
        assert list_layers(sandbox) == []
        async with asyncio.timeout(60):
            while f"sleep\0{LONG}" in list_processes():
                await asyncio.sleep(0.01)
        assert (project / "notes.txt").read_text() == "one\n"
        await talk.prompt("The model says that it is done.")
        assert await talk.prompt() == "one\n"


async def test_cancelled_question_leaves_the_session_and_is_asked_again(sandbox: ReviewSettings, project: Path) -> None:
    uses = (in_session("echo two >> notes.txt"), in_session("true"))
    model = ScriptedModel([Reply(tool_calls=[use]) for use in uses])
    async with converse(project, sandbox, model, None) as talk:
        for count in (1, 2):
            turn = asyncio.ensure_future(talk.editor.prompt(talk.id, "go"))
            await talk.editor.until(lambda editor, count=count: len(editor.questions) == count)
            await talk.editor.cancel(talk.id)
            await turn
        assert (project / "notes.txt").read_text() == "one\n"
        assert [diff.new_text for diff in get_diffs(talk.questions[1])] == ["one\ntwo\n"]


async def test_session_that_ended_by_itself_is_opened_anew_in_the_sandbox(
    sandbox: ReviewSettings, project: Path
) -> None:
    (project / "go").touch()  # a program that has missed a file in the view may not find it later
    model = in_turn(
        in_session("(until [ -s go ]; do sleep 0.05; done; kill -9 $$) & echo two >> notes.txt"),
        in_session("echo three >> notes.txt"),
        in_session("echo three >> notes.txt; echo $(readlink /proc/self/ns/pid)"),
    )
    async with converse(project, sandbox, model, mode="accept-edits") as talk:
        await talk.prompt()
        pid = find_shell(talk.session)
        (project / "go").write_text("go\n")
        async with asyncio.timeout(60):
            while is_alive(pid):
                await asyncio.sleep(0.01)
        said = await talk.prompt()
        if "not run" in said:  # its end was seen before the command was given
            assert (project / "notes.txt").read_text() == "one\ntwo\n"
        assert os.readlink("/proc/self/ns/pid") not in await talk.prompt()
        assert (project / "notes.txt").read_text() == "one\ntwo\nthree\n"
        assert talk.questions == []


async def test_programs_of_a_session_are_interrupted_and_go_on(sandbox: ReviewSettings, project: Path) -> None:
    model = in_turn(
        in_session("sleep 1000", wait=0.5),
        {"name": "terminal", "arguments": {"session": "one", "keys": "C-c"}},
        in_session("sleep 1000", timeout=0.5),
        in_session("echo $(echo alive)"),
    )
    async with converse(project, sandbox, model) as talk:
        assert "still running" in await talk.prompt()
        assert "[exit code 130]" in await talk.prompt()
        assert "timed out" in await talk.prompt()
        assert await talk.prompt() == "alive\n"
        assert talk.questions == []


async def test_session_that_was_opened_outside_of_the_sandbox_is_asked_about_before(
    sandbox: ReviewSettings, project: Path
) -> None:
    model = in_turn(in_session("readlink /proc/self/ns/pid"), in_session("echo $(true) >> notes.txt"))
    async with converse(project, sandbox, model, mode="yolo", permit="reject_once") as talk:
        assert await talk.prompt() == os.readlink("/proc/self/ns/pid") + "\n"
        await talk.editor.set_option(talk.id, "mode", "ask")
        assert "was not run" in await talk.prompt()  # what it changes could not be seen
        assert len(talk.questions) == 1


PROGRAM = """
import asyncio, sys
from pathlib import Path
from crow_permissions.review import ReviewSettings
from crow_testing.reviewed import converse, in_turn, run

async def main(project, sandbox):
    command = "echo two > notes.txt; sleep 2468 & sleep 2469"
    model = in_turn(run(command, session="one", wait=1), run("true $(true)"))
    async with converse(Path(project), ReviewSettings(Path(sandbox)), model, mode="plan") as talk:
        await talk.prompt()
        print("begun", flush=True)
        await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_killed_crow_leaves_no_process_and_no_layer_of_a_session(sandbox: ReviewSettings, project: Path) -> None:
    words = [sys.executable, "-c", PROGRAM, str(project), str(sandbox.folder)]
    crow = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    assert crow.stdout
    assert await crow.stdout.readline() == b"begun\n"
    assert "sleep\0002468" in list_processes()
    crow.kill()
    await crow.wait()
    async with asyncio.timeout(60):
        while any(each in list_processes() for each in ("sleep\0002468", "sleep\0002469", f"{project}\0")):
            await asyncio.sleep(0.01)
    assert list_layers(sandbox) != []
    async with converse(project, sandbox, in_turn(in_session("cat notes.txt"), KILL)) as talk:
        assert await talk.prompt() == "one\n"
        await talk.prompt()
        assert list_layers(sandbox) == []


def find_shell(session: Any) -> int:
    from crow_sandbox.lasting import find_process

    (command,) = session.state[REVIEW].commands.values()
    return find_process(command.run.folder / "info")
