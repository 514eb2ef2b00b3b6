"""Tasks of MCP servers that are killed while they are asked for a task, over a command's streams and over HTTP."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from crow_core.acp.schema import McpServer
from crow_core.app import Crow
from crow_core.mcp import server as mcp_server
from crow_core.mcp.server import Server
from crow_core.mcp.server_source import from_acp
from crow_core.testing import Reply, ScriptedModel, connect

pytestmark = [pytest.mark.anyio, pytest.mark.posix, pytest.mark.timeout(120)]

BUILD = Reply(tool_calls=[{"name": "jobs_build", "arguments": {}}])
SERVER = """
import json, os, signal, socket, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

killed, listener = sys.argv[1], sys.argv[2:]
TASK = {"taskId": "t1", "pollIntervalMs": 0, "createdAt": "2026-11-27T10:00:00Z",
        "lastUpdatedAt": "2026-11-27T10:00:00Z", "ttlMs": None}

def answer(request):
    match request["method"]:
        case "server/discover":
            result = {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}, "ttlMs": 0,
                      "cacheScope": "private"}
        case "tools/list":
            result = {"tools": [{"name": "build", "inputSchema": {"type": "object"}}], "ttlMs": 0,
                      "cacheScope": "private"}
        case "tools/call":
            result = {"resultType": "task", "status": "working", **TASK}
        case "tasks/get" if os.path.exists(killed):
            content = [{"type": "text", "text": "built"}]
            result = {"status": "completed", "result": {"content": content}, **TASK}
        case "tasks/get":
            open(killed, "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
    return {"jsonrpc": "2.0", "id": request["id"], "result": {"resultType": "complete", **result}}

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.dumps(answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass

if listener:
    server = ThreadingHTTPServer(("", 0), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = socket.socket(fileno=int(listener[0]))
    server.serve_forever()
for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        print(json.dumps(answer(request)), flush=True)
"""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A listening socket: who connects while no server runs waits for the next one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def start(listener: socket.socket, killed: Path) -> "subprocess.Popen[bytes]":
    number = listener.fileno()
    return subprocess.Popen([sys.executable, "-c", SERVER, str(killed), str(number)], pass_fds=[number])


def make_http_server(listener: socket.socket) -> Server:
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
    return from_acp(McpServer(type="http", name="jobs", url=url, headers=[]), "/")


async def build(server: Server) -> list[str]:
    """Let the model call the tool once, and return the results that it has read."""
    model = ScriptedModel([BUILD, Reply("Good.")])
    async with connect(Crow(model, servers=[server])) as editor:
        session = (await editor.new_session("/")).session_id
        assert (await editor.prompt(session, "Build.")).stop_reason == "end_turn"
    return [str(message["content"]) for message in model.requests[-1]["messages"] if message["role"] == "tool"]


async def test_command_that_is_killed_while_it_is_asked_is_started_again_and_asked_again(tmp_path: Path):
    killed = tmp_path / "killed"
    config = McpServer(name="jobs", command=sys.executable, args=["-c", SERVER, str(killed)], env=[])
    assert await build(from_acp(config, "/")) == ["built"]
    assert killed.exists()


async def test_server_that_is_killed_while_it_is_asked_is_asked_again_when_it_is_back(
    tmp_path: Path, listener: socket.socket
):
    killed, server = tmp_path / "killed", make_http_server(listener)
    process = start(listener, killed)
    building = asyncio.ensure_future(build(server))
    await asyncio.to_thread(process.wait)
    process = start(listener, killed)
    try:
        assert await building == ["built"]
        assert killed.exists()
    finally:
        process.kill()
        process.wait()


async def test_server_that_is_gone_is_one_sentence_for_the_model(
    tmp_path: Path, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(mcp_server, "RECONNECTS", 2)
    server = make_http_server(listener)
    process = start(listener, tmp_path / "killed")
    listener.close()  # nobody can connect without the process
    (answer,) = await build(server)
    assert answer.startswith("The tool failed: the connection to its server broke, and it may have run all the same")
    process.wait()


async def test_server_that_accepts_connections_and_answers_nothing_is_waited_for_until_the_timeout(
    tmp_path: Path, listener: socket.socket
):
    server = make_http_server(listener)
    server.timeout = 2
    process = start(listener, tmp_path / "killed")
    try:
        assert await build(server) == ["The tool failed: it timed out: nothing was heard for 2 s."]
    finally:
        process.kill()
        process.wait()
