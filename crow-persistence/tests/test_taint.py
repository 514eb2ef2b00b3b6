"""The markers of the extension `taint` are kept by a load, a fork, a rewind, a compaction, and a search of sessions."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from crow_core.acp.schema import ForkSessionRequest, ForkSessionResponse, LoadSessionRequest
from crow_core.app import Crow
from crow_core.mcp.server import Server
from crow_core.testing import Editor, Reply, ScriptedModel, connect
from crow_permissions.extension import permissions
from crow_permissions.taint import taint
from crow_persistence.database import Database
from crow_persistence.extension import persistence
from fastmcp import FastMCP

pytestmark = pytest.mark.anyio

READ_KEY: dict[str, Any] = {
    "name": "look",
    "description": "Read a file.",
    "inputSchema": {"type": "object", "properties": {"path": {"type": "string"}}},
    "_meta": {"crow/kind": "read"},
}


def call(name: str, **arguments: Any) -> Reply:
    return Reply(tool_calls=[{"name": name, "arguments": arguments}])


SEND = [call("demo_send", text="x"), Reply("Done.")]
READ = [call("look", path=".env"), Reply("The orchid is KEY=hunter2.")]


@asynccontextmanager
async def open_editor(database: Database, *replies: Reply) -> AsyncGenerator[tuple[Crow, Editor]]:
    """Yield an app on this database that allows everything, and an editor that rejects what it is asked about."""
    files, demo = FastMCP("files"), FastMCP("demo")

    @files.tool
    def look(path: str) -> str:
        return f"This is {path}."

    @demo.tool
    def send(text: str) -> str:
        return text

    servers = [
        Server("files", lambda: files, definitions=[READ_KEY], built_in=True, shared=True),
        Server("demo", lambda: demo, shared=True),
    ]
    url = database.url.render_as_string(hide_password=False)
    crow = Crow(ScriptedModel(list(replies)), servers=servers).use(persistence, url=url, folder=database.folder)
    crow.use(permissions, allow=["demo_*"]).use(taint)
    async with connect(crow, permit="reject_once") as editor:
        yield crow, editor


async def load(editor: Editor, id: str, folder: Path) -> None:
    request = LoadSessionRequest(session_id=id, cwd=str(folder), mcp_servers=[])
    await editor.connection.request("session/load", request)


async def fork_session(editor: Editor, id: str, folder: Path) -> str:
    request = ForkSessionRequest(session_id=id, cwd=str(folder), mcp_servers=[])
    response: ForkSessionResponse = await editor.connection.request("session/fork", request)
    return response.session_id


async def read_key(database: Database, folder: Path) -> str:
    """Read private data in a new session; return its id."""
    async with open_editor(database, *READ) as (_, editor):
        id = (await editor.new_session(str(folder))).session_id
        await editor.prompt(id, "go")
        assert editor.questions == []
    return id


async def test_a_loaded_session_keeps_its_taint(database: Database, tmp_path: Path):
    id = await read_key(database, tmp_path)
    async with open_editor(database, *SEND) as (_, editor):
        await load(editor, id, tmp_path)
        await editor.prompt(id, "go")
        assert len(editor.questions) == 1


async def test_a_fork_keeps_the_taint_of_what_it_has_read(database: Database, tmp_path: Path):
    id = await read_key(database, tmp_path)
    async with open_editor(database, *SEND) as (_, editor):
        fork = await fork_session(editor, id, tmp_path)
        await editor.prompt(fork, "go")
        assert len(editor.questions) == 1


async def test_a_session_that_was_rewound_keeps_its_taint_when_it_is_loaded(database: Database, tmp_path: Path):
    async with open_editor(database, *READ) as (crow, editor):
        id = (await editor.new_session(str(tmp_path))).session_id
        await editor.prompt(id, "go")
        crow.sessions[id].rewind("")
        await crow.sessions[id].log.written()
    async with open_editor(database, *SEND) as (_, editor):
        await load(editor, id, tmp_path)
        await editor.prompt(id, "go")
        assert len(editor.questions) == 1


async def test_a_compaction_does_not_hide_the_taint(database: Database, tmp_path: Path):
    async with open_editor(database, *READ) as (crow, editor):
        id = (await editor.new_session(str(tmp_path))).session_id
        await editor.prompt(id, "go")
        crow.sessions[id].log.append({"crow": {"kind": "compaction", "summary": "Nothing.", "from": ""}})
    async with open_editor(database, *SEND) as (_, editor):
        await load(editor, id, tmp_path)
        await editor.prompt(id, "go")
        assert len(editor.questions) == 1


@pytest.mark.parametrize(("words", "questions"), [("orchid", 1), ("tulip", 0)])
async def test_what_a_search_finds_in_a_tainted_session_is_private(
    words: str, questions: int, database: Database, tmp_path: Path
):
    await read_key(database, tmp_path)
    async with open_editor(database, call("search_sessions", words=words), *SEND) as (_, editor):
        id = (await editor.new_session(str(tmp_path))).session_id
        await editor.prompt(id, "go")
        assert len(editor.questions) == questions


async def test_a_search_finds_the_taint_behind_a_fork(database: Database, tmp_path: Path):
    id = await read_key(database, tmp_path)
    async with open_editor(database, Reply("A tulip is hunter2.")) as (_, editor):
        fork = await fork_session(editor, id, tmp_path)
        await editor.prompt(fork, "again")
    async with open_editor(database, call("search_sessions", words="tulip"), *SEND) as (_, editor):
        new = (await editor.new_session(str(tmp_path))).session_id
        await editor.prompt(new, "go")
        assert len(editor.questions) == 1
