"""Measure the CPU time of a streamed chunk: in the reader, in the whole client, and in the openai SDK's typed stream.

Run with `uv run python benchmarks/stream.py`. Each reads the same 3,000 events from memory, one event in a network
chunk, so no socket is measured. Compare the ratios: the absolute times depend on the machine.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from time import process_time
from typing import Any

import httpx2
import openai
from crow_core.models.chat_model import ChatModel
from crow_core.models.model_call import ModelCall
from crow_core.models.reply import ReplyBuilder
from crow_core.models.stream import EventStreamReader

CHUNKS = 3_000
ROUNDS = 7

MESSAGES: list[Any] = [{"role": "user", "content": "Tell me a story."}]


def event(delta: dict[str, Any], reason: str | None = None) -> bytes:
    chunk = {
        "id": "chatcmpl-AbCdEfGhIjKlMnOpQrStUvWxYz012",
        "object": "chat.completion.chunk",
        "created": 1_790_000_000,
        "model": "gpt-4o-2024-08-06",
        "system_fingerprint": "fp_0123456789",
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}],
        "usage": None,
    }
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


EVENTS = [*(event({"content": " word"}) for _ in range(CHUNKS - 1)), event({}, "stop"), b"data: [DONE]\n\n"]


class Story(httpx2.AsyncByteStream):
    """The events as the body of an HTTP response."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for data in EVENTS:
            yield data


def respond(request: httpx2.Request) -> httpx2.Response:
    return httpx2.Response(200, headers={"content-type": "text/event-stream"}, stream=Story())


async def read_and_merge(client: openai.AsyncOpenAI) -> str:
    reader, reply = EventStreamReader("http://model/v1"), ReplyBuilder()
    for data in EVENTS:
        for delta in reader.feed(data):
            reply.add(delta)
    for delta in reader.finish():
        reply.add(delta)
    return str(reply.build().get("content"))


async def run_model_call(client: openai.AsyncOpenAI) -> str:
    model_call = ModelCall(ChatModel(name="m", client=client), {"messages": MESSAGES})
    await model_call.run()
    return str(model_call.reply.get("content"))


async def read_typed_stream(client: openai.AsyncOpenAI) -> str:
    text: list[str] = []
    async for chunk in await client.chat.completions.create(model="m", messages=MESSAGES, stream=True):
        text.append(chunk.choices[0].delta.content or "")
    return "".join(text)


async def measure(work: Callable[[openai.AsyncOpenAI], Awaitable[str]], client: openai.AsyncOpenAI) -> float:
    """Return the least CPU time of a chunk in several rounds, in microseconds. The first round is a warm-up."""
    costs: list[float] = []
    for _ in range(ROUNDS):
        started = process_time()
        text = await work(client)
        costs.append((process_time() - started) / CHUNKS * 1e6)
        if text != " word" * (CHUNKS - 1):
            raise SystemExit(f"{work.__name__} read something else")
    return min(costs[1:])


async def main() -> None:
    http = httpx2.AsyncClient(transport=httpx2.MockTransport(respond))
    async with openai.AsyncOpenAI(base_url="http://model/v1", api_key="x", http_client=http) as client:
        for name, work in (
            ("EventStreamReader + ReplyBuilder", read_and_merge),
            ("ChatModel, over the SDK's connection", run_model_call),
            ("openai SDK, create(stream=True)", read_typed_stream),
        ):
            sys.stdout.write(f"{name:38} {await measure(work, client):6.1f} µs a chunk\n")


if __name__ == "__main__":
    asyncio.run(main())
