"""The scripted endpoint and the scripted model."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import httpx2
import openai
import pytest
from crow_core.testing import Failure, Raw, Reply, ScriptedModel, ScriptedServer, ScriptEnded

pytestmark = pytest.mark.anyio

T = TypeVar("T")

WEATHER = Reply(
    content="Let me look.",
    reasoning="The user asks about the weather.",
    tool_calls=[{"name": "weather", "arguments": {"city": "Zürich"}}, {"name": "now", "arguments": "{", "id": "mine"}],
)
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Will it rain?"}], "stream": True}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def make_client(server: ScriptedServer) -> Any:
    """Make an AsyncOpenAI client. Its type is Any because the requests here are plain dicts."""
    return openai.AsyncOpenAI(base_url=server.url, api_key="any", max_retries=0)


async def collect(items: AsyncIterator[T], into: list[T]) -> None:
    """Append the items, also those before an error."""
    async for item in items:
        into.append(item)


def merge_deltas(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge deltas into one message."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}}
    for delta in deltas:
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning_content") or ""
        parts: list[dict[str, Any]] = delta.get("tool_calls") or []
        for part in parts:
            call = message["calls"].setdefault(part["index"], {"id": "", "name": "", "arguments": ""})
            call["id"] += part.get("id") or ""
            call["name"] += part["function"].get("name") or ""
            call["arguments"] += part["function"].get("arguments") or ""
    return message


async def test_openai_client_reads_a_streamed_reply() -> None:
    async with ScriptedServer([WEATHER]) as server, make_client(server) as client:
        stream = await client.chat.completions.create(**ASK, stream_options={"include_usage": True})
        chunks = [chunk.model_dump(exclude_unset=True) async for chunk in stream]

    *body, finish, tokens = chunks
    assert merge_deltas([chunk["choices"][0]["delta"] for chunk in body]) == {
        "content": "Let me look.",
        "reasoning": "The user asks about the weather.",
        "calls": {
            0: {"id": "call_1_0", "name": "weather", "arguments": '{"city": "Zürich"}'},
            1: {"id": "mine", "name": "now", "arguments": "{"},
        },
    }
    assert body[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len(body) > 15
    assert finish["choices"] == [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]
    assert tokens["choices"] == []
    assert tokens["usage"]["total_tokens"] == tokens["usage"]["prompt_tokens"] + tokens["usage"]["completion_tokens"]


async def test_stream_ends_with_done_and_reports_usage_only_when_asked() -> None:
    async with ScriptedServer([Reply("Hi")]) as server, httpx2.AsyncClient() as client:
        response = await client.post(f"{server.url}/chat/completions", json=ASK)

    events = response.text.removesuffix("\n\n").split("\n\n")
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert events[-1] == "data: [DONE]"
    assert not any("usage" in json.loads(event.removeprefix("data: ")) for event in events[:-1])


async def test_request_without_stream_is_answered_in_one_object() -> None:
    reply = Reply("No.", reasoning="Dry.", usage={"prompt_tokens": 7, "completion_tokens": 1, "total_tokens": 8})
    async with ScriptedServer([reply, WEATHER]) as server, make_client(server) as client:
        said = await client.chat.completions.create(**ASK | {"stream": False})
        called = await client.chat.completions.create(**ASK | {"stream": False})

    assert said.choices[0].message.content == "No."
    assert said.choices[0].message.model_dump()["reasoning_content"] == "Dry."
    assert said.choices[0].finish_reason == "stop"
    assert said.usage
    assert said.usage.total_tokens == 8
    assert called.choices[0].finish_reason == "tool_calls"
    tool_calls: list[Any] = called.choices[0].message.tool_calls
    assert [call.id for call in tool_calls] == ["call_2_0", "mine"]


async def test_models_are_listed() -> None:
    async with ScriptedServer([]) as server, make_client(server) as client:
        assert [model.id async for model in client.models.list()] == ["scripted"]


async def test_requests_are_recorded_parsed_raw_and_with_headers() -> None:
    body = b'{"messages":  [], "stream": true}'
    async with ScriptedServer([Reply("Hi")]) as server, httpx2.AsyncClient() as client:
        await client.post(f"{server.url}/chat/completions", content=body, headers={"Authorization": "Bearer key"})

    assert server.requests == [{"messages": [], "stream": True}]
    assert server.bodies == [body]
    assert server.headers[0]["authorization"] == "Bearer key"


async def test_request_after_the_end_of_a_list_is_answered_500() -> None:
    async with ScriptedServer([Reply("Hi")]) as server, make_client(server) as client:
        await client.chat.completions.create(**ASK)
        with pytest.raises(openai.InternalServerError, match="holds 1 replies and was asked for one more"):
            await client.chat.completions.create(**ASK)


async def test_script_receives_the_request_and_its_errors_reach_the_client() -> None:
    async def script(request: dict[str, Any]) -> Reply:
        assert request["model"] == "m", "only m is served"
        return Reply(f"{len(request['messages'])} message")

    async with ScriptedServer(script) as server, make_client(server) as client:
        completion = await client.chat.completions.create(**ASK | {"stream": False})
        with pytest.raises(openai.InternalServerError, match="AssertionError: only m is served"):
            await client.chat.completions.create(**ASK | {"model": "other"})

    assert completion.choices[0].message.content == "1 message"


async def test_request_that_is_not_json_is_answered_400() -> None:
    async with ScriptedServer([Reply("Hi")]) as server, httpx2.AsyncClient() as client:
        response = await client.post(f"{server.url}/chat/completions", content=b"{")

    assert response.status_code == 400
    assert "not JSON" in response.json()["error"]["message"]
    assert server.requests == []


async def test_failures_carry_their_status_headers_and_body() -> None:
    busy = Failure(429, {"error": {"message": "slow down"}}, {"Retry-After": "3"})
    async with ScriptedServer([busy, Failure(503, "down")]) as server, httpx2.AsyncClient() as client:
        first = await client.post(f"{server.url}/chat/completions", json=ASK)
        second = await client.post(f"{server.url}/chat/completions", json=ASK)

    assert (first.status_code, first.headers["retry-after"]) == (429, "3")
    assert first.json() == {"error": {"message": "slow down"}}
    assert (second.status_code, second.text) == (503, "down")


async def test_raw_chunks_arrive_unchanged() -> None:
    chunks = [b"data: {\xc3", b"\xbc}\r\n\r\n", b": still here\n\n"]
    raw = Raw(chunks, {"X-Served-By": "nobody"})
    async with ScriptedServer([raw]) as server, httpx2.AsyncClient() as client:
        response = await client.post(f"{server.url}/chat/completions", json=ASK)

    assert response.content == b"".join(chunks)
    assert response.headers["x-served-by"] == "nobody"
    assert response.headers["content-type"] == "text/event-stream"


@pytest.mark.parametrize("cut", [Raw([b"data: 1\n\n"], abort=True), Reply("half", error=ConnectionError())])
async def test_cut_response_is_an_error_after_the_sent_bytes(cut: Raw | Reply) -> None:
    pieces: list[bytes] = []
    async with ScriptedServer([cut, Reply("whole")]) as server, httpx2.AsyncClient() as client:
        async with client.stream("POST", f"{server.url}/chat/completions", json=ASK) as response:
            with pytest.raises(httpx2.RemoteProtocolError):
                await collect(response.aiter_raw(), pieces)
        next_one = await client.post(f"{server.url}/chat/completions", json=ASK)
    received = b"".join(pieces)

    assert received.startswith(b"data: ")
    assert b"[DONE]" not in received
    assert b"[DONE]" in next_one.content
    assert server.hangups == 0


async def test_client_that_hangs_up_stops_the_stream_and_is_counted() -> None:
    stopped = asyncio.Event()

    async def wait_forever(request: dict[str, Any]) -> Reply:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        return Reply()

    async with ScriptedServer(wait_forever) as server, make_client(server) as client:
        asking = asyncio.create_task(client.chat.completions.create(**ASK))
        await server.until(lambda: len(server.requests) == 1)
        asking.cancel()
        await server.until(lambda: server.hangups == 1)
        assert stopped.is_set()


async def test_hang_up_in_the_middle_of_a_hanging_reply_leaves_the_server_working() -> None:
    async with (
        ScriptedServer([Reply("thinking…", hang=True), Reply("Hi")]) as server,
        make_client(server) as client,
    ):
        stream = await client.chat.completions.create(**ASK)
        seen = ""
        async for chunk in stream:
            seen += chunk.choices[0].delta.content or ""
            if seen == "thinking…":
                break
        await stream.close()
        await server.until(lambda: server.hangups == 1)
        completion = await client.chat.completions.create(**ASK | {"stream": False})

    assert completion.choices[0].message.content == "Hi"
    assert server.hangups == 1


@pytest.mark.parametrize("hanging", [Reply("Hi", hang=True), Raw([b'data: {"cho'], hang=True)])
async def test_leaving_ends_a_hanging_reply_and_frees_the_port(hanging: Reply | Raw) -> None:
    async with httpx2.AsyncClient() as client:
        async with ScriptedServer([hanging]) as server:
            url = f"{server.url}/chat/completions"
            response = await client.send(client.build_request("POST", url, json=ASK), stream=True)
        with pytest.raises(httpx2.RemoteProtocolError):
            await response.aread()
        with pytest.raises(httpx2.ConnectError):
            await client.post(url, json=ASK)

    assert server.hangups == 0


async def test_server_writes_nothing(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    cut = Raw([b"data: 1\n\n"], abort=True)
    caplog.set_level(0, "uvicorn")
    async with ScriptedServer([cut]) as server, httpx2.AsyncClient() as client:
        with pytest.raises(httpx2.RemoteProtocolError):
            await client.post(f"{server.url}/chat/completions", json=ASK)

    assert [record for record in caplog.records if record.name.startswith(("uvicorn", "crow_core"))] == []
    assert capfd.readouterr() == ("", "")


async def test_many_clients_are_answered_at_once() -> None:
    everyone = asyncio.Barrier(5)

    async def together(request: dict[str, Any]) -> Reply:
        await everyone.wait()
        return Reply(request["model"])

    async with ScriptedServer(together) as server, make_client(server) as client:
        asks = [client.chat.completions.create(**ASK | {"stream": False, "model": str(n)}) for n in range(5)]
        completions = await asyncio.gather(*asks)

    assert [completion.choices[0].message.content for completion in completions] == ["0", "1", "2", "3", "4"]


async def test_model_streams_deltas_then_the_finish() -> None:
    model = ScriptedModel([WEATHER, Reply("Done.", finish_reason="length", usage={"total_tokens": 9})])
    first = [delta async for delta in model.stream(ASK)]
    second = [delta async for delta in model.stream(ASK)]

    assert merge_deltas(first[:-1])["calls"][0] == {
        "id": "call_1_0",
        "name": "weather",
        "arguments": '{"city": "Zürich"}',
    }
    assert first[-1]["finish_reason"] == "tool_calls"
    assert second == [
        {"content": "Done"},
        {"content": "."},
        {"finish_reason": "length", "usage": {"total_tokens": 9}},
    ]
    with pytest.raises(ScriptEnded):
        await anext(model.stream(ASK))


async def test_model_records_copies_of_the_requests() -> None:
    request: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
    model = ScriptedModel(lambda request: Reply("Hello"))
    async for _ in model.stream(request):
        request["messages"].append({"role": "assistant"})

    assert model.requests == [{"messages": [{"role": "user", "content": "Hi"}]}]


async def test_model_raises_its_error_after_its_content() -> None:
    model = ScriptedModel([Reply("half", error=ConnectionError("gone"))])
    seen: list[dict[str, Any]] = []
    with pytest.raises(ConnectionError, match="gone"):
        await collect(model.stream(ASK), seen)

    assert seen == [{"content": "half"}]


async def test_hanging_model_waits_after_its_content_until_cancelled() -> None:
    model = ScriptedModel([Reply("half", hang=True)])
    seen: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def listen() -> None:
        async for delta in model.stream(ASK):
            seen.put_nowait(delta)

    listening = asyncio.create_task(listen())
    assert await seen.get() == {"content": "half"}
    listening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await listening
    assert seen.empty()


async def test_importing_the_doubles_imports_no_web_server() -> None:
    source = "import sys, crow_core.testing as t; t.ScriptedModel; print({'starlette', 'uvicorn'} & set(sys.modules))"
    process = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", source], capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == "set()"


async def test_command_serves_its_arguments_in_order_and_repeats_the_last() -> None:
    call = {"name": "file_editor", "arguments": {"command": "view", "path": "seen.csv"}}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "crow_core.testing", json.dumps(call), "It is up."), stdout=subprocess.PIPE
    )
    assert process.stdout
    try:
        _, url, model = (await process.stdout.readline()).decode().split()
        assert model == "CROW_MODEL=scripted"
        async with httpx2.AsyncClient(base_url=url.removeprefix("OPENAI_BASE_URL="), trust_env=False) as client:
            answers = [(await client.post("/chat/completions", json=ASK | {"stream": False})).json() for _ in range(3)]
    finally:
        process.kill()
        await process.wait()
    first, *others = [answer["choices"][0]["message"] for answer in answers]
    assert first["tool_calls"][0]["function"]["name"] == "file_editor"
    assert [message["content"] for message in others] == ["It is up.", "It is up."]
