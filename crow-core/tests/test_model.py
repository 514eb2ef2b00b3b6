"""The model client over real HTTP: requests, answers, retries, and the errors that a user reads."""

import asyncio
import json
import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from traceback import format_exception
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import httpx2
import openai
import pytest
import stamina
from crow_core.errors import ModelError
from crow_core.messages.message import Delta, Message, answer_tool_call, settle
from crow_core.messages.passes import view
from crow_core.models import chat_model as models
from crow_core.models.chat_model import ChatModel
from crow_core.models.model_call import ModelCall, ModelRequest
from crow_core.testing import Failure, Raw, Reply, ScriptedServer
from crow_testing.chaos import to_chunk, to_event
from crow_testing.listening import connect_to, listen
from stamina.instrumentation import RetryDetails, set_on_retry_hooks

pytestmark = pytest.mark.anyio

Make = Callable[..., ChatModel]

ASK: ModelRequest = {"messages": [{"role": "user", "content": "Will it rain?"}]}
BUSY = Failure(429, {"error": {"message": "Slow down."}}, {"Retry-After": "0"})


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    """Keep the number of attempts, without the waits between them."""
    with stamina.set_testing(True, attempts=100, cap=True):
        yield


@pytest.fixture(params=["own client", "openai SDK"])
async def make(request: pytest.FixtureRequest) -> AsyncGenerator[Make]:
    """Make models that use crow's own HTTP client, then models that use the SDK's."""
    made: list[ChatModel] = []

    def model(url: str, **settings: Any) -> ChatModel:
        if request.param == "own client":
            made.append(ChatModel(name="m", base_url=url, **settings))
        else:
            client = openai.AsyncOpenAI(base_url=url, api_key=settings.pop("api_key", "x"))
            made.append(ChatModel(name="m", client=client, **settings))
        return made[-1]

    yield model
    for one in made:
        await one.close()
        if one.client is not None:
            await one.client.close()


@asynccontextmanager
async def open_model(url: str, **settings: Any) -> AsyncGenerator[ChatModel]:
    """Make a model that uses crow's own HTTP client."""
    model = ChatModel(name="m", base_url=url, **settings)
    try:
        yield model
    finally:
        await model.close()


async def run_call(model: ChatModel, request: ModelRequest = ASK) -> tuple[ModelCall, list[str]]:
    """Run a model call; return it and its notices."""
    call, notices = ModelCall(model, request), list[str]()

    async def tell(delta: Delta) -> None:
        notices.extend([delta["notice"]] if "notice" in delta else [])

    await call.run(tell)
    return call, notices


async def read_error(model: ChatModel) -> str:
    with pytest.raises(ModelError) as caught:
        await run_call(model)
    return str(caught.value)


async def test_reply_is_streamed_with_reasoning_calls_finish_and_usage(make: Make) -> None:
    reply = Reply(
        "Let me look.",
        reasoning="About the weather.",
        tool_calls=[{"name": "weather", "arguments": {"city": "Zürich"}, "id": "a"}],
        usage={"prompt_tokens": 7, "completion_tokens": 9},
    )
    async with ScriptedServer([reply]) as server:
        call, notices = await run_call(make(server.url))

    assert settle(call.reply, used=set()) == {
        "role": "assistant",
        "reasoning_content": "About the weather.",
        "content": "Let me look.",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}
        ],
    }
    assert (call.finish_reason, call.usage) == ("tool_calls", {"prompt_tokens": 7, "completion_tokens": 9})
    assert notices == []
    assert call.started <= call.first_delta <= call.ended


async def test_deltas_come_while_the_reply_is_being_made(make: Make) -> None:
    async with (
        ScriptedServer([Reply("four by four", hang=True)]) as server,
        aclosing(make(server.url).stream(ASK)) as deltas,
    ):
        assert "sent" in await anext(deltas)
        assert [await anext(deltas) for _ in range(3)] == [{"content": c} for c in ("four", " by ", "four")]


async def test_request_carries_tools_and_images_as_they_are(make: Make) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    request: ModelRequest = {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]}],
    }
    async with ScriptedServer([Reply("A bird.")]) as server:
        await run_call(make(server.url), request)
    sent = server.requests[0]
    assert (sent["tools"], sent["messages"]) == (request["tools"], request["messages"])
    assert (sent["model"], sent["stream"], sent["stream_options"]) == ("m", True, {"include_usage": True})


async def test_parameters_are_added_and_the_request_wins(make: Make) -> None:
    async with ScriptedServer([Reply("Hi")]) as server:
        model = make(server.url, parameters={"temperature": 0.5, "max_tokens": 9, "chat_template_kwargs": {"x": 1}})
        await run_call(model, {**ASK, "max_tokens": 5})
    sent = server.requests[0]
    assert (sent["temperature"], sent["max_tokens"], sent["chat_template_kwargs"]) == (0.5, 5, {"x": 1})


async def test_messages_are_the_last_key_of_the_body() -> None:
    async with ScriptedServer([Reply("Hi")]) as server, open_model(server.url, parameters={"temperature": 0}) as model:
        await run_call(model, {**ASK, "tools": [], "max_tokens": 5})
    assert list(json.loads(server.bodies[0]))[-1] == "messages"


async def test_streaming_does_not_change_the_request(make: Make) -> None:
    request: ModelRequest = {"messages": list(ASK["messages"]), "tools": []}
    async with ScriptedServer([Reply("Hi")]) as server:
        await run_call(make(server.url, parameters={"temperature": 0}), request)
    assert request == {"messages": ASK["messages"], "tools": []}


async def test_text_with_half_a_character_is_sent_with_a_question_mark() -> None:
    async with ScriptedServer([Reply("Hi")]) as server, open_model(server.url) as model:
        await run_call(model, {"messages": [{"role": "user", "content": "caf\udce9 ü"}]})
    assert server.requests[0]["messages"][0]["content"] == "caf? ü"


async def test_without_a_key_no_authorization_is_sent() -> None:
    async with ScriptedServer([Reply("Hi")]) as server, open_model(server.url) as model:
        await run_call(model)
    assert "authorization" not in server.headers[0]


async def test_key_and_headers_are_sent() -> None:
    async with (
        ScriptedServer([Reply("Hi")]) as server,
        open_model(server.url, api_key="k", headers={"X-Title": "crow"}) as model,
    ):
        await run_call(model)
    assert server.headers[0]["authorization"] == "Bearer k"
    assert server.headers[0]["x-title"] == "crow"
    assert server.headers[0]["content-type"] == "application/json"


@pytest.mark.parametrize("tail", ["", "/", "/chat/completions", "/chat/completions/", "?a=b", "/chat/completions?a=b"])
async def test_base_url_may_end_in_a_slash_or_be_the_whole_address(tail: str) -> None:
    async with ScriptedServer([Reply("Hi")]) as server, open_model(server.url + tail) as model:
        call, _ = await run_call(model)
    assert call.reply.get("content") == "Hi"


async def test_azure_client_reaches_its_deployment() -> None:
    seen: list[httpx2.Request] = []

    def azure(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        chunk = b'data: {"choices": [{"delta": {"content": "Hi"}, "finish_reason": "stop"}]}\n\n'
        return httpx2.Response(200, content=b'data: {"choices": []}\n\n' + chunk + b"data: [DONE]\n\n")

    client = openai.AsyncAzureOpenAI(
        azure_endpoint="https://server.example",
        api_key="k",
        api_version="2026-01-01",
        http_client=httpx2.AsyncClient(transport=httpx2.MockTransport(azure)),
    )
    async with client:
        call, _ = await run_call(ChatModel(name="gpt", client=client))

    assert call.reply.get("content") == "Hi"
    assert str(seen[0].url) == "https://server.example/openai/deployments/gpt/chat/completions?api-version=2026-01-01"
    assert seen[0].headers["api-key"] == "k"


@asynccontextmanager
async def count_connections(url: str) -> AsyncGenerator[tuple[str, list[int]]]:
    """Forward to a server; yield the new URL and a list that grows with each connection."""
    connections: list[int] = []
    host, port = urlsplit(url).hostname or "", urlsplit(url).port or 0

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(len(connections))
        async with connect_to(host, port) as (inner, outer), asyncio.TaskGroup() as group:
            group.create_task(pump(reader, outer))
            group.create_task(pump(inner, writer))

    async with listen(accept) as own_port:
        yield f"http://127.0.0.1:{own_port}/v1", connections


async def test_connection_is_reused_for_the_next_request(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "END_TIMEOUT", 30)  # the server may be slow to end its response
    replies = [Reply("one"), BUSY, Reply("two", tool_calls=[{"name": "f", "arguments": {}}]), Reply("three")]
    async with ScriptedServer(replies) as server, count_connections(server.url) as (url, connections):
        model = make(url)
        for _ in range(3):
            await run_call(model)
        await model.close()
        if model.client is not None:
            await model.client.close()
    assert len(server.requests) == 4
    assert len(connections) == 1


async def test_connections_of_many_requests_at_once_are_all_reused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "END_TIMEOUT", 30)
    together = asyncio.Barrier(30)

    async def answer(request: object) -> Reply:
        await together.wait()
        return Reply("Hello.")

    async with ScriptedServer(answer) as server, count_connections(server.url) as (url, connections):
        model = make(url)
        for _ in range(3):
            await asyncio.gather(*(run_call(model) for _ in range(30)))
        await model.close()
        if model.client is not None:
            await model.client.close()
    assert len(connections) == 30


@asynccontextmanager
async def serve_without_end(body: bytes) -> AsyncGenerator[str]:
    """Serve a body without ever ending the response."""
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(f"{len(body):x}\r\n".encode() + body + b"\r\n")
        while await reader.read(1 << 16):
            pass
        gone.set()

    async with listen(serve) as port:
        yield f"http://127.0.0.1:{port}/v1"
        await gone.wait()


async def test_answer_is_complete_at_done_even_if_the_response_never_ends() -> None:
    chunk = b'data: {"choices": [{"delta": {"content": "Hi"}, "finish_reason": "stop"}]}\n\n'
    async with serve_without_end(chunk + b"data: [DONE]\n\n") as url, open_model(url) as model:
        call, notices = await run_call(model)
        await model.close()
    assert (call.reply.get("content"), notices) == ("Hi", [])


async def test_error_page_without_an_end_is_cut() -> None:
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 418 I'm a teapot\r\ncontent-type: text/plain\r\n\r\n")
        with suppress(ConnectionError):
            while not writer.is_closing():
                writer.write(b"short and stout, " * 4096)
                await writer.drain()
        gone.set()

    async with listen(serve) as port:
        async with open_model(f"http://127.0.0.1:{port}/v1") as model:
            assert "refused the request (418): short and stout, short" in await read_error(model)
        await gone.wait()


async def test_connection_is_closed_when_the_consumer_stops(make: Make) -> None:
    async with ScriptedServer([Reply("four by four", hang=True)]) as server:
        deltas = make(server.url).stream(ASK)
        assert [list(await anext(deltas)) for _ in range(2)] == [["sent"], ["content"]]
        await deltas.aclose()
        await server.until(lambda: server.hangups == 1)


async def test_cancelled_model_call_closes_the_connection_and_keeps_the_reply_so_far(make: Make) -> None:
    told = asyncio.Event()

    async def tell(delta: Delta) -> None:
        if "content" in delta:
            told.set()

    async with ScriptedServer([Reply("four", hang=True)]) as server:
        call = ModelCall(make(server.url), ASK)
        listening = asyncio.create_task(call.run(tell))
        await told.wait()
        listening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await listening
        await server.until(lambda: server.hangups == 1)
    assert call.reply == {"role": "assistant", "content": "four"}
    assert call.error == "cancelled"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("delta", "limit"),
    [
        ({"content": "word " * 20_000}, "8,000,000 characters"),
        ({"reasoning_content": "hm " * 30_000}, "8,000,000 characters"),
        ({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "1" * 100_000}}]}, "8,000,000 characters"),
        ({"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}, "1,000 tool calls"),
    ],
)
async def test_reply_without_end_is_cut_off_at_a_limit(make: Make, delta: Any, limit: str) -> None:
    flood = Raw([to_event(to_chunk(delta))] * 1_100, hang=True)
    shown: list[Delta] = []

    async def tell(delta: Delta) -> None:
        shown.append(delta)

    async with ScriptedServer([flood]) as server:
        call = ModelCall(make(server.url), ASK)
        await call.run(tell)
        await server.until(lambda: server.hangups == 1)
    assert call.finish_reason == "length"
    assert shown[-1] == {"notice": f"The reply was cut off at crow's limit of {limit}."}
    for key in ("content", "reasoning_content"):
        assert call.reply.get(key, "") == "".join(delta.get(key, "") for delta in shown)


async def test_connection_is_closed_when_on_delta_raises(make: Make) -> None:
    async def tell(delta: Delta) -> None:
        if "content" in delta:
            raise RuntimeError("the screen is gone")

    async with ScriptedServer([Reply("four", hang=True)]) as server:
        call = ModelCall(make(server.url), ASK)
        with pytest.raises(RuntimeError) as caught:
            await call.run(tell)
        await server.until(lambda: server.hangups == 1)
        del caught
    assert call.error == "the screen is gone"


async def test_model_call_cancelled_before_the_first_delta_is_not_sent_again(make: Make) -> None:
    async with ScriptedServer([Reply(hang=True), Reply("Hi")]) as server:
        listening = asyncio.create_task(run_call(make(server.url)))
        await server.until(lambda: len(server.requests) == 1)
        listening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await listening
        await server.until(lambda: server.hangups == 1)
        assert len(server.requests) == 1


async def test_model_call_cancelled_during_a_wait_is_not_sent_again(make: Make) -> None:
    noticed = asyncio.Event()

    async def tell(delta: Delta) -> None:
        if "notice" in delta:
            noticed.set()

    async with ScriptedServer([Failure(503, "down", {"Retry-After": "60"}), Reply("Hi")]) as server:
        with stamina.set_testing(False):
            listening = asyncio.create_task(ModelCall(make(server.url), ASK).run(tell))
            await noticed.wait()
            listening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await listening
        assert len(server.requests) == 1


async def test_consumer_that_stops_at_a_notice_ends_the_retries(make: Make) -> None:
    async with ScriptedServer([BUSY, Reply("Hi")]) as server:
        async with aclosing(make(server.url).stream(ASK)) as deltas:
            assert [list(await anext(deltas)) for _ in range(2)] == [["sent"], ["notice"]]
        assert len(server.requests) == 1


TRANSIENT = [
    BUSY,
    *(Failure(status, "down") for status in (408, 409, 425, 429, 498, 500, 502, 503, 504, 520, 524, 529, 599)),
    Failure(522, "<html><title>522: Connection timed out</title></html>", {"content-type": "text/html"}),
    Failure(503, "<?xml version='1.0'?><Error><Message>busy</Message></Error>", {"content-type": "application/xml"}),
    Failure(400, "odd", {"x-should-retry": "true"}),
    Raw([], abort=True),
    Raw([b": still here\n\n"], abort=True),
    Raw([b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'], abort=True),
    Raw([b""]),
    Raw([b'data: {"error": {"message": "overloaded", "code": 503}}\n\n']),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("trouble", TRANSIENT, ids=lambda trouble: repr(trouble)[:60])
async def test_failure_before_the_first_delta_is_reported_and_the_third_attempt_succeeds(
    make: Make, trouble: Failure | Raw
) -> None:
    async with ScriptedServer([trouble, trouble, Reply("Hi")]) as server:
        call, notices = await run_call(make(server.url))

    assert call.reply == {"role": "assistant", "content": "Hi"}
    assert len(server.requests) == 3
    assert len(notices) == 2
    assert server.url in notices[0]
    assert re.search(r"Asking again (now|in \d+ s)\.$", notices[0])


async def test_retried_requests_are_identical(make: Make) -> None:
    async with ScriptedServer([BUSY, BUSY, Reply("Hi")]) as server:
        await run_call(make(server.url))
    assert server.bodies[0] == server.bodies[1] == server.bodies[2]


@pytest.mark.parametrize("trouble", [Failure(500, "boom"), Raw([], abort=True)], ids=["500", "cut"])
async def test_request_fails_after_the_last_attempt(make: Make, trouble: Any) -> None:
    async with ScriptedServer(lambda request: trouble) as server:
        model = make(server.url, attempts=3)
        call = ModelCall(model, ASK)
        with pytest.raises(ModelError) as caught:
            await call.run()
        assert len(server.requests) == 3
    assert str(caught.value).startswith(server.url)
    assert call.error == str(caught.value)
    assert call.first_delta == 0, "a notice is no fragment of the reply"


async def test_wait_before_a_retry_is_as_long_as_the_endpoint_asks(make: Make) -> None:
    waits: list[float] = []

    def note(details: RetryDetails) -> None:
        waits.append(details.wait_for)

    set_on_retry_hooks([note])
    try:
        async with ScriptedServer([Failure(429, "", {"Retry-After": "0.01"}), BUSY, Reply("Hi")]) as server:
            with stamina.set_testing(False):
                _, notices = await run_call(make(server.url))
    finally:
        set_on_retry_hooks(None)
    assert waits == pytest.approx([0.01, 0])  # pyright: ignore[reportUnknownMemberType]
    assert [notice.rpartition(". ")[2] for notice in notices] == ["Asking again in 1 s.", "Asking again now."]


async def test_request_fails_if_the_endpoint_asks_for_a_wait_of_more_than_a_minute(make: Make) -> None:
    async with ScriptedServer([Failure(429, "", {"Retry-After": "3600"})]) as server:
        assert await read_error(make(server.url)) == (
            f"{server.url} is limiting requests (429): it sent nothing. Wait 3600 s, or choose another model."
        )


@pytest.fixture
def waits() -> Iterator[list[float]]:
    """Real waits before retries, but short ones; yield their lengths as crow asked for them."""
    asked: list[float] = []

    def note(details: RetryDetails) -> None:
        asked.append(details.wait_for)

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(0)

    set_on_retry_hooks([note])
    with stamina.set_testing(False), pytest.MonkeyPatch.context() as patch:
        patch.setattr("stamina._core._smart_sleep", sleep)
        yield asked
    set_on_retry_hooks(None)


LIMITED = [
    Failure(429, {"error": {"message": "Slow down."}}),
    Failure(529, {"error": {"type": "overloaded_error", "message": "Overloaded"}}),
    Raw([b'event: error\ndata: {"message": "The model is overloaded."}\n\n']),
]


@pytest.mark.parametrize("answer", LIMITED, ids=["429", "529", "stream"])
async def test_waits_for_an_endpoint_that_limits_requests_grow_to_a_minute(
    make: Make, waits: list[float], answer: Failure | Raw
) -> None:
    async with ScriptedServer([answer] * 5 + [Reply("Hi")]) as server:
        _, notices = await run_call(make(server.url, attempts=6))
    assert waits[0] < 5
    assert sorted(map(round, waits)) == list(map(round, waits))
    assert sum(waits[:4]) > 60, "a limit for each minute is over then"
    assert round(waits[-1]) == 60
    told = [int(re.findall(r"Asking again in (\d+) s\.$", notice)[0]) for notice in notices]
    assert told == [math.ceil(round(wait, 6)) for wait in waits]


@pytest.mark.parametrize(
    ("headers", "wait"),
    [
        ({"retry-after-ms": "250", "Retry-After": "30"}, 0.25),
        ({"Retry-After": "30"}, 30),
        ({"x-ratelimit-reset-requests": "1.5s"}, 1.5),
    ],
)
async def test_wait_is_the_one_that_the_endpoint_asks_for(
    make: Make, waits: list[float], headers: dict[str, str], wait: float
) -> None:
    async with ScriptedServer([Failure(429, "", headers), Reply("Hi")]) as server:
        await run_call(make(server.url))
    assert waits == [wait]


async def test_endpoint_that_forbids_a_retry_is_not_asked_again(make: Make) -> None:
    async with ScriptedServer([Failure(503, "down", {"x-should-retry": "false"})]) as server:
        assert "has trouble (503): down" in await read_error(make(server.url))
        assert len(server.requests) == 1


async def test_call_is_cancelled_during_a_patient_wait() -> None:
    async with ScriptedServer([LIMITED[0]]) as server, open_model(server.url) as model:
        noticed = asyncio.Event()

        async def tell(delta: Delta) -> None:
            if "notice" in delta:
                noticed.set()

        with stamina.set_testing(False):
            calling = asyncio.create_task(ModelCall(model, ASK).run(tell))
            await noticed.wait()
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calling
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("failure", "sentence"),
    [
        (
            Failure(401, {"error": {"message": "No auth credentials found."}}),
            "refused the key (401): No auth credentials found. Check the model's api_key, or OPENAI_API_KEY.",
        ),
        (
            Failure(403, "<html>Forbidden</html>"),
            "denied access (403): it sent a web page. "
            "Check the model's api_key, and whether your account may use this model.",
        ),
        (
            Failure(404, {"error": {"message": "model not found"}}),
            "has no model 'm', or base_url is wrong (404): model not found. Check both.",
        ),
        (
            Failure(400, {"error": {"message": "messages[2]: no images\nin tool messages"}}),
            "refused the request (400): messages[2]: no images in tool messages. "
            "Check the model's settings, or go on in a new session.",
        ),
        (
            Failure(500, {"error": {"message": "the request exceeds the available context size."}}),
            "refused the request as too long (500): the request exceeds the available context size. "
            "Take the prompt back (/undo), go on in a new session, or choose a model with a larger window.",
        ),
        (
            Failure(402, {"error": {"message": "Insufficient credits"}}),
            "wants to be paid (402): Insufficient credits. Check your account there.",
        ),
        (
            Failure(429, {"error": {"message": "You exceeded your quota.", "code": "insufficient_quota"}}),
            "wants to be paid (429): You exceeded your quota. Check your account there.",
        ),
        (
            Failure(418, "short and stout"),
            "refused the request (418): short and stout. Check the model's settings, or go on in a new session.",
        ),
    ],
    ids=lambda value: str(value.status) if isinstance(value, Failure) else "",
)
async def test_refusal_says_what_happened_where_and_what_to_do(make: Make, failure: Failure, sentence: str) -> None:
    async with ScriptedServer(lambda request: failure) as server:
        error = await read_error(make(server.url))
        assert len(server.requests) == 1, "what was refused for good is not sent again"
    assert error == f"{server.url} {sentence}"


async def test_redirect_is_an_error_that_names_the_new_address() -> None:
    async with (
        ScriptedServer([Failure(308, "", {"Location": "https://x.example/v1"})]) as server,
        open_model(server.url) as m,
    ):
        assert await read_error(m) == (
            f"{server.url} has moved (308) to https://x.example/v1. Set base_url accordingly."
        )


async def test_web_page_with_200_is_an_error_that_is_not_sent_again(make: Make) -> None:
    page = Raw([b"<!DOCTYPE html>", b"<html>Welcome</html>"], {"content-type": "text/html"})
    async with ScriptedServer(lambda request: page) as server:
        error = await read_error(make(server.url))
        assert len(server.requests) == 1
    assert "it sent a web page instead of JSON; base_url usually ends in /v1" in error


async def test_plain_json_completion_is_read_like_a_stream(make: Make) -> None:
    body = {"choices": [{"message": {"content": "Hi"}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 3}}
    plain = Raw([json.dumps(body, indent=2).encode()], {"content-type": "application/json"})
    async with ScriptedServer([plain]) as server:
        call, _ = await run_call(make(server.url))
    assert (call.reply, call.usage) == ({"role": "assistant", "content": "Hi"}, {"prompt_tokens": 3})


async def test_refused_connection_on_this_machine_says_to_start_the_server(make: Make, nowhere: str) -> None:
    model = make(nowhere)
    assert await read_error(model) == (
        f"Nothing answers at {model.display_url}. Start the model server, or set OPENAI_BASE_URL."
    )


async def test_host_without_an_address_is_an_error_after_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    async with open_model("http://no-such-host.invalid/v1", attempts=2) as model:
        with pytest.raises(
            ModelError, match=r"^http://no-such-host\.invalid/v1 cannot be reached \(.+\)\. Check base_url"
        ):
            await run_call(model)


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "ALL_PROXY"])
async def test_proxy_that_does_not_answer_is_named_without_its_password(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_PROXY", "no_proxy", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "http://me:secret@127.0.0.1:9")
    async with open_model("http://no-such-host.invalid/v1", attempts=1) as model:
        error = await read_error(model)
    assert error.startswith("http://no-such-host.invalid/v1 cannot be reached through the proxy http://127.0.0.1:9 (")
    assert error.endswith("Check base_url, the network, and HTTPS_PROXY or NO_PROXY.")


@pytest.mark.parametrize("url", ["localhost:11434/v1", "", "http://[::1/v1", "http:///v1"])
async def test_invalid_base_url_is_an_error_with_an_example(url: str) -> None:
    async with open_model(url) as model:
        assert await read_error(model) == (
            f"{url!r} is no web address. Set base_url, for example http://localhost:11434/v1."
        )


async def test_white_space_around_a_key_is_dropped() -> None:
    async with ScriptedServer([Reply("Hi")]) as server, open_model(server.url, api_key=" k\n") as model:
        await run_call(model)
    assert server.headers[0]["authorization"] == "Bearer k"


@pytest.mark.parametrize("key", ["sk-…", "sk-123\n4567890"])
async def test_key_that_no_header_can_hold_is_an_error_that_does_not_quote_it(key: str) -> None:
    async with ScriptedServer([Reply("Hi")]) as server, open_model(server.url, api_key=key) as model:
        error = await read_error(model)
    assert "api_key" in error
    assert "sk-" not in error


KEY = "sk-c4n4ry/Q+x9=Zr"
QUOTED_KEY = quote(KEY, safe="")

ECHOES: dict[str, Failure | Raw] = {
    "401": Failure(401, {"error": f"Wrong key: {KEY}!"}),
    "400": Failure(400, {"error": {"message": f"Incorrect API key provided: {KEY}"}}),
    "403, text": Failure(403, f"no access for Bearer {KEY}"),
    "500": Failure(500, {"error": {"message": f"upstream refused {KEY}"}}),
    "503, title": Failure(503, f"<html><title>{KEY} is busy</title></html>", {"content-type": "text/html"}),
    "cut": Failure(400, {"error": {"message": f"{'x' * 290} {KEY} {'y' * 99}"}}),
    "cut in a page": Failure(400, f"{'x ' * 144} {KEY}"),
    "escaped": Failure(400, '{"error": {"message": "' + KEY.replace("/", "\\/") + '"'),
    "percent-encoded": Failure(400, f"no access to /?key={QUOTED_KEY}"),
    "percent-encoded in lower case": Failure(
        400, "no access to /?key=" + re.sub("%..", lambda found: found[0].lower(), QUOTED_KEY)
    ),
    "key of an object": Failure(400, {KEY: 1}),
    "raw error": Failure(400, {"error": {"message": "no", "metadata": {"raw": json.dumps({"error": KEY})}}}),
    "stream": Raw([f'data: {{"error": {{"message": "no access for {KEY}"}}}}\n\n'.encode()]),
    "stream, passing": Raw([f'data: {{"error": {{"message": "overloaded for {KEY}", "code": 503}}}}\n\n'.encode()]),
    "event": Raw([f"event: error\ndata: no access for {KEY}\n\n".encode()]),
    "no event stream": Raw([json.dumps({"detail": f"no access for {KEY}"}).encode()]),
    "web page": Raw([f"Welcome, {KEY}".encode()], {"content-type": "text/plain"}),
    "unknown event": Raw([f'data: {{"choices": [{{"delta": {{"tool_calls": "{KEY}"}}}}]}}\n\n'.encode()]),
    "event without an answer": Raw([f'data: {{"message": "hello {KEY}"}}\n\n'.encode()]),
    "retry-after": Failure(429, "slow", {"retry-after": KEY}),
}
"""Answers that quote the key of the request."""


@pytest.mark.parametrize("name", ECHOES)
async def test_key_that_the_server_quotes_is_shown_nowhere(
    make: Make, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with ScriptedServer(lambda request: ECHOES[name]) as server:
        model, notices = make(server.url, api_key=KEY, attempts=2), list[str]()
        call = ModelCall(model, ASK)

        async def tell(delta: Delta) -> None:
            notices.extend([delta["notice"]] if "notice" in delta else [])

        with caplog.at_level("DEBUG", "crow"), pytest.raises(ModelError) as caught:
            await call.run(tell)
    traceback = "".join(format_exception(caught.value))
    for text in (str(caught.value), *notices, call.error, repr(call), repr(model), traceback, caplog.text):
        for part in (KEY, QUOTED_KEY, KEY[:12], KEY[-8:]):
            assert part not in unquote(text)


@pytest.mark.parametrize(
    "location",
    [
        f"https://x.example/v1?key={KEY}",
        f"https://x.example/v1?next=%2Fv1%3Fkey%3D{QUOTED_KEY}",
        f"https://{QUOTED_KEY}@x.example/v1",
        f"https://me:{QUOTED_KEY}@x.example/v1#{KEY}",
        "https://x.example/v1\x1b]0;title\x07",
    ],
)
async def test_new_address_is_told_without_secrets_and_control_characters(location: str) -> None:
    async with (
        ScriptedServer([Failure(307, "", {"Location": location})]) as server,
        open_model(server.url, api_key=KEY) as model,
    ):
        error = await read_error(model)
    assert f"{server.url} has moved (307) to https://x.example/v1" in error
    assert KEY[:8] not in unquote(error)
    assert error.isprintable()


@pytest.mark.parametrize(
    "answer",
    [f"HTTP/1.1 200 OK {KEY}\r\n{KEY}\r\n\r\n", f"{KEY}\r\n\r\n", f"HTTP/1.1 200 OK\r\nX: {KEY}\r\nA B: {KEY}\r\n\r\n"],
    ids=["line", "status", "header"],
)
async def test_key_in_an_answer_that_is_no_http_is_shown_nowhere(make: Make, answer: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer.encode())
        with suppress(ConnectionError):
            await writer.drain()

    async with listen(serve) as port:
        with pytest.raises(ModelError) as caught:
            await run_call(make(f"http://127.0.0.1:{port}/v1", api_key=KEY, attempts=1))
    assert KEY[:12] not in "".join(format_exception(caught.value))


@pytest.mark.parametrize(
    ("url", "settings"),
    [
        ("http://HOST/v1?api_key=KEY", {}),
        ("http://HOST/v1?sig=KEY", {}),
        ("http://me:KEY@HOST/v1", {}),
        ("http://KEY@HOST/v1", {}),
        ("http://HOST/v1", {"headers": {"Authorization": f"Bearer {KEY}"}}),
        ("http://HOST/v1", {"headers": {"X-Tenant": KEY}}),
        ("http://HOST/v1", {"parameters": {"api_key": KEY}}),
    ],
)
async def test_every_credential_of_an_endpoint_is_masked(url: str, settings: dict[str, Any]) -> None:
    async def script(request: dict[str, Any]) -> Failure:
        sent = server.headers[-1].get("authorization", "")
        return Failure(400, {"error": f"no access for {KEY}, {QUOTED_KEY}, {sent}"})

    async with ScriptedServer(script) as server:
        whole = url.replace("HOST", urlsplit(server.url).netloc).replace("KEY", QUOTED_KEY)
        async with open_model(whole, **settings) as model:
            error = await read_error(model)
    assert error.startswith(f"{server.url} refused the request (400): no access for [secret], [secret],")
    sent = server.headers[-1].get("authorization", "").partition(" ")[2]
    assert not sent or sent not in error


async def test_secrets_in_a_url_are_left_out_of_errors(nowhere: str) -> None:
    url = nowhere.replace("//", "//user:secret@") + "?key=secret"
    async with open_model(url) as model:
        error = await read_error(model)
    assert error.startswith("Nothing answers at http://127.0.0.1:")
    assert "secret" not in error
    assert "secret" not in repr(ChatModel(name="m", api_key="secret", headers={"X-Key": "secret"}))


async def test_cut_stream_is_an_error_that_keeps_the_text_and_is_not_retried(make: Make) -> None:
    async with ScriptedServer([Reply("Half a sentence", error=ConnectionError()), Reply("Hi")]) as server:
        call = ModelCall(make(server.url), ASK)
        with pytest.raises(ModelError) as caught:
            await call.run()
        assert len(server.requests) == 1, "what was shown is not shown twice"
    assert call.reply == {"role": "assistant", "content": "Half a sentence"}
    assert str(caught.value).startswith(f"{server.url} broke off (")
    assert call.error == str(caught.value)


async def test_stream_cut_after_the_finish_reason_is_complete(make: Make) -> None:
    whole = b'data: {"choices": [{"delta": {"content": "Hi"}, "finish_reason": "stop"}]}\n\n'
    async with ScriptedServer([Raw([whole, b'data: {"usage": {"prompt_'], abort=True)]) as server:
        call, notices = await run_call(make(server.url))
    assert (call.reply, call.finish_reason, notices) == ({"role": "assistant", "content": "Hi"}, "stop", [])


async def test_error_object_in_a_stream_keeps_the_text_and_is_not_retried(make: Make) -> None:
    chunk = b'data: {"choices": [{"delta": {"content": "Half"}}]}\n\n'
    error = b'data: {"error": {"message": "overloaded", "code": 503}}\n\n'
    async with ScriptedServer([Raw([chunk, error]), Reply("Hi")]) as server:
        call = ModelCall(make(server.url), ASK)
        with pytest.raises(ModelError, match="reported an error: overloaded"):
            await call.run()
        assert len(server.requests) == 1
    assert call.reply == {"role": "assistant", "content": "Half"}


@pytest.mark.parametrize("together", [False, True], ids=["in two reads", "in one read"])
@pytest.mark.parametrize("end", ["error", "cut", "cut in an event", "cut behind an event without its line end"])
async def test_all_text_before_a_broken_end_is_kept(make: Make, end: str, together: bool) -> None:
    chunks = [b'data: {"choices": [{"delta": {"content": "' + text + b'"}}]}\n\n' for text in (b"Half", b" of it, a <")]
    match end:
        case "error":
            chunks.append(b'data: {"error": {"message": "overloaded", "code": 503}}\n\n')
        case "cut in an event":
            chunks.append(b'data: {"choices": [{"del')
        case "cut behind an event without its line end":
            chunks[-1] = chunks[-1].rstrip()
        case _:
            pass
    sent = [b"".join(chunks)] if together else chunks
    async with ScriptedServer([Raw(sent, abort=end != "error"), Reply("Hi")]) as server:
        call = ModelCall(make(server.url), ASK)
        with pytest.raises(ModelError) as caught:
            await call.run()
        assert len(server.requests) == 1
    assert call.reply == {"role": "assistant", "content": "Half of it, a <"}
    assert caught.value.retry


async def test_silence_before_the_first_delta_is_reported_and_retried(make: Make) -> None:
    silent = asyncio.Event()

    async def script(request: dict[str, Any]) -> Reply:
        if not silent.is_set():
            silent.set()
            await asyncio.Event().wait()
        return Reply("Hi")

    async with ScriptedServer(script) as server:
        model = make(server.url, idle_timeout=1)
        call, notices = await run_call(model)
    assert call.reply.get("content") == "Hi"
    told = f"{model.display_url} sent nothing for 1 s. Set idle_timeout if it needs longer. Asking again now."
    assert set(notices) == {told}  # one text; several times if the machine is busy


async def test_silence_in_a_stream_is_an_error_that_keeps_the_text(make: Make) -> None:
    async with ScriptedServer(lambda request: Reply("Half", hang=True)) as server:
        heard: list[int] = []

        async def tell(delta: Delta) -> None:
            if "content" in delta:
                heard.append(len(server.requests))

        call = ModelCall(make(server.url, idle_timeout=1), ASK)
        with pytest.raises(ModelError, match=r"sent nothing for 1 s\. Set idle_timeout if it needs longer\.$"):
            await call.run(tell)
        await server.until(lambda: server.hangups == len(server.requests))
        assert heard == [len(server.requests)], "what was shown is not requested again"
    assert call.reply == {"role": "assistant", "content": "Half"}


def test_server_on_this_machine_has_a_longer_read_timeout() -> None:
    assert ChatModel(name="m", base_url="http://localhost:8080/v1").read_timeout == 3600
    assert ChatModel(name="m", base_url="https://api.openai.com/v1").read_timeout == 120
    assert ChatModel(name="m", base_url="https://api.openai.com/v1", idle_timeout=5).read_timeout == 5


@pytest.mark.parametrize(
    "refusal",
    [
        Failure(400, {"error": {"message": "Unknown parameter: 'stream_options'."}}),
        Failure(422, {"detail": [{"loc": ["body", "stream_options"], "msg": "Extra inputs are not permitted"}]}),
    ],
    ids=["400", "422"],
)
async def test_refused_stream_options_are_not_sent_again(make: Make, refusal: Failure) -> None:
    async with ScriptedServer(lambda request: refusal if "stream_options" in request else Reply("Hi")) as server:
        model = make(server.url)
        first, _ = await run_call(model)
        second, notices = await run_call(model)
        assert ["stream_options" in request for request in server.requests] == [True, False, False]
    assert first.reply == second.reply == {"role": "assistant", "content": "Hi"}
    assert notices == []
    assert not model.quirks.stream_usage


async def test_next_request_begins_with_the_bytes_of_the_one_before(make: Make) -> None:
    """Servers cache the beginning of a request, so requests only grow at their end."""
    weather = Reply(
        "Let me look.",
        reasoning="Hm.",
        tool_calls=[{"name": "look", "arguments": {"city": "Zürich"}}, {"name": "look", "arguments": '{"city'}],
    )
    replies = [weather, Reply("", reasoning="Hm."), weather, Reply("Sun.")]
    results: list[Any] = ["sunny", [{"type": "image_url", "image_url": {"url": "data:,"}}]]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    log: list[Message] = [{"crow": {"kind": "render"}}, {"role": "user", "content": "Will it rain?"}]
    used: set[str] = set()
    async with ScriptedServer(replies) as server:
        model = make(server.url, parameters={"temperature": 0})
        for _ in replies:
            system: Message = {"role": "system", "content": "You are crow."}
            call, _ = await run_call(model, {"tools": tools, "messages": [system, *view(log)]})
            reply = settle(call.reply, used=used)
            log.append(reply)
            calls = reply.get("tool_calls", [])
            log += [answer_tool_call(call, result) for call, result in zip(calls, results, strict=False)]
            if not calls:
                log.append({"role": "user", "content": "Well?"})
    for request, body, following in zip(server.requests, server.bodies, server.bodies[1:], strict=False):
        last = json.dumps(request["messages"][-1], ensure_ascii=False, separators=(",", ":")).encode()
        assert following.startswith(body[: body.rindex(last)])
        assert body.rindex(last) > 60


async def test_model_can_be_used_by_iterating_alone(make: Make) -> None:
    async def words(deltas: AsyncIterator[Delta]) -> list[str]:
        return [delta["content"] async for delta in deltas if "content" in delta]

    async with ScriptedServer([Reply("Hi")]) as server:
        assert await words(make(server.url).stream(ASK)) == ["Hi"]
