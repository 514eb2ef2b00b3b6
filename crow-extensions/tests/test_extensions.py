"""The smaller extensions that ship with the core, through an ACP client."""

import base64
import re
from pathlib import Path
from typing import Any

import crow_mcp_server
import pytest
from crow_core.acp.connection import RpcError
from crow_core.acp.schema import (
    AvailableCommandsUpdate,
    ConfigOptionUpdate,
    CurrentModeUpdate,
    ResourceLinkBlock,
    SelectConfigOption,
    SessionInfoUpdate,
    TextBlock,
    ToolCallUpdate,
    UsageUpdate,
)
from crow_core.app import Crow
from crow_core.mcp.server import Server
from crow_core.models.token_usage import ASSUMED_WINDOW
from crow_core.session.prompts import Prompt
from crow_core.testing import Reply, ScriptedModel, connect
from crow_core.testing.script import ScriptedCall as Use
from crow_extensions.commands import commands
from crow_extensions.refused_prompts import refused_prompts
from crow_extensions.templates import templates
from crow_extensions.titles import titles
from crow_extensions.truncate import truncate
from crow_extensions.usage import usage
from crow_permissions.extension import permissions
from fastmcp import FastMCP
from fastmcp.tools.base import ToolResult
from fastmcp.utilities.types import Image
from mcp_types import AudioContent, BlobResourceContents, EmbeddedResource, TextContent, TextResourceContents

pytestmark = pytest.mark.anyio

ROOT = str(Path("/").absolute())
"""The folder of a session in "/"; on Windows with the drive."""

PNG = b"\x89PNG\r\n\x1a\n"
"""The first bytes of an image of this kind."""


def two_models() -> dict[str, ScriptedModel]:
    return {
        "small": ScriptedModel(lambda request: Reply("I am small."), name="small-1b"),
        "large": ScriptedModel(lambda request: Reply("I am large."), name="large-70b"),
    }


async def test_the_client_receives_the_list_of_commands():
    crow = Crow(two_models()).use(permissions).use(commands).use(usage)
    async with connect(crow) as editor:
        await editor.new_session("/")
        await editor.until(lambda editor: editor.of(AvailableCommandsUpdate))
    (update,) = editor.of(AvailableCommandsUpdate)
    names = [command.name for command in update.available_commands]
    assert names == ["help", "prompt", "worktree", "model", "mode", "usage"]


async def test_help_lists_commands_without_asking_the_model():
    models = two_models()
    async with connect(Crow(models).use(commands).use(usage)) as editor:
        session = await editor.new_session("/")
        answer = await editor.prompt(session.session_id, "/help")
        assert answer.stop_reason == "end_turn"
    assert "`/model [model]`" in editor.text
    assert "`/usage`" in editor.text
    assert models["small"].requests == []


@pytest.mark.parametrize("typed", ["/model large", "/model\nlarge", "/model   large  "])
async def test_the_command_model_switches_the_model_and_updates_the_client(typed: str):
    async with connect(Crow(two_models()).use(commands)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, typed)
        (update,) = editor.of(ConfigOptionUpdate)
        (option,) = update.config_options
        assert isinstance(option, SelectConfigOption)
        assert option.current_value == "large"
        await editor.prompt(session.session_id, "who are you?")
    assert editor.text.endswith("I am large.")


async def test_the_command_mode_lists_modes_and_refuses_an_unknown_one():
    crow = Crow(two_models()).use(permissions).use(commands)
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "/mode")
        assert "- **ask**" in editor.text
        await editor.prompt(session.session_id, "/mode god")
        assert "There is no mode 'god'. Choose one of: ask, accept-edits, plan, yolo." in editor.text
        assert editor.of(CurrentModeUpdate) == []
        await editor.prompt(session.session_id, "/mode plan")
        assert [update.current_mode_id for update in editor.of(CurrentModeUpdate)] == ["plan"]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("/nosuch now", "There is no command `/nosuch`. `/help` lists the commands."),
        ("/Halp", "There is no command `/Halp`. Did you mean `/help`?"),
    ],
)
async def test_unknown_command_is_answered_without_the_model(typed: str, said: str):
    models = two_models()
    async with connect(Crow(models).use(commands)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, typed)
        assert editor.text == f"{said} To send this text to the model, put a space before the slash."
    assert not models["small"].requests


@pytest.mark.parametrize("typed", ["/etc/passwd looks odd", "/", "//", " /help", "/help/me", "/tmp is full", "/1"])
async def test_a_text_that_is_no_command_is_sent_to_the_model(typed: str):
    models = two_models()
    async with connect(Crow(models).use(commands)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, typed)
    assert models["small"].requests[0]["messages"][-1]["content"] == typed


async def test_a_command_with_attachments_is_recognised():
    models = two_models()
    async with connect(Crow(models).use(commands).use(usage)) as editor:
        session = await editor.new_session("/")
        link = ResourceLinkBlock(uri="file:///a.py", name="a.py")
        await editor.prompt(session.session_id, [TextBlock(text="/usage"), link])
    assert editor.text == "The model has not been asked in this session."


async def test_the_command_prompt_shows_the_system_prompt_and_the_size_of_the_tools():
    model = ScriptedModel([Reply("Hello.")])
    crow = Crow(model, system=Prompt("system", "You are in\n{{ cwd }}.")).use(commands)
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "/prompt")
        version = crow.prompts["system"].version
        assert f"System prompt: system, version {version}; nothing has been sent yet." in editor.text
        await editor.prompt(session.session_id, "hi")
        await editor.prompt(session.session_id, "/prompt")
    prompt = f"You are in\n{ROOT}."
    assert f"version {version}, {len(prompt)} characters, about 3 tokens.\n\nTools: 0, " in editor.text
    assert editor.text.endswith(f"    You are in\n    {ROOT}.")


async def test_usage_is_reported_after_each_reply_and_adds_up():
    counts = {"prompt_tokens": 1000, "completion_tokens": 20, "prompt_tokens_details": {"cached_tokens": 900}}
    model = ScriptedModel([Reply("One.", usage=counts), Reply("Two.", usage=counts)], window=8192)
    async with connect(Crow(model).use(commands).use(usage)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "hi")
        await editor.prompt(session.session_id, "hi")
        assert [(update.used, update.size) for update in editor.of(UsageUpdate)] == [(1020, 8192)] * 2
        await editor.prompt(session.session_id, "/usage")
    assert "Context: 1,020 of 8,192 tokens." in editor.text
    assert "2 model calls: 2,000 tokens in (1,800 from the server's cache, 90%), 40 out." in editor.text


@pytest.mark.parametrize("counts", [{}, {"prompt_tokens": None, "completion_tokens": None}])
async def test_usage_that_the_server_did_not_count_is_estimated(counts: dict[str, Any]):
    model = ScriptedModel([Reply("One.", usage=counts)])
    async with connect(Crow(model).use(commands).use(usage)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "hi")
        (update,) = editor.of(UsageUpdate)
        assert update.size == ASSUMED_WINDOW
        await editor.prompt(session.session_id, "/usage")
    assert "(assumed)" in editor.text
    assert ("about" in editor.text) == (not counts)


async def test_a_session_is_named_once_after_its_first_prompt():
    model = ScriptedModel([Reply("Hello."), Reply("Hello again.")])
    async with connect(Crow(model).use(titles)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "Please  fix\nthe \x1b[31mred\x1b[0m bird" + " and the others" * 9)
        await editor.prompt(session.session_id, "And now?")
    (update,) = editor.of(SessionInfoUpdate)
    assert isinstance(update.title, str)
    assert update.title.startswith("Please fix the  [31mred")
    assert update.title.endswith("…")
    assert len(update.title) <= 60


async def test_a_slash_command_does_not_name_the_session():
    async with connect(Crow(two_models()).use(commands).use(titles)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "/help")
        assert editor.of(SessionInfoUpdate) == []
        await editor.prompt(session.session_id, "Hello")
        assert [update.title for update in editor.of(SessionInfoUpdate)] == ["Hello"]


def contents(path: str) -> str | None:
    return Path(path).read_text() if Path(path).exists() else None


def flood(content: Any) -> Server:
    server = FastMCP("demo")
    server.tool(lambda: ToolResult(content), name="flood")
    return Server("demo", lambda: server, shared=True)


async def test_a_long_result_is_cut_in_the_middle_and_written_to_a_file():
    """Both for the model and the client. The file tools can read the file until the session ends."""
    text = "".join(f"{number}\n" for number in range(30_000))
    strange: Use = {"name": "demo_flood", "arguments": {}, "id": "../../outside/call"}
    built_in = Server(
        "crow", crow_mcp_server.create_server, definitions=crow_mcp_server.tools(), built_in=True, shared=True
    )
    paths: list[str] = []

    def script(request: dict[str, Any]) -> Reply:
        said = request["messages"][-1]["content"]
        if "left out" in said:
            paths.append(said.partition("the whole is in ")[2].partition("]")[0])
            view = {"command": "view", "path": paths[0], "view_range": [15_001, 15_001]}
            return Reply(tool_calls=[{"name": "file_editor", "arguments": view}])
        return Reply("Done.") if request["messages"][-1]["role"] == "tool" else Reply(tool_calls=[strange])

    model = ScriptedModel(script)
    async with connect(Crow(model, servers=[flood(text), built_in]).use(truncate, limit=1000)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
        said = model.requests[1]["messages"][-1]["content"]
        assert len(said) < 1300
        assert said.startswith("0\n1\n")
        assert said.endswith("29999\n")
        assert f"{len(text) - 1000:,} of {len(text):,} characters left out" in said
        assert contents(paths[0]) == text
        assert "15000" in model.requests[2]["messages"][-1]["content"]
        assert len(repr(editor.of(ToolCallUpdate)[1].content)) < 3000
    assert contents(paths[0]) is None


async def test_large_data_in_a_result_is_left_out_and_written_to_a_file():
    """The data of one result is counted together. Text that is no base64 is written as it is."""
    sound = AudioContent(type="audio", data=base64.b64encode(b"s" * 3_000).decode(), mime_type="audio/wav")
    document = BlobResourceContents(uri="memory://a.pdf", mime_type="application/pdf", blob="?" * 4_001)
    blocks = [Image(data=PNG + b"i" * 2_992, format="png").to_image_content(), sound]
    blocks.append(EmbeddedResource(type="resource", resource=document))
    model = ScriptedModel([Reply(tool_calls=[{"name": "demo_flood", "arguments": {}}]), Reply("Done.")])
    async with connect(Crow(model, servers=[flood(blocks)]).use(truncate, data_limit=4_000)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
        answer, images = (repr(message["content"]) for message in model.requests[1]["messages"][-2:])
        assert images.count("data:image/png;base64,") == 1
        (sound_kind, sound_path), (kind, path) = re.findall(r"\[(\S+), 3,000 bytes: [^]]*; it is in ([^]]+)\]", answer)
        assert (sound_kind, contents(sound_path)) == ("audio/wav", "s" * 3_000)
        assert (kind, contents(path)) == ("application/pdf", "?" * 4_001)
        assert len(repr(editor.of(ToolCallUpdate)[1].content)) < 6_000


async def test_structured_content_without_text_is_cut_like_text():
    server = FastMCP("demo")
    server.tool(lambda: ToolResult([], structured_content={"rows": ["x" * 10] * 500}), name="flood")
    model = ScriptedModel([Reply(tool_calls=[{"name": "demo_flood", "arguments": {}}]), Reply("Done.")])
    crow = Crow(model, servers=[Server("demo", lambda: server, shared=True)]).use(truncate, limit=1000)
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
        said = model.requests[1]["messages"][-1]["content"]
        assert said.startswith('{"rows":["xxx')
        assert "of 6,510 characters left out" in said


async def test_the_limit_holds_for_all_texts_of_a_result_together():
    page = TextResourceContents(uri="memory://page", text="p" * 400)
    pieces = [TextContent(type="text", text="x" * 400), EmbeddedResource(type="resource", resource=page)] * 5
    model = ScriptedModel([Reply(tool_calls=[{"name": "demo_flood", "arguments": {}}]), Reply("Done.")])
    image = Image(data=PNG + b"pixels", format="png").to_image_content()
    async with connect(Crow(model, servers=[flood([*pieces, image])]).use(truncate, limit=1000)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    read = repr(model.requests[1]["messages"])
    assert "left out" in read
    assert read.count("p") + read.count("x") < 1300
    assert "data:image/png;base64," in read


async def test_a_limit_of_zero_leaves_no_text():
    model = ScriptedModel([Reply(tool_calls=[{"name": "demo_flood", "arguments": {}}]), Reply("Done.")])
    async with connect(Crow(model, servers=[flood("x" * 1000)]).use(truncate, limit=0)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    assert model.requests[1]["messages"][-1]["content"].strip().startswith("[1,000 of 1,000 characters left out")


async def test_a_result_within_the_limits_is_unchanged():
    model = ScriptedModel([Reply(tool_calls=[{"name": "demo_flood", "arguments": {}}]), Reply("Done.")])
    async with connect(Crow(model, servers=[flood("x" * 1000)]).use(truncate, limit=1000)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    assert model.requests[1]["messages"][-1]["content"] == "x" * 1000


async def test_a_refused_prompt_is_not_sent_to_the_model_again():
    model = ScriptedModel([Reply("Hello."), Reply("No.", finish_reason="content_filter"), Reply("Yes.")])
    async with connect(Crow(model).use(refused_prompts)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "hi")
        refused = await editor.prompt(session.session_id, "something foul")
        await editor.prompt(session.session_id, "something fair")
    assert refused.stop_reason == "refusal"
    assert [message["content"] for message in model.requests[2]["messages"][1:]] == ["hi", "Hello.", "something fair"]


async def test_a_file_replaces_a_prompt_from_the_next_session_on(tmp_path: Path):
    file = tmp_path / "system.md.j2"
    file.write_text("You are in {{ cwd }}.")
    model = ScriptedModel([Reply("Yes.")] * 3)
    async with connect(Crow(model).use(templates, files=lambda session: {"system": file})) as editor:
        one = await editor.new_session("/")
        await editor.prompt(one.session_id, "hi")
        file.write_text("You are still in {{ cwd }}.")
        two = await editor.new_session("/")
        await editor.prompt(one.session_id, "hi")
        await editor.prompt(two.session_id, "hi")
    systems = [request["messages"][0]["content"] for request in model.requests]
    assert systems == [f"You are in {ROOT}.", f"You are in {ROOT}.", f"You are still in {ROOT}."]


async def test_the_error_for_an_invalid_template_names_it(tmp_path: Path):
    file = tmp_path / "system.md.j2"
    file.write_text("You are {{ nobody }}.")
    async with connect(Crow(ScriptedModel([])).use(templates, files=lambda session: {"system": file})) as editor:
        session = await editor.new_session("/")
        with pytest.raises(RpcError) as caught:
            await editor.prompt(session.session_id, "hi")
    assert caught.value.data == {"details": "The template of the prompt 'system' is wrong: 'nobody' is undefined."}


async def test_the_error_for_an_unreadable_template_names_its_file(tmp_path: Path):
    file = tmp_path / "system.md.j2"
    file.write_bytes(b"\xff\xfe\xfd")
    async with connect(Crow(ScriptedModel([])).use(templates, files=lambda session: {"system": file})) as editor:
        with pytest.raises(RpcError) as caught:
            await editor.new_session("/")
    assert str(file) in caught.value.data["details"]
