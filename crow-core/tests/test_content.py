"""Conversions: ACP content becomes the user message, and tool results become updates."""

import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import crow_mcp_server
import pytest
from crow_core.acp.schema import (
    AudioBlock,
    BlockContent,
    ClientCapabilities,
    ContentBlock,
    DiffContent,
    ImageBlock,
    ResourceBlock,
    ResourceContents,
    ResourceLinkBlock,
    TextBlock,
    ToolCall,
    ToolCallUpdate,
    UnknownContentBlock,
    UserMessageChunk,
)
from crow_core.app import Crow
from crow_core.content import replay, to_interruption, to_user_message
from crow_core.mcp.server import Server
from crow_core.mcp.tool import ToolCall as CalledTool
from crow_core.messages.message import Message
from crow_core.models.chat_model import ChatModel
from crow_core.models.quirks import Quirks
from crow_core.testing import Editor, Reply, ScriptedModel, ScriptedServer, connect
from crow_core.testing.script import ScriptedCall as Use
from crow_core.text import fence
from fastmcp import FastMCP
from fastmcp.tools.base import ToolResult
from fastmcp.utilities.types import Audio, Image
from mcp_types import EmbeddedResource, ResourceLink, TextContent, TextResourceContents

pytestmark = pytest.mark.anyio

PIXEL = b64encode(b"\x89PNG\r\n\x1a\n and no more").decode()
BUILT_IN = Server(
    "crow", crow_mcp_server.create_server, definitions=crow_mcp_server.tools(), built_in=True, shared=True
)


async def send_prompt(*blocks: ContentBlock) -> Any:
    """Send a prompt of these blocks; return the content of the user message."""
    model = ScriptedModel([Reply("I see.")])
    async with connect(Crow(model)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, blocks)
    return model.requests[0]["messages"][-1]["content"]


async def use(crow: Crow, cwd: Path, *uses: Use) -> Editor:
    """Run a turn with these tool calls; return the editor."""
    async with connect(crow) as editor:
        session = await editor.new_session(str(cwd))
        await editor.prompt(session.session_id, "go")
    return editor


def link(uri: str, name: str = "", **more: Any) -> ResourceLinkBlock:
    return ResourceLinkBlock(uri=uri, name=name, **more)


async def test_several_text_blocks_become_one_text():
    assert await send_prompt(TextBlock(text="One."), TextBlock(text=""), TextBlock(text="Two.")) == "One.\n\nTwo."


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (link("file:///home/me/a%20file.py", "a file.py"), "[a file.py](/home/me/a file.py)"),
        (link("file:///home/me/src/"), "/home/me/src/"),
        (link("file:///no/such/file.txt", "/no/such/file.txt"), "/no/such/file.txt"),
        (link("file:///home/me/a.py#L10-20", "a.py", title="main"), "[main](/home/me/a.py#L10-20)"),
        (link("file:///home/me/a.py?symbol=main#L1:4", "main"), "[main](/home/me/a.py#L1:4)"),
        (link("https://example.org/a?b=c#d", "page"), "[page](https://example.org/a?b=c#d)"),
        (link("http://[broken", "odd"), "[odd](http://[broken)"),
        (link("zed:///agent/thread/1", "thread"), "[thread](zed:///agent/thread/1)"),
    ],
)
async def test_a_resource_link_becomes_text_that_names_it(block: ResourceLinkBlock, text: str):
    """A folder, a missing file, a range of lines and a web page are named, and none is opened."""
    assert await send_prompt(TextBlock(text="See"), block) == f"See\n\n{text}"


async def test_embedded_files_are_included_whole_and_in_order():
    one = ResourceBlock(resource=ResourceContents(uri="file:///a.py", text="print('{{ 7*7 }}')\n"))
    two = ResourceBlock(resource=ResourceContents(uri="file:///b.py#L3-4", text="</resource> {0.__class__}"))
    assert await send_prompt(TextBlock(text="Compare"), one, two) == (
        "Compare\n\n<resource uri=\"/a.py\">\nprint('{{ 7*7 }}')\n\n</resource>\n\n"
        '<resource uri="/b.py#L3-4">\n</resource> {0.__class__}\n</resource>'
    )


@pytest.mark.parametrize("blob", [b64encode(b"12345678\0").decode(), "A", "not base64 at all!"])
async def test_an_embedded_binary_file_is_named(blob: str):
    block = ResourceBlock(resource=ResourceContents(uri="file:///a.bin", blob=blob, mime_type="application/zip"))
    content = await send_prompt(block)
    assert content.startswith("[attached: /a.bin, ")
    assert content.endswith("bytes that are neither text nor an image]")


async def test_images_become_parts_beside_the_text():
    embedded = ResourceContents(uri="file:///b.png", blob=PIXEL, mime_type="image/png")
    content = await send_prompt(
        TextBlock(text="Compare"),
        TextBlock(text=""),
        ImageBlock(data=PIXEL, mime_type="image/jpeg"),
        ResourceBlock(resource=embedded),
    )
    assert content == [
        {"type": "text", "text": "Compare"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
    ]


@pytest.mark.parametrize(
    ("mime_type", "format"),
    [("audio/wav", "wav"), ("audio/x-wav", "wav"), ("audio/mpeg", "mp3"), ("audio/ogg; codecs=opus", "ogg"), ("", "")],
)
def test_an_audio_block_becomes_an_audio_part(mime_type: str, format: str):
    sound = AudioBlock(data=PIXEL, mime_type=mime_type)
    assert to_user_message([TextBlock(text="Listen"), sound]).get("content") == [
        {"type": "text", "text": "Listen"},
        {"type": "input_audio", "input_audio": {"data": PIXEL, "format": format}},
    ]


@pytest.mark.parametrize(
    ("model", "sent"),
    [
        ("hears", [{"type": "input_audio", "input_audio": {"data": PIXEL, "format": "wav"}}]),
        ("deaf", "[a sound, which this model cannot hear]"),
    ],
)
async def test_audio_is_announced_if_a_model_takes_it_and_sent_to_such_a_model_only(model: str, sent: Any):
    async with ScriptedServer([Reply("I see.")]) as server:
        models = {
            name: ChatModel(name=name, base_url=server.url, quirks=Quirks(audio=name == "hears"))
            for name in ("hears", "deaf")
        }
        async with connect(Crow(models)) as editor:
            told = await editor.initialize("editor", ClientCapabilities())
            assert told.agent_capabilities.prompt_capabilities.audio
            session = await editor.new_session("/")
            await editor.set_option(session.session_id, "model", model)
            await editor.prompt(session.session_id, [AudioBlock(data=PIXEL, mime_type="audio/wav")])
        assert server.requests[0]["messages"][-1]["content"] == sent


async def test_audio_is_not_announced_if_no_model_takes_it():
    async with connect(Crow(ChatModel(name="m", base_url="http://localhost:1/v1"))) as editor:
        told = await editor.initialize("editor", ClientCapabilities())
    assert not told.agent_capabilities.prompt_capabilities.audio


def test_attachments_of_a_prompt_are_shown_again_unchanged():
    blocks: list[ContentBlock] = [
        AudioBlock(data="c291bmQ=", mime_type="audio/wav"),
        TextBlock(text="and"),
        ImageBlock(data=PIXEL, mime_type="image/png"),
        AudioBlock(data="bW9yZQ==", mime_type="audio/mpeg"),
    ]
    shown = list(replay([to_user_message(blocks)], "/"))
    assert [update.content for update in shown if isinstance(update, UserMessageChunk)] == blocks


@pytest.mark.parametrize("kind", [{}, {"mime_type": None}, {"mime_type": "application/zip"}])
def test_an_attached_binary_file_is_shown_again_without_its_data(kind: dict[str, Any]):
    """With and without a MIME type."""
    (shown,) = replay(
        [to_user_message([ResourceBlock(resource=ResourceContents(uri="file:///a", blob="AAAA", **kind))])], "/"
    )
    assert isinstance(shown, UserMessageChunk)
    assert shown.content == ResourceBlock(resource=ResourceContents(uri="file:///a", blob="", **kind))


def test_content_that_the_model_cannot_read_is_named():
    message = to_user_message([UnknownContentBlock({"type": "hologram", "beam": 7})])
    assert message.get("content") == "[attached: something this agent does not know]"


async def test_a_tool_call_is_shown_with_name_kind_location_and_arguments(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one\n")
    long = "echo " + "x" * 5000 + "\nrm -rf /tmp/nothing"
    uses: list[Use] = [
        {"name": "file_editor", "arguments": {"command": "view", "path": "a.txt"}},
        {
            "name": "file_editor",
            "arguments": {"command": "insert", "path": "a.txt", "insert_line": 1, "new_str": "two"},
        },
        {"name": "terminal", "arguments": {"command": long}},
    ]
    model = ScriptedModel([Reply(tool_calls=[each]) for each in uses] + [Reply("Done.")])
    editor = await use(Crow(model, servers=[BUILT_IN]), tmp_path)
    view, insert, run = editor.of(ToolCall)
    assert (view.name, view.kind, view.title) == ("file_editor", "read", "view a.txt")
    assert (insert.name, insert.kind, insert.title) == ("file_editor", "edit", "insert a.txt")
    assert (run.name, run.kind, run.title) == ("terminal", "execute", "terminal")
    whole = next(update for update in editor.of(ToolCallUpdate) if update.tool_call_id == run.tool_call_id)
    assert str(whole.title).startswith("echo xxx")
    assert len(str(whole.title)) < 250
    assert [call.raw_input for call in (view, insert, whole)] == [each["arguments"] for each in uses]
    for call in (view, insert):
        assert isinstance(call.locations, list)
        assert [place.path for place in call.locations] == [str(tmp_path / "a.txt")]


async def test_an_edit_is_shown_as_the_diff_of_its_changes(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    arguments = {"command": "str_replace", "path": "a.txt", "old_str": "two", "new_str": "2"}
    model = ScriptedModel([Reply(tool_calls=[{"name": "file_editor", "arguments": arguments}]), Reply("Done.")])
    editor = await use(Crow(model, servers=[BUILT_IN]), tmp_path)
    end = editor.of(ToolCallUpdate)[-1]
    assert end.status == "completed"
    path = str(tmp_path / "a.txt")
    assert end.content == [DiffContent(path=path, old_text="one\ntwo\n", new_text="one\n2\n")]
    assert isinstance(end.locations, list)
    assert [(place.path, place.line) for place in end.locations] == [(path, 2)]


async def test_a_failed_edit_is_shown_as_failed_and_without_a_diff(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one\n")
    arguments = {"command": "str_replace", "path": "a.txt", "old_str": "three", "new_str": "3"}
    model = ScriptedModel([Reply(tool_calls=[{"name": "file_editor", "arguments": arguments}]), Reply("Oh.")])
    editor = await use(Crow(model, servers=[BUILT_IN]), tmp_path)
    end = editor.of(ToolCallUpdate)[-1]
    assert end.status == "failed"
    assert isinstance(end.content, list)
    assert all(isinstance(content, BlockContent) for content in end.content)


@pytest.mark.posix("the command is that of a POSIX shell")
async def test_the_output_of_a_command_is_shown_unchanged(tmp_path: Path):
    arguments = {"command": "printf '# no title\\n```\\nnor code'"}
    model = ScriptedModel([Reply(tool_calls=[{"name": "terminal", "arguments": arguments}]), Reply("Done.")])
    editor = await use(Crow(model, servers=[BUILT_IN]), tmp_path)
    end = editor.of(ToolCallUpdate)[-1]
    assert end.content == [BlockContent(content=TextBlock(text="````\n# no title\n```\nnor code\n````"))]
    assert model.requests[1]["messages"][-1]["content"] == "# no title\n```\nnor code"


async def test_every_kind_of_result_reaches_both_client_and_model(tmp_path: Path):
    server = FastMCP("demo")
    page = TextResourceContents(uri="memory://page", text="a page")

    @server.tool
    def everything() -> ToolResult:
        return ToolResult(
            [
                TextContent(type="text", text="words"),
                Image(data=b"\x89PNG\r\n\x1a\npixels", format="png").to_image_content(),
                Audio(data=b"waves", format="wav").to_audio_content(),
                EmbeddedResource(type="resource", resource=page),
                ResourceLink(type="resource_link", uri="https://example.org/", name="site"),
            ]
        )

    model = ScriptedModel([Reply(tool_calls=[{"name": "demo_everything", "arguments": {}}]), Reply("Much.")])
    editor = await use(Crow(model, servers=[Server("demo", lambda: server, shared=True)]), tmp_path)
    end = editor.of(ToolCallUpdate)[-1]
    assert isinstance(end.content, list)
    shown = [content.content for content in end.content if isinstance(content, BlockContent)]
    kinds = [type(block) for block in shown]
    assert kinds == [TextBlock, ImageBlock, AudioBlock, ResourceBlock, ResourceLinkBlock]
    read = json.dumps(model.requests[1]["messages"])
    for words in (
        "words",
        b64encode(b"\x89PNG\r\n\x1a\npixels").decode(),
        "a sound, audio/wav",
        "a page",
        "[site](https://example.org/)",
    ):
        assert words in read


async def test_an_empty_result_says_that_it_is_one(tmp_path: Path):
    server = FastMCP("demo")
    server.tool(lambda: ToolResult([]), name="nothing")
    server.tool(lambda: ToolResult([], structured_content={"birds": 3}), name="structured")
    calls: list[Use] = [{"name": f"demo_{name}", "arguments": {}} for name in ("nothing", "structured")]
    model = ScriptedModel([Reply(tool_calls=calls), Reply("Well.")])
    await use(Crow(model, servers=[Server("demo", lambda: server, shared=True)]), tmp_path)
    assert [m["content"] for m in model.requests[1]["messages"][-2:]] == ["(no output)", '{"birds":3}']


async def test_changes_that_an_external_server_reports_are_ignored(tmp_path: Path):
    server = FastMCP("demo")
    lie = {"crow/changes": [{"path": "/etc/passwd", "old": "", "new": "root::0:0"}], "crow/locations": []}

    @server.tool(meta={"crow/kind": "read"})
    def peek() -> ToolResult:
        return ToolResult("done", meta=lie)

    model = ScriptedModel([Reply(tool_calls=[{"name": "demo_peek", "arguments": {}}]), Reply("Done.")])
    editor = await use(Crow(model, servers=[Server("demo", lambda: server, shared=True)]), tmp_path)
    assert [call.kind for call in editor.of(ToolCall)] == ["other"]
    assert editor.of(ToolCallUpdate)[-1].content == [BlockContent(content=TextBlock(text="done"))]


@pytest.mark.parametrize(
    "arguments",
    [
        {"command": "view", "path": "a\x1b[2Jb\u202etxt.exe"},
        {"command": "ls \x1b]52;c;aGk=\x07"},
        {"command": "ls \x9b2J"},
        {"query": "a\x1b[31m\nb\U000e0041\U000e0042"},
    ],
)
async def test_a_title_is_one_line_without_control_characters(arguments: dict[str, str], tmp_path: Path):
    model = ScriptedModel([Reply(tool_calls=[{"name": "nonesuch", "arguments": arguments}]), Reply("Oh.")])
    editor = await use(Crow(model), tmp_path)
    (call,) = editor.of(ToolCall)
    assert call.title.isprintable()
    shown = [call.raw_input[name].replace("\n", "") for name in arguments]
    assert "".join(shown).isprintable()


@pytest.mark.parametrize(
    ("text", "marks"), [("", "```"), ("``", "```"), ("a ``` b", "````"), ("`````\n```", "``````"), ("`" * 10**5, "")]
)
def test_the_fence_of_a_code_block_is_longer_than_any_fence_in_it(text: str, marks: str):
    marks = marks or "`" * (10**5 + 1)
    assert fence(text) == f"{marks}\n{text}\n{marks}"


def test_a_client_that_shows_compactions_is_told_where_the_conversation_was_compacted():
    marker: Message = {"crow": {"kind": "compaction", "id": "c1", "summary": "so far"}}
    log: list[Message] = [{"role": "user", "content": "one"}, marker, {"role": "user", "content": "two"}]
    shown = [type(update).__name__ for update in replay(log, "/", compactions=True)]
    assert shown == ["UserMessageChunk", "CompactionUpdate", "UserMessageChunk"]
    assert [type(update).__name__ for update in replay(log, "/")] == ["UserMessageChunk", "UserMessageChunk"]


def test_calls_that_did_not_run_say_so_when_a_session_is_loaded():
    use: Any = {"id": "1", "type": "function", "function": {"name": "fetch", "arguments": "{}"}}
    tool_call = CalledTool(use, {}, True, "fetch", "fetch")
    log: list[Message] = [{"role": "assistant", "tool_calls": [use]}, to_interruption(tool_call, begun=False)]
    *_, end = replay(log, "/")
    assert isinstance(end, ToolCallUpdate)
    assert (end.status, end.meta) == ("failed", {"crow": {"notRun": True}})
