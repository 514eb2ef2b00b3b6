"""The problems that an edit made are added to its result, and those of before are not."""

import asyncio
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from crow_core.app import Crow
from crow_core.masking import MASK
from crow_core.mcp.server import Server
from crow_core.messages.message import to_parts
from crow_core.session.session import Session
from crow_core.testing import Editor, Reply, ScriptedModel, connect
from crow_extensions.commands import commands
from crow_extensions.diagnostic_settings import Diagnostics
from crow_extensions.diagnostics import diagnostics
from crow_extensions.mask_secrets import mask_secrets
from crow_extensions.problems import READY, list_new, read_problems
from crow_extensions.shell import start_command
from crow_extensions.undo import undo
from crow_mcp_server import create_server
from crow_mcp_server import tools as list_tools
from crow_testing.skipping import unable

pytestmark = [pytest.mark.anyio, pytest.mark.posix("the commands are those of a POSIX shell")]

LINTER = "grep -Hn TODO *.py | sed 's/:\\([0-9]*\\):/:\\1:1: found /'"


def edit(path: str, old: str, new: str) -> Reply:
    arguments = {"command": "str_replace", "path": path, "old_str": old, "new_str": new}
    return Reply(tool_calls=[{"name": "file_editor", "arguments": arguments}])


def run(command: str) -> Reply:
    return Reply(tool_calls=[{"name": "terminal", "arguments": {"command": command}}])


async def turn(
    folder: Path, commands: dict[str, Sequence[str]], *replies: Reply, timeout: float = 60, secrets: Sequence[str] = ()
) -> tuple[Editor, list[str]]:
    """Run a turn with commands for diagnostics; return the editor and the results of its tools."""
    model = ScriptedModel([*replies, Reply("Done.")])
    tools = Server("crow", create_server, definitions=list_tools({}), built_in=True, shared=True)

    async def find(session: Session) -> list[Diagnostics]:
        return [Diagnostics(commands, timeout, [str(Path(sys.executable).parent)])]

    crow = Crow(model, servers=[tools]).use(mask_secrets, known=secrets).use(diagnostics, find=find)
    async with connect(crow) as editor:
        session = await editor.new_session(str(folder))
        await editor.prompt(session.session_id, "Go.")
    answers = [message for message in model.requests[-1]["messages"] if message["role"] == "tool"]
    return editor, ["\n\n".join(part["text"] for part in to_parts(answer["content"])) for answer in answers]


def notices(editor: Editor) -> list[str]:
    return [str(update) for update in editor.updates if "[diagnostics]" in str(update)]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "a.py").write_text("one = 1\nold = 'TODO'\ntwo = 2\n", "utf-8")
    return tmp_path


async def test_only_what_is_new_since_before_the_edit_is_told(project: Path):
    replies = [edit("a.py", "one = 1", "zero = 0\none = 1"), edit("a.py", "two = 2", "two = 'TODO'")]
    editor, (moved, added) = await turn(project, {"*.py": [LINTER]}, *replies)
    assert "New since" not in moved  # the old problem is a line further down
    assert added.count("\n- ") == 1
    assert "- a.py:4:1: found two = 'TODO'" in added
    assert notices(editor) == []


async def test_a_second_problem_of_the_same_words_is_new(project: Path):
    _, (result,) = await turn(project, {"*.py": [LINTER]}, edit("a.py", "two = 2", "old = 'TODO'"))
    assert "- a.py:3:1: found old = 'TODO'" in result


async def test_what_a_command_of_the_model_changes_is_not_blamed_on_the_next_edit(project: Path):
    replies = [
        edit("a.py", "one = 1", "one = 3"),
        run("echo \"more = 'TODO'\" >> a.py"),
        edit("a.py", "two = 2", "two = 4"),
    ]
    _, results = await turn(project, {"*.py": [LINTER]}, *replies)
    assert not [result for result in results if "New since" in result]


async def test_a_command_runs_only_for_the_files_of_its_pattern(project: Path):
    (project / "b.txt").write_text("text\n", "utf-8")
    replies = [edit("b.txt", "text", "TODO"), edit("a.py", "two", "three")]
    await turn(
        project, {"*.py": ["touch ran.py"], "*.txt": ["touch ran.txt"], "sub/*.txt": ["touch sub.txt"]}, *replies
    )
    assert {*os.listdir(project)} == {"a.py", "b.txt", "ran.py", "ran.txt"}


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("sleep 60", "took more than 5 seconds"),
        ("yes a.py:1:1: no", "printed more than 2,000,000 bytes"),
        ("no-such-linter", "is not installed"),
        ("echo no such option; exit 2", "failed with exit code 2: no such option"),
    ],
)
async def test_a_command_that_fails_is_told_once_and_the_edit_stands(project: Path, command: str, says: str):
    replies = [edit("a.py", "two = 2", "two = 'TODO'"), edit("a.py", "one = 1", "one = 'TODO'")]
    editor, (first, second) = await turn(
        project, {"*.py": [command, LINTER]}, *replies, timeout=5 if "60" in command else 60
    )
    (notice,) = notices(editor)
    assert says in notice
    assert "found two = 'TODO'" in first
    assert "found one = 'TODO'" in second
    assert says not in first + second
    assert (project / "a.py").read_text("utf-8").count("TODO") == 3


async def test_a_command_whose_output_nobody_reads_ends_with_its_block(tmp_path: Path):
    os.mkfifo(full := tmp_path / "full")
    printing = f"""
import os, select
os.set_blocking(1, False)
while select.select([], [1], [], 0.5)[1]:
    os.write(1, bytes(65536))
open({str(full)!r}, "w").close()
os.set_blocking(1, True)
os.write(1, bytes(65536))
"""
    async with (
        asyncio.timeout(30),
        start_command([sys.executable, "-c", printing], str(tmp_path), asyncio.subprocess.PIPE),
    ):
        await asyncio.to_thread(full.read_text)  # crow holds as much as it wants, and the pipe is full


async def test_an_edit_whose_diagnostics_are_cancelled_can_be_undone(project: Path):
    os.mkfifo(pipe := project / "pipe")
    look = "test -e ran && { echo again > pipe; sleep 60; }; touch ran"
    model = ScriptedModel([edit("a.py", "two = 2", "two = 3")])
    tools = Server("crow", create_server, definitions=list_tools({}), built_in=True, shared=True)

    async def find(session: Session) -> list[Diagnostics]:
        return [Diagnostics({"*.py": [look]})]

    crow = Crow(model, servers=[tools]).use(commands).use(undo).use(diagnostics, find=find)
    async with connect(crow) as editor:
        id = (await editor.new_session(str(project))).session_id
        turn = asyncio.ensure_future(editor.prompt(id, "Go."))
        await asyncio.to_thread(pipe.read_text)
        await editor.cancel(id)
        assert (await turn).stop_reason == "cancelled"
        assert "two = 3" in (project / "a.py").read_text("utf-8")
        await editor.prompt(id, "/undo yes")
    assert "two = 2" in (project / "a.py").read_text("utf-8")


async def test_many_new_problems_are_counted_and_secrets_masked(project: Path):
    many = "\n".join(f"n{n} = 'TODO s3cret-word'" for n in range(50))
    _, (result,) = await turn(project, {"*.py": [LINTER]}, edit("a.py", "two = 2", many), secrets=["s3cret-word"])
    new = result[result.index("New since") :]
    assert "… and 30 more" in new
    assert MASK in new
    assert "s3cret-word" not in new


async def test_ruff_and_pyright_are_ready(project: Path):
    if not Path(sys.executable).with_name("pyright").exists():
        unable("pyright is not installed; `uv run --group types pytest` installs it")
    (project / "a.py").write_text("import os\n\nnumber: int = 1\n", "utf-8")
    _, (result,) = await turn(project, {"*.py": ["ruff", "pyright"]}, edit("a.py", "= 1", "= str(missing)"), timeout=60)
    assert "says `ruff`:\n- a.py:3:19: F821 Undefined name `missing`" in result
    assert "says `pyright`:" in result
    assert "- a.py:3: error: " in result
    assert "F401" not in result


ESLINT = json.dumps(
    [{"filePath": "/w/a.js", "messages": [{"ruleId": "no-undef", "message": "'x' is not defined.", "line": 1}]}]
)


@pytest.mark.parametrize(
    ("output", "line"),
    [
        (ESLINT, "a.js:1: 'x' is not defined. (no-undef)"),
        (
            "a.ts(3,5): error TS2322: Type 'string' is not assignable.",
            "a.ts(3,5): error TS2322: Type 'string' is not assignable.",
        ),
        (
            "src/main.rs:2:5: error[E0425]: cannot find value\nerror: could not compile",
            "src/main.rs:2:5: error[E0425]: cannot find value",
        ),
        ("warning: slow\n" + ESLINT, "a.js:1: 'x' is not defined. (no-undef)"),
    ],
)
def test_outputs_of_other_linters_are_read(output: str, line: str):
    found = read_problems(1, output, "/w")
    assert list_new({}, found) == [line]
    assert list_new(found, found) == []


def test_ready_commands_can_be_parsed():
    assert all(shlex.split(command) for command in READY.values())
