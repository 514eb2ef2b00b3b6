"""Test ACP over streamable HTTP with real sockets: requests, streams that are cut, and proxies between."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from crow_core.acp import http_stream
from crow_core.acp.connection import ConnectionClosed, RpcError
from crow_core.acp.remote_agent import ServerRefusal, connect
from crow_core.acp.schema import ClientCapabilities, LoadSessionRequest, UserMessageChunk
from crow_core.app import Crow
from crow_core.testing import Editor, MemoryStore, Reply, ScriptedModel
from crow_testing.proxies import TOKEN, buffer_answers, cut_after, proxying, serving

pytestmark = pytest.mark.anyio

BEARER = {"Authorization": f"Bearer {TOKEN}"}
JSON = {"content-type": "application/json"}
WORDS = "".join(f"{number} " for number in range(2000))


@asynccontextmanager
async def editing(url: str, version: int = 1) -> AsyncIterator[Editor]:
    editor = Editor(await connect(url, TOKEN))
    async with editor.serving():
        await editor.initialize("editor", ClientCapabilities(), version=version)
        yield editor


@pytest.mark.parametrize("version", [1, 2])
async def test_an_editor_prompts_and_loads_over_http(version: int):
    crow = Crow(ScriptedModel([Reply("Hello.", reasoning="Hm."), Reply("Again.")]))
    crow.store = MemoryStore()
    async with serving(crow) as url:
        async with editing(url, version) as editor:
            session = (await editor.new_session("/")).session_id
            assert (await editor.prompt(session, "go")).stop_reason == "end_turn"
            assert (editor.text, editor.thoughts) == ("Hello.", "Hm.")
        assert crow.sessions == {}
        async with editing(url, version) as editor:
            params = LoadSessionRequest(session_id=session, cwd="/", mcp_servers=[])
            await editor.request("session/load", params)
            assert [each.content.text for each in editor.of(UserMessageChunk)] == ["go"]
            assert editor.text == "Hello."
            await editor.prompt(session, "again")
            assert editor.text == "Hello.Again."


async def test_cancel_ends_the_turn():
    async with serving(Crow(ScriptedModel([Reply("Well", hang=True)]))) as url, editing(url) as editor:
        session = (await editor.new_session("/")).session_id
        turn = asyncio.ensure_future(editor.prompt(session, "go"))
        await editor.until(lambda editor: editor.text)
        await editor.cancel(session)
        assert (await turn).stop_reason == "cancelled"


@pytest.mark.parametrize("version", [1, 2])
async def test_a_load_balancer_that_cuts_connections_loses_and_repeats_nothing(version: int):
    async with (
        serving(Crow(ScriptedModel([Reply(WORDS)]))) as url,
        proxying(url, cut_after(20_000)) as proxy,
        editing(proxy, version) as editor,
    ):
        session = (await editor.new_session("/")).session_id
        assert (await editor.prompt(session, "go")).stop_reason == "end_turn"
        assert editor.text == WORDS


async def test_a_proxy_that_buffers_passes_events_on_at_once():
    model = ScriptedModel([Reply("Well", hang=True)])
    async with serving(Crow(model)) as url, proxying(url, buffer_answers) as proxy, editing(proxy) as editor:
        session = (await editor.new_session("/")).session_id
        turn = asyncio.ensure_future(editor.prompt(session, "go"))
        await editor.until(lambda editor: editor.text)
        await editor.cancel(session)
        assert (await turn).stop_reason == "cancelled"


async def initialize(client: httpx2.AsyncClient, url: str) -> dict[str, str]:
    params = {"protocolVersion": 1, "clientCapabilities": {}}
    request = {"jsonrpc": "2.0", "id": "a", "method": "initialize", "params": params}
    answer = await client.post(url, json=request)
    assert answer.status_code == 200
    assert answer.json()["id"] == "a"
    return {"acp-connection-id": answer.headers["acp-connection-id"]}


async def test_requests_get_the_statuses_of_the_draft():
    async with serving(Crow(ScriptedModel([]))) as url, httpx2.AsyncClient(headers=BEARER) as client:
        known = await initialize(client, url)
        unknown, events = {"acp-connection-id": "x"}, {"accept": "text/event-stream"}
        message = {"jsonrpc": "2.0", "id": 1, "method": "session/list", "params": {}}
        prompt = {**message, "method": "session/prompt", "params": {"sessionId": "s", "prompt": []}}
        assert (await client.post(url, json=message, headers=known)).status_code == 202
        assert (await client.post(url, json=message)).status_code == 400
        assert (await client.post(url, json=message, headers=unknown)).status_code == 404
        assert (await client.post(url, json=prompt, headers=known)).status_code == 400
        assert (await client.post(url, json=[message], headers=known)).status_code == 501
        assert (await client.post(url, content=b"{", headers={**known, **JSON})).status_code == 400
        assert (
            await client.post(url, content=b"{}", headers={**known, "content-type": "text/plain"})
        ).status_code == 415
        assert (await client.get(url, headers=events)).status_code == 400
        assert (await client.get(url, headers={**events, **unknown})).status_code == 404
        assert (await client.get(url, headers=known)).status_code == 406
        assert (await client.get(url, headers={**known, **events, "last-event-id": "99"})).status_code == 410
        assert (await client.put(url)).status_code == 405
        assert (await client.delete(url)).status_code == 400
        assert (await client.delete(url, headers=known)).status_code == 202


async def test_each_request_needs_the_token_and_an_allowed_origin():
    async with serving(Crow(ScriptedModel([]))) as url, httpx2.AsyncClient() as client:
        for method in ("GET", "POST", "DELETE", "OPTIONS"):
            assert (await client.request(method, url)).status_code == 401
            strange = {**BEARER, "origin": "https://evil.example"}
            assert (await client.request(method, url, headers=strange)).status_code == 403
            assert (await client.request(method, url, headers={**BEARER, "host": "evil.example"})).status_code == 403
        with pytest.raises(ServerRefusal, match="Check the token"):
            await connect(url, "another-token-of-32-characters")
    with pytest.raises(OSError, match=r"."):
        await connect(url, TOKEN)


async def test_a_stream_goes_on_after_the_last_event_and_a_number_is_taken_once():
    async with serving(Crow(ScriptedModel([]))) as url, httpx2.AsyncClient(headers=BEARER) as client:
        known = await initialize(client, url)
        for number in (1, 2, 2):
            message = {"jsonrpc": "2.0", "id": number, "method": "session/list", "params": {}}
            await client.post(url, json=message, headers={**known, "crow-message-number": str(number)})
        first = await read_events(client, url, known, 2)
        assert first == [("1", 1), ("2", 2)]
        assert await read_events(client, url, {**known, "last-event-id": "1"}, 1) == [("2", 2)]
        assert await read_events(client, url, {**known, "last-event-id": "0"}, 2) == first


async def read_events(client: httpx2.AsyncClient, url: str, headers: dict[str, str], count: int) -> list[Any]:
    """Read events of a stream; return their numbers and the ids of their messages."""
    found: list[Any] = []
    async with client.stream("GET", url, headers={**headers, "accept": "text/event-stream"}) as response:
        async for event in httpx2.EventSource(response):
            found.append((event.id, json.loads(event.data)["id"]))
            if len(found) == count:
                break
    return found


async def test_a_client_that_leaves_without_a_word_ends_its_connection_after_a_while(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_stream, "RESUME_TIMEOUT", 0.05)
    async with serving(Crow(ScriptedModel([])), 1) as url, httpx2.AsyncClient(headers=BEARER) as client:
        known, message = await initialize(client, url), {"jsonrpc": "2.0", "method": "_x"}
        while (await client.post(url, json=message, headers=known)).status_code != 404:
            await asyncio.sleep(0.01)
        await initialize(client, url)


async def test_the_end_of_the_server_ends_the_clients_prompt():
    crow = Crow(ScriptedModel([Reply("Well", hang=True)]))
    async with serving(crow) as url:
        editor = Editor(await connect(url, TOKEN))
        async with editor.serving():
            await editor.initialize("editor", ClientCapabilities())
            session = (await editor.new_session("/")).session_id
            turn = asyncio.ensure_future(editor.prompt(session, "go"))
            await editor.until(lambda editor: editor.text)
            await editor.connection.close()
            with pytest.raises((ConnectionClosed, RpcError)):
                await turn
