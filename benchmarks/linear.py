"""Measure how the cost of a reply grows with its length: CPU time, and bytes written to the database.

uv run benchmarks/linear.py [--sizes 0.25 0.5 1 2 4] [--kinds text reasoning arguments event]

A session with a store (SQLite in a temporary folder) streams one reply from an endpoint in this process to a client in
this process. `small` deltas have 4 characters, about a token; `large` ones 4,000; an `event` is one event with the
whole reply, in reads of 1,460 bytes. Each line shows the CPU time and the bytes written for each size, then by how much
the CPU time grew from the first size to the last, divided by the growth of the size: 1 is linear.
"""

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from time import process_time
from typing import Any

import httpx2
from crow_core.app import Crow
from crow_core.models.chat_model import ChatModel
from crow_core.testing import connect
from crow_persistence.extension import persistence

READ = 1_460
"""Bytes of a read of an `event`: the payload of a TCP segment."""
BATCH = 65_536
"""Bytes of a read in all other streams, at least."""
PIECES = {"small": 4, "large": 4_000}


def make_event(delta: dict[str, Any], reason: str | None = None) -> bytes:
    return (
        b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}).encode() + b"\n\n"
    )


def make_delta(kind: str, text: str) -> dict[str, Any]:
    match kind:
        case "reasoning":
            return {"reasoning_content": text}
        case "arguments":
            return {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}
        case _:
            return {"content": text}


def make_events(kind: str, size: int, piece: int) -> Iterator[bytes]:
    """Yield the events of a reply of `size` characters in pieces."""
    words = "lorem ipsum dolor sit amet "
    text = words * (size // len(words) + 1)
    if kind == "arguments":
        first = {"index": 0, "id": "call_1", "function": {"name": "none", "arguments": '{"text": "'}}
        yield make_event({"tool_calls": [first]})
    for start in range(0, size, piece):
        yield make_event(make_delta(kind, text[start : min(start + piece, size)]))
    if kind == "arguments":
        yield make_event(make_delta(kind, '"}'))
    else:
        yield make_event({"content": "."})
    yield make_event({}, "tool_calls" if kind == "arguments" else "stop")
    yield b"data: [DONE]\n\n"


class Body(httpx2.AsyncByteStream):
    """The events of a reply as the body of an HTTP response."""

    def __init__(self, kind: str, size: int, piece: int, read: int) -> None:
        self.events = make_events(kind, size, piece)
        self.read = read

    async def __aiter__(self) -> AsyncIterator[bytes]:
        pending = bytearray()
        for event in self.events:
            pending += event
            start = 0
            while len(pending) - start >= self.read:
                yield bytes(pending[start : start + self.read])
                start += self.read
                await asyncio.sleep(0)
            del pending[:start]
        yield bytes(pending)


def count_written() -> int:
    """Return the bytes that this process has passed to write calls."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


async def stream(kind: str, size: int, piece: int, read: int) -> tuple[float, int]:
    """Stream one reply; return the CPU seconds and the bytes written."""
    answers = iter([Body(kind, size, piece, read)])

    def respond(request: httpx2.Request) -> httpx2.Response:
        body = next(answers, None) or Body("text", 10, 10, BATCH)
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, stream=body)

    model = ChatModel(name="m", base_url="http://model/v1", transport=httpx2.MockTransport(respond))
    with tempfile.TemporaryDirectory() as folder:
        crow = Crow(model).use(persistence, url=f"sqlite:///{folder}/crow.db", folder=Path(folder))
        async with connect(crow) as editor:
            id = (await editor.new_session(folder)).session_id
            written, started = count_written(), process_time()
            answer = await editor.prompt(id, "Write.")
            if answer.stop_reason != "end_turn":
                raise SystemExit(f"The turn ended with {answer.stop_reason}")
        return process_time() - started, count_written() - written


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="*", default=[0.25, 0.5, 1, 2, 4], help="millions of characters")
    parser.add_argument("--kinds", nargs="*", default=["text", "reasoning", "arguments", "event"])
    args = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}")
    await stream("text", 10_000, 4, BATCH)  # imports
    cases = [(kind, name, piece) for kind in args.kinds if kind != "event" for name, piece in PIECES.items()]
    if "event" in args.kinds:
        cases.append(("event", "one", 0))
    for kind, name, piece in cases:
        found: list[tuple[float, float, int]] = []
        for size in args.sizes:
            characters = int(size * 1e6)
            cpu, written = await stream(kind, characters, piece or characters, BATCH if piece else READ)
            found.append((size, cpu, written))
        shown = ", ".join(f"{size:g} MB: {cpu:.2f} s {written / 1e6:.1f} MB" for size, cpu, written in found)
        (least, first, _), (most, last, _) = found[0], found[-1]
        print(f"{kind:9} {name:5} {shown}; growth {last / first / (most / least):.2f}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
