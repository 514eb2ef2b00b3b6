"""Measure the time to the first token of a session's prompts on a local server, beside bare requests of the same text.

    uv run scripts/lab.py                    # serves the model, at port 8137
    uv run python benchmarks/warm_prefix.py

Prints for each request, by llama.cpp's own counters, the tokens that it had in its cache and those that it processed.
Then come the seconds until the server sent its first token, and until crow passed on the first part of an answer or a
call. The bare requests have no system prompt and no tools, only the same prompts and the answers that came.
Nothing else should use the server.
"""

import asyncio
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator
from time import monotonic
from typing import Any

import httpx2
from crow_agent.app import build
from crow_core.models.chat_model import ChatModel
from crow_core.models.model_call import ModelCall
from crow_core.models.quirks import find_quirks
from crow_core.session.session import Session
from crow_core.testing import connect

URL = os.environ.get("CROW_LAB_URL", "http://127.0.0.1:8137/v1")
NAME = os.environ.get("CROW_LAB_MODEL", "qwen2.5-coder-1.5b")
PROMPTS = ("What is a list in Python? Answer in one sentence.", "And what is a tuple? Answer in one sentence.")
LIMIT = 600.0
"""Seconds that one request may take."""
TOKEN = re.compile(rb'"(?:content|arguments|name)":"[^"]')
COUNTERS = re.compile(rb'"(cache_n|prompt_n|predicted_n)":(\d+)')


class Clock(httpx2.AsyncHTTPTransport):
    """Passes on what the server sends, and notes the time of its first token and its counters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = 0.0
        self.counters: dict[str, int] = {}

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.first, self.counters = 0.0, {}
        response = await super().handle_async_request(request)
        response.stream = Watched(response.stream, self)  # pyright: ignore[reportArgumentType]
        return response


class Watched(httpx2.AsyncByteStream):
    """A response's bytes, seen by a clock."""

    def __init__(self, stream: Any, clock: Clock) -> None:
        self._stream, self._clock = stream, clock

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            if not self._clock.first and TOKEN.search(chunk):
                self._clock.first = monotonic()
            self._clock.counters |= {name.decode(): int(count) for name, count in COUNTERS.findall(chunk)}
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


def report(label: str, call: ModelCall, clock: Clock) -> None:
    counters, shown = clock.counters, (call.first_delta or call.ended) - call.started
    print(
        f"{label:<24}{counters.get('cache_n', 0):>6} cached {counters.get('prompt_n', 0):>5} processed"
        f"{clock.first - call.started:8.2f} s to the first token{shown:8.2f} s until it is passed on",
        flush=True,
    )


def make_model(clock: Clock) -> ChatModel:
    parameters = {"temperature": 0, "max_tokens": 60}
    return ChatModel(name=NAME, base_url=URL, parameters=parameters, quirks=find_quirks(URL, NAME), transport=clock)


async def measure_session(folder: str) -> list[str]:
    """Open a session, wait until its beginning is in the cache, and prompt it; return the answers."""
    clock, answers = Clock(), list[str]()
    crow = await build({"CROW_HOME": folder, "HOME": folder}, models={"lab": make_model(clock)}, mode="plan")
    warm: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    label = "crow, while one types"

    async def collect(session: Session, call: ModelCall) -> None:
        if call.ended:
            report(label if call.purpose == "turn" else f"crow, {call.purpose}", call, clock)
            if not warm.done():
                warm.set_result(None)

    crow.model_call(collect)
    async with connect(crow) as editor:
        session = await editor.new_session(folder)
        await asyncio.wait_for(warm, LIMIT)
        for number, prompt in enumerate(PROMPTS, 1):
            label, before = f"crow, prompt {number}", len(editor.text)
            await asyncio.wait_for(editor.prompt(session.session_id, prompt), LIMIT)
            answers.append(editor.text[before:])
    return answers


async def measure_bare(answers: list[str]) -> None:
    """Send the prompts and the answers of the session alone."""
    clock, messages = Clock(), list[Any]()
    model = make_model(clock)
    for number, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True), 1):
        messages.append({"role": "user", "content": prompt})
        call = ModelCall(model, {"messages": [*messages]})
        await call.run()
        report(f"bare, prompt {number}", call, clock)
        messages.append({"role": "assistant", "content": answer})
    await model.close()


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        answers = await measure_session(folder)
    await measure_bare(answers)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
