"""Tests with MCP servers that misbehave: each has its own error, the session goes on, and no process is left."""

import asyncio
import gzip
import os
import re
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import pytest
import uvicorn
from crow_core.acp.schema import (
    ClientCapabilities,
    CloseSessionRequest,
    ElicitationCapabilities,
    ElicitationFormCapabilities,
    ElicitationUrlCapabilities,
    EnvVariable,
    McpServer,
)
from crow_core.app import Crow
from crow_core.mcp import stdio
from crow_core.mcp.server import Server
from crow_core.mcp.server_source import from_acp
from crow_core.testing import Reply, ScriptedModel, connect
from crow_core.testing.script import ScriptedCall as Use
from crow_system import CHOSEN, find_descendants
from crow_testing.clock import advance_clock
from crow_testing.servers import DESCRIPTIONS, FAULTS, MISSING_COMMAND, make_faulty_server
from fastmcp import FastMCP
from starlette.responses import Response

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]

CAW = "caw"
NUMBER = r"\d+"
DIED = r"The tool failed: the connection to its server broke, and it may have run all the same\. Look before .*"
TIMED_OUT = r"The tool failed: .*timed out.*"
ABSENT = r"There is no tool 'bad_\w+'\. The tools are: good_bad, good_pid\."
AT_LENGTH = r"(?s).*\[[\d,]+ of 1\d\d,[\d,]+ bytes left out; the first 67,108,864 bytes are in \S+, as JSON .*the end.*"


@dataclass(frozen=True)
class Case:
    """The expected outcome of a fault."""

    bad: str = ABSENT
    """A pattern for the result of a call of `bad`."""
    pid: str = ABSENT
    """A pattern for the result of a later call of `pid`."""
    notice: str = ""
    """A pattern for the notice that the user gets."""


OUTCOMES = {
    MISSING_COMMAND: Case(
        notice="MCP server 'bad' did not start: the command 'no-such-command-7' was not found; check .*"
    ),
    "hangs at start": Case(notice=r"MCP server 'bad' did not answer within 2 s\."),
    "exits at once": Case(notice=r"MCP server 'bad' did not start: .* It said: ImportError: no module named 'birds'\."),
    "prints junk": Case(CAW, NUMBER),
    "prints 100 MB of junk": Case(CAW, NUMBER),
    "ignores signals": Case(CAW, NUMBER),
    "hangs at list": Case(notice=r"MCP server 'bad' did not answer within 2 s\."),
    "dies at list": Case(notice=r"MCP server 'bad' did not start: Connection closed\."),
    "lists 100 MB": Case(notice=r"MCP server 'bad' did not start: its answer of 100,0\d\d,\d\d\d bytes is too long\."),
    "lists a tool that is none": Case(CAW, NUMBER, r"MCP server 'bad' has tools that were left out: 'odd': what .+\."),
    "hangs in a call": Case(TIMED_OUT, NUMBER),
    "stops reading": Case(TIMED_OUT, TIMED_OUT),
    "dies in a call": Case(DIED, NUMBER),
    "dies in an answer": Case(DIED, NUMBER),
    "dies before its children": Case(DIED, NUMBER),
    "leaves children without a trace": Case(r"\d+ \d+", NUMBER),
    "leaves children": Case(r"\d+ \d+", NUMBER),
    "answers with 100 MB": Case(AT_LENGTH, NUMBER),
    "answers with one line of 100 MB": Case(AT_LENGTH, NUMBER),
    "answers with empty blocks": Case(r"\(no output\)", NUMBER),
    "answers with invalid blocks": Case(r"The tool failed: what it sent does not keep to MCP \(.+\)\.", NUMBER),
    "answers at great depth": Case(r"The tool failed: .*depth.*", NUMBER),
    "answers nonsense": Case(r"The tool failed: its answer is not valid\.", NUMBER),
    "answers with half a character": Case("caw \N{REPLACEMENT CHARACTER}", NUMBER),
    "answers what is no result": Case(r"The tool failed: what it sent does not keep to MCP \(.+\)\.", NUMBER),
    "answers others": Case(CAW, NUMBER),
    "answers in latin 1": Case("Kr\N{REPLACEMENT CHARACTER}he", NUMBER),
    "floods with notifications": Case(CAW, NUMBER),
    "floods with requests": Case(CAW, NUMBER),
    "floods standard error": Case(CAW, NUMBER),
    "asks for secrets": Case(
        r'\[{"action": "decline"}, {"action": "decline"}\]', NUMBER, "(?s)A question of .* declined.*"
    ),
}


@dataclass(frozen=True)
class Marked:
    """Makes servers with a mark in their environment, by which their processes are found."""

    mark: str = field(default_factory=lambda: uuid4().hex)

    def server(self, fault: str, name: str = "bad") -> McpServer:
        config = make_faulty_server(fault, name)
        config.env = [EnvVariable(name="CROW_TEST", value=self.mark)]
        return config

    def alive(self) -> list[int]:
        return list(self._alive())

    async def end(self) -> None:
        """Wait until no marked process is left."""
        while alive := self.alive():
            for pid in alive:
                await end_of(pid)

    def _alive(self) -> Iterator[int]:
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self.mark.encode() in path.read_bytes():  # empty for a zombie
                    yield int(path.parent.name)
            except OSError:
                pass


async def end_of(pid: int) -> None:
    """Wait until a process that is not a child of this one has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(descriptor, ended.set)
    await ended.wait()
    asyncio.get_running_loop().remove_reader(descriptor)
    os.close(descriptor)


def use(*names: str) -> Reply:
    return Reply(tool_calls=[Use(name=name, arguments={}) for name in names])


def results(request: dict[str, Any]) -> list[str]:
    return [message["content"] for message in request["messages"] if message["role"] == "tool"]


@pytest.fixture
def marked() -> Marked:
    return Marked()


def test_every_fault_has_an_outcome_and_an_explanation():
    assert set(OUTCOMES) == {*FAULTS, MISSING_COMMAND}
    asked = subprocess.run([sys.executable, "-m", "crow_testing.servers"], capture_output=True, text=True, check=False)
    assert asked.returncode == 1
    assert all(f"{fault}: {DESCRIPTIONS[fault]}" in asked.stderr for fault in FAULTS)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=pytest.mark.slow if "floods" in fault else []) for fault in OUTCOMES]
)
async def test_faulty_server_has_an_error_and_the_others_work(
    fault: str, marked: Marked, capfd: pytest.CaptureFixture[str]
):
    """The session goes on, the next call reaches the server again, no process is left, and nothing was printed."""
    outcome = OUTCOMES[fault]
    server = from_acp(marked.server(fault), "/")
    server.start_timeout = 2 if "within 2 s" in outcome.notice else None
    steps = iter([("bad_bad", outcome.bad), ("bad_pid", outcome.pid)])

    def script(request: dict[str, Any]) -> Reply:
        name, outcome = next(steps, ("", ""))
        server.timeout = 1 if outcome == TIMED_OUT else None
        return use(name, "good_pid") if name else Reply("Done.")

    model = ScriptedModel(script)
    crow = Crow(model)
    crow.mcp_servers(lambda session: [server])
    async with connect(crow) as editor:
        session = await editor.new_session("/", [marked.server("hangs in a call", "good")])
        answer = await editor.prompt(session.session_id, "go")
        assert answer.stop_reason == "end_turn"
        bad, good, pid, same = results(model.requests[-1])
        assert re.fullmatch(outcome.bad, bad), bad[-1000:]
        assert re.fullmatch(outcome.pid, pid), pid
        assert re.fullmatch(NUMBER, good)
        assert good == same
        assert re.fullmatch(outcome.notice, editor.thoughts.strip()), editor.thoughts
        assert editor.thoughts.replace("\n", "").isprintable()
        await editor.request("session/close", CloseSessionRequest(session_id=session.session_id))
        await marked.end()
    assert capfd.readouterr() == ("", "")


MEASURE = """
import asyncio, resource, sys, time
from crow_core.app import Crow
from crow_core.testing import Reply, ScriptedModel, connect
from crow_testing.servers import make_faulty_server


async def main():
    uses = [Reply(tool_calls=[{"name": name, "arguments": {}}]) for name in ("bad_pid", "bad_bad")]
    async with connect(Crow(ScriptedModel([*uses, Reply("Done.")]))) as editor:
        session = await editor.new_session("/", [make_faulty_server(sys.argv[1])])
        turn = asyncio.ensure_future(editor.prompt(session.session_id, "go"))
        await editor.until(lambda editor: "completed" in str(editor.calls()))
        before = resource.getrusage(resource.RUSAGE_SELF)
        await turn
        after = resource.getrusage(resource.RUSAGE_SELF)
        print(after.ru_utime - before.ru_utime, (after.ru_maxrss - before.ru_maxrss) // 1024)


asyncio.run(main())
"""
"""Prints the seconds of processor time and the megabytes that the call with the fault takes."""


@pytest.mark.parametrize(
    ("fault", "seconds", "limit"),
    [
        ("answers with empty blocks", 3, 150),
        pytest.param("answers with invalid blocks", 3, 150, marks=pytest.mark.slow),
        pytest.param("floods with requests", 60, 40, marks=pytest.mark.slow),  # a kilobyte of each would be 50
    ],
)
def test_flood_in_an_answer_or_of_requests_costs_little(fault: str, seconds: float, limit: int):
    done = subprocess.run([sys.executable, "-c", MEASURE, fault], capture_output=True, text=True, check=True)
    spent, megabytes = map(float, done.stdout.split())
    assert spent < seconds
    assert megabytes < limit


@pytest.mark.skipif(sys.platform != "linux" or "psutil" in CHOSEN, reason="only Linux has subreapers")
async def test_processes_without_environment_and_session_end_with_their_server(marked: Marked):
    model = ScriptedModel([use("bad_bad"), Reply("Done.")])
    async with connect(Crow(model)) as editor:
        session = await editor.new_session("/", [marked.server("leaves children without a trace")])
        await editor.prompt(session.session_id, "go")
        pids = list(map(int, results(model.requests[-1])[0].split()))
        assert set(pids).isdisjoint(marked.alive())
        pids += [pid for pid, _ in find_descendants(*pids)]
        await editor.request("session/close", CloseSessionRequest(session_id=session.session_id))
        for pid in pids:
            async with asyncio.timeout(60):
                await end_of(pid)


async def test_dead_server_is_started_again(marked: Marked):
    model = ScriptedModel([use("bad_pid"), use("bad_bad"), use("bad_pid"), use("bad_pid"), Reply("Done.")])
    async with connect(Crow(model)) as editor:
        session = await editor.new_session("/", [marked.server("dies in a call")])
        await editor.prompt(session.session_id, "go")
        before, _, after, still = results(model.requests[-1])
        assert before != after == still
        assert marked.alive() == [int(after)]


async def test_tool_call_of_a_server_that_stopped_reading_can_be_cancelled(marked: Marked):
    model = ScriptedModel([use("bad_bad"), use("good_pid"), Reply("Done.")])
    async with connect(Crow(model)) as editor:
        session = await editor.new_session("/", [marked.server("stops reading"), marked.server("prints junk", "good")])
        turn = asyncio.ensure_future(editor.prompt(session.session_id, "go"))
        await editor.until(lambda editor: "in_progress" in repr(editor.calls()))
        await editor.cancel(session.session_id)
        assert (await turn).stop_reason == "cancelled"
        await editor.prompt(session.session_id, "again")
        assert re.fullmatch(NUMBER, results(model.requests[-1])[-1])


async def test_huge_form_and_script_page_are_declined(marked: Marked):
    can = ElicitationCapabilities(form=ElicitationFormCapabilities(), url=ElicitationUrlCapabilities())
    model = ScriptedModel([use("bad_bad"), Reply("Done.")])
    async with connect(Crow(model), capabilities=ClientCapabilities(elicitation=can)) as editor:
        session = await editor.new_session("/", [marked.server("asks for secrets")])
        await editor.prompt(session.session_id, "go")
        assert editor.forms == []
        assert results(model.requests[-1]) == ['[{"action": "decline"}, {"action": "decline"}]']


@pytest.mark.slow
async def test_many_sessions_leave_no_process(marked: Marked):
    async with connect(Crow(ScriptedModel(lambda request: Reply("Hello.")))) as editor:
        for _ in range(10):
            session = await editor.new_session(
                "/", [marked.server("leaves children"), marked.server("ignores signals")]
            )
            await editor.request("session/close", CloseSessionRequest(session_id=session.session_id))
        await marked.end()


DRIVER = """
import asyncio, sys
from crow_core.acp.schema import EnvVariable
from crow_core.app import Crow
from crow_core.testing import Reply, ScriptedModel, connect
from crow_testing.servers import make_faulty_server

def server(fault):
    config = make_faulty_server(fault, fault[0])
    config.env = [EnvVariable(name="CROW_TEST", value=sys.argv[1])]
    return config

async def main():
    calls = [{"name": f"{name}_bad", "arguments": {}} for name in "lhs"]
    async with connect(Crow(ScriptedModel([Reply(tool_calls=calls)]))) as editor:
        faults = ["leaves children", "hangs in a call", "stops reading", "ignores signals"]
        session = await editor.new_session("/", [server(fault) for fault in faults])
        turn = asyncio.ensure_future(editor.prompt(session.session_id, "go"))
        await editor.until(lambda editor: "completed" in repr(editor.calls()))
        print("now", flush=True)
        await turn

asyncio.run(main())
"""


@pytest.mark.slow
async def test_sigkill_during_a_tool_call_leaves_no_process(marked: Marked):
    ours = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DRIVER, marked.mark, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert ours.stdout
    assert await ours.stdout.readline() == b"now\n"
    others = [pid for pid in marked.alive() if pid != ours.pid]
    assert len(others) >= 4 + 2  # the servers, and the children of one of them
    ours.kill()
    await ours.wait()
    await marked.end()


PEAK = """
import asyncio, sys
from pathlib import Path
from crow_core.app import Crow
from crow_extensions.truncate import truncate
from crow_core.testing import Reply, ScriptedModel, connect
from crow_testing.servers import make_faulty_server

def peak():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])

async def main():
    replies = Reply(tool_calls=[{"name": "bad_bad", "arguments": {}}]), Reply("Done.")
    async with connect(Crow(ScriptedModel([*replies, *replies])).use(truncate)) as editor:
        for fault in ("prints junk", sys.argv[1]):
            before = peak()
            session = await editor.new_session("/", [make_faulty_server(fault)])
            await editor.prompt(session.session_id, "go")
        print((peak() - before) // 1024)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [*(fault for fault in FAULTS if "100 MB" in fault), "floods standard error", "floods with notifications"],
)
async def test_message_of_100_MB_takes_less_than_64_MB_of_memory(fault: str):
    """As junk or as a result, in one line or several."""
    ours = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PEAK, fault, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    out, _ = await ours.communicate()
    assert int(out) < 64


async def test_long_answer_is_written_to_a_file_that_the_model_may_read(
    marked: Marked, monkeypatch: pytest.MonkeyPatch
):
    """Its line breaks are unescaped, and it is deleted with the session."""
    monkeypatch.setattr(stdio, "LINE_LIMIT", 1_000_000)
    monkeypatch.setattr(stdio, "FILE_LIMIT", 200_000_000)
    model = ScriptedModel([use("bad_bad"), Reply("Done.")])
    crow = Crow(model)
    async with connect(crow) as editor:
        session = await editor.new_session("/", [marked.server("answers with 100 MB")])
        await editor.prompt(session.session_id, "go")
        (said,) = results(model.requests[-1])
        found = re.search(r"bytes left out; the whole is in (\S+), as JSON", said)
        assert found
        path = Path(found[1])
        lines = (await asyncio.to_thread(path.read_text)).split("\n")
        assert lines[1:-1] == ["x" * 99] * (len(lines) - 2)
        assert len(lines) == 1_000_001
        assert lines[0].endswith("x" * 99)
        assert lines[-1].startswith("the end")
        (opened,) = crow.sessions.values()
        roots = opened.folders.for_tools()
        assert str(path.parent) in roots
    assert not await asyncio.to_thread(path.exists)


async def test_long_answer_without_a_file_still_is_an_answer(marked: Marked, tmp_path: Path):
    """As when the disk is full."""
    server = from_acp(marked.server("answers with 100 MB"), "/")
    server.calls.find_folder = lambda: tmp_path / "gone"
    answer, after = await server.call("bad", {}, {}), await server.call("pid", {}, {})
    await server.close()
    assert re.fullmatch(r"(?s).*bytes left out; it was not saved\].*the end.*", answer.content[0]["text"])
    assert not answer.is_error
    assert re.fullmatch(NUMBER, after.content[0]["text"])


@asynccontextmanager
async def served(web: Any, path: str = "mcp") -> AsyncGenerator[Server]:
    """Serve an app over HTTP, and connect a `Server` to it."""
    listener = socket.create_server(("127.0.0.1", 0))
    http = uvicorn.Server(uvicorn.Config(web, log_config=None, ws="none", timeout_graceful_shutdown=1))
    serving = asyncio.ensure_future(http.serve(sockets=[listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/{path}"
    server = from_acp(McpServer(name="bad", type="sse" if path == "sse" else "http", url=url, headers=[]), "/")
    try:
        yield server
    finally:
        await server.close()
        http.should_exit = True
        await serving


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("transport", "mode"), [("http", "auto"), ("http", "legacy"), ("sse", "auto")])
async def test_long_answer_over_http_is_shortened_and_written_to_a_file(
    transport: Literal["http", "sse"], mode: Literal["auto", "legacy"], tmp_path: Path
):
    """As one body, as in MCP since 2026, and as an event of a stream."""
    bad = FastMCP("bad")

    @bad.tool(name="bad")
    def sing(lines: int) -> str:
        return ("x" * 99 + "\n") * lines + "the end"

    path = "sse" if transport == "sse" else "mcp"
    async with served(bad.http_app(transport=transport), path) as server:
        server.mode, server.calls.find_folder = mode, lambda: tmp_path
        assert await server.list()  # now the output schema is known
        short, long, too_long, after = [await server.call("bad", {"lines": n}, {}) for n in (1, 2_000, 120_000, 2)]
    assert (len(short.content[0]["text"]), len(long.content[0]["text"])) == (107, 200_007)
    text = too_long.content[0]["text"]
    assert not too_long.is_error
    assert len(text) < 10_000
    found = re.fullmatch(r"(?s).*bytes left out; the whole is in (\S+), as JSON .*the end.*", text)
    assert found
    lines = (await asyncio.to_thread(Path(found[1]).read_text)).split("\n")
    assert lines[1:120_000] == ["x" * 99] * 119_999
    assert len(after.content[0]["text"]) == 207


async def test_long_list_over_http_is_an_error_of_its_server():
    bad = FastMCP("bad")
    bad.tool(lambda: "caw", name="bad", description="x" * 10_000_000)
    async with served(bad.http_app()) as server:
        assert await server.list() == []
    assert re.fullmatch(r"MCP server 'bad' did not start: its answer of 10,[\d,]+ bytes is too long\.", server.error)


async def test_compressed_answer_is_refused():
    async def bomb(scope: Any, receive: Any, send: Any) -> None:
        headers = {"content-encoding": "gzip", "content-type": "application/json"}
        await Response(gzip.compress(b" " * 50_000_000), headers=headers)(scope, receive, send)

    async with served(bomb) as server:
        assert await server.list() == []
    assert "it is compressed (gzip), which nobody asked for" in server.error


async def test_tool_call_over_http_may_be_silent_until_its_timeout():
    """The SDK's own limit, of five minutes, does not apply."""
    slow = FastMCP("slow")

    @slow.tool
    async def think() -> str:
        advance_clock(600)
        for _ in range(100):  # a limit that is over ends the call in one of these rounds
            await asyncio.sleep(0)
        return "caw"

    async with served(slow.http_app()) as server:
        answer = await server.call("think", {}, {})
    assert answer.content[0]["text"] == "caw"
