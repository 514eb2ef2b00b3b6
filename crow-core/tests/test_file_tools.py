"""The built-in file tools as an editor and a model see them."""

from pathlib import Path

import crow_mcp_server
import pytest
from crow_core.acp.schema import DiffContent, ImageBlock, ToolCall, ToolCallUpdate
from crow_core.app import Crow
from crow_core.mcp.server import Server
from crow_core.testing import Editor, Reply, ScriptedModel, connect
from crow_core.testing.script import ScriptedCall as Use

pytestmark = pytest.mark.anyio

BUILT_IN = Server(
    "crow", crow_mcp_server.create_server, definitions=crow_mcp_server.tools(), built_in=True, shared=True
)


async def use(cwd: Path, *uses: Use) -> tuple[Editor, ScriptedModel]:
    """A turn in which the model used tools, one after the other."""
    model = ScriptedModel([*(Reply(tool_calls=[each]) for each in uses), Reply("Done.")])
    async with connect(Crow(model, servers=[BUILT_IN])) as editor:
        session = await editor.new_session(str(cwd))
        await editor.prompt(session.session_id, "go")
    return editor, model


async def test_searches_are_shown_as_searches_and_need_no_permission(tmp_path: Path):
    (tmp_path / "a.py").write_text("import os\nneedle = 1\n")
    editor, model = await use(
        tmp_path,
        {"name": "grep", "arguments": {"pattern": "needle"}},
        {"name": "glob", "arguments": {"pattern": "*.py"}},
        {"name": "tree", "arguments": {}},
    )
    assert [call.kind for call in editor.of(ToolCall)] == ["search"] * 3
    answers = [message["content"] for message in model.requests[-1]["messages"] if message["role"] == "tool"]
    assert answers == ["a.py\n2:needle = 1", "a.py", f"{tmp_path}/ (1 files)\n  a.py"]


async def test_an_image_that_is_viewed_reaches_editor_and_model(tmp_path: Path):
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n rest")
    editor, model = await use(tmp_path, {"name": "file_editor", "arguments": {"command": "view", "path": "a.png"}})
    content = editor.of(ToolCallUpdate)[-1].content
    assert isinstance(content, list)
    assert any(isinstance(getattr(block, "content", None), ImageBlock) for block in content)
    assert "data:image/png;base64,iVBORw0KGgogcmVzdA==" in str(model.requests[-1]["messages"])


async def test_several_edits_are_one_diff(tmp_path: Path):
    (tmp_path / "a").write_text("one\ntwo\n")
    edits = [{"old_str": "one", "new_str": "1"}, {"old_str": "two", "new_str": "2"}]
    editor, _ = await use(
        tmp_path, {"name": "file_editor", "arguments": {"command": "str_replace", "path": "a", "edits": edits}}
    )
    diff = DiffContent(path=str(tmp_path / "a"), old_text="one\ntwo\n", new_text="1\n2\n")
    assert editor.of(ToolCallUpdate)[-1].content == [diff]


async def test_a_dry_run_of_the_models_is_not_shown_as_a_change(tmp_path: Path):
    (tmp_path / "a").write_text("one\n")
    edit = {"command": "str_replace", "path": "a", "old_str": "one", "new_str": "two", "dry_run": True}
    editor, _ = await use(tmp_path, {"name": "file_editor", "arguments": edit})
    assert not any(
        isinstance(block, DiffContent) for update in editor.of(ToolCallUpdate) for block in update.content or ()
    )
    assert (tmp_path / "a").read_text() == "one\n"
