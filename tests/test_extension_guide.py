"""The extensions in the pages on extensions work when they are installed as the page says: a file and a table each."""

import asyncio
import os
import re
import runpy
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from crow_agent.app import BUILT_IN, build
from crow_core import Crow, ModelError, Server
from crow_core.testing import Editor, Reply, ScriptedModel, connect
from crow_persistence.extension import persistence
from crow_testing.listening import listen
from fastmcp import FastMCP

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[1]
PAGES = ("extensions", "hooks", "tools", "extension-examples")
GUIDE = "".join((ROOT / "docs" / f"{name}.md").read_text("utf-8") for name in PAGES)
FILES = dict(re.findall(r"^```python\n# (.+?)\n(.*?)^```", GUIDE, re.M | re.S))
TABLES = re.findall(r"^```toml\n(.*?)^```", GUIDE, re.M | re.S)

DEMO = FastMCP("demo")


@DEMO.tool
def add(a: int, b: int) -> int:
    return a + b


def call_tool(name: str, **arguments: Any) -> Reply:
    return Reply(tool_calls=[{"name": name, "arguments": arguments}])


@asynccontextmanager
async def install_all(
    home: Path, model: ScriptedModel, *, permit: str = "allow_once", **values: str
) -> AsyncGenerator[Editor]:
    """Install every extension of the guide, and connect; `values` replace texts in its tables."""
    (home / "extensions").mkdir()
    for name, code in FILES.items():
        if name.startswith("extensions/"):
            (home / name).write_text(code)
    text = "\n".join(table for table in TABLES if "sober" not in table or "sober" in values)
    text = (
        text.replace("notify-send", "true")
        .replace("just test", "true")
        .replace('"/home/me/bin/look-at-it.py"', '"-c", "pass"')
    )
    for old, new in ({"https://example.org": "http://127.0.0.1:9"} | values).items():
        text = text.replace(old, new)
    (home / "config.toml").write_text(text)
    crow = await build({"CROW_HOME": str(home), "HOME": str(home)}, models={"scripted": model}, without=[persistence])
    crow.servers_wait = 60  # the machine may be busy
    async with connect(crow, permit=permit) as editor:
        yield editor


async def test_phone_numbers_are_hidden_from_the_model(tmp_path: Path):
    (tmp_path / "contacts.txt").write_text("Ada: +49 30 1234567\n")
    model = ScriptedModel([call_tool("terminal", command="cat contacts.txt"), Reply("Done.")])
    async with install_all(tmp_path, model) as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    assert "Ada: [a number]" in model.requests[1]["messages"][-1]["content"]


@pytest.mark.parametrize("name", ["test_redact.py", "test_with_tools.py", "test_memory_store.py"])
def test_the_tests_in_the_guide_pass(tmp_path: Path, name: str):
    (tmp_path / "redact.py").write_text(FILES["extensions/redact.py"])
    (tmp_path / name).write_text(FILES[name])
    subprocess.run([sys.executable, name], cwd=tmp_path, check=True)


async def test_the_hooks_are_called_in_the_order_that_the_guide_shows():
    (drawn,) = re.findall(r"^```text order\n(.*?)^```", GUIDE, re.M | re.S)
    listed = re.findall(r"[a-z_]+", re.sub(r"\(.*?\)|^ *[a-z ]+?  +", "", drawn, flags=re.M))
    add = call_tool("demo_add", a=1, b=2)
    model, called = ScriptedModel([Reply(error=ModelError("Busy.", retry=True)), add, Reply("3.")]), list[str]()
    crow = Crow(model, servers=[Server("demo", lambda: DEMO, shared=True)])
    for name in set(listed):
        getattr(crow, name)(lambda *_, name=name: called.append(name))
    crow.model_error(lambda session, error: True)
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    del called[called.index("model_error") + 1]  # before_model, as the failed request is made again
    assert called == listed


@pytest.mark.slow
def test_the_script_for_the_real_command_runs(tmp_path: Path):
    (tmp_path / "contacts.txt").write_text("Ada: +49 30 1234567\n")
    (tmp_path / "extensions").mkdir()
    (tmp_path / "extensions" / "redact.py").write_text(FILES["extensions/redact.py"])
    (tmp_path / "config.toml").write_text(TABLES[0])
    (tmp_path / "try_redact.py").write_text(FILES["try_redact.py"])
    bin = str(Path(sys.executable).parent)
    env = {"PATH": f"{bin}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path), "CROW_HOME": str(tmp_path)}
    command = [sys.executable, "try_redact.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, check=True, stdout=subprocess.PIPE, text=True)
    assert "Found her." in done.stdout
    assert "Ada: [a number]" in done.stdout


async def test_the_user_sets_a_temperature(tmp_path: Path):
    model = ScriptedModel([Reply("Cold."), Reply("Warm.")])
    async with install_all(tmp_path, model) as editor:
        session = await editor.new_session("/tmp")
        await editor.prompt(session.session_id, "go")
        await editor.prompt(session.session_id, "/temperature 0.7")
        await editor.prompt(session.session_id, "go")
    assert [request["temperature"] for request in model.requests] == [0.2, 0.7]


async def test_the_guide_lists_every_tool(tmp_path: Path):
    model = ScriptedModel([Reply("Done.")])
    async with install_all(tmp_path, model) as editor:
        session = await editor.new_session("/tmp")
        await editor.prompt(session.session_id, "go")
    offered = {tool["function"]["name"] for tool in model.requests[0]["tools"]} - {"dice_roll", "note"}
    table = GUIDE.partition("## The tools\n")[2].partition("\n## ")[0]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`(\w+)`", row)}
    assert named - offered == {"search_sessions", "read_output", "skills", "mcp_resources", "tool_search", "call_tool"}
    assert offered <= named


async def test_a_webhook_receives_a_summary_of_the_turn(tmp_path: Path):
    received: list[Any] = []

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = re.search(rb"content-length: (\d+)", head, re.I)
        assert size
        received.append(msgspec.json.decode(await reader.readexactly(int(size[1]))))
        writer.write(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n")

    async with listen(receive) as port:
        url = f"http://127.0.0.1:{port}"
        async with install_all(tmp_path, ScriptedModel([Reply("Done.")]), **{"https://example.org": url}) as editor:
            session = await editor.new_session("/tmp")
            await editor.prompt(session.session_id, "go")
    (summary,) = received
    assert summary == {"session": session.session_id, "folder": "/tmp", "outcome": "end_turn", "text": "Done."}


async def test_the_model_rolls_dice_and_writes_notes(tmp_path: Path):
    model = ScriptedModel([call_tool("dice_roll", times=3), call_tool("note", text="They rolled."), Reply("Done.")])
    async with install_all(tmp_path, model) as editor:
        session = await editor.new_session("/tmp")
        await editor.prompt(session.session_id, "go")
        assert len(editor.questions) == 1
        await editor.prompt(session.session_id, "/notes")
    assert len(msgspec.json.decode(model.requests[1]["messages"][-1]["content"])) == 3
    assert model.requests[2]["messages"][-1]["content"] == "Note 1 is written."
    assert editor.text.endswith("- They rolled.")


async def test_the_user_is_asked_late_in_the_evening(tmp_path: Path):
    async with install_all(tmp_path, ScriptedModel([]), permit="reject_once", sober="sober") as editor:
        session = await editor.new_session("/tmp")
        await editor.prompt(session.session_id, "go")
    assert editor.text == "Good night."


def test_the_table_of_hooks_is_up_to_date():
    generator = runpy.run_path(str(ROOT / "scripts" / "generate_hook_table.py"))
    page = generator["TARGET"].read_text("utf-8")
    assert generator["insert"](page, generator["render"]()) == page, "run scripts/generate_hook_table.py"


def test_what_the_guide_sets_of_crows_own_exists():
    assert {"titles", "truncate", "loop_guard", "budgets", "goal", "subagents"} <= BUILT_IN.keys()
