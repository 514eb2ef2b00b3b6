"""The roots of the file tools: the client's roots, `--root`, or the folder of the process."""

import os
import sys
from pathlib import Path

import pytest
from crow_mcp_server import create_server
from fastmcp import Client
from fastmcp.client.transports import StdioTransport

pytestmark = pytest.mark.anyio


@pytest.fixture
def elsewhere(tmp_path):
    """A folder beside the working folder, with a file."""
    folder = tmp_path / "else where"
    folder.mkdir()
    (folder / "a.txt").write_text("needle\n")
    return folder


async def view(client, path):
    return await client.call_tool_mcp("file_editor", {"command": "view", "path": str(path)})


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_client_roots_bound_the_file_tools_in_both_protocol_versions(mode, folder, elsewhere, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "own.txt").touch()
    async with Client(create_server(), mode=mode, roots=[elsewhere.as_uri()]) as client:
        assert not (await view(client, elsewhere / "a.txt")).is_error
        assert not (await view(client, "a.txt")).is_error, "the first root is where relative paths start"
        assert "outside of the folders" in (await view(client, folder / "own.txt")).content[0].text
        found = await client.call_tool_mcp("grep", {"pattern": "needle"})
        assert found.content[0].text == "a.txt\n1:needle"
        ran = await client.call_tool_mcp("terminal", {"command": "pwd"})
        assert ran.content[0].text == f"{elsewhere}\n"


async def test_changed_roots_take_effect_at_once(folder, elsewhere):
    roots = [folder.as_uri()]
    async with Client(create_server(), mode="legacy", roots=lambda _: roots) as client:
        assert (await view(client, elsewhere / "a.txt")).is_error
        roots.append(elsewhere.as_uri())
        assert not (await view(client, elsewhere / "a.txt")).is_error


async def test_client_that_fails_to_list_its_roots_opens_nothing(folder):
    def broken(_):
        raise ValueError("no")

    async with Client(create_server(), mode="legacy", roots=broken) as client:
        result = await view(client, folder)
        assert result.is_error
        assert "--root" in result.content[0].text


async def test_client_without_roots_works_in_the_folder_of_the_process(folder, elsewhere, monkeypatch):
    monkeypatch.chdir(folder)
    async with Client(create_server(), roots=[]) as client:
        assert not (await view(client, ".")).is_error
        assert (await view(client, elsewhere)).is_error


def serving(folder: Path, log: Path, *arguments: str) -> StdioTransport:
    command = ["-m", "crow_mcp_server", *arguments]
    return StdioTransport(
        sys.executable, command, cwd=str(folder), env=dict(os.environ), keep_alive=False, log_file=log
    )


async def test_roots_on_the_command_line_override_the_clients(folder, elsewhere, tmp_path):
    for name in ("own.txt", "second/b.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    arguments = ["--root", str(elsewhere), "--root", str(folder / "second")]
    transport = serving(folder, tmp_path / "log", *arguments)
    async with Client(transport, mode="legacy", roots=[folder.as_uri()]) as client:
        assert not (await view(client, "a.txt")).is_error
        assert not (await view(client, folder / "second/b.txt")).is_error
        assert (await view(client, folder / "own.txt")).is_error
        meta = {"crow/roots": ["/"], "crow/cwd": str(folder)}
        asked = await client.call_tool_mcp("file_editor", {"command": "view", "path": "own.txt"}, meta=meta)
        assert "outside of the folders" in asked.content[0].text


@pytest.mark.slow
async def test_option_allow_outside_opens_other_folders(folder, elsewhere, tmp_path):
    async with Client(serving(folder, tmp_path / "log", "--allow-outside")) as client:
        path = elsewhere / "a.txt"
        assert not (await view(client, path)).is_error
        edit = {"command": "str_replace", "path": str(path), "old_str": "needle", "new_str": "pin"}
        assert not (await client.call_tool_mcp("file_editor", edit)).is_error
        (folder / "here").touch()
        assert not (await view(client, "here")).is_error
    assert path.read_text() == "pin\n"
