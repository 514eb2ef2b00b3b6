"""The web tools in crow."""

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest
from crow_agent.app import build
from crow_core.testing import Reply, ScriptedModel, connect
from crow_persistence.extension import persistence
from crow_testing.listening import listen

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

pytestmark = pytest.mark.anyio

KEY = "canary-0123456789-brave"


@pytest.fixture
async def brave() -> AsyncIterator[tuple[str, list[str]]]:
    """Run a search provider that puts the key in its answer; yield its URL and the requests that it received."""
    requests: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append((await reader.readuntil(b"\r\n\r\n")).decode())
        body = f'{{"web": {{"results": [{{"title": "Key {KEY}", "url": "https://example.com/"}}]}}}}'
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode())
        await writer.drain()

    async with listen(answer) as port:
        yield f"http://127.0.0.1:{port}", requests


async def test_search_provider_is_asked_after_permission_and_its_key_is_masked(
    machine: "Machine", brave: tuple[str, list[str]]
) -> None:
    url, requests = brave
    env = machine.env | {"BRAVE_API_KEY": KEY, "BRAVE_API_URL": url}
    calls = [("web_search", {"query": "crows"}), ("terminal", {"command": "env"})]
    replies = [Reply(tool_calls=[{"name": name, "arguments": arguments}]) for name, arguments in calls]
    model = ScriptedModel([*replies, Reply("Done.")])
    crow = await build(env, models={"scripted": model}, without=[persistence])
    async with connect(crow, permit="allow_once") as editor:
        session = await editor.new_session(str(machine.project))
        await editor.prompt(session.session_id, "go")
    assert [question.tool_call.name for question in editor.questions] == ["web_search", "terminal"]
    assert f"X-Subscription-Token: {KEY}" in requests[0]
    assert "https://example.com/" in str(model.requests[-1])
    assert KEY not in str(model.requests)


async def test_host_in_allow_hosts_can_be_fetched(machine: "Machine", brave: tuple[str, list[str]]) -> None:
    url, requests = brave
    machine.configure(f'[fetch]\nallow_hosts = ["{url.removeprefix("http://")}"]\n')
    model = ScriptedModel([Reply(tool_calls=[{"name": "fetch", "arguments": {"url": f"{url}/a"}}]), Reply("Done.")])
    crow = await build(machine.env, models={"scripted": model}, without=[persistence])
    async with connect(crow, permit="allow_once") as editor:
        session = await editor.new_session(str(machine.project))
        await editor.prompt(session.session_id, "go")
    assert "https://example.com/" in str(model.requests[-1])
    assert any(request.startswith("GET /a ") for request in requests)


async def test_each_tool_is_offered_once(machine: "Machine") -> None:
    model = ScriptedModel([Reply("Hello.")])
    crow = await build(machine.env, models={"scripted": model}, without=[persistence])
    async with connect(crow) as editor:
        session = await editor.new_session(str(machine.project))
        await editor.prompt(session.session_id, "go")
    names = [tool["function"]["name"] for tool in model.requests[0]["tools"]]
    assert len(names) == len(set(names))
    assert {"fetch", "web_search", "plan"} <= set(names)
