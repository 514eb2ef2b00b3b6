"""Tests of resources of MCP servers: mentioned, linked, and read by the model."""

import sys
from typing import Any

import pytest
from crow_core.acp.schema import (
    ClientCapabilities,
    ClientSessionCapabilities,
    McpServer,
    NoticeCapabilities,
    NoticeUpdate,
    ResourceLinkBlock,
    TextBlock,
    ToolCall,
    UserMessageChunk,
)
from crow_core.app import Crow
from crow_core.content import replay
from crow_core.extensions import resources as module
from crow_core.extensions.commands import commands
from crow_core.extensions.mcp import mcp
from crow_core.extensions.permissions import permissions
from crow_core.extensions.resources import resources
from crow_core.mcp.server import Server
from crow_core.testing import Editor, Reply, ScriptedModel, connect
from crow_core.testing.script import ScriptedCall as Use
from fastmcp import FastMCP

pytestmark = pytest.mark.anyio

NOTICES = ClientCapabilities(session=ClientSessionCapabilities(notices=NoticeCapabilities()))
PNG = b"\x89PNG\r\n"


def library() -> FastMCP:
    server = FastMCP("docs")
    server.resource("docs://readme", name="readme", description="What it is")(lambda: "Read me.")
    server.resource("docs://logo", mime_type="image/png")(lambda: PNG)
    server.resource("docs://blob", mime_type="application/zip")(lambda: b"12345")
    server.resource("docs://long")(lambda: "x" * 1000)

    @server.resource("page://{number}")
    def page(number: str) -> str:
        return f"Page {number}."

    @server.resource("docs://broken")
    def broken() -> str:
        raise ValueError("torn out")

    return server


def app(model: ScriptedModel, *servers: FastMCP, name: str = "docs") -> Crow:
    crow = Crow(model, servers=[Server(name, lambda server=server: server, shared=True) for server in servers])
    return crow.use(permissions).use(commands).use(mcp).use(resources)


def hello() -> ScriptedModel:
    return ScriptedModel(lambda request: Reply("Hello."))


async def say(crow: Crow, *blocks: Any) -> Editor:
    async with connect(crow, permit=None, capabilities=NOTICES) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, [TextBlock(text=b) if isinstance(b, str) else b for b in blocks])
    return editor


def asked(model: ScriptedModel) -> Any:
    return next(message["content"] for message in model.requests[-1]["messages"] if message["role"] == "user")


def result(model: ScriptedModel) -> Any:
    return model.requests[-1]["messages"][-1]["content"]


def offered(model: ScriptedModel) -> list[str]:
    return [tool["function"]["name"] for tool in model.requests[-1].get("tools", [])]


def reading(**arguments: Any) -> ScriptedModel:
    return ScriptedModel([Reply(tool_calls=[Use(name="mcp_resources", arguments=arguments)]), Reply("Done.")])


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIST_TIMEOUT", 200)


README = '<resource uri="docs://readme">\nRead me.\n</resource>'


@pytest.mark.parametrize("said", ["docs://readme", "readme", "docs://readme.", "readme),"])
async def test_mentioned_resource_is_attached_to_the_prompt(said: str):
    model = hello()
    await say(app(model, library()), f"Explain @docs:{said} please")
    assert asked(model) == f"Explain @docs:{said} please\n\n{README}"


POOR = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    match request["method"]:
        case "initialize":
            version, about = request["params"]["protocolVersion"], {"name": "docs", "version": "1"}
            answer = {"result": {"protocolVersion": version, "capabilities": {"resources": {}}, "serverInfo": about}}
        case "resources/list":
            answer = {"result": {"resources": [{"name": "no address"}, {"uri": "docs://readme", "name": "readme"}]}}
        case "resources/read":
            contents = {"uri": "docs://readme", "mimeType": "text/plain", "text": "Read me."}
            answer = {"result": {"contents": [contents]}}
        case _:
            answer = {"error": {"code": -32601, "message": "Method not found"}}
    if "id" in request:
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **answer}), flush=True)
"""


async def test_server_with_only_resources_and_an_invalid_one_is_read(
    caplog: pytest.LogCaptureFixture,
):
    model = hello()
    async with connect(app(model), permit=None, capabilities=NOTICES) as editor:
        docs = McpServer(name="docs", command=sys.executable, args=["-c", POOR], env=[])
        session = await editor.new_session("/", [docs])
        await editor.prompt(session.session_id, "Explain @docs:readme")
    assert asked(model) == f"Explain @docs:readme\n\n{README}"
    assert not editor.of(NoticeUpdate)
    assert "MCP server 'docs' has resources that were left out: 'no address': " in caplog.text


async def test_template_is_mentioned_by_a_matching_uri():
    model = hello()
    await say(app(model, library()), "See @docs:page://7 and @docs:page://8")
    assert 'uri="page://7">\nPage 7.' in asked(model)
    assert 'uri="page://8">\nPage 8.' in asked(model)


async def test_replay_shows_the_prompt_without_resources():
    crow = app(hello(), library())
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "@docs:readme")
        (opened,) = crow.sessions.values()
        content = [update.content for update in replay(opened.log, "/") if isinstance(update, UserMessageChunk)]
    assert content == [TextBlock(text="@docs:readme")]


async def test_link_to_a_resource_is_read_and_other_links_stay():
    model = hello()
    links = [ResourceLinkBlock(uri=uri, name="it") for uri in ("docs://readme", "page://3", "https://x/y")]
    await say(app(model, library()), "Explain", *links)
    assert asked(model).startswith("Explain\n\n[it](docs://readme)\n\n[it](page://3)\n\n[it](https://x/y)")
    assert README in asked(model)
    assert "Page 3." in asked(model)
    assert asked(model).count("<resource") == 2


async def test_mentioned_image_is_sent_and_a_blob_is_described():
    model = hello()
    await say(app(model, library()), "@docs:docs://logo @docs:docs://blob")
    text, image, note = asked(model)
    assert text["text"] == "@docs:docs://logo @docs:docs://blob"
    assert image["image_url"]["url"].startswith("data:image/png;base64,")
    assert note["text"] == "[docs://blob: 6 bytes of application/zip, which cannot be shown]"


async def test_text_of_resources_in_a_prompt_is_limited(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "TEXT_LIMIT", 900)
    model = hello()
    await say(app(model, library()), "@docs:docs://long @docs:readme")
    assert "x" * 900 + "\n[100 characters left out]" in asked(model)
    assert "x" * 901 not in asked(model)
    assert "\n[8 characters left out]" in asked(model)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("@docs:nothing", "The MCP server 'docs' has no 'nothing' to read. /mcp shows how it is."),
        ("@docs:docs://broken", "docs://broken was not read: "),
    ],
)
async def test_unreadable_resource_is_a_notice_and_the_prompt_goes_on(said: str, sentence: str):
    model = hello()
    editor = await say(app(model, library()), said)
    (notice,) = editor.of(NoticeUpdate)
    assert notice.title.startswith(sentence)
    assert asked(model) == said


@pytest.mark.parametrize("said", ["me@docs.example:80", "@someone: hi", "@other:readme", "a@docs:readme", "@docs: x"])
async def test_text_that_resembles_a_mention_is_left_alone(said: str):
    model = hello()
    editor = await say(app(model, library()), said)
    assert asked(model) == said
    assert not editor.of(NoticeUpdate)


async def test_secrets_in_a_resource_are_masked():
    server = FastMCP("docs")
    server.resource("docs://key")(lambda: "the key is canary-7f3a02c2")
    model = hello()
    crow = app(model, server)
    crow.servers[0].secrets = {"canary-7f3a02c2"}
    await say(crow, "@docs:docs://key")
    assert "the key is [secret]" in asked(model)


async def test_model_lists_and_reads_resources_without_a_permission():
    model = reading()
    editor = await say(app(model, library()), "go")
    assert "docs: docs://readme, readme: What it is\n" in result(model)
    assert "docs: page://{number} (a template: fill in the braces), page" in result(model)
    assert [call.kind for call in editor.of(ToolCall)] == ["read"]
    assert editor.questions == []


@pytest.mark.parametrize("server", ["", "docs"])
@pytest.mark.parametrize(("uri", "text"), [("docs://readme", "Read me."), ("page://7", "Page 7.")])
async def test_model_reads_a_resource(server: str, uri: str, text: str):
    model = reading(uri=uri, server=server)
    await say(app(model, library()), "go")
    assert result(model) == text


async def test_unknown_resource_is_an_error_with_advice():
    model = reading(uri="docs://no")
    await say(app(model, library()), "go")
    assert result(model) == "No MCP server lists 'docs://no'. Call without a URI to see what there is."


async def test_model_gets_an_image_that_it_reads():
    model = reading(uri="docs://logo")
    await say(app(model, library()), "go")
    parts = [part for message in model.requests[-1]["messages"][-2:] for part in message["content"]]
    assert any("image_url" in part for part in parts if isinstance(part, dict))


async def test_tool_is_offered_only_if_there_are_resources():
    with_some, without = hello(), hello()
    await say(app(with_some, library()), "go")
    assert offered(with_some) == ["mcp_resources"]
    await say(app(without, FastMCP("docs")), "go")
    assert offered(without) == []
