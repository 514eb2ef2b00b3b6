"""End-to-end tests with MCP servers that others wrote, a client, and a scripted model."""

import asyncio
import base64
import json
import re
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from crow_core.acp.schema import (
    BlockContent,
    ClientCapabilities,
    CreateElicitationRequest,
    CreateElicitationResponse,
    ElicitationCapabilities,
    ElicitationFormCapabilities,
    EnvVariable,
    ImageBlock,
    McpServer,
    ResourceBlock,
    ResourceLinkBlock,
    ToolCallUpdate,
)
from crow_core.app import Crow
from crow_core.testing import Editor, Reply, ScriptedModel, connect
from crow_core.testing.script import ScriptedCall as Use
from fastmcp import FastMCP
from msgspec import to_builtins

if TYPE_CHECKING:
    from conftest import Node

pytestmark = pytest.mark.anyio

EVERYTHING = "node_modules/@modelcontextprotocol/server-everything/dist/index.js"
FILESYSTEM = "node_modules/@modelcontextprotocol/server-filesystem/dist/index.js"
LOWLEVEL = Path(__file__).parent / "python" / "lowlevel.py"


@pytest.fixture
def everything(node: "Node") -> McpServer:
    return node.server("every", EVERYTHING, "stdio")


def use(name: str, **arguments: Any) -> Use:
    return {"name": name, "arguments": arguments}


def one_by_one(*uses: Use) -> ScriptedModel:
    """A model that makes one tool call in each reply."""
    return ScriptedModel([*(Reply(tool_calls=[each]) for each in uses), Reply("Done.")])


def results(model: ScriptedModel) -> list[str]:
    return [message["content"] for message in model.requests[-1]["messages"] if message["role"] == "tool"]


def find_content(editor: Editor, kind: type) -> list[Any]:
    """Return the content of one kind that the client got in tool calls."""
    parts = [part for update in editor.of(ToolCallUpdate) for part in update.content or []]
    return [part.content for part in parts if isinstance(part, BlockContent) and isinstance(part.content, kind)]


async def call_tools(server: McpServer, *uses: Use, cwd: str = "/") -> list[str]:
    """Return the results of tool calls, made one after the other, as the model reads them."""
    model = one_by_one(*uses)
    async with connect(Crow(model)) as editor:
        session = await editor.new_session(cwd, [server])
        await editor.prompt(session.session_id, "go")
        assert editor.thoughts == ""
    return results(model)


@asynccontextmanager
async def birds(transport: str, tmp_path: Path) -> AsyncGenerator[McpServer]:
    """A FastMCP server with one tool."""
    if transport == "stdio":
        code = "from fastmcp import FastMCP\nserver = FastMCP('birds')\n"
        code += "server.tool(lambda times: 'caw ' * int(times), name='sing')\nserver.run(show_banner=False)\n"
        yield McpServer(name="birds", command=sys.executable, args=["-c", code], env=[])
        return
    server = FastMCP("birds")
    server.tool(lambda times: "caw " * int(times), name="sing")
    listener = socket.create_server(("127.0.0.1", 0))
    web = server.http_app(transport="sse" if transport == "sse" else "http")
    http = uvicorn.Server(uvicorn.Config(web, log_config=None, ws="none", timeout_graceful_shutdown=0))
    serving = asyncio.ensure_future(http.serve(sockets=[listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/{'sse' if transport == 'sse' else 'mcp'}"
    try:
        yield McpServer(name="birds", type="sse" if transport == "sse" else "http", url=url, headers=[])
    finally:
        http.should_exit = True
        await serving


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transport", ["stdio", "http", "sse"])
async def test_fastmcp_server_is_called_over_every_transport(transport: str, tmp_path: Path):
    async with birds(transport, tmp_path) as server:
        assert await call_tools(server, use("birds_sing", times=2)) == ["caw caw "]


async def test_lowlevel_server_of_the_official_sdk_is_called():
    server = McpServer(name="birds", command=sys.executable, args=[str(LOWLEVEL)], env=[])
    assert await call_tools(server, use("birds_sing", times=2)) == ["caw caw"]


async def test_everything_echoes(everything: McpServer):
    texts = await call_tools(
        everything,
        use("every_echo", message="caw"),
        use("every_get-sum", a=2, b=3),
        use("every_get-structured-content", location="Chicago"),
        use("every_get-sum", a="two"),
    )
    assert texts[:2] == ["Echo: caw", "The sum of 2 and 3 is 5."]
    assert json.loads(texts[2])["temperature"]
    assert "invalid" in texts[3].lower()


async def test_everything_shows_images_links_and_embedded_files(everything: McpServer):
    model = one_by_one(
        use("every_get-tiny-image"),
        use("every_get-annotated-message", messageType="success", includeImage=True),
        use("every_get-resource-links", count=2),
        use("every_get-resource-reference", resourceType="Text", resourceId=1),
        use("every_get-resource-reference", resourceType="Blob", resourceId=2),
    )
    async with connect(Crow(model)) as editor:
        session = await editor.new_session("/", [everything])
        await editor.prompt(session.session_id, "go")
        assert [base64.b64decode(image.data)[:4] for image in find_content(editor, ImageBlock)] == [b"\x89PNG"] * 2
        assert len(find_content(editor, ResourceLinkBlock)) == 2
        text, blob = find_content(editor, ResourceBlock)
        assert text.resource.text.startswith("Resource 1:")
        assert base64.b64decode(blob.resource.blob).startswith(b"Resource 2:")
    read = repr(model.requests[-1]["messages"])
    assert read.count("data:image/png;base64,") == 2
    assert "Resource 1:" in read


async def test_everything_reports_progress(everything: McpServer):
    model = one_by_one(use("every_trigger-long-running-operation", duration=1, steps=4))
    async with connect(Crow(model)) as editor:
        session = await editor.new_session("/", [everything])
        await editor.prompt(session.session_id, "go")
        (states,) = editor.calls().values()
        assert states[-1] == "completed"
        assert states.count("in_progress") > 1
        assert "Long running operation completed" in results(model)[0]


async def test_everything_gets_the_roots_of_the_session(everything: McpServer, tmp_path: Path):
    (said,) = await call_tools(everything, use("every_get-roots-list"), cwd=str(tmp_path))
    assert tmp_path.as_uri() in said


async def test_everything_gets_only_the_promised_environment(everything: McpServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CROW_API_KEY", "canary")
    everything.env = [EnvVariable(name="BIRD", value="crow")]
    (said,) = await call_tools(everything, use("every_get-env"))
    assert json.loads(said)["BIRD"] == "crow"
    assert "canary" not in said


async def test_everything_samples_with_a_permission(everything: McpServer):
    def script(request: dict[str, Any]) -> Reply:
        match request["messages"][-1]:
            case {"role": "user", "content": str(text)} if "context: Which bird?" in text:
                return Reply("A crow.")
            case {"role": "tool"}:
                return Reply("Done.")
            case _:
                return Reply(tool_calls=[use("every_trigger-sampling-request", prompt="Which bird?")])

    model = ScriptedModel(script)
    async with connect(Crow(model)) as editor:
        session = await editor.new_session("/", [everything])
        await editor.prompt(session.session_id, "go")
        (question,) = editor.questions
        assert "Which bird?" in repr(question)
        assert "A crow." in results(model)[0]


async def test_everything_shows_a_form_with_every_kind_of_field(everything: McpServer):
    def fill(form: CreateElicitationRequest) -> CreateElicitationResponse:
        fields: dict[str, Any] = to_builtins(form.requested_schema)["properties"]
        content = {name: field["default"] for name, field in fields.items() if "default" in field}
        return CreateElicitationResponse(action="accept", content=content | {"name": "A. Crow"})

    can = ClientCapabilities(elicitation=ElicitationCapabilities(form=ElicitationFormCapabilities()))
    model = one_by_one(use("every_trigger-elicitation-request"))
    async with connect(Crow(model), capabilities=can) as editor:
        editor.answer = fill
        session = await editor.new_session("/", [everything])
        await editor.prompt(session.session_id, "go")
        (form,) = editor.forms
        assert "every" in form.message
        (said,) = results(model)
        assert "A. Crow" in said
        assert "42" in said


@pytest.mark.parametrize(("transport", "path"), [("streamableHttp", "mcp"), ("sse", "sse")])
async def test_everything_is_called_over_http(transport: str, path: str, node: "Node"):
    reserved = socket.socket()  # bound: nobody else is given its port, and the server may still listen there
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    port = reserved.getsockname()[1]
    command = node.server("every", EVERYTHING, transport)
    process = await asyncio.create_subprocess_exec(
        str(command.command), *command.args or (), env={"PORT": str(port)}, stdout=DEVNULL, stderr=PIPE
    )
    assert process.stderr
    try:
        while str(port).encode() not in (line := await process.stderr.readline()):
            assert line
        kind: Any = "sse" if transport == "sse" else "http"
        server = McpServer(name="every", type=kind, url=f"http://127.0.0.1:{port}/{path}", headers=[])
        assert await call_tools(server, use("every_echo", message="caw")) == ["Echo: caw"]
    finally:
        process.kill()
        await process.communicate()
        reserved.close()


async def test_filesystem_works_only_in_the_folder_of_the_session(node: "Node", tmp_path: Path):
    (tmp_path / "in").mkdir()
    (tmp_path / "secret").write_text("canary")
    inside = tmp_path / "in" / "birds.txt"
    texts = await call_tools(
        node.server("files", FILESYSTEM, str(tmp_path / "in")),
        use("files_list_allowed_directories"),
        use("files_write_file", path=str(inside), content="A crow.\n"),
        use("files_edit_file", path=str(inside), edits=[{"oldText": "A crow", "newText": "Two crows"}]),
        use("files_read_text_file", path=str(inside)),
        use("files_read_text_file", path=str(tmp_path / "secret")),
        cwd=str(tmp_path / "in"),
    )
    assert re.findall(r"^/.*", texts[0], re.MULTILINE) == [str(tmp_path / "in")]
    assert "+Two crows." in texts[2]
    assert texts[3] == inside.read_text() == "Two crows.\n"
    assert "denied" in texts[4]
    assert "canary" not in texts[4]
