"""Measure `crow web` with 500 sessions of 100 messages: the time of each page, its size, and the memory of the process.

Run with `uv run benchmarks/web.py`. One session has 2,000 messages. With Chromium and Playwright, it also measures how
long the browser takes until a page can be used.

Measured on an idle machine with two cores: the list took 68 ms (26 of the processor), a search 126 to 140, a session of
100 messages 26 (130 kB), one of 2,000 messages 117 (236 kB), its requests 89, charts 43. The browser could use the list
after 0.2 s and the session of 2,000 messages after 0.3 s. The process held 84 MiB after all pages.
"""

import argparse
import asyncio
import os
import re
import shutil
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import Mapping
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

import httpx2
from crow_core.messages.message import Message
from crow_persistence import search
from crow_persistence.database import Database
from crow_persistence.entries import encode
from crow_persistence.tables import blobs, calls, messages, sessions
from sqlalchemy import insert

CHROMIUM = shutil.which("chromium")
STARTS = ("gar", "hou", "wat", "pla", "see", "lea", "roo", "sto")
WORDS = [start + end for start in STARTS for end in ("den", "se", "er", "nt", "d", "f", "t", "ne")]
ROUNDS = 10
HEAD = "0" * 64
START = 1_790_000_000_000
chance = Random(5)


def say(count: int) -> str:
    return " ".join(chance.choices(WORDS, k=count))


def make_entries(prefix: str, count: int) -> list[Message]:
    """Make the messages of a session: prompts, tool calls with results of about two screens, and answers."""
    made: list[Message] = []
    for n in range(count):
        notes: Any = {"id": f"{prefix}{n:08x}"}
        match n % 6:
            case 0:
                made.append({"role": "user", "content": say(25), "crow": notes})
            case 1 | 3:
                function: Any = {"name": "terminal", "arguments": encode({"command": say(6)})}
                use: Any = {"id": f"{prefix}{n}", "type": "function", "function": function}
                made.append({"role": "assistant", "content": say(15), "tool_calls": [use], "crow": notes})
            case 2 | 4:
                text = "\n".join(say(10) for _ in range(20))
                made.append({"role": "tool", "tool_call_id": f"{prefix}{n - 1}", "content": text, "crow": notes})
            case _:
                text = f"**{say(4)}**\n\n- {say(12)}\n- {say(9)}\n\n```python\nprint({say(2)!r})\n```\n\n{say(60)}"
                made.append({"role": "assistant", "content": text, "crow": notes})
    return made


def fill(database: Database, count: int) -> str:
    """Fill the database, and return the id of the longest session."""
    id = 0
    with database.begin_write() as connection:
        connection.execute(insert(blobs).values(hash=HEAD, data=b'{"messages":[]}'))
    for number in range(1, count + 1):
        prefix, at = f"{number:024x}", START + number * 3_600_000
        entries = make_entries(prefix, 2_000 if number == count else 100)
        rows = [(id + n, entry) for n, entry in enumerate(entries, 1)]
        id += len(entries)
        bodies = [
            {"id": row, "session": number, "at": at + n * 4000, "kind": entry.get("role"), "body": encode(entry)}
            for n, (row, entry) in enumerate(rows)
        ]
        for before, body in pairwise(bodies):
            body["parent"] = before["id"]
        bodies[0]["parent"] = None
        made = [to_call(number, at + n * 4000, row, entry) for n, (row, entry) in enumerate(rows) if is_reply(entry)]
        cwd = f"/home/me/project{number % 20}"
        with database.begin_write() as connection:
            connection.execute(
                insert(sessions).values(
                    number=number, id=f"{number:032x}", cwd=cwd, roots="[]", options="{}", title=say(6),
                    created=at, updated=at + 100_000, head=id,
                )
            )  # fmt: skip
            connection.execute(insert(messages), bodies)
            connection.execute(insert(calls), made)
            search.index_entries(connection, number, cwd, rows)
    return f"{count:032x}"


def is_reply(entry: Message) -> bool:
    return entry.get("role") == "assistant"


def to_call(number: int, at: int, row: int, entry: Message) -> dict[str, Any]:
    """Make the model call of a reply."""
    return {
        "id": entry.get("crow", {}).get("id"), "session": number, "purpose": "turn", "model": f"model-{number % 4}",
        "endpoint": "http://localhost", "crow": "0.1.0", "started": at - 2000, "first": 300.0, "total": 1900.0,
        "stop_reason": "stop", "usage": "{}", "input": 9000, "output": 200, "cached": 7000, "cost": 0.01,
        "currency": "USD", "head": HEAD, "tools": HEAD, "sampling": "{}", "messages": "[0]", "digest": HEAD,
        "reply": row,
    }  # fmt: skip


def read_memory(pid: int) -> float:
    """Return the MiB of memory that a process holds."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def read_cpu(pid: int) -> float:
    """Return the milliseconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")


async def measure_browser(address: str, key: str, path: str) -> float:
    """Return the milliseconds until the browser has loaded a page and run its scripts."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        name, _, value = key.partition("=")
        context = await browser.new_context()
        await context.add_cookies([{"name": name, "value": value, "url": address}])
        page = await context.new_page()
        times: list[float] = []
        for _ in range(5):
            begun = perf_counter()
            await page.goto(f"{address}{path}", wait_until="load")
            times.append((perf_counter() - begun) * 1e3)
        await browser.close()
    return median(times)


async def measure(env: Mapping[str, str], longest: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "crow_cli", "web", "--no-open", env=env, stdout=PIPE
    )
    assert process.stdout
    try:
        first = (await process.stdout.readline()).decode().strip()
        address = first.partition("/?")[0]
        pages = {
            "the list": "/", "a search": "/?q=garden+leaden", "a rare search": "/?q=stone+roof+seed",
            "a session of 100": f"/session/{1:032x}", "a session of 2,000": f"/session/{longest}",
            "its requests": f"/session/{longest}/calls", "charts": "/charts?days=366", "permissions": "/permissions",
        }  # fmt: skip
        async with httpx2.AsyncClient(base_url=address, timeout=60) as client:
            answer = await client.get(first.removeprefix(address))
            key = answer.headers["set-cookie"].partition(";")[0]
            for name, path in pages.items():
                times: list[float] = []
                size = 0
                await client.get(path, headers={"cookie": key})
                used = read_cpu(process.pid)
                for _ in range(ROUNDS):
                    begun = perf_counter()
                    answer = await client.get(path, headers={"cookie": key})
                    times.append((perf_counter() - begun) * 1e3)
                    size = len(answer.content)
                assert answer.status_code == 200, answer.text
                cpu = (read_cpu(process.pid) - used) / ROUNDS
                print(f"{name:20} {median(times):6.0f} ms, of the processor {cpu:4.0f} ms {size / 1000:6.0f} kB")
        print(f"{'memory':20} {read_memory(process.pid):6.0f} MiB")
        if find_spec("playwright") and CHROMIUM:
            for name in ("the list", "a session of 2,000"):
                print(f"{name + ', usable':27} {await measure_browser(address, key, pages[name]):6.0f} ms")
    finally:
        process.terminate()
        await process.wait()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=500)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        database = Database(f"sqlite:///{folder}/crow.db", Path(folder))
        longest = fill(database, args.sessions)
        database.close()
        env = {**os.environ, "CROW_HOME": folder, "HOME": folder}
        await measure(env, longest)


if __name__ == "__main__":
    asyncio.run(main())
