"""Measure the terminal: the time from `crow` to the first frame, its CPU time at rest and while an answer streams.

uv run benchmarks/chat.py [--rounds 5]

The terminal is a pseudo-terminal of 100 columns and 40 rows. The agent is another process, which streams Markdown; its
CPU time is not counted. The 10,000 lines come as fast as the terminal takes them.

Measured: first frame 154 to 202 ms, nothing at rest, 11.6 % of a core at 200 tokens a second, 10,000 lines in 5.4 s
with 1.9 s of CPU and 47 MB.
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
from time import monotonic

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

    def get_cpu(self) -> float:
        """Return the seconds of CPU that the program has used, without its children."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def get_memory(self) -> int:
        """Return its peak memory in MB."""
        found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{self.pid}/status").read_text())
        return int(found[1]) // 1024 if found else 0

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.file)


def measure(rounds: int) -> None:
    crow = str(Path(sys.executable).with_name("crow"))
    command = [crow, "chat", "--agent", f"{sys.executable} {__file__} --serve"]
    paints: list[float] = []
    for _ in range(rounds):
        screen = Screen([crow])
        paints.append(screen.read(30, "❯".encode()))
        screen.kill()
    print(f"first frame          {min(paints) * 1000:.0f} to {max(paints) * 1000:.0f} ms")
    screen = Screen(command)
    screen.read(30, "❯".encode())
    screen.read(3)
    before = screen.get_cpu()
    seconds = screen.read(10)
    print(f"at rest              {(screen.get_cpu() - before) / seconds:.2%} of a core")
    screen.send("stream")
    screen.read(2)
    before = screen.get_cpu()
    seconds = screen.read(10)
    print(f"{TOKENS_A_SECOND} tokens a second  {(screen.get_cpu() - before) / seconds:.1%} of a core")
    screen.kill()
    screen = Screen(command)
    screen.read(30, "❯".encode())
    screen.read(2)
    before = screen.get_cpu()
    screen.send("long")
    seconds = screen.read(120, b"THE-END")
    cpu = screen.get_cpu() - before
    print(f"10,000 lines         {seconds:.1f} s, {cpu:.1f} s of CPU, {screen.get_memory()} MB at most")
    screen.kill()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve())
    else:
        measure(options.rounds)
