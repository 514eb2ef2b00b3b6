"""Test the transports with real processes, pipes, files, sockets and terminals."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import crow_system as system
import pytest
from anyio import wait_all_tasks_blocked
from crow_core.acp.connection import Connection, ConnectionClosed
from crow_core.acp.schema import (
    AGENT_METHODS,
    CLIENT_METHODS,
    INVALID_REQUEST,
    AgentMessageChunk,
    CancelNotification,
    PromptRequest,
    PromptResponse,
    SessionNotification,
    TextBlock,
)
from crow_core.acp.transports import (
    HIGH_WATER_BYTES,
    MAX_MESSAGE_BYTES,
    ChildTransport,
    LineTooLong,
    StreamTransport,
    spawn,
)
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.anyio

EXIT_TIMEOUT = 60.0
"""Seconds for a process to end by itself, also on a busy machine."""

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process there")

AGENT = """
import asyncio, os, subprocess, sys
from crow_core.acp.connection import Connection
from crow_core.acp.schema import *
from crow_core.acp.transports import stdio

async def main():
    running = set()

    async def say(text):
        update = AgentMessageChunk(content=TextBlock(text=text))
        await agent.notify("session/update", SessionNotification(session_id="s", update=update))

    async def prompt(params):
        text = params.prompt[0].text
        match text:
            case "count":
                for number in range(3000):
                    await say(str(number))
            case "print":
                print("printed")
                sys.stdout.flush()
                os.write(1, b"written\\n")
                child = 'import sys; print("from the child", repr(sys.stdin.read()), flush=True)'
                subprocess.run([sys.executable, "-c", child], check=True)
                await say(repr(sys.stdin.read()))
            case "where":
                await say(os.environ["WHERE"] + " " + os.getcwd())
            case "wait":
                try:
                    await say("waiting")
                    await asyncio.get_running_loop().create_future()
                except asyncio.CancelledError:
                    return PromptResponse(stop_reason="cancelled")
            case _:
                await say(text)
        return PromptResponse(stop_reason="end_turn")

    async def memory(params):
        with open("/proc/self/status") as status:
            kibibytes = {line.split()[0]: int(line.split()[1]) for line in status if line.startswith("Vm")}
        return {"now": kibibytes["VmRSS:"] * 1024, "peak": kibibytes["VmHWM:"] * 1024}

    handlers = {"session/prompt": prompt, "_memory": memory}
    agent = Connection(await stdio(), AGENT_METHODS, CLIENT_METHODS, handlers)
    await agent.serve()

asyncio.run(main())
"""


@pytest.fixture
def agent(tmp_path: Path) -> str:
    """The path of a script that runs an agent."""
    path = tmp_path / "agent.py"
    path.write_text(AGENT)
    return str(path)


class Talk:
    """A client's connection, and the texts that it received."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.texts: asyncio.Queue[str] = asyncio.Queue()

    async def prompt(self, text: str) -> PromptResponse:
        return await self.connection.request(
            "session/prompt", PromptRequest(session_id="s", prompt=[TextBlock(text=text)])
        )

    def get_texts(self) -> list[str]:
        return [self.texts.get_nowait() for _ in range(self.texts.qsize())]


@asynccontextmanager
async def talking(transport: StreamTransport) -> AsyncIterator[Talk]:
    async def show(params: SessionNotification) -> None:
        assert isinstance(params.update, AgentMessageChunk)
        assert isinstance(params.update.content, TextBlock)
        talk.texts.put_nowait(params.update.content.text)

    talk = Talk(Connection(transport, CLIENT_METHODS, AGENT_METHODS, {"session/update": show}))
    async with asyncio.TaskGroup() as group:
        group.create_task(talk.connection.serve())
        yield talk
        await talk.connection.close()


async def send(child: ChildTransport, line: bytes) -> None:
    child.write(line)
    await child.drain()


def request(id: Any, text: str) -> bytes:
    params = {"sessionId": "s", "prompt": [{"type": "text", "text": text}]}
    return json.dumps({"jsonrpc": "2.0", "id": id, "method": "session/prompt", "params": params}).encode() + b"\n"


async def test_updates_arrive_in_order_and_before_the_answer(agent: str):
    child = await spawn(sys.executable, [agent], close_timeout=EXIT_TIMEOUT)
    async with talking(child) as talk:
        assert await talk.prompt("count") == PromptResponse(stop_reason="end_turn")
        assert talk.get_texts() == [str(number) for number in range(3000)]
    assert child.process.returncode == 0


async def test_output_of_the_process_and_its_children_goes_to_standard_error(agent: str, tmp_path: Path):
    with (tmp_path / "stderr").open("wb") as stderr:
        async with talking(await spawn(sys.executable, [agent], stderr=stderr)) as talk:
            await talk.prompt("print")
            assert talk.get_texts() == ["''"]
    assert (tmp_path / "stderr").read_text().split("\n") == ["printed", "written", "from the child ''", ""]


async def test_child_gets_its_environment_and_folder(agent: str, tmp_path: Path):
    async with talking(await spawn(sys.executable, [agent], {"WHERE": "here"}, tmp_path)) as talk:
        await talk.prompt("where")
        assert talk.get_texts() == [f"here {tmp_path}"]


async def test_command_that_does_not_exist_is_an_error():
    with pytest.raises(FileNotFoundError):
        await spawn("/no/such/agent")


async def test_twenty_mebibytes_are_sent_through_pipes_both_ways(agent: str):
    text = "\u00e9x" * (10 * 1024 * 1024)
    async with talking(await spawn(sys.executable, [agent])) as talk:
        await talk.prompt(text)
        assert talk.get_texts() == [text]


async def memory_of(child: ChildTransport) -> dict[str, int]:
    """Return the memory of a process in bytes, current and peak."""
    await send(child, b'{"jsonrpc":"2.0","id":"memory","method":"_memory","params":{}}\n')
    return json.loads(await child.readline())["result"]


@needs_proc
async def test_line_over_the_limit_takes_little_memory_and_gets_one_error(agent: str):
    child = await spawn(sys.executable, [agent])
    before = await memory_of(child)
    piece = b"x" * 1024 * 1024
    await send(child, b'{"jsonrpc":"2.0","id":1,"method":"session/prompt","params":"')
    for _ in range(150):
        await send(child, piece)
    await send(child, b'"}\n')
    refusal = json.loads(await child.readline())
    assert refusal["id"] is None
    assert refusal["error"]["code"] == INVALID_REQUEST
    assert (await memory_of(child))["peak"] - before["now"] < 1.5 * MAX_MESSAGE_BYTES
    await child.close()


@needs_proc
async def test_memory_of_a_large_message_is_freed_while_its_handler_runs(agent: str):
    child = await spawn(sys.executable, [agent])
    before = await memory_of(child)
    unread = b',"unread":"' + b"x" * (MAX_MESSAGE_BYTES - 1000) + b'"}}\n'
    await send(child, request(1, "wait").replace(b"}}\n", unread))
    assert json.loads(await child.readline())["method"] == "session/update"
    after = await memory_of(child)
    assert after["peak"] - before["now"] > MAX_MESSAGE_BYTES / 2
    assert after["now"] - before["now"] < MAX_MESSAGE_BYTES / 2
    await child.close()


async def test_end_of_input_ends_the_agent_after_its_running_requests_are_answered(agent: str):
    child = await spawn(sys.executable, [agent], close_timeout=EXIT_TIMEOUT)
    await send(child, request(1, "wait"))
    assert json.loads(await child.readline())["method"] == "session/update"
    await child.close()  # waits for the exit
    assert child.process.returncode == 0
    assert json.loads(await child.readline()) == {"jsonrpc": "2.0", "id": 1, "result": {"stopReason": "cancelled"}}
    assert await child.readline() == b""


@pytest.mark.posix("Windows does not tell that nobody reads a pipe")
@pytest.mark.parametrize("is_busy", [True, False])
async def test_agent_ends_when_nobody_reads_its_output_any_more(agent: str, is_busy: bool):
    process = await asyncio.create_subprocess_exec(
        sys.executable, agent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdin
    assert process.stdout
    process.stdin.write(request(1, "wait" if is_busy else "hi") + b"\n")
    for _ in range(1 if is_busy else 2):
        await process.stdout.readline()
    process._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined]  # its input stays open
    async with asyncio.timeout(EXIT_TIMEOUT):
        assert await process.wait() == 0
    process.stdin.close()


async def test_data_written_before_the_end_arrives_completely(agent: str):
    text = "x" * 4 * 1024 * 1024
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, agent], input=request(1, text), stdout=subprocess.PIPE, check=True
    )
    update, answer = map(json.loads, done.stdout.splitlines())
    assert update["params"]["update"]["content"]["text"] == text
    assert answer["id"] == 1


async def test_last_line_needs_no_newline(agent: str):
    answer = await asyncio.to_thread(
        subprocess.run, [sys.executable, agent], input=request(1, "hi")[:-1], stdout=subprocess.PIPE, check=True
    )
    assert [json.loads(line).get("id") for line in answer.stdout.splitlines()] == [None, 1]


async def test_files_can_be_input_and_output(agent: str, tmp_path: Path):
    (tmp_path / "in").write_bytes(request(1, "one") + b"\n" + request(2, "two"))
    with (tmp_path / "in").open("rb") as source, (tmp_path / "out").open("wb") as sink:
        await asyncio.to_thread(subprocess.run, [sys.executable, agent], stdin=source, stdout=sink, check=True)
    answers = [json.loads(line) for line in (tmp_path / "out").read_bytes().splitlines()]
    assert [answer["id"] for answer in answers if "id" in answer] == [1, 2]


async def test_agent_without_input_ends(agent: str):
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, agent], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True
    )
    assert done.stdout == b""


@pytest.mark.posix("a socket is no standard stream there")
async def test_one_socket_can_be_input_and_output(agent: str):
    ours, theirs = socket.socketpair()
    process = subprocess.Popen([sys.executable, agent], stdin=theirs, stdout=theirs)  # noqa: ASYNC220
    theirs.close()
    reader, writer = await asyncio.open_connection(sock=ours)
    for id in range(3):
        writer.write(request(id, "hi"))
        assert json.loads(await reader.readline())["method"] == "session/update"
        assert json.loads(await reader.readline())["id"] == id
    writer.write_eof()
    assert await reader.read() == b""
    assert await asyncio.to_thread(process.wait) == 0
    writer.close()
    await writer.wait_closed()


@pytest.mark.posix("there are no pseudo-terminals")
async def test_terminal_can_be_used_and_is_restored(agent: str):
    import pty  # Windows has neither
    import tty

    ours, theirs = pty.openpty()
    tty.setraw(theirs)
    process = subprocess.Popen([sys.executable, agent], stdin=theirs, stdout=theirs)  # noqa: ASYNC220
    with open(ours, "r+b", buffering=0) as terminal:  # noqa: ASYNC230
        terminal.write(request(1, "hi"))
        lines = b""
        while lines.count(b"\n") < 2:
            lines += await asyncio.to_thread(terminal.read, 65536)
        assert [json.loads(line).get("id") for line in lines.splitlines()] == [None, 1]
        terminal.write(b'{"jsonrpc":"2.0","id":2,"method":"_end"}\n')
        while lines.count(b"\n") < 3:
            lines += await asyncio.to_thread(terminal.read, 65536)
        assert json.loads(lines.splitlines()[2])["id"] == 2
        assert os.get_blocking(theirs) is not system.POLLS_PIPES
        process.send_signal(signal.SIGINT)
        await asyncio.to_thread(process.wait)
        assert os.get_blocking(theirs)
        os.close(theirs)


@pytest.mark.posix("it hangs there, for a reason not yet known")
async def test_sender_waits_for_a_process_that_does_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    async def talk(connection: Connection) -> None:
        nonlocal sent
        while True:
            await connection.notify("session/cancel", CancelNotification(session_id="x" * 1000))
            sent += 1000

    sent = 0
    deaf = tmp_path / "deaf.py"
    deaf.write_text("import time; print('up', flush=True); time.sleep(60)")
    child = await spawn(sys.executable, [str(deaf)])
    assert (await child.readline() or b"").rstrip() == b"up"
    connection = Connection(child, CLIENT_METHODS, AGENT_METHODS, {})
    sending = asyncio.create_task(talk(connection))
    await wait_all_tasks_blocked()
    while sent <= HIGH_WATER_BYTES:  # a thread writes
        await asyncio.sleep(0.001)
    assert sent < 1_000_000
    child.process.kill()
    with pytest.raises(ConnectionClosed):
        await sending
    for _ in range(10):
        child.write(b"to nobody\n")
    assert caplog.text == ""
    await connection.close()


@pytest.mark.posix("there are no process groups")
@pytest.mark.slow
async def test_close_kills_the_rest_of_the_process_group(tmp_path: Path):
    stubborn = tmp_path / "stubborn.py"
    stubborn.write_text(
        "import os, signal, subprocess, sys\n"
        "signal.alarm(60)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if len(sys.argv) == 1:\n"
        "    subprocess.Popen([sys.executable, __file__, 'grandchild'])\n"
        "else:\n"
        "    print('up', flush=True)\n"
        "while True: signal.pause()\n"
    )
    child = await spawn(sys.executable, [str(stubborn)])
    assert await child.readline() == b"up"
    await child.close()
    assert child.process.returncode == -signal.SIGKILL
    assert await child.readline() == b""  # the grandchild held the other end


class Pieces:
    """A source that returns the given pieces one by one."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = iter(pieces)

    async def read(self, size: int) -> bytes:
        return next(self._pieces, b"")

    def close(self) -> None: ...


class Nowhere:
    """A sink for tests that only read."""

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None: ...

    async def close(self) -> None: ...


async def lines_of(pieces: list[bytes]) -> list[bytes | None]:
    """Return the lines that are read, with None for one that is too long."""
    streams, lines = StreamTransport(Pieces(pieces), Nowhere()), list[bytes | None]()
    while True:
        try:
            line = await streams.readline()
        except LineTooLong:
            lines.append(None)
        else:
            if not line:
                return lines
            lines.append(bytes(line))


@settings(deadline=None)
@given(st.lists(st.sampled_from([b"\n", b"\n\n", b"a", b"bc", b"d\n", b"\ne", b"f\ng\nh"])))
def test_lines_are_the_same_wherever_chunks_end(pieces: list[bytes]):
    whole = [line for line in b"".join(pieces).split(b"\n") if line]
    assert asyncio.run(lines_of(pieces)) == whole


async def test_line_may_have_exactly_the_limit():
    full = b"x" * MAX_MESSAGE_BYTES
    assert await lines_of([full, b"\n", b"next\n"]) == [full, b"next"]
    assert await lines_of([b"before\n", full, b"x", b"x\nnext\n", full, b"x"]) == [b"before", None, b"next", None]
