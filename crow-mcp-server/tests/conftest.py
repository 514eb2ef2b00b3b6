"""A real client on a real server over FastMCP's memory transport."""

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
    """The tools in a folder; every call says so in its `_meta`, as the agent does."""

    client: Client[Any]
    folder: Path

    async def call(self, tool: str, arguments: dict[str, Any], **meta: Any) -> Result:
        context = {"crow/session": "one", "crow/cwd": str(self.folder), "crow/roots": [str(self.folder)]}
        named = {f"crow/{name}": value for name, value in meta.items()}
        answer = await self.client.call_tool_mcp(tool, arguments, meta=context | named)
        text = "".join(block.text for block in answer.content if block.type == "text")
        return Result(text, answer.is_error, answer.meta or {}, answer.structured_content or {})

    async def edit(self, command: str, path: object, **arguments: Any) -> Result:
        """An edit that is expected to succeed."""
        result = await self.call("file_editor", {"command": command, "path": str(path)} | arguments)
        assert not result.is_error, result.text
        return result

    async def refused(self, command: str, path: object, **arguments: Any) -> str:
        """What the model reads about an edit that is expected to fail."""
        result = await self.call("file_editor", {"command": command, "path": str(path)} | arguments)
        assert result.is_error, result.text
        return result.text

    async def run(self, command: str, **arguments: Any) -> str:
        """What a command that is expected to start tells."""
        result = await self.call("terminal", {"command": command} | arguments)
        assert not result.is_error, result.text
        return result.text

    async def look(self, session: str, **arguments: Any) -> str:
        """What a session shows that is expected to be there."""
        result = await self.call("terminal", {"session": session} | arguments)
        assert not result.is_error, result.text
        return result.text

    async def look_until(self, session: str, *signs: str, **given: str) -> str:
        """Give a command, input or keys, if any, and look until all signs have been seen."""
        seen = await self.look(session, wait=0, **given)
        while not all(sign in seen for sign in signs):
            seen += await self.look(session, wait=0.05)
        return seen

    async def not_run(self, **arguments: Any) -> str:
        """What the model reads about a call of `terminal` that is expected to fail."""
        result = await self.call("terminal", arguments)
        assert result.is_error, result.text
        return result.text

    async def pids(self, count: int) -> list[int]:
        """The process ids that commands have written to files named *.pid, once there are `count`."""

        def written() -> list[int]:
            return [int(text) for file in self.folder.glob("*.pid") if (text := file.read_text()).endswith("\n")]

        await self.until(lambda: len(written()) == count)
        return written()

    async def gone(self, pids: Sequence[int]) -> None:
        """Wait until none of these processes is left."""
        await self.until(lambda: not any(map(self.alive, pids)))

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            await asyncio.sleep(0.01)

    def alive(self, pid: int) -> bool:
        """Whether a process runs; one that only waits to be reaped does not."""
        return self.state(pid)[:1] not in ("", "Z", "X")

    def state(self, pid: int) -> str:
        """What `ps` says of it, such as "S+": it sleeps, in the foreground of its terminal."""
        command = ["ps", "-o", "stat=", "-p", str(pid)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The working folder, with room around it for what lies outside."""
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


@pytest.fixture
async def tools(folder: Path) -> AsyncIterator[Tools]:
    async with Client(create_server(hidden_env=["CROW_TEST_KEY"])) as client:
        yield Tools(client, folder)


@pytest.fixture
async def later() -> Callable[[float], None]:
    """Lets seconds pass at once for all that waits in the event loop, so that a test says what comes before a
    timeout."""
    loop = asyncio.get_running_loop()
    clock, ahead = loop.time, [0.0]
    loop.time = lambda: clock() + sum(ahead)
    return ahead.append
