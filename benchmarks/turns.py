"""Measure the cost of turns: of a prompt, of a tool turn, of many sessions at once, and of a session of 2,000 turns.

uv run benchmarks/turns.py [--turns 2000] [--plot FILE.svg] [--only costs|throughput|growth]

The model answers in the same process, and no request leaves it. `costs` and `throughput` compare an app without a store
with one that stores in SQLite and, if CROW_TEST_POSTGRES names a server, in PostgreSQL. `growth` runs the whole app of
the command `crow` with one session; compaction keeps the context of its model constant, so that a turn should cost the
same at the end as at the start. CPU is that of the process, with the threads of the store. Run the same file with the
source of an earlier version to compare.
"""

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from crow_agent.app import build
from crow_core.app import Crow
from crow_core.mcp.server import Server
from crow_core.messages.message import Delta
from crow_core.testing import Editor, connect
from crow_permissions.extension import permissions
from crow_persistence.extension import persistence
from fastmcp import FastMCP
from search import database_on
from sqlalchemy import Engine, event

ROUNDS, PROMPTS, TOOL_TURNS = 10, 20, 10
"""Number of rounds, of which the best counts, of the prompts in each, and of the tool turns in each of those with
tools."""
BURST, SESSIONS = 200, 50
"""Number of prompts at once, and of the sessions that they are for."""
BLOCK = 100
"""Number of turns that share a point of the plot."""
WINDOW = 24_000
"""Tokens that fit into a request of the long session. Compaction begins at 80 %."""
ANSWER = "The tests pass now: the parser kept the last line of a file without its newline. " * 5
LINES = [f"{n:5}  def function_{n}(value: int) -> int:  # returns the value, {n} times" for n in range(2_000)]


class LocalModel:
    """A model in this process that calls its tool `uses` times in each turn, then answers."""

    name = "local"
    window: int | None

    def __init__(self, uses: Callable[[], int], call: Callable[[int], dict[str, str]], window: int = 10**6) -> None:
        self.uses, self.call, self.window = uses, call, window
        self.calls = 0

    async def stream(self, request: dict[str, Any]) -> AsyncIterator[Delta]:
        self.calls += 1
        yield {"sent": request}
        messages = request["messages"]
        last = next(at for at in range(len(messages) - 1, -1, -1) if messages[at]["role"] == "user")
        if sum(message["role"] == "tool" for message in messages[last:]) < self.uses():
            yield {"tool_calls": [{"index": 0, "id": f"c{self.calls}", "function": self.call(self.calls)}]}
        else:
            for start in range(0, len(ANSWER), 80):
                yield {"content": ANSWER[start : start + 80]}
        counted = sum(len(str(message["content"])) + 20 for message in messages) // 4
        yield {"finish_reason": "stop", "usage": {"prompt_tokens": counted, "completion_tokens": 100}}


@dataclass
class Counts:
    """Statements and commits of all databases of this process."""

    statements: int = 0
    commits: int = 0


@contextmanager
def count() -> Generator[Counts]:
    counts = Counts()

    def add_statement(*_: Any) -> None:
        counts.statements += 1

    def add_commit(*_: Any) -> None:
        counts.commits += 1

    event.listen(Engine, "before_cursor_execute", add_statement)
    event.listen(Engine, "commit", add_commit)
    try:
        yield counts
    finally:
        event.remove(Engine, "before_cursor_execute", add_statement)
        event.remove(Engine, "commit", add_commit)


def small_app(model: LocalModel, url: str, folder: Path) -> Crow:
    """Make an app with one tool and permissions; it stores its sessions if there is a URL."""
    server = FastMCP("files")

    def read(line: int) -> str:
        return "\n".join(LINES[line : line + 20])

    server.tool(read, output_schema=None)
    schema = {"type": "object", "properties": {"line": {"type": "integer"}}, "required": ["line"]}
    files = Server(
        "files", lambda: server, definitions=[{"name": "read", "inputSchema": schema}], built_in=True, shared=True
    )
    crow = Crow(model, servers=[files], max_requests=1000)
    crow = crow.use(persistence, url=url, folder=folder) if url else crow
    return crow.use(permissions, mode="yolo")


def read_lines(n: int) -> dict[str, str]:
    return {"name": "read", "arguments": f'{{"line": {n % 1000}}}'}


async def measure_costs(url: str, folder: Path) -> None:
    """Print what a prompt and a tool turn cost."""
    uses = 0
    async with connect(small_app(LocalModel(lambda: uses, read_lines), url, folder)) as editor:
        ids = [(await editor.new_session("/")).session_id for _ in range(2)]
        for id, uses, what in zip(ids, (0, TOOL_TURNS), ("a prompt", "a tool turn"), strict=True):
            for _ in range(3):
                await editor.prompt(id, "Read on, please.")
            turns = PROMPTS // (uses or 1)
            times: list[float] = []
            with count() as counts:
                for _ in range(ROUNDS):
                    begun = process_time()
                    for _ in range(turns):
                        await editor.prompt(id, "Read on, please.")
                    times.append((process_time() - begun) / PROMPTS)
            asked = ROUNDS * PROMPTS  # a tool turn with its share of a prompt
            print(
                f"  {what:12} {min(times) * 1e3:6.2f} ms CPU {counts.statements / asked:6.1f} statements "
                f"{counts.commits / asked:5.1f} commits"
            )


async def measure_throughput(url: str, folder: Path) -> None:
    """Print how fast many prompts of many sessions are answered."""
    async with connect(small_app(LocalModel(lambda: 0, read_lines), url, folder)) as editor:
        ids = [(await editor.new_session("/")).session_id for _ in range(SESSIONS)]

        async def prompt_in_order(id: str) -> None:
            for _ in range(BURST // SESSIONS):
                await editor.prompt(id, "Read on, please.")

        await asyncio.gather(*(editor.prompt(id, "Hello.") for id in ids))
        walls: list[float] = []
        times: list[float] = []
        with count() as counts:
            for _ in range(ROUNDS):
                begun, busy = perf_counter(), process_time()
                await asyncio.gather(*map(prompt_in_order, ids))
                walls.append((perf_counter() - begun) / BURST)
                times.append((process_time() - busy) / BURST)
        asked = ROUNDS * BURST
        print(
            f"  {BURST} prompts of {SESSIONS} sessions: {1 / min(walls):6.0f} a second, "
            f"{min(times) * 1e3:6.2f} ms CPU, {counts.statements / asked:5.1f} statements, "
            f"{counts.commits / asked:5.2f} commits each"
        )


async def measure_growth(folder: Path, turns: int) -> list[float]:
    """Run a long session with the whole app. Print and return the CPU of a turn, in milliseconds, by blocks."""
    (folder / "config.toml").write_text(f'[database]\nurl = "sqlite:///{folder}/crow.db"\n')
    (folder / "text.py").write_text("\n".join(LINES))
    turn = 0

    def view_file(n: int) -> dict[str, str]:
        arguments = {"command": "view", "path": f"{folder}/text.py", "view_range": [n % 900 + 1, n % 900 + 30]}
        return {"name": "file_editor", "arguments": json.dumps(arguments)}

    model = LocalModel(lambda: turn % 2, view_file, WINDOW)  # every other turn uses a tool
    crow = await build({"CROW_HOME": str(folder), "HOME": str(folder)}, mode="yolo", models={"local": model})
    points: list[float] = []
    async with connect(crow) as editor:
        id = (await editor.new_session(str(folder))).session_id
        await prompt_and_forget(editor, id, "Read on, please. What is wrong in it?")
        for first in range(0, turns, BLOCK):
            with count() as counts:
                begun, asked = process_time(), model.calls
                for turn in range(first, first + BLOCK):
                    await prompt_and_forget(editor, id, f"Read on, please. What is wrong in part {turn}?")
                points.append((process_time() - begun) / BLOCK * 1e3)
            print(
                f"  turns {first + 1:5} to {first + BLOCK:5}: {points[-1]:6.2f} ms CPU, "
                f"{counts.statements / BLOCK:5.1f} statements, {(model.calls - asked) / BLOCK:4.2f} model calls each; "
                f"log of {len(crow.sessions[id].log):,} entries",
                flush=True,
            )
    return points


async def prompt_and_forget(editor: Editor, id: str, text: str) -> None:
    """Prompt a session, and keep none of its updates."""
    await editor.prompt(id, text)
    editor.updates.clear()


def draw(points: list[float], file: Path) -> None:
    """Draw the CPU of a turn, by turns, to an SVG file."""
    width, height, top = 800, 300, max(points) * 1.1
    places = [((n + 0.5) / len(points) * width, height - value / top * height) for n, value in enumerate(points)]
    path = " ".join(f"{x:.0f},{y:.0f}" for x, y in places)
    file.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-60 -20 {width + 80} {height + 60}" '
        f'font-family="sans-serif" font-size="13"><path d="M0 0V{height}H{width}" fill="none" stroke="#888"/>'
        f'<polyline points="{path}" fill="none" stroke="#06c" stroke-width="2"/>'
        f'<text x="-6" y="5" text-anchor="end">{top:.0f} ms</text><text x="-6" y="{height}" text-anchor="end">0</text>'
        f'<text x="{width}" y="{height + 20}" text-anchor="end">turn {len(points) * BLOCK:,}</text>'
        f'<text x="{width / 2}" y="{height + 20}" text-anchor="middle">CPU of a turn</text></svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the cost of turns.")
    parser.add_argument("--turns", type=int, default=2_000, help="turns of the long session")
    parser.add_argument("--plot", type=Path, help="SVG file to draw the long session to")
    parser.add_argument("--only", choices=("costs", "throughput", "growth"))
    options = parser.parse_args()
    stores = {"without a store": None, "SQLite": "", "PostgreSQL": os.environ.get("CROW_TEST_POSTGRES")}
    for name, server in stores.items():
        if options.only == "growth" or (name == "PostgreSQL" and not server):
            continue
        print(name)
        with database_on(server or "") as database:
            url = "" if server is None else database.url.render_as_string(hide_password=False)
            if options.only != "throughput":
                asyncio.run(measure_costs(url, database.folder))
            if options.only != "costs":
                asyncio.run(measure_throughput(url, database.folder))
    if options.only in (None, "growth"):
        print("a long session of the command's app, on SQLite")
        with tempfile.TemporaryDirectory() as folder:
            points = asyncio.run(measure_growth(Path(folder), options.turns))
        if options.plot:
            draw(points, options.plot)


if __name__ == "__main__":
    main()
