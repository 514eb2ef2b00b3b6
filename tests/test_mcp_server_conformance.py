"""crow-mcp-server with two reference clients: MCP Inspector's command line and the MCP conformance suite."""

import asyncio
import json
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import crow_mcp_server
import pytest
from crow_testing.listening import connect_to, listen

if TYPE_CHECKING:
    from conftest import Node

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

INSPECTOR = (
    *("node_modules/@modelcontextprotocol/inspector/clients/launcher/build/index.js", "--cli"),
    *("--connect-timeout", "0"),  # a machine may be slow
)
SUITES = ("node_modules/@modelcontextprotocol/conformance/dist/index.js", "node_modules/conformance-next/dist/index.js")
NOTES = Path(__file__).parent.parent / "crow-mcp-server" / "CONFORMANCE.md"
TOKEN = "0123456789abcdef0123"
SERVER = (sys.executable, "-m", "crow_mcp_server")
HEAD = re.compile(rb"^((?:GET|POST|DELETE|OPTIONS) \S+ HTTP/1\.1\r\n)", re.MULTILINE)
RESULTS = json.dumps({"results": [{"title": "Crows", "url": "https://example.com/", "content": "They count."}]})


@asynccontextmanager
async def listening(answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]) -> AsyncIterator[str]:
    """Context manager: answer connections on this machine; the value is the address `HOST:PORT`."""
    async with listen(answer) as port:
        yield f"127.0.0.1:{port}"


async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer a request like a web page and like SearXNG."""
    start = await reader.readuntil(b"\r\n\r\n")
    status, body = ("404 Not Found", "") if b"robots.txt" in start else ("200 OK", RESULTS)
    writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode())
    await writer.drain()
    writer.close()


CALLS: dict[str, tuple[dict[str, str], str]] = {
    "ask_user": ({"question": "Why?"}, "Ask in the text of your answer"),
    "fetch": ({"url": "http://{web}/page"}, "They count."),
    "file_editor": ({"command": "view", "path": "a.txt"}, "one"),
    "glob": ({"pattern": "*.txt"}, "a.txt"),
    "grep": ({"pattern": "one"}, "a.txt"),
    "plan": ({"entries": '[{"content": "count", "status": "pending"}]'}, "[ ] count"),
    "terminal": ({"command": "cat a.txt"}, "one"),
    "tree": ({}, "a.txt"),
    "web_search": ({"query": "crows"}, "https://example.com/"),
}
"""The arguments of a call of each tool, and a part of the expected answer."""


@pytest.mark.slow
@pytest.mark.parametrize("tool", [tool["name"] for tool in crow_mcp_server.tools()])
async def test_inspector_calls_every_tool(node: "Node", tool: str):
    (node.project / "a.txt").write_text("one\n")
    arguments, expected = CALLS[tool]
    async with listening(web) as address:
        command = [*SERVER, "--allow-host", address]
        given = [f"{name}={value.replace('{web}', address)}" for name, value in arguments.items()]
        call = ["--method", "tools/call", "--tool-name", tool, *(["--tool-arg", *given] if given else [])]
        result = await node.run("", *INSPECTOR, "-e", f"SEARXNG_URL=http://{address}", *call, "--", *command)
    assert expected in result.out, result
    assert json.loads(result.out).get("isError", False) is (tool == "ask_user")  # the Inspector shows no forms


@pytest.mark.slow
async def test_inspector_lists_the_tools_with_valid_schemas(node: "Node"):
    result = await node.run("", *INSPECTOR, "--method", "tools/list", "--strict", "--", *SERVER)
    assert result.code == 0, result
    listed = {tool["name"]: tool for tool in json.loads(result.out)["tools"]}
    assert set(listed) == {tool["name"] for tool in crow_mcp_server.tools()} <= set(CALLS)
    assert all(tool["description"] and tool["annotations"] for tool in listed.values())


@asynccontextmanager
async def token_proxy(address: str) -> AsyncIterator[str]:
    """Context manager: run a proxy that adds the token to requests, because the suite cannot send one."""
    host, _, port = address.rpartition(":")

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, added: bytes = b"") -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(HEAD.sub(lambda head: head[1] + added, data) if added else data)
                await writer.drain()
        writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        token = f"Authorization: Bearer {TOKEN}\r\n".encode()
        async with connect_to(host, int(port)) as (inner, outer):
            await asyncio.gather(pass_on(reader, outer, token), pass_on(inner, writer))

    async with listening(connect) as proxy:
        yield proxy


@asynccontextmanager
async def serving(node: "Node", token_file: Path) -> AsyncIterator[str]:
    """Context manager: run crow-mcp-server over HTTP; the value is its address."""
    command = [*SERVER, "--root", str(node.project), "--http", "0", "--token-file", str(token_file)]
    process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stderr=PIPE, env=node.env)
    try:
        assert process.stderr
        line = (await process.stderr.readline()).decode()
        yield line.rpartition("http://")[2].removesuffix("/mcp\n")
    finally:
        process.terminate()
        await process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
async def test_conformance_suite_passes_except_for_listed_scenarios(node: "Node", tmp_path: Path, suite: str):
    rows = "".join(re.findall(r"^\| (`.*?`) \|", NOTES.read_text(encoding="utf-8"), re.MULTILINE))
    not_applicable = set(re.findall(r"`([a-z0-9-]+)`", rows))
    results, token_file = tmp_path / "results", tmp_path / "token"
    token_file.write_text(TOKEN)
    async with serving(node, token_file) as address, token_proxy(address) as proxy:
        url = f"http://{proxy}/mcp"
        result = await node.run("", suite, "server", "--url", url, "--suite", "all", "-o", str(results))
    verdicts = {name: mark for mark, name in re.findall(r"([✓✗])\S* ([a-z0-9-]+): \d+ passed", result.out)}
    assert len(verdicts) >= 30, result
    assert {name for name, mark in verdicts.items() if mark == "✗"} == not_applicable & set(verdicts)
    assert {"dns-rebinding-protection", "server-initialize", "tools-list"} <= set(verdicts) - not_applicable
    stateless = [json.loads(file.read_text()) for file in results.glob("*server-stateless*/checks.json")]
    failed = {check["id"] for checks in stateless for check in checks if check["status"] == "FAILURE"}
    undeclared = {"sep-2575-server-rejects-undeclared-capability", "sep-2575-missing-capability-http-400"}
    assert failed == (undeclared if stateless else set())
