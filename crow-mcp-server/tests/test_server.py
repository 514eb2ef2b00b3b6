"""The server: its tools, its workspaces and its process."""

import asyncio
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import crow_mcp_server
import crow_system as system
import pytest
from crow_mcp_server import create_server
from crow_mcp_server.workspace import CommandOutcome, Workspace, local_workspace
from fastmcp import Client
from fastmcp.client.transports import StdioTransport

pytestmark = pytest.mark.anyio

WAYS = ({}, {"wait": 0.01}, {"session": "a"})
"""The ways to run a command: until it ends, in the background, and in a session with a name."""
GENERATOR = Path(__file__).parents[2] / "scripts" / "generate_tools.py"


async def test_tools_json_is_what_the_server_lists():
    generator = runpy.run_path(str(GENERATOR))
    fresh = generator["render"](await generator["list_tools"]())
    written = await anyio.Path(generator["TARGET"]).read_text(encoding="utf-8")
    if sys.platform != "win32":  # where the terminal is another one
        assert written == fresh, "tools.json is stale: run scripts/generate_tools.py"
    assert crow_mcp_server.tools() == json.loads(fresh)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_both_protocol_versions_list_the_same_tools(mode):
    async with Client(create_server(env={"SEARXNG_URL": "http://localhost"}), mode=mode) as client:
        listed = [tool.model_dump(mode="json", by_alias=True, exclude_none=True) for tool in await client.list_tools()]
    known = {tool["name"]: tool for tool in crow_mcp_server.tools()}
    for tool in known.values():
        del tool["_meta"]["crow/arguments"], tool["_meta"]["crow/replaces"]
    assert {tool["name"]: {key: tool.get(key) for key in known[tool["name"]]} for tool in listed} == known


def test_every_command_has_a_kind_and_annotations():
    tools = {tool["name"]: tool for tool in crow_mcp_server.tools()}
    editor, terminal = tools["file_editor"], tools["terminal"]
    assert set(editor["_meta"]["crow/kind"]) == set(editor["inputSchema"]["properties"]["command"]["enum"])
    assert editor["_meta"]["crow/kind"]["view"] == "read"
    hints = editor["_meta"]["crow/annotations"]
    assert [name for name in hints if hints[name]["readOnlyHint"]] == ["view"]
    assert [name for name in hints if hints[name]["idempotentHint"]] == ["view", "create"]
    assert terminal["_meta"]["crow/kind"] == "execute"


def test_schemas_stay_small():
    shown = [{key: tool[key] for key in ("name", "description", "inputSchema")} for tool in crow_mcp_server.tools()]
    assert len(json.dumps(shown)) < 8_000


def test_listing_the_tools_imports_nothing_heavy():
    script = "import sys, crow_mcp_server; crow_mcp_server.tools(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"fastmcp", "mcp", "pydantic", "anyio", "asyncio"} & set(loaded)


@pytest.mark.slow
def test_rarely_used_libraries_are_imported_on_use():
    script = "import sys, crow_mcp_server; crow_mcp_server.create_server(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"pypdf", "rapidfuzz", "mammoth", "openpyxl", "pptx"} & set(loaded)


def test_protocols_can_be_imported_without_fastmcp():
    script = "import sys, crow_mcp_server.workspace; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert "fastmcp" not in loaded


async def test_without_meta_the_process_folder_is_the_workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_text("one\n")
    async with Client(create_server()) as client:
        viewed = await client.call_tool("file_editor", {"command": "view", "path": "a"})
        assert viewed.content[0].text.startswith(f"{tmp_path}/a (1 line)")
        outside = await client.call_tool_mcp("file_editor", {"command": "view", "path": ".."})
        assert outside.is_error
        assert (await client.call_tool("terminal", {"command": "pwd"})).content[0].text == f"{tmp_path}\n"


async def test_relative_folder_in_the_meta_is_an_error(tmp_path):
    async with Client(create_server()) as client:
        for meta in ({"crow/cwd": "here"}, {"crow/roots": ["here"]}):
            result = await client.call_tool_mcp("file_editor", {"command": "view", "path": "."}, meta=meta)
            assert result.is_error
            assert "must be absolute" in result.content[0].text


@dataclass
class Editor:
    """A host with buffers and a terminal. Like some editors, it converts line endings to line feeds."""

    buffers: dict[str, str] = field(default_factory=dict)
    saved: list[str] = field(default_factory=list)
    commands: list[dict[str, Any]] = field(default_factory=list)
    on_save: Callable[[str], str] = str
    reads: bool = True
    writes: bool = True

    async def read_text(self, path: str) -> str | None:
        if path in self.buffers:
            return self.buffers[path]
        return await anyio.Path(path).read_text(encoding="utf-8")  # universal newlines: the carriage returns are gone

    async def write_text(self, path: str, text: str) -> None:
        self.saved.append(path)
        self.buffers.pop(path, None)
        await anyio.Path(path).write_bytes(self.on_save(text).encode())

    async def run(self, command: str, **how: Any) -> CommandOutcome:
        self.commands.append({"command": command} | how)
        return CommandOutcome(exit_code=2, signal=None, output="\x1b[31mfrom the editor\x1b[0m\n")

    def workspace(self, meta: dict[str, Any]) -> Workspace:
        here = local_workspace(meta)
        return Workspace(here.session, here.cwd, here.roots, files=self, terminals=self)


async def edit(client: Client[Any], folder: Path, command: str, path: str, **arguments: Any) -> Any:
    return await client.call_tool_mcp(
        "file_editor", {"command": command, "path": path} | arguments, meta={"crow/cwd": str(folder)}
    )


async def test_unsaved_changes_of_the_host_are_seen_and_edited(folder):
    (folder / "a").write_text("on disk\n")
    editor = Editor({str(folder / "a"): "unsaved\n"})
    async with Client(create_server(editor.workspace)) as client:
        assert "unsaved" in (await edit(client, folder, "view", "a")).content[0].text
        result = await edit(client, folder, "str_replace", "a", old_str="unsaved", new_str="edited")
    [change] = result.meta["crow/changes"]
    assert (change["path"], change["old"], change["new"]) == (str(folder / "a"), "unsaved\n", "edited\n")
    assert (folder / "a").read_text() == "edited\n"
    assert editor.saved == [str(folder / "a")]


async def test_new_file_goes_through_the_host(folder):
    editor = Editor()
    async with Client(create_server(editor.workspace)) as client:
        result = await edit(client, folder, "create", "deep/a", file_text="new\n")
        assert not result.is_error
        undone = await edit(client, folder, "undo_edit", "deep/a")
        assert not undone.is_error
    assert editor.saved == [str(folder / "deep/a")]
    assert not (folder / "deep/a").exists()


async def test_text_that_the_host_reformats_on_save_is_reported(folder):
    (folder / "a").write_text("x=1\n")
    editor = Editor(on_save=lambda text: text.replace("=", " = "))
    async with Client(create_server(editor.workspace)) as client:
        result = await edit(client, folder, "str_replace", "a", old_str="1", new_str="2")
        assert result.meta["crow/changes"][0]["new"] == "x = 2\n"
        assert result.content[0].text.endswith("[the editor changed the text when it saved it; this is how it is now]")
        again = await edit(client, folder, "str_replace", "a", old_str="x = 2", new_str="y = 2")
        assert not again.is_error


async def test_line_endings_survive_a_host_that_shows_line_feeds_only(folder):
    (folder / "a").write_bytes(b"one\r\ntwo\r\n")
    editor = Editor()
    async with Client(create_server(editor.workspace)) as client:
        await edit(client, folder, "str_replace", "a", old_str="one\ntwo", new_str="1\n2")
    assert (folder / "a").read_bytes() == b"1\r\n2\r\n"


async def test_file_in_another_encoding_bypasses_the_host(folder):
    (folder / "latin").write_bytes(b"caf\xe9\n")
    (folder / "mark").write_bytes(b"\xef\xbb\xbfone\n")
    editor = Editor()
    async with Client(create_server(editor.workspace)) as client:
        await edit(client, folder, "str_replace", "latin", old_str="caf", new_str="th")
        await edit(client, folder, "str_replace", "mark", old_str="one", new_str="two")
    assert editor.saved == []
    assert (folder / "latin").read_bytes() == b"th\xe9\n"
    assert (folder / "mark").read_bytes() == b"\xef\xbb\xbftwo\n"


async def test_failing_host_is_a_tool_error_and_records_nothing(folder):
    (folder / "a").write_text("one\n")

    class Broken(Editor):
        async def write_text(self, path: str, text: str) -> None:
            raise ConnectionError("the editor went away")

    async with Client(create_server(Broken().workspace)) as client:
        result = await edit(client, folder, "str_replace", "a", old_str="one", new_str="two")
        assert result.is_error
        assert "not known whether" in result.content[0].text
        assert "the editor went away" in result.content[0].text
        undo = await edit(client, folder, "undo_edit", "a")
        assert "no edit" in undo.content[0].text


async def test_host_that_does_not_write_is_detected(folder):
    class Liar(Editor):
        async def write_text(self, path: str, text: str) -> None: ...

    async with Client(create_server(Liar().workspace)) as client:
        result = await edit(client, folder, "create", "a", file_text="new\n")
        assert result.is_error
        assert "reported that it wrote" in result.content[0].text
        (folder / "a").write_text("one\n")
        result = await edit(client, folder, "str_replace", "a", old_str="one", new_str="two")
        assert result.meta["crow/changes"][0]["new"] == "one\n"
        assert "     1\tone" in result.content[0].text


async def test_hanging_host_does_not_block_other_calls(folder):
    asked = 0
    everybody = asyncio.Event()

    class Deaf(Editor):
        async def read_text(self, path: str) -> str | None:
            nonlocal asked
            asked += 1
            if asked == 50:
                everybody.set()
            await asyncio.Event().wait()

    deaf = Deaf()

    def workspace(meta: dict[str, Any]) -> Workspace:
        return deaf.workspace(meta) if meta.get("crow/session") == "deaf" else local_workspace(meta)

    for name in (*map(str, range(50)), "other"):
        (folder / name).write_text("one\n")
    async with Client(create_server(workspace)) as client:
        meta = {"crow/cwd": str(folder), "crow/session": "deaf"}
        calls = [
            asyncio.create_task(client.call_tool_mcp("file_editor", {"command": "view", "path": f"{n}"}, meta=meta))
            for n in range(50)
        ]
        await everybody.wait()
        assert not (await edit(client, folder, "view", "other")).is_error
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def test_cancelled_call_releases_the_lock_of_a_file(folder):
    (folder / "a").write_text("one\n")
    asked = asyncio.Event()

    class Deaf(Editor):
        async def read_text(self, path: str) -> str:
            if not asked.is_set():
                asked.set()
                await asyncio.Event().wait()
            return await super().read_text(path)

    async with Client(create_server(Deaf().workspace)) as client:
        call = asyncio.create_task(edit(client, folder, "view", "a"))
        await asked.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not (await edit(client, folder, "view", "a")).is_error


async def test_commands_run_in_the_terminal_of_the_host(folder):
    editor = Editor()
    async with Client(create_server(editor.workspace, ["API_KEY"])) as client:
        result = await client.call_tool_mcp(
            "terminal", {"command": "make", "timeout": 9999}, meta={"crow/cwd": str(folder)}
        )
    assert result.content[0].text == "from the editor\n[exit code 2]"
    [call] = editor.commands
    assert (call["command"], call["cwd"], call["timeout"]) == ("make", str(folder), 600)
    assert (call["env"]["PAGER"], call["env"]["PWD"], call["env"]["API_KEY"]) == ("cat", str(folder), "")
    assert "PATH" not in call["env"]


def stdio(folder: Path, log: Path, *arguments: str) -> StdioTransport:
    return StdioTransport(
        sys.executable,
        ["-m", "crow_mcp_server", *arguments],
        cwd=str(folder),
        env=dict(os.environ),
        keep_alive=False,
        log_file=log,
    )


async def test_over_stdio_it_serves_a_folder_and_ignores_the_env_file_there(folder, tmp_path):
    (folder / ".env").write_text("FASTMCP_MASK_ERROR_DETAILS=true\nFASTMCP_LOG_LEVEL=nonsense\n")
    (folder / "a").write_text("one\n")
    async with Client(stdio(tmp_path, tmp_path / "log", "--root", str(folder))) as client:
        assert {tool.name for tool in await client.list_tools()} == {tool["name"] for tool in crow_mcp_server.tools()}
        viewed = await client.call_tool("file_editor", {"command": "view", "path": "a"})
        assert viewed.content[0].text.endswith("     1\tone")
        outside = await client.call_tool_mcp("file_editor", {"command": "view", "path": str(tmp_path)})
        assert outside.is_error
        assert (await client.call_tool("terminal", {"command": "pwd -P"})).content[0].text == f"{folder.resolve()}\n"
    assert (tmp_path / "log").read_text() == ""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["close", signal.SIGTERM, system.KILL])
async def test_running_commands_end_with_the_server(folder, end):
    hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    command = "trap '' TERM; exec 9>running; echo started >&9; sleep 999"
    calls = [{"name": "terminal", "arguments": {"command": command} | how} for how in WAYS]
    os.mkfifo(folder / "running")  # at its end once every process that writes to it has ended
    pipe = os.fdopen(os.open(folder / "running", os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0)
    running = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(running), pipe)
    async with await anyio.open_process(
        [sys.executable, "-m", "crow_mcp_server"], cwd=folder, stderr=subprocess.DEVNULL
    ) as server:
        assert server.stdin
        for message in (
            {"id": 1, "method": "initialize", "params": hello},
            {"method": "notifications/initialized"},
            *({"id": id, "method": "tools/call", "params": call} for id, call in enumerate(calls, 2)),
        ):
            await server.stdin.send(json.dumps({"jsonrpc": "2.0"} | message).encode() + b"\n")
        for _ in calls:
            assert await running.readline() == b"started\n"
        if end == "close":
            await server.stdin.aclose()
        else:
            server.send_signal(end)
        await server.wait()
    assert await running.read() == b""


def test_version_and_a_wrong_root_are_reported(tmp_path):
    run = [sys.executable, "-m", "crow_mcp_server"]
    told = subprocess.run([*run, "--version"], capture_output=True, text=True, check=True)
    assert told.stdout.count(".") == 2
    wrong = subprocess.run([*run, "--root", str(tmp_path / "gone")], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "No such file" in wrong.stderr
