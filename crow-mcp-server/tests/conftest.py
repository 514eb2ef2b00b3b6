"""A real client on a real server over FastMCP's memory transport."""

from collections.abc import AsyncIterator
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
