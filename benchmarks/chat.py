"""Measure the terminal: the time from `crow` to the first frame, and its CPU time at rest, for a key and for a stream.

uv run benchmarks/chat.py [--rounds 3] [--beside /path/to/an/older/.venv/bin/crow]

The terminal is a pseudo-terminal of 100 columns and 40 rows. The agent is another process, which streams Markdown; its
CPU time is not counted. The 10,000 lines come as fast as the terminal takes them.

Measured on an idle machine: first frame 154 to 202 ms, nothing at rest, 11.6 % of a core at 200 tokens a second, 10,000
lines with 1.9 s of CPU and 47 MB. In one run, beside the crow of 24 November 2026: first frame 157 and 154 ms, a key
3.5 and 3.4 ms (3.92 and 3.90 of CPU), 10.7 % of a core for both, 10,000 lines 1.8 s for both, 50 and 48 MB.
"""

import argparse
import asyncio
import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
from itertools import cycle
from pathlib import Path
from statistics import median
from time import monotonic
from typing import NamedTuple

from crow_core.acp.connection import Connection
from crow_core.acp.schema import (
    AGENT_METHODS,
    CLIENT_METHODS,
    AgentMessageChunk,
    Implementation,
    InitializeRequest,
    InitializeResponse,
    NewSessionRequest,
    NewSessionResponse,
    PromptRequest,
    PromptResponse,
    SessionNotification,
    TextBlock,
)
from crow_core.acp.transports import StreamTransport, stdio

TOKENS_A_SECOND = 200
KEYS = "Compare the recipe with the notes, and explain each difference in a sentence. " * 2
PARAGRAPH = "The **quick** brown fox `jumps` over the lazy dog, 日本語の文章 and a [link](https://example.org/x). "
CODE = "".join(f"def f{n}(x: int) -> str:\n    return f'{{x}} {n}'  # comment\n" for n in range(12))
TABLE = "| name | value |\n|---|---|\n" + "".join(f"| row {n} | {n * n} |\n" for n in range(8))
LIST = "- one\n- two with `code`\n  - three\n"
ANSWER = f"# Answer\n\n{PARAGRAPH * 3}\n\n{LIST}\n```python\n{CODE}```\n\n{TABLE}\n> quoted\n\n"
LINES = "".join(
    ("- item " if n % 3 == 0 else "plain line ") + f"{n} with **bold** text\n" + ("\n" if n % 5 == 0 else "")
    for n in range(10_000)
)


class Agent:
    """An ACP agent that streams."""

    def __init__(self, transport: StreamTransport) -> None:
        handlers = {"initialize": self.initialize, "session/new": self.new_session, "session/prompt": self.prompt}
        self.connection = Connection(transport, AGENT_METHODS, CLIENT_METHODS, handlers)

    async def initialize(self, params: InitializeRequest) -> InitializeResponse:
        return InitializeResponse(protocol_version=1, agent_info=Implementation(name="bench", version="1"))

    async def new_session(self, params: NewSessionRequest) -> NewSessionResponse:
        return NewSessionResponse(session_id="one")

    async def prompt(self, params: PromptRequest) -> PromptResponse:
        asked = "".join(block.text for block in params.prompt if isinstance(block, TextBlock))
        if asked == "long":
            for at in range(0, len(LINES), 200):
                await self.say(LINES[at : at + 200])
            await self.say("\n\nTHE-END\n")
            return PromptResponse(stop_reason="end_turn")
        start = monotonic()
        for n, token in enumerate(cycle(re.findall(r"\s*\S{1,5}|\s+", ANSWER))):
            await self.say(token)
            await asyncio.sleep(max(0, start + (n + 1) / TOKENS_A_SECOND - monotonic()))
        raise AssertionError

    async def say(self, text: str) -> None:
        chunk = AgentMessageChunk(content=TextBlock(text=text))
        await self.connection.notify("session/update", SessionNotification(session_id="one", update=chunk))


async def serve() -> None:
    await Agent(await stdio()).connection.serve()


class Screen:
    """A program on a pseudo-terminal."""

    def __init__(self, command: list[str]) -> None:
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            os.environ |= {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
            os.execvp(command[0], command)
        fcntl.ioctl(self.file, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))

    def read(self, seconds: float, until: bytes = b"") -> float:
        """Read for some seconds, or until this is shown; return the seconds that it took."""
        start, seen = monotonic(), b""
        while (passed := monotonic() - start) < seconds:
            if select.select([self.file], [], [], 0.02)[0]:
                data = os.read(self.file, 65536)
                seen = seen[-100:] + data
                if b"\x1b[6n" in data:
                    os.write(self.file, b"\x1b[1;1R")
                if until and until in seen:
                    return monotonic() - start
        assert not until, f"{until!r} was not shown in {seconds} s"
        return passed

    def send(self, text: str) -> None:
        os.write(self.file, text.encode())
        self.read(0.3)
        os.write(self.file, b"\r")

    def press(self, key: str) -> float:
        """Press a key; return the seconds until the screen changes, and read the rest of the frame."""
        start = monotonic()
        os.write(self.file, key.encode())
        select.select([self.file], [], [], 30)
        passed = monotonic() - start
        self.read(0.05)
        return passed

    def get_cpu(self) -> float:
        """Return the seconds of CPU that the threads of the program have used."""
        threads = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9

    def get_memory(self) -> int:
        """Return its peak memory in MB."""
        found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{self.pid}/status").read_text())
        return int(found[1]) // 1024 if found else 0

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.file)


class Figures(NamedTuple):
    """The figures of one round."""

    first_frame: float
    rest: float
    key: float
    key_cpu: float
    stream: float
    lines_cpu: float
    memory: float


LABELS = {
    "first_frame": ("first frame", "{:.0f} ms", 1e3),
    "rest": ("at rest, of a core", "{:.2f} %", 100),
    "key": ("a key, until the screen changes", "{:.1f} ms", 1e3),
    "key_cpu": ("a key, CPU", "{:.2f} ms", 1e3),
    "stream": (f"{TOKENS_A_SECOND} tokens a second, of a core", "{:.1f} %", 100),
    "lines_cpu": ("10,000 lines, CPU", "{:.1f} s", 1),
    "memory": ("10,000 lines, memory", "{:.0f} MB", 1),
}


def measure(crow: str) -> Figures:
    """Measure one round of a command `crow`."""
    command = [crow, "chat", "--agent", f"{sys.executable} {__file__} --serve"]
    screen = Screen([crow])
    first_frame = screen.read(60, "❯".encode())
    screen.kill()
    screen = Screen(command)
    screen.read(60, "❯".encode())
    screen.read(3)
    before = screen.get_cpu()
    rest = -before / (seconds := screen.read(5)) + screen.get_cpu() / seconds
    for key in "warm ":
        screen.press(key)
    before = screen.get_cpu()
    times = [screen.press(key) for key in KEYS]
    key_cpu = (screen.get_cpu() - before) / len(KEYS)
    screen.press("\x15")
    screen.send("stream")
    screen.read(2)
    before = screen.get_cpu()
    stream = -before / (seconds := screen.read(8)) + screen.get_cpu() / seconds
    screen.kill()
    screen = Screen(command)
    screen.read(60, "❯".encode())
    screen.read(2)
    before = screen.get_cpu()
    screen.send("long")
    screen.read(300, b"THE-END")
    lines_cpu, memory = screen.get_cpu() - before, screen.get_memory()
    screen.kill()
    return Figures(first_frame, rest, median(times), key_cpu, stream, lines_cpu, memory)


def compare(crows: list[str], rounds: int) -> None:
    """Measure the commands in turn, and print the median of each figure."""
    found = {crow: list[Figures]() for crow in crows}
    for _ in range(rounds):
        for crow in crows:
            found[crow].append(measure(crow))
    for name, (label, form, factor) in LABELS.items():
        values = [median(getattr(one, name) for one in found[crow]) for crow in crows]
        print(f"{label:36}" + "".join(f"{form.format(value * factor):>12}" for value in values))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", help="another crow to measure in turn, such as that of an older checkout")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve())
    else:
        crow = str(Path(sys.executable).with_name("crow"))
        compare([crow, *([options.beside] if options.beside else [])], options.rounds)
