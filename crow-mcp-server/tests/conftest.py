"""Fixtures: a client and a server, connected by FastMCP's memory transport."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from crow_mcp_server import create_server
from fastmcp import Client


@dataclass
class Result:
    text: str
    is_error: bool
    meta: dict[str, Any]
    data: dict[str, Any]
    """The structured content."""

    @property
    def changes(self) -> list[dict[str, Any]]:
        return self.meta["crow/changes"]


@dataclass
class Tools:
    """Calls tools in a folder, which every call names in its `_meta`, as crow does."""

    client: Client[Any]
    folder: Path

    async def call(self, tool: str, arguments: dict[str, Any], **meta: Any) -> Result:
        context = {"crow/session": "one", "crow/cwd": str(self.folder), "crow/roots": [str(self.folder)]}
        named = {f"crow/{name}": value for name, value in meta.items()}
        answer = await self.client.call_tool_mcp(tool, arguments, meta=context | named)
        text = "".join(block.text for block in answer.content if block.type == "text")
        return Result(text, answer.is_error, answer.meta or {}, answer.structured_content or {})

    async def edit(self, command: str, path: object, **arguments: Any) -> Result:
        """Make an edit that is expected to succeed."""
        result = await self.call("file_editor", {"command": command, "path": str(path)} | arguments)
        assert not result.is_error, result.text
        return result

    async def get_edit_error(self, command: str, path: object, **arguments: Any) -> str:
        """Return the error message of an edit that is expected to fail."""
        result = await self.call("file_editor", {"command": command, "path": str(path)} | arguments)
        assert result.is_error, result.text
        return result.text

    async def run(self, command: str, **arguments: Any) -> str:
        """Return the answer, without a newline at its end, to a command that is expected to start."""
        result = await self.call("terminal", {"command": command} | arguments)
        assert not result.is_error, result.text
        return result.text.removesuffix("\n")

    async def poll(self, session: str, **arguments: Any) -> str:
        """Return the answer, without a newline at its end, to a poll of a session that is expected to exist."""
        result = await self.call("terminal", {"session": session} | arguments)
        assert not result.is_error, result.text
        return result.text.removesuffix("\n")

    async def poll_until(self, session: str, *signs: str, **given: str) -> str:
        """Send a command, input or keys, if any, and poll the session until all signs have appeared."""
        seen = await self.poll(session, wait=0, **given)
        while not all(sign in seen for sign in signs):
            seen += await self.poll(session, wait=0.05)
        return seen

    async def get_terminal_error(self, **arguments: Any) -> str:
        """Return the error message of a call of `terminal` that is expected to fail."""
        result = await self.call("terminal", arguments)
        assert result.is_error, result.text
        return result.text

    async def wait_for_pids(self, count: int) -> list[int]:
        """Return the process ids that commands have written to files named *.pid, once there are `count`."""

        def read_pids() -> list[int]:
            return [int(text) for file in self.folder.glob("*.pid") if (text := file.read_text()).endswith("\n")]

        await self.wait_until(lambda: len(read_pids()) == count)
        return read_pids()

    async def wait_until_gone(self, pids: Sequence[int]) -> None:
        """Wait until none of these processes is left."""
        await self.wait_until(lambda: not any(map(self.is_alive, pids)))

    async def wait_until(self, condition: Callable[[], object]) -> None:
        while not condition():
            await asyncio.sleep(0.01)

    def is_alive(self, pid: int) -> bool:
        """Return whether a process runs; a zombie does not."""
        return self.get_state(pid)[:1] not in ("", "Z", "X")

    def get_state(self, pid: int) -> str:
        """Return the state in the output of `ps`, such as "S+" for sleeping in the foreground of a terminal."""
        command = ["ps", "-o", "stat=", "-p", str(pid)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The working folder, in a folder for files outside of it."""
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


@pytest.fixture
async def tools(folder: Path) -> AsyncIterator[Tools]:
    async with Client(create_server(hidden_env=["CROW_TEST_KEY"])) as client:
        yield Tools(client, folder)


class Clock:
    """The clock of the running event loop, which a test can advance, so that timeouts expire at once."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.time, self.call_at = self.loop.time, self.loop.call_at
        self.ahead = 0.0
        self.timers: list[float] = []
        """The times of all timers that were set, by this clock."""
        self.loop.time = lambda: self.time() + self.ahead
        self.loop.call_at = self.set_timer

    def set_timer(self, when: float, *args: Any, **more: Any) -> asyncio.TimerHandle:
        self.timers.append(when)
        return self.call_at(when, *args, **more)

    def has_timer(self, seconds: float) -> bool:
        """Whether a timer was set that expires once the clock is advanced by so many seconds, and not long before."""
        return any(0 <= self.loop.time() + seconds - when < 60 for when in self.timers)

    def __call__(self, seconds: float) -> None:
        self.ahead += seconds


@pytest.fixture
async def later() -> Clock:
    """Returns a function that advances the event loop's clock by some seconds."""
    return Clock()
