"""The command `crow-mcp-server --http`."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from anyio.streams.text import TextReceiveStream
from fastmcp import Client
from fastmcp.client.transports import StreamableHttpTransport

pytestmark = pytest.mark.anyio

RUN = [sys.executable, "-m", "crow_mcp_server"]
TOKEN = "0123456789abcdef-secret"
HELLO = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
}
HEADERS = {"Accept": "application/json, text/event-stream", "Authorization": f"Bearer {TOKEN}"}


@asynccontextmanager
async def serving(folder: Path, *arguments: str) -> AsyncIterator[tuple[str, str]]:
    """Yield the address and the other text on standard error."""
    command = [*RUN, "--root", str(folder), "--http", "0", *arguments]
    async with await anyio.open_process(command, stdin=subprocess.DEVNULL, env=dict(os.environ)) as server:
        assert server.stderr
        told = ""
        async for text in TextReceiveStream(server.stderr):
            told += text
            if found := re.search(r"http://\S+", told):
                break
        else:
            pytest.fail(f"it did not start: {told}")
        try:
            yield found[0], told
        finally:
            server.terminate()
            assert await server.wait() in (0, -signal.SIGTERM)
        assert server.stdout
        assert [text async for text in TextReceiveStream(server.stdout)] == []


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    return str(file)


async def ask(url: str, **headers: str) -> int:
    async with httpx2.AsyncClient(timeout=60) as client:
        return (await client.post(url, json=HELLO, headers=HEADERS | headers)).status_code


async def test_client_with_the_token_can_use_the_tools(folder: Path, token_file: str):
    (folder / "a").write_text("one\n")
    async with serving(folder, "--token-file", token_file) as (url, told):
        assert url.startswith("http://127.0.0.1:")
        assert TOKEN not in told
        transport = StreamableHttpTransport(url, headers={"Authorization": f"Bearer {TOKEN}"})
        async with Client(transport) as client:
            viewed = await client.call_tool("file_editor", {"command": "view", "path": "a"})
            assert "one" in viewed.content[0].text


async def test_requests_without_token_or_from_other_origins_are_refused(folder: Path, token_file: str):
    async with serving(folder, "--token-file", token_file) as (url, _):
        assert await ask(url) == 200
        async with httpx2.AsyncClient(timeout=60) as client:
            assert (await client.post(url, json=HELLO, headers={"Accept": HEADERS["Accept"]})).status_code == 401
        assert await ask(url, Authorization="Bearer wrong") == 401
        assert await ask(url, Authorization=f"Basic {TOKEN}") == 401
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "169.254.169.254"):
            assert 400 <= await ask(url, Host=host) < 500
        for origin in ("https://evil.example", "null", "http://127.0.0.1.evil.example"):
            assert await ask(url, Origin=origin) == 403


async def test_without_a_file_a_token_is_made_and_printed(folder: Path):
    async with serving(folder) as (url, told):
        found = re.search(r"Token for this run: (\S{40,})\n", told)
        assert found
        assert await ask(url, Authorization=f"Bearer {found[1]}") == 200
        assert await ask(url) == 401


@pytest.mark.slow
async def test_option_tools_limits_the_tools(folder: Path, token_file: str):
    async with serving(folder, "--token-file", token_file, "--tools", "fetch,plan") as (url, _):
        transport: Any = StreamableHttpTransport(url, headers={"Authorization": f"Bearer {TOKEN}"})
        async with Client(transport) as client:
            assert {tool.name for tool in await client.list_tools()} == {"fetch", "plan"}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tools", "terminal,telepathy"], "telepathy: no such tool; there are ask_user"),
        (["--token-file", "x"], "--token-file is for --http"),
        (["--http", "here"], "it is not HOST:PORT"),
        pytest.param(["--http", "127.0.0.1:99999"], "it is not HOST:PORT", marks=pytest.mark.slow),
        pytest.param(["--http", "0", "--token-file", "/nowhere/token"], "No such file", marks=pytest.mark.slow),
        (["--http", "0", "--token-file", os.devnull], "at least 16 characters"),
    ],
)
def test_wrong_option_is_reported_in_a_sentence(arguments: list[str], says: str):
    ran = subprocess.run([*RUN, *arguments], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert says in ran.stderr
    assert "Traceback" not in ran.stderr


def test_help_names_the_tools():
    told = subprocess.run([*RUN, "--help"], capture_output=True, text=True, check=True).stdout
    assert "web_search" in told
    assert "--allow-host" in told
