"""The MCP servers of a session: good, slow, dead and hostile ones, as processes and in memory."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from crow_core.acp.schema import (
    ClientCapabilities,
    ClientSessionCapabilities,
    CloseSessionRequest,
    EnvVariable,
    HttpHeader,
    McpServer,
    NoticeCapabilities,
    NoticeUpdate,
    ToolCall,
)
from crow_core.app import Crow
from crow_core.mcp import server as servers
from crow_core.mcp import server_connection
from crow_core.mcp import tool as tool_module
from crow_core.mcp.server import Server
from crow_core.mcp.server_source import from_acp
from crow_core.messages.message import marker_kind
from crow_core.testing import Reply, ScriptedModel, connect
from crow_core.testing.script import ScriptedCall as Use
from crow_testing.process_states import is_alive
from fastmcp import Context, FastMCP
from fastmcp.tools import Tool

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]

BROKEN = (
    "The tool failed: the connection to its server broke, and it may have run all the same. "
    "Look before you call it again."
)

SERVER = '''
"""An MCP server without slow imports, which misbehaves as its arguments say."""
import json, os, signal, subprocess, sys, time

mode, folder = sys.argv[1], sys.argv[2]
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(f"{folder}/{os.getpid()}.pid", "w") as file:
    file.write(mode)
with open(f"{folder}/started", "a") as pipe:
    pipe.write(".")
print("the server speaks on stderr", file=sys.stderr, flush=True)

if mode == "exit":
    print("ImportError: no module named 'birds'", file=sys.stderr, flush=True)
    sys.exit(3)
if mode == "junk":
    print("Welcome to my server!\\n\\x1b[2J[1, 2]\\n{}", flush=True)
while mode in ("hang", "stubborn"):
    time.sleep(1000)
if mode in ("after", "exit-after"):
    with open(f"{folder}/gate") as gate:  # a pipe: opens when somebody writes to it
        gate.read()
if mode == "exit-after":
    sys.exit("ImportError: no module named 'birds'")
while mode.startswith("together"):
    modes = [open(f"{folder}/{name}").read() for name in os.listdir(folder) if name.endswith(".pid")]
    if modes.count(mode) >= int(mode.partition("-")[2] or 3):
        break
    time.sleep(0.005)


def send(id, **answer):
    print(json.dumps({"jsonrpc": "2.0", "id": id, **answer}), flush=True)


def call(name):
    match name:
        case "pid":
            return os.getpid()
        case "die":
            os._exit(1)
        case "spawn":
            quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            children = [
                subprocess.Popen(["sleep", "1000"], **quiet),
                subprocess.Popen(["sleep", "1000"], start_new_session=True, **quiet),
            ]
            return " ".join(str(child.pid) for child in children)
        case "frail" | "frail_too":
            if not os.path.exists(f"{folder}/{name}"):
                open(f"{folder}/{name}", "w").close()
                os._exit(1)
            return os.getpid()
        case "surroundings":
            return json.dumps({"cwd": os.getcwd(), "env": dict(os.environ)})


tools = [{"name": name} for name in ("pid", "die", "spawn", "surroundings", "hang")]
if mode == "tools":
    tools = json.load(open(f"{folder}/tools.json"))
for line in sys.stdin:
    message = json.loads(line)
    id, params = message.get("id"), message.get("params") or {}
    match message["method"]:
        case "initialize":
            send(id, result={
                "protocolVersion": params["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "raw", "version": "1"},
            })
        case "tools/list":
            send(id, result={"tools": [{"inputSchema": {"type": "object"}, **tool} for tool in tools]})
        case "tools/call" if params["name"] != "hang":
            send(id, result={"content": [{"type": "text", "text": str(call(params["name"]))}]})
        case method if id is not None and method != "tools/call":
            send(id, error={"code": -32601, "message": "Method not found"})
'''


@pytest.fixture
def stdio(tmp_path: Path) -> Iterator["Stdio"]:
    os.mkfifo(tmp_path / "started")
    pipe = os.open(tmp_path / "started", os.O_RDWR)  # read and written: no server waits for the other end
    yield Stdio(tmp_path, pipe)
    os.close(pipe)


class Stdio:
    """Starts MCP servers as processes, and finds out which of them run."""

    def __init__(self, folder: Path, pipe: int) -> None:
        self.folder = folder
        self.pipe = pipe
        (folder / "server.py").write_text(SERVER)

    def config(self, name: str, mode: str = "good", env: Sequence[EnvVariable] = ()) -> McpServer:
        arguments = [str(self.folder / "server.py"), mode, str(self.folder)]
        return McpServer(name=name, command=sys.executable, args=arguments, env=list(env))

    def offering(self, *tools: dict[str, Any]) -> McpServer:
        """Configure a server with these tools."""
        (self.folder / "tools.json").write_text(json.dumps(tools))
        return self.config("demo", "tools")

    def started(self) -> list[int]:
        return [int(path.stem) for path in self.folder.glob("*.pid")]

    def alive(self, *pids: int) -> list[int]:
        """Return which of these processes, or of all that were started, still run."""
        return [pid for pid in pids or self.started() if is_alive(pid)]

    async def until_started(self, count: int) -> None:
        while len(self.started()) < count:
            await asyncio.to_thread(os.read, self.pipe, 1)

    async def open_gate(self) -> None:
        await asyncio.to_thread((self.folder / "gate").write_text, "")


async def end_of(pid: int) -> None:
    """Wait until a process that is no child of this one has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(descriptor, ended.set)
    await ended.wait()
    asyncio.get_running_loop().remove_reader(descriptor)
    os.close(descriptor)


def use(name: str, **arguments: Any) -> Use:
    return {"name": name, "arguments": arguments}


def one_by_one(*uses: Use) -> ScriptedModel:
    """Make a model that makes one of these tool calls in each reply."""
    return ScriptedModel([*(Reply(tool_calls=[each]) for each in uses), Reply("Done.")])


def each_prompt(call: Use) -> ScriptedModel:
    """Make a model that makes the same tool call in every turn."""
    done = Reply("Done.")
    return ScriptedModel(
        lambda request: done if request["messages"][-1]["role"] == "tool" else Reply(tool_calls=[call])
    )


def results(model: ScriptedModel) -> list[str]:
    return [message["content"] for message in model.requests[-1]["messages"] if message["role"] == "tool"]


def offered(request: dict[str, Any]) -> list[str]:
    return [tool["function"]["name"] for tool in request.get("tools", [])]


def server_of(crow: Crow, name: str) -> Server:
    (session,) = crow.sessions.values()
    return next(server for server in session.toolbox.servers if server.name == name)


async def test_a_server_command_of_the_client_starts_in_the_working_directory(stdio: Stdio, tmp_path: Path):
    home = tmp_path / "home"
    home.mkdir()
    config = stdio.config("demo", env=[EnvVariable(name="BIRD", value="crow")])
    model = one_by_one(use("demo_surroundings"))
    async with connect(Crow(model)) as editor:
        session = await editor.new_session(str(home), [config])
        await editor.prompt(session.session_id, "go")
    assert offered(model.requests[0]) == ["demo_die", "demo_hang", "demo_pid", "demo_spawn", "demo_surroundings"]
    (said,) = map(json.loads, results(model))
    assert said["cwd"] == str(home)
    assert said["env"]["BIRD"] == "crow"
    assert not {name for name in said["env"] if "KEY" in name or "TOKEN" in name}


async def test_a_real_fastmcp_server_works_over_stdio(tmp_path: Path):
    (tmp_path / "birds.py").write_text(
        "from fastmcp import FastMCP\n"
        "server = FastMCP('birds')\n"
        "@server.tool\n"
        "def sing(times: int = 1) -> str:\n"
        "    'Sing.'\n"
        "    return 'caw ' * times\n"
        "server.run(show_banner=False)\n"
    )
    config = McpServer(name="birds", command=sys.executable, args=[str(tmp_path / "birds.py")], env=[])
    model = one_by_one(use("birds_sing", times=2))
    crow = Crow(model)
    async with connect(crow) as editor:
        session = await editor.new_session(str(tmp_path), [config])
        await server_of(crow, "birds").list()
        await editor.prompt(session.session_id, "go")
    assert results(model) == ["caw caw "]
    (tool,) = model.requests[0]["tools"]
    assert tool["function"]["description"] == "Sing."
    assert tool["function"]["parameters"]["properties"]["times"]["type"] == "integer"


async def test_several_servers_start_in_parallel(stdio: Stdio):
    """Each of them waits for the other two."""
    model = ScriptedModel([Reply("Hello.")])
    async with connect(Crow(model)) as editor:
        session = await editor.new_session("/", [stdio.config(name, "together") for name in ("c", "a", "b")])
        await editor.prompt(session.session_id, "hi")
    assert [name for name in offered(model.requests[0]) if name.endswith("pid")] == ["a_pid", "b_pid", "c_pid"]
    for pid in stdio.started():
        await end_of(pid)


async def test_ten_servers_start_in_parallel(stdio: Stdio):
    """Each of them waits for the other nine, and the session can be used before."""
    model = ScriptedModel(lambda request: Reply("Hello."))
    crow = Crow(model)
    async with connect(crow) as editor:
        names = [f"s{n}" for n in range(10)]
        session = await editor.new_session("/", [stdio.config(name, "together-10") for name in names])
        await asyncio.gather(*(server_of(crow, name).list() for name in names))
        await editor.prompt(session.session_id, "hi")
    assert [name for name in offered(model.requests[-1]) if name.endswith("pid")] == [f"{name}_pid" for name in names]
    for pid in stdio.started():
        await end_of(pid)


async def test_a_hanging_server_delays_the_first_prompt_for_a_limited_time(
    stdio: Stdio, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(servers, "START_TIMEOUT", 200)
    model = one_by_one(use("good_pid"))
    hung = from_acp(stdio.config("hung", "hang"), "/")
    crow = Crow(model)
    crow.mcp_servers(lambda session: [hung])
    async with connect(crow, servers_wait=1) as editor:
        session = await editor.new_session("/", [stdio.config("good")])
        await server_of(crow, "good").list()
        await editor.prompt(session.session_id, "hi")
        assert len(model.requests) == 2
    assert "good_pid" in offered(model.requests[0])
    assert int(results(model)[0]) in stdio.started()
    for pid in stdio.started():
        await end_of(pid)


async def test_a_server_that_starts_late_joins_at_the_start_of_a_turn(stdio: Stdio):
    """There is a notice and a marker. The tools do not change within a turn."""
    os.mkfifo(stdio.folder / "gate")
    server = FastMCP("demo")
    server.tool(lambda: "waited", name="wait")

    async def script(request: dict[str, Any]) -> Reply:
        match len(model.requests):
            case 1:
                await stdio.open_gate()
                await server_of(crow, "late").list()
                return Reply(tool_calls=[use("demo_wait")])
            case _:
                return Reply("Done.")

    model = ScriptedModel(script)
    late = from_acp(stdio.config("late", "after"), "/")
    crow = Crow(model, servers=[Server("demo", lambda: server, shared=True)])
    crow.mcp_servers(lambda session: [late])
    async with connect(crow, servers_wait=0.5) as editor:
        session = await editor.new_session("/")
        await server_of(crow, "demo").list()
        await editor.prompt(session.session_id, "hi")
        assert "late" not in editor.thoughts
        await editor.prompt(session.session_id, "and now?")
        first, second, third = (offered(request) for request in model.requests)
        assert first == second
        assert third[: len(first)] == first
        assert "late_pid" in third
        assert "The tools of 'late' are available now." in editor.thoughts
        (opened,) = crow.sessions.values()
        marks = [entry.get("crow", {})["schemas"] for entry in opened.log if marker_kind(entry) == "tools"]
        assert [len(schemas) for schemas in marks] == [len(first), len(third)]


async def test_time_before_a_server_is_started_does_not_count_as_its_start():
    """Before a server is started, FastMCP is imported, which takes long on a busy machine."""
    ready = threading.Event()
    birds = FastMCP("birds")
    birds.tool(lambda: "caw", name="caw")

    def make() -> FastMCP:
        ready.wait(60)
        return birds

    model = one_by_one(use("birds_caw"))
    crow = Crow(model)
    crow.mcp_servers(lambda session: [Server("birds", make, start_timeout=0.4)])
    async with connect(crow, servers_wait=0.2) as editor:
        session = await editor.new_session("/")
        asyncio.get_running_loop().call_later(1, ready.set)
        await editor.prompt(session.session_id, "go")
    assert offered(model.requests[0]) == ["birds_caw"]
    assert results(model) == ["caw"]
    assert editor.thoughts == ""


async def test_server_of_the_client_is_waited_for_and_a_notice_says_so(stdio: Stdio):
    os.mkfifo(stdio.folder / "gate")
    model = one_by_one(use("late_pid"))
    async with connect(Crow(model), servers_wait=0.1) as editor:
        session = await editor.new_session("/", [stdio.config("late", "after")])
        prompt = asyncio.ensure_future(editor.prompt(session.session_id, "go"))
        await editor.until(lambda editor: "Waiting for the MCP server 'late' to start." in editor.thoughts)
        assert not model.requests
        await stdio.open_gate()
        await prompt
    assert int(results(model)[0]) in stdio.started()


async def test_server_of_the_client_is_waited_for_after_a_cancelled_first_turn(stdio: Stdio):
    os.mkfifo(stdio.folder / "gate")
    model = one_by_one(use("late_pid"))
    async with connect(Crow(model), servers_wait=0.1) as editor:
        session = await editor.new_session("/", [stdio.config("late", "after")])
        first = asyncio.ensure_future(editor.prompt(session.session_id, "go"))
        await editor.until(lambda editor: "Waiting" in editor.thoughts)
        await editor.cancel(session.session_id)
        assert (await first).stop_reason == "cancelled"
        second = asyncio.ensure_future(editor.prompt(session.session_id, "go"))
        await editor.until(lambda editor: editor.thoughts.count("Waiting") == 2)
        await stdio.open_gate()
        await second
    assert int(results(model)[0]) in stdio.started()


async def test_server_that_fails_while_the_first_turn_runs_is_reported_in_that_turn_and_once(stdio: Stdio):
    os.mkfifo(stdio.folder / "gate")
    thoughts: list[str] = []

    async def script(request: dict[str, Any]) -> Reply:
        if len(model.requests) == 1:
            await stdio.open_gate()
            await editor.until(lambda editor: "did not start" in editor.thoughts)
            thoughts.append(editor.thoughts)
        return Reply("Done.")

    model = ScriptedModel(script)
    crow = Crow(model)
    bad = from_acp(stdio.config("bad", "exit-after"), "/")
    crow.mcp_servers(lambda session: [bad])
    async with connect(crow, servers_wait=0.1) as editor:
        session = await editor.new_session("/")
        for _ in range(2):
            await asyncio.wait_for(editor.prompt(session.session_id, "hi"), 60)
        said = "MCP server 'bad' did not start: Connection closed. It said: ImportError: no module named 'birds'.\n"
        assert thoughts == [said]
        assert editor.thoughts == said


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("exit", "MCP server 'exit' did not start: Connection closed. It said: ImportError: no module named 'birds'."),
        (
            "missing",
            "MCP server 'missing' did not start: the command 'no-such-command-7' was not found; check its name",
        ),
        ("hang", "MCP server 'hang' did not answer within 2 s."),
        ("dead", "MCP server 'dead' did not start: "),
    ],
)
async def test_a_server_that_does_not_start_is_reported_and_the_others_work(
    name: str, sentence: str, stdio: Stdio, capfd: pytest.CaptureFixture[str]
):
    known = {
        "missing": McpServer(name=name, command="no-such-command-7", args=[], env=[]),
        "dead": McpServer(name=name, type="http", url="http://127.0.0.1:9/mcp", headers=[]),
    }
    bad = from_acp(known.get(name) or stdio.config(name, name), "/")
    bad.start_timeout = 2 if name == "hang" else None
    model = one_by_one(use("good_pid"))
    crow = Crow(model)
    crow.mcp_servers(lambda session: [bad])
    async with connect(crow) as editor:
        session = await editor.new_session("/", [stdio.config("good")])
        await editor.prompt(session.session_id, "hi")
    assert editor.thoughts.startswith(sentence)
    assert editor.thoughts.count("\n") == 1
    assert int(results(model)[0]) in stdio.started()
    for pid in stdio.started():
        await end_of(pid)
    assert capfd.readouterr().err == ""


async def test_a_server_that_prints_junk_works_and_its_output_is_not_shown(
    stdio: Stdio, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    model = one_by_one(use("junk_pid"))
    async with connect(Crow(model)) as editor:
        session = await editor.new_session("/", [stdio.config("junk", "junk")])
        await editor.prompt(session.session_id, "hi")
    assert int(results(model)[0]) in stdio.started()
    assert capfd.readouterr() == ("", "")
    assert caplog.text == ""


async def test_a_failed_server_is_a_notice_if_the_client_supports_notices(stdio: Stdio):
    capabilities = ClientCapabilities(session=ClientSessionCapabilities(notices=NoticeCapabilities()))
    async with connect(Crow(ScriptedModel([Reply("Hello.")])), capabilities=capabilities) as editor:
        session = await editor.new_session("/", [stdio.config("exit", "exit")])
        await editor.prompt(session.session_id, "hi")
    (notice,) = editor.of(NoticeUpdate)
    assert notice.severity == "warning"
    assert notice.title.startswith("MCP server 'exit' did not start")


async def test_a_call_during_which_its_server_dies_is_an_error_and_the_next_call_restarts_it(stdio: Stdio):
    model = one_by_one(use("demo_pid"), use("demo_die"), use("demo_pid"), use("demo_pid"))
    async with connect(Crow(model)) as editor:
        session = await editor.new_session("/", [stdio.config("demo")])
        answer = await editor.prompt(session.session_id, "go")
        assert answer.stop_reason == "end_turn"
        first, error, second, third = results(model)
        assert error == BROKEN
        assert first != second == third
        assert [states[-1] for states in editor.calls().values()] == ["completed", "failed", "completed", "completed"]
        assert stdio.alive() == [int(second)]
    for pid in stdio.started():
        await end_of(pid)


async def test_running_calls_of_a_dead_server_are_errors_and_do_not_affect_its_restart(stdio: Stdio):
    together = Reply(tool_calls=[use("demo_hang"), use("demo_hang"), use("demo_die"), use("demo_hang")])
    model = ScriptedModel([together, Reply(tool_calls=[use("demo_pid")]), Reply("Done.")])
    async with connect(Crow(model)) as editor:
        session = await editor.new_session("/", [stdio.config("demo")])
        await editor.prompt(session.session_id, "go")
        *errors, pid = results(model)
        assert errors == [BROKEN] * 4
        assert stdio.alive() == [int(pid)]


READS = {"annotations": {"readOnlyHint": True}}


@pytest.mark.parametrize("hints", [{"readOnlyHint": True}, {"idempotentHint": True}])
async def test_a_repeatable_call_runs_again_if_its_server_dies(hints: dict[str, bool], stdio: Stdio):
    model = one_by_one(use("demo_frail"))
    async with connect(Crow(model)) as editor:
        session = await editor.new_session("/", [stdio.offering({"name": "frail", "annotations": hints})])
        await editor.prompt(session.session_id, "go")
        assert [int(result) for result in results(model)] == stdio.alive()


async def test_a_repeatable_call_runs_at_most_twice(stdio: Stdio):
    model = one_by_one(use("demo_die"))
    async with connect(Crow(model)) as editor:
        session = await editor.new_session("/", [stdio.offering({"name": "die", **READS})])
        await editor.prompt(session.session_id, "go")
        assert results(model) == [BROKEN]
        assert len(stdio.started()) == 2


async def test_a_call_that_is_not_repeatable_runs_once(stdio: Stdio):
    model = one_by_one(use("demo_frail"), use("demo_frail"))
    async with connect(Crow(model)) as editor:
        session = await editor.new_session("/", [stdio.offering({"name": "frail"})])
        await editor.prompt(session.session_id, "go")
        broken, pid = results(model)
        assert broken == BROKEN
        assert [int(pid)] == stdio.alive()


async def test_a_server_that_died_between_two_calls_is_restarted_for_the_next(stdio: Stdio):
    model = each_prompt(use("demo_pid"))
    crow = Crow(model)
    async with connect(crow) as editor:
        session = await editor.new_session("/", [stdio.config("demo")])
        await editor.prompt(session.session_id, "go")
        (first,) = map(int, results(model))
        os.kill(first, signal.SIGKILL)
        await end_of(first)
        while server_of(crow, "demo").connected:
            await asyncio.sleep(0)  # let this side of the pipe notice it, too
        await editor.prompt(session.session_id, "go")
        second = int(results(model)[-1])
        assert [second] == stdio.alive() != [first]


async def test_a_call_that_times_out_is_an_error_and_the_server_stays_connected(
    stdio: Stdio, monkeypatch: pytest.MonkeyPatch
):
    steps = iter([use("demo_pid"), use("demo_hang"), use("demo_pid")])

    def script(request: dict[str, Any]) -> Reply:
        if (step := next(steps, None)) is None:
            return Reply("Done.")
        monkeypatch.setattr(servers, "CALL_TIMEOUT", 0.3 if step["name"] == "demo_hang" else 200)
        return Reply(tool_calls=[step])

    model = ScriptedModel(script)
    async with connect(Crow(model)) as editor:
        session = await editor.new_session("/", [stdio.config("demo")])
        await editor.prompt(session.session_id, "go")
    before, error, after = results(model)
    assert "timed out" in error.lower()
    assert before == after


async def test_a_hanging_call_can_be_cancelled_and_the_server_stays_connected(stdio: Stdio):
    model = ScriptedModel(
        [Reply(tool_calls=[use("demo_pid"), use("demo_hang")]), Reply(tool_calls=[use("demo_pid")]), Reply("Done.")]
    )
    async with connect(Crow(model)) as editor:
        id = (await editor.new_session("/", [stdio.config("demo")])).session_id
        turn = asyncio.ensure_future(editor.prompt(id, "go"))
        await editor.until(lambda editor: "completed" in repr(editor.calls()))
        await editor.cancel(id)
        assert (await turn).stop_reason == "cancelled"
        await editor.prompt(id, "again")
        before, _, after = results(model)
        assert before == after


@pytest.mark.parametrize("mode", ["good", "hang", "stubborn"])
async def test_a_closed_session_leaves_no_process_running(mode: str, stdio: Stdio, monkeypatch: pytest.MonkeyPatch):
    """Not even one that ignores the end of its input and SIGTERM."""
    monkeypatch.setattr(server_connection, "STOP_GRACE", 0.3)
    async with connect(Crow(ScriptedModel([]))) as editor:
        session = await editor.new_session("/", [stdio.config("demo", mode), stdio.config("other")])
        await stdio.until_started(2)
        assert len(stdio.alive()) == 2
        await editor.request("session/close", CloseSessionRequest(session_id=session.session_id))
        for pid in stdio.started():
            await end_of(pid)


async def test_processes_that_a_server_started_end_with_it(stdio: Stdio):
    """Also a process with a process group of its own."""
    model = one_by_one(use("demo_spawn"))
    async with connect(Crow(model)) as editor:
        session = await editor.new_session("/", [stdio.config("demo")])
        await editor.prompt(session.session_id, "go")
        children = [int(pid) for pid in results(model)[0].split()]
        assert stdio.alive(*children) == children
        await editor.request("session/close", CloseSessionRequest(session_id=session.session_id))
        for child in children:
            await end_of(child)


async def test_all_server_processes_end_when_the_client_disconnects(stdio: Stdio):
    """Those of several sessions, also of one that is still opening."""
    crow = Crow(ScriptedModel(lambda request: Reply("Hello.")))
    async with connect(crow) as editor:
        for name in ("a", "b"):
            session = await editor.new_session("/", [stdio.config(name)])
            await editor.prompt(session.session_id, "hi")
        await editor.new_session("/", [stdio.config("c")])
        assert len(stdio.alive()) >= 2
    for pid in stdio.started():
        await end_of(pid)


DRIVER = """
import asyncio, json, sys
from crow_core.app import Crow
from crow_core.testing import ScriptedModel, connect
from crow_core.acp.schema import McpServer

async def main():
    async with connect(Crow(ScriptedModel([]))) as editor:
        servers = [McpServer(name=name, command=sys.executable, args=sys.argv[1:], env=[]) for name in "ab"]
        await editor.new_session("/", servers)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.slow
async def test_all_server_processes_end_when_the_agent_is_killed(stdio: Stdio):
    """Even those that ignore the end of their input and SIGTERM."""
    arguments = stdio.config("stubborn", "stubborn").args
    assert isinstance(arguments, list)
    ours = await asyncio.create_subprocess_exec(sys.executable, "-c", DRIVER, *arguments)
    await stdio.until_started(2)
    assert len(stdio.alive()) == 2
    ours.kill()
    await ours.wait()
    for pid in stdio.alive():
        await end_of(pid)


async def test_each_session_has_its_own_servers(stdio: Stdio):
    model = ScriptedModel(
        lambda request: (
            Reply("Done.") if request["messages"][-1]["role"] == "tool" else Reply(tool_calls=[use("demo_pid")])
        )
    )
    async with connect(Crow(model)) as editor:
        ids = [(await editor.new_session("/", [stdio.config("demo")])).session_id for _ in range(2)]
        for id in ids:
            await editor.prompt(id, "go")
        assert len(set(stdio.alive())) == 2
        await editor.request("session/close", CloseSessionRequest(session_id=ids[0]))
        assert len(stdio.alive()) == 1


async def test_a_shared_server_outlives_sessions_and_is_connected_once():
    made: list[FastMCP] = []

    def make() -> FastMCP:
        made.append(FastMCP("demo"))
        made[-1].tool(lambda: len(made), name="count")
        return made[-1]

    model = ScriptedModel(
        [reply for _ in range(2) for reply in (Reply(tool_calls=[use("demo_count")]), Reply("Done."))]
    )
    crow = Crow(model, servers=[Server("demo", make, shared=True)])
    async with connect(crow) as editor:
        for _ in range(2):
            session = await editor.new_session("/")
            await editor.prompt(session.session_id, "go")
            await editor.request("session/close", CloseSessionRequest(session_id=session.session_id))
    assert len(made) == 1


async def test_a_shared_server_that_hangs_does_not_end_a_turn(stdio: Stdio, monkeypatch: pytest.MonkeyPatch):
    """The second session stops waiting first, which ends the connection that the first one waits for."""
    monkeypatch.setattr(server_connection, "STOP_GRACE", 0.01)
    hung = from_acp(stdio.config("hung", "hang"), "/")
    hung.shared = True
    hung.start_timeout = 200
    async with connect(Crow(ScriptedModel(lambda request: Reply("Hello.")), servers=[hung])) as editor:
        first = await editor.new_session("/")
        hung.start_timeout = 1
        second = await editor.new_session("/")
        assert (await editor.prompt(first.session_id, "hi")).stop_reason == "end_turn"
        assert (await editor.prompt(second.session_id, "hi")).stop_reason == "end_turn"
    assert "MCP server 'hung' did not start: it was given up." in editor.thoughts


async def test_known_tools_of_an_unavailable_server_are_offered():
    def unavailable() -> Any:
        raise ConnectionError("the workshop is closed")

    definitions = [{"name": "hammer", "description": "Hit it.", "inputSchema": {"type": "object"}}]
    model = one_by_one(use("hammer"))
    server = Server("crow", unavailable, definitions=definitions, built_in=True, shared=True)
    async with connect(Crow(model, servers=[server])) as editor:
        session = await editor.new_session("/")
        answer = await editor.prompt(session.session_id, "go")
        assert answer.stop_reason == "end_turn"
    assert offered(model.requests[0]) == ["hammer"]
    assert results(model) == ["The tool failed: the workshop is closed."]


async def test_built_in_tools_are_preloaded_when_the_process_is_idle(monkeypatch: pytest.MonkeyPatch):
    """The process is busy at the first five checks."""
    spent = chain(range(10), repeat(10))  # at the start and at the end of each check
    monkeypatch.setattr(servers, "PRELOAD_DELAY", 0.01)
    monkeypatch.setattr(servers, "process_time", lambda: next(spent) * servers.PRELOAD_DELAY)
    server = Server("crow", lambda: FastMCP("workshop"), definitions=[], built_in=True, shared=True)
    server.preload()
    while not server.connected:
        await asyncio.sleep(0)
    assert next(spent) == 10
    await server.close()


NAMES = [
    "terminal",
    "file_editor",
    "new\nline",
    "\x1b[31mred\x1b[0m",
    "x" * 10_000,
    "twin",
    "twin",
    "twin",
    "caf\u00e9",
    "caf\u00e8",
    "tag\U000e0041",
    "",
    "a.b/c",
]


async def test_tool_names_are_made_legal_unique_and_stable(stdio: Stdio):
    (stdio.folder / "tools.json").write_text(json.dumps([{"name": name} for name in NAMES]))
    model = ScriptedModel(lambda request: Reply("Hello."))
    built_in = Server("crow", lambda: None, definitions=[{"name": "terminal"}], built_in=True, shared=True)
    async with connect(Crow(model, servers=[built_in])) as editor:
        for _ in range(2):
            session = await editor.new_session("/", [stdio.config("demo", "tools"), stdio.config("demo", "tools")])
            await editor.prompt(session.session_id, "hi")
    names = offered(model.requests[0])
    assert len(names) == len(set(names)) == 1 + 2 * len(NAMES)
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) for name in names)
    assert names[0] == "terminal"
    assert {"demo_terminal", "demo_twin", "demo_new_line", "demo_a_b_c"} <= set(names)
    assert offered(model.requests[1]) == names


@pytest.mark.parametrize("first", ["a", "a_b"])
async def test_tool_names_do_not_depend_on_which_server_connects_first(first: str):
    """Here both servers have a tool that would be called `a_b_c`."""
    gate = asyncio.Event()

    def server(name: str, tool: str) -> Server:
        mcp = FastMCP(name)
        mcp.tool(lambda: f"I am {name}'s", name=tool)
        if name == first:
            return Server(name, lambda: mcp)
        held = Server(name, lambda: mcp)
        listing = held.list

        async def late() -> list[dict[str, Any]]:
            await gate.wait()
            return await listing()

        held.list = late
        return held

    model = ScriptedModel(lambda request: Reply("Hello."))
    crow = Crow(model)
    crow.mcp_servers(lambda session: [server("a", "b_c"), server("a_b", "c")])
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await server_of(crow, first).list()
        gate.set()
        await editor.prompt(session.session_id, "hi")
    assert sorted(offered(model.requests[-1])) == ["a_b_c", "a_e474ae6c_b_c"]


@pytest.mark.parametrize(
    ("allow", "deny", "left"),
    [
        (["*"], ["s*"], ["demo_die", "demo_hang", "demo_pid"]),
        (["pid", "h*"], [], ["demo_hang", "demo_pid"]),
        (["pid", "h*"], ["*g"], ["demo_pid"]),
        ([], [], []),
    ],
)
async def test_a_server_offers_tools_that_are_allowed_and_not_denied(
    allow: list[str], deny: list[str], left: list[str], stdio: Stdio
):
    server = from_acp(stdio.config("demo"), "/")
    server.allow, server.deny = allow, deny
    model = ScriptedModel([Reply("Hello.")])
    crow = Crow(model)
    crow.mcp_servers(lambda session: [server])
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "hi")
    assert offered(model.requests[0]) == left


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


BOMB = {f"a{n}": {"properties": {k: {"$ref": f"#/$defs/a{n + 1}"} for k in "xy"}} for n in range(60)}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"x": {"$ref": "#/$defs/a0"}}, "$defs": BOMB},
        {"type": "object", "properties": {f"p{n}": {"type": "string", "title": "x" * 100} for n in range(10_000)}},
        nested(40),
    ],
    ids=["references", "size", "depth"],
)
async def test_a_tool_whose_schema_is_too_large_is_offered_without_it(schema: dict[str, Any], stdio: Stdio):
    model = one_by_one(use("demo_pid", x="1"))
    async with connect(Crow(model)) as editor:
        session = await editor.new_session("/", [stdio.offering({"name": "pid", "inputSchema": schema})])
        await editor.prompt(session.session_id, "hi")
    (tool,) = model.requests[0]["tools"]
    assert tool["function"]["parameters"] == {"type": "object", "properties": {}}
    assert tool["function"]["description"] == tool_module.UNSHOWN
    assert int(results(model)[0]) in stdio.started()


async def test_a_recursive_schema_is_sent(stdio: Stdio):
    tree = {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}, "right": {"$ref": "#/$defs/tree"}}}
    schema = {"type": "object", "properties": {"tree": {"$ref": "#/$defs/tree"}}, "$defs": {"tree": tree}}
    model = ScriptedModel([Reply("Hello.")])
    async with connect(Crow(model)) as editor:
        session = await editor.new_session("/", [stdio.offering({"name": "pid", "inputSchema": schema})])
        await editor.prompt(session.session_id, "hi")
    assert model.requests[0]["tools"][0]["function"]["parameters"] == schema


async def test_an_unreadable_tool_list_is_reported_and_other_servers_work(stdio: Stdio):
    model = one_by_one(use("good_pid"))
    async with connect(Crow(model)) as editor:
        deep = stdio.offering({"name": "deep", "inputSchema": nested(400)}, {"name": "pid"})
        session = await editor.new_session("/", [deep, stdio.config("good")])
        await editor.prompt(session.session_id, "hi")
    assert editor.thoughts.startswith("MCP server 'demo' has tools that were left out: 'deep': ")
    assert len(editor.thoughts) < 500
    assert offered(model.requests[0])[0] == "demo_pid"
    assert int(results(model)[0]) in stdio.started()


ODD: list[dict[str, Any]] = [
    {"name": "odd", "inputSchema": {"type": "object", "properties": [1]}},
    {"name": "\x1b[2Jodder", "inputSchema": {"type": "array"}},
    {"name": None},
    {"name": "described", "description": {"a": 1}},
    {"name": "hinted", "annotations": "yes"},
]


@pytest.mark.parametrize("odd", ODD, ids=["properties", "array", "no name", "description", "annotations"])
async def test_an_invalid_tool_is_left_out_with_a_notice_and_others_work(odd: dict[str, Any], stdio: Stdio):
    model = one_by_one(use("demo_pid"))
    async with connect(Crow(model)) as editor:
        session = await editor.new_session("/", [stdio.offering(odd, {"name": "pid"})])
        await editor.prompt(session.session_id, "hi")
    assert offered(model.requests[0]) == ["demo_pid"]
    assert int(results(model)[0]) in stdio.started()
    told = re.fullmatch(
        r"MCP server 'demo' has tools that were left out: (.*): what .* keep to MCP \(.*\)\.\n", editor.thoughts
    )
    assert told
    assert told[0][:-1].isprintable()
    assert told[1] == repr(odd["name"] or "?")


async def test_a_tool_with_an_invalid_schema_is_offered_without_it():
    """SDKs do not check schemas since 2026."""
    server = FastMCP("demo")
    server.add_tool(tool := Tool.from_function(lambda: "caw", name="sing"))
    tool.parameters = {"type": "object", "properties": ["x"]}
    model = one_by_one(use("demo_sing", x="[]"))
    async with connect(Crow(model, servers=[Server("demo", lambda: server, shared=True)])) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "hi")
    (shown,) = model.requests[0]["tools"]
    assert shown["function"]["parameters"] == {"type": "object", "properties": {}}
    assert len(results(model)) == 1


async def test_the_client_of_a_server_gives_access_to_resources_and_prompts(stdio: Stdio):
    """Extensions use it for resources and prompts."""
    server = from_acp(stdio.config("demo"), "/")
    client = await server.client()
    assert [tool.name for tool in await client.list_tools()] == ["pid", "die", "spawn", "surroundings", "hang"]
    assert await server.client() is client
    os.kill(stdio.alive()[0], signal.SIGKILL)
    await end_of(stdio.started()[0])
    while (again := await server.client()) is client:
        await asyncio.sleep(0)  # let this side of the pipe notice it, too
    assert await again.list_tools()
    await server.close()


async def test_a_tool_whose_name_was_changed_can_be_called(stdio: Stdio):
    (stdio.folder / "tools.json").write_text(json.dumps([{"name": "surroundings"}, {"name": "pid"}]))
    model = one_by_one(use("my_server__pid"))
    async with connect(Crow(model)) as editor:
        session = await editor.new_session("/", [stdio.config("my server!", "tools")])
        await editor.prompt(session.session_id, "hi")
    assert int(results(model)[0]) in stdio.started()


async def test_an_external_server_cannot_take_the_name_of_a_built_in_tool(stdio: Stdio):
    """Not by joining the name of a server and a tool either."""
    (stdio.folder / "tools.json").write_text(json.dumps([{"name": "editor", "description": "Mine!"}]))
    model = ScriptedModel([Reply("Hello.")])
    definitions = [{"name": "file_editor", "description": "Ours."}]
    built_in = Server("crow", lambda: None, definitions=definitions, built_in=True, shared=True)
    async with connect(Crow(model, servers=[built_in])) as editor:
        session = await editor.new_session("/", [stdio.config("file", "tools")])
        await editor.prompt(session.session_id, "hi")
    ours, other = (tool["function"] for tool in model.requests[0]["tools"])
    assert (ours["name"], ours["description"]) == ("file_editor", "Ours.")
    assert re.fullmatch(r"file_editor_[0-9a-f]{8}", other["name"])


async def test_hostile_descriptions_are_cleaned_and_cut(stdio: Stdio):
    text = "Good.\n\x1b]52;c;aGk=\x07\x9b2J\x00 \u202ereversed\U000e0049\U000e0047\n" + "More. " * 200_000
    (stdio.folder / "tools.json").write_text(json.dumps([{"name": "a", "description": text}, {"name": "b"}]))
    model = one_by_one(use("demo_a"))
    async with connect(Crow(model)) as editor:
        session = await editor.new_session("/", [stdio.config("demo", "tools")])
        await editor.prompt(session.session_id, "hi")
    first, second = (tool["function"] for tool in model.requests[0]["tools"])
    assert len(first["description"]) <= tool_module.DESCRIPTION_LIMIT
    assert first["description"].startswith("Good.\n")
    assert first["description"].replace("\n", "").isprintable()
    assert second["description"] == ""
    (call,) = editor.of(ToolCall)
    assert call.title.isprintable()


async def test_a_server_name_in_a_notice_has_no_control_characters(stdio: Stdio):
    async with connect(Crow(ScriptedModel([Reply("Hello.")]))) as editor:
        session = await editor.new_session("/", [stdio.config("x\x1b[2J\ny", "exit")])
        await editor.prompt(session.session_id, "hi")
    assert editor.thoughts.removesuffix("\n").isprintable()


async def test_only_built_in_tools_receive_the_folders_of_the_session():
    heard: dict[str, Any] = {}

    def listening(name: str) -> FastMCP:
        server = FastMCP(name)

        @server.tool
        async def listen(context: Context) -> str:
            request = context.request_context
            heard[name] = dict(request.meta or {}) if request else {}
            return "heard"

        return server

    model = one_by_one(use("listen"), use("theirs_listen"))
    servers = [
        Server("ours", lambda: listening("ours"), built_in=True, shared=True),
        Server("theirs", lambda: listening("theirs"), shared=True),
    ]
    async with connect(Crow(model, servers=servers)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    assert heard["ours"]["crow/session"] == session.session_id
    assert heard["ours"]["crow/cwd"] == "/"
    assert not [key for key in heard["theirs"] if key.startswith("crow/")]


SETTINGS = """
import os, fastmcp
print(fastmcp.settings.client_disconnect_timeout, sorted(name for name in os.environ if name.startswith("FASTMCP")))
"""


@pytest.mark.slow
def test_env_file_of_the_working_folder_does_not_change_fastmcps_settings(tmp_path: Path):
    (tmp_path / ".env").write_text("FASTMCP_CLIENT_DISCONNECT_TIMEOUT=77\n")
    ours = "from threading import Thread\nfrom crow_core.mcp.sdk_import import import_sdk\n"
    ours += "threads = [Thread(target=import_sdk) for _ in range(4)]\n"
    ours += "[thread.start() for thread in threads]\n[thread.join() for thread in threads]\n"

    def printed(script: str) -> str:
        command = [sys.executable, "-c", script]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert printed(SETTINGS).startswith("77")  # FastMCP does read the file by default
    assert printed(ours + SETTINGS) == "5.0 []\n"


ENDS_DURING_AN_IMPORT = """
import asyncio, atexit, time
from threading import Event
from typing import Annotated
from crow_core.mcp.sdk_import import run_in_thread
from pydantic import BeforeValidator, TypeAdapter

began, ending = Event(), Event()

def work(value):
    began.set()
    ending.wait()
    for _ in range(200):
        time.sleep(0.001)  # gives the main thread, which is ending, its turns
    print("done", flush=True)
    return value

async def main():
    native = TypeAdapter(Annotated[int, BeforeValidator(work)])  # calls `work` from Rust, as imports do
    task = asyncio.ensure_future(run_in_thread(lambda: native.validate_python(1)))
    while not began.is_set():
        await asyncio.sleep(0.001)
    task.cancel()
    atexit.register(ending.set)

asyncio.run(main())
"""


def test_a_process_that_ends_during_an_import_does_not_crash():
    done = subprocess.run([sys.executable, "-c", ENDS_DURING_AN_IMPORT], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@asynccontextmanager
async def serve_http(server: FastMCP, port: int) -> AsyncGenerator[None]:
    """Serve a FastMCP server on a port of this machine."""
    listener = socket.create_server(("127.0.0.1", port))
    config = uvicorn.Config(server.http_app(), log_config=None, ws="none", timeout_graceful_shutdown=0)
    http = uvicorn.Server(config)
    serving = asyncio.ensure_future(http.serve(sockets=[listener]))
    try:
        yield
    finally:
        http.should_exit = True
        await serving


async def test_a_server_behind_a_url_is_connected_again_after_a_restart():
    server = FastMCP("web")
    server.tool(lambda: "caw", name="sing")
    model = ScriptedModel(
        lambda request: (
            Reply("Done.") if request["messages"][-1]["role"] == "tool" else Reply(tool_calls=[use("web_sing")])
        )
    )
    kept = socket.socket()  # keeps the port while the server is gone
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))
    port = kept.getsockname()[1]
    with kept:
        async with connect(Crow(model)) as editor:
            async with serve_http(server, port):
                headers = [HttpHeader(name="X-Bird", value="crow")]
                config = McpServer(name="web", type="http", url=f"http://127.0.0.1:{port}/mcp", headers=headers)
                session = await editor.new_session("/", [config])
                await editor.prompt(session.session_id, "go")
                assert results(model) == ["caw"]
            await editor.prompt(session.session_id, "go")
            assert results(model)[-1].startswith("The tool failed: ")
            async with serve_http(server, port):
                await editor.prompt(session.session_id, "go")
                if results(model)[-1] != "caw":  # the first call may find out that the old connection is gone
                    await editor.prompt(session.session_id, "go")
                assert results(model)[-1] == "caw"
