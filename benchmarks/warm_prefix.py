"""Measure the time to the first token of a session's prompts on a local server, beside bare requests of the same text.

    uv run scripts/lab.py                    # serves the model, at port 8137
    uv run python benchmarks/warm_prefix.py

Prints for each request the tokens of the prompt, how many of them the server had in its cache by its own count, and
the seconds to the first token. The bare requests have no system prompt and no tools, only the conversation so far.
Nothing else should use the server.
"""

import asyncio
import os
import sys
import tempfile
from typing import Any

from crow_agent.app import build
from crow_core.models.chat_model import ChatModel
from crow_core.models.model_call import ModelCall
from crow_core.models.quirks import find_quirks
from crow_core.models.token_usage import count_cached_tokens, count_prompt_tokens
from crow_core.session.session import Session
from crow_core.testing import connect

URL = os.environ.get("CROW_LAB_URL", "http://127.0.0.1:8137/v1")
NAME = "qwen2.5-coder-1.5b"
PROMPTS = ("What is a list in Python? Answer in one sentence.", "And what is a tuple? Answer in one sentence.")


def report(label: str, call: ModelCall) -> None:
    tokens, cached = count_prompt_tokens(call.usage), count_cached_tokens(call.usage)
    seconds = call.first_delta - call.started if call.first_delta else call.ended - call.started
    print(f"{label:<26}{tokens:>7} tokens {cached:>7} cached {seconds:8.2f} s", flush=True)


def make_model() -> ChatModel:
    parameters = {"temperature": 0, "max_tokens": 60}
    return ChatModel(name=NAME, base_url=URL, parameters=parameters, quirks=find_quirks(URL, NAME))


async def measure_session(folder: str) -> None:
    """Open a session, wait until its beginning is in the cache, and prompt it."""
    crow = await build({"CROW_HOME": folder, "HOME": folder}, models={"lab": make_model()}, mode="plan")
    ended: asyncio.Queue[ModelCall] = asyncio.Queue()

    async def collect(session: Session, model_call: ModelCall) -> None:
        if model_call.ended:
            await ended.put(model_call)

    crow.model_call(collect)
    async with connect(crow) as editor:
        session = await editor.new_session(folder)
        report("crow, while one types", await ended.get())
        for number, prompt in enumerate(PROMPTS, 1):
            await editor.prompt(session.session_id, prompt)
            calls = [ended.get_nowait() for _ in range(ended.qsize())]
            report(f"crow, prompt {number}", calls[0])


async def measure_bare() -> None:
    """Send the prompts alone."""
    model, messages = make_model(), list[Any]()
    for number, prompt in enumerate(PROMPTS, 1):
        messages.append({"role": "user", "content": prompt})
        call = ModelCall(model, {"messages": [*messages]})
        await call.run()
        report(f"bare, prompt {number}", call)
        messages.append({"role": "assistant", "content": call.reply.get("content")})
    await model.close()


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        await measure_session(folder)
    await measure_bare()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
