"""The commands /fork and /export, as a client sends them."""

from pathlib import Path

import pytest
from crow_core.acp.schema import LoadSessionRequest
from crow_core.app import Crow
from crow_core.extensions.commands import commands
from crow_core.testing import Reply, ScriptedModel, connect
from crow_persistence.database import Database
from crow_persistence.extension import persistence

pytestmark = pytest.mark.anyio


def app(database: Database, model: ScriptedModel) -> Crow:
    url = database.url.render_as_string(hide_password=False)
    return Crow(model).use(persistence, url=url, folder=database.folder).use(commands)


async def test_fork_command_copies_the_session_and_both_continue(database: Database):
    model = ScriptedModel(lambda request: Reply("Well."))
    async with connect(app(database, model)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "/fork")
        assert editor.text == "There is nothing to fork yet."
        await editor.prompt(session.session_id, "one")
        await editor.prompt(session.session_id, "/fork")
        id = editor.text.rpartition("Session ")[2].split()[0]
        await editor.prompt(session.session_id, "two")
        await editor.request("session/load", LoadSessionRequest(session_id=id, cwd="/", mcp_servers=[]))
        await editor.prompt(id, "three")
    said = [[m["content"] for m in request["messages"] if m["role"] == "user"] for request in model.requests]
    assert said == [["one"], ["one", "two"], ["one", "three"]]


@pytest.mark.parametrize(("words", "suffix"), [("", ".md"), ("html", ".html"), ("jsonl", ".jsonl"), ("atif", ".json")])
async def test_export_command_writes_a_file_without_secrets(
    database: Database, tmp_path: Path, words: str, suffix: str
):
    key = "sk-" + "a1B2c3D4" * 5
    async with connect(app(database, ScriptedModel([Reply("I saw it.")]))) as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, f"My key is {key}")
        await editor.prompt(session.session_id, f"/export {words}")
    file = tmp_path / f"crow-{session.session_id[:8]}{suffix}"
    assert f"Written to {file}. Likely secrets masked: " in editor.text
    written = file.read_text()
    assert "I saw it." in written
    assert key not in written


async def test_export_command_reports_its_failures(database: Database, tmp_path: Path):
    async with connect(app(database, ScriptedModel([Reply("Hello.")]))) as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "/export")
        assert editor.text == "There is nothing to export yet."
        await editor.prompt(session.session_id, "hi")
        await editor.prompt(session.session_id, "/export pdf")
        assert "There is no format 'pdf'. Choose one of: markdown, jsonl, html, atif." in editor.text
        (tmp_path / f"crow-{session.session_id[:8]}.md").mkdir()
        await editor.prompt(session.session_id, "/export")
    assert editor.text.endswith("cannot be written: Is a directory.")
