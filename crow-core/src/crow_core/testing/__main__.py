"""Serve a scripted model, to try crow without a model: `python -m crow_core.testing "It is up."`.

Each argument is a reply: a text, or a tool call as JSON with `name` and `arguments`. The last one is repeated.
"""

import asyncio
import sys

import msgspec

from crow_core.testing.script import Reply, ScriptedCall
from crow_core.testing.scripted_server import ScriptedServer


def parse_reply(text: str) -> Reply:
    """Parse a reply: a tool call if the text is one, else the text itself."""
    try:
        return Reply(tool_calls=[msgspec.json.decode(text, type=ScriptedCall)])
    except msgspec.DecodeError:
        return Reply(text)


async def serve(replies: list[Reply]) -> None:
    """Print the variables that select the scripted model, and answer until the process is stopped."""
    remaining = iter(replies)
    async with ScriptedServer(lambda _: next(remaining, replies[-1])) as server:
        print(f"export OPENAI_BASE_URL={server.url} CROW_MODEL=scripted", flush=True)  # noqa: T201
        await asyncio.Event().wait()


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(__doc__)
    try:
        asyncio.run(serve([parse_reply(text) for text in sys.argv[1:]]))
    except KeyboardInterrupt:
        sys.exit(130)
