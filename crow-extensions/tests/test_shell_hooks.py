"""Commands of the user as hooks."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from crow_core.app import Crow
from crow_core.masking import MASK
from crow_core.mcp.server import Server
from crow_core.testing import Editor, Reply, ScriptedModel, connect
from crow_extensions.mask_secrets import mask_secrets
from crow_extensions.shell_hooks import ShellHook, shell_hooks
from crow_permissions.extension import permissions
from fastmcp import FastMCP

pytestmark = pytest.mark.anyio


def add_server(ran: list[int]) -> Server:
    server = FastMCP("maths")

    @server.tool
    def add(a: int, b: int) -> int:
        ran.append(a + b)
        return a + b

    return Server("maths", lambda: server, shared=True)


def complain(text: str, code: int = 2) -> ShellHook:
    """Make a hook that prints a text to standard error and ends with an exit code."""
    if sys.platform == "win32":
        return ShellHook(
            command=[sys.executable, "-c", f"import sys; print({text!r}, file=sys.stderr); sys.exit({code})"]
        )
    return ShellHook(command=f"echo '{text}' >&2; exit {code}")


async def turn(folder: Path, **hooks: Any) -> tuple[Editor, ScriptedModel, list[int]]:
    """Run a turn that adds 2 and 3; return the editor, the model, and the sums."""
    ran: list[int] = []
    call = Reply(tool_calls=[{"name": "maths_add", "arguments": {"a": 2, "b": 3}, "id": "one"}])
    model = ScriptedModel([call, Reply("Done.")])
    crow = Crow(model, servers=[add_server(ran)]).use(shell_hooks, **hooks).use(permissions)
    async with connect(crow) as editor:
        session = await editor.new_session(str(folder))
        await editor.prompt(session.session_id, "2 + 3?")
    return editor, model, ran


def result(model: ScriptedModel) -> str:
    return model.requests[-1]["messages"][-1]["content"]


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_a_command_is_told_that_crow_waits_for_an_answer(tmp_path: Path):
    call = Reply(tool_calls=[{"name": "maths_add", "arguments": {"a": 2, "b": 3}, "id": "one"}])
    os.mkfifo(pipe := tmp_path / "pipe")
    crow = Crow(ScriptedModel([call, Reply("Done.")]), servers=[add_server([])])
    crow.use(shell_hooks, question=[ShellHook(command=f"cat > {pipe}")]).use(permissions)
    async with connect(crow) as editor:
        editor.waits["session/request_permission"] = told_about = asyncio.Event()
        session = await editor.new_session(str(tmp_path))
        turn = asyncio.ensure_future(editor.prompt(session.session_id, "2 + 3?"))
        told = json.loads(await asyncio.to_thread(pipe.read_text))
        told_about.set()
        await turn
    assert told["moment"] == "question"
    assert "add" in told["question"]


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_a_shell_hook_receives_what_happens_as_json(tmp_path: Path):
    moments = ["session_start", "before_prompt", "before_tool", "after_tool", "turn_end", "session_end"]
    write = [ShellHook(command="cat >> log; echo >> log")]
    await turn(tmp_path, **dict.fromkeys(moments, write))
    told = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [one["moment"] for one in told] == moments
    assert {one["cwd"] for one in told} == {str(tmp_path)}
    assert told[1]["prompt"] == "2 + 3?"
    assert told[2] | {"session": ""} == {
        "moment": "before_tool",
        "session": "",
        "cwd": str(tmp_path),
        "tool": "maths_add",
        "arguments": {"a": 2, "b": 3},
        "call": "one",
    }
    assert (told[3]["result"], told[3]["is_error"]) == ("5", False)
    assert told[4]["outcome"] == "end_turn"


async def test_exit_code_2_refuses_a_tool_call_before_the_permission_question(tmp_path: Path):
    no = [complain("No sums today."), ShellHook(command="touch second")]
    editor, model, ran = await turn(tmp_path, before_tool=no)
    assert ran == []
    assert editor.questions == []
    assert result(model) == "This was not run: No sums today."
    assert not (tmp_path / "second").exists()


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_a_shell_hook_can_be_a_program_with_arguments_for_some_tools(tmp_path: Path):
    hooks = [ShellHook(command=["touch", "$HOME"]), ShellHook(command=["touch", "other"], tool="terminal*")]
    await turn(tmp_path, before_tool=hooks)
    assert os.listdir(tmp_path) == ["$HOME"]


async def test_exit_code_2_after_a_tool_adds_to_its_result(tmp_path: Path):
    _, model, ran = await turn(tmp_path, after_tool=[complain("Round it.")])
    assert ran == [5]
    assert result(model) == "5\n\nRound it."


async def test_a_secret_in_the_output_of_a_shell_hook_is_masked(tmp_path: Path):
    hooks = [complain("canary-0123456789 is wrong.")]
    model = ScriptedModel([Reply(tool_calls=[{"name": "maths_add", "arguments": {"a": 2, "b": 3}}]), Reply("Done.")])
    crow = Crow(model, servers=[add_server([])]).use(mask_secrets, known=["canary-0123456789"])
    async with connect(crow.use(shell_hooks, after_tool=hooks)) as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "2 + 3?")
    assert result(model) == f"5\n\n{MASK} is wrong."


async def test_exit_code_2_before_a_prompt_ends_the_turn(tmp_path: Path):
    editor, model, _ = await turn(tmp_path, before_prompt=[complain("Not on Sundays.")])
    assert model.requests == []
    assert editor.text == "Not on Sundays."


@pytest.mark.parametrize(
    ("hook", "says"),
    [
        (complain("ouch", 1), "failed: ouch"),
        (ShellHook(command="exit 7"), "failed: exit code 7"),
        pytest.param(
            ShellHook(command="sleep 60 & wait", timeout=0.05),
            "failed: it took more than 0.05 seconds",
            marks=pytest.mark.posix("it is a command of a POSIX shell"),
        ),
        (ShellHook(command=["no-such-program"]), "['no-such-program'] failed: ["),
        pytest.param(
            ShellHook(command="kill -9 $$"),
            "failed: exit code -9",
            marks=pytest.mark.posix("there are no signals"),
        ),
    ],
)
async def test_a_shell_hook_that_fails_is_only_a_warning(tmp_path: Path, hook: ShellHook, says: str):
    editor, _, ran = await turn(tmp_path, before_tool=[hook], session_end=[hook], session_start=[hook])
    assert ran == [5]
    assert says in editor.thoughts
    assert editor.thoughts.count("failed") == 1


async def test_a_shell_hook_can_leave_a_process_running_and_ignore_its_input(tmp_path: Path):
    editor, _, ran = await turn(tmp_path, after_tool=[ShellHook(command="exec < /dev/null; sleep 3 & exit 0")])
    assert ran == [5]
    assert editor.text == "Done."
