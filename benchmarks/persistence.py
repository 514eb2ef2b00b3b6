"""Measure the cost of storing sessions, compared with the bare drivers sqlite3 and psycopg in the same run.

uv run benchmarks/persistence.py

Measures appending a message, loading a session of 5,000 messages, listing the latest of 10,000 sessions, the size of
the database compared with its messages as JSON, and the delay of the first model request compared with an app without a
store. Runs on SQLite in a temporary folder; also on PostgreSQL, in a new database, if CROW_TEST_POSTGRES names a
server: postgresql+psycopg://postgres@127.0.0.1:5432/postgres.
"""

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from uuid import uuid4

import psycopg
from crow_core.app import Crow
from crow_core.mcp.server import Server
from crow_core.messages.message import Message
from crow_core.testing import Editor, Reply, ScriptedModel, connect
from crow_persistence.database import Database
from crow_persistence.entries import encode
from crow_persistence.extension import persistence
from crow_persistence.sql_store import BlockingStore
from crow_persistence.tables import sessions
from search import chance, database_on, sizes, some_entry, some_text
from sqlalchemy import insert

LONG = 5_000
"""Number of messages in a long session."""
MANY = 10_000
"""Number of sessions to list."""
SESSIONS, TURNS = 20, 50
"""Number of sessions with tools whose size is measured, and of turns in each."""
STARTS = 9
"""Number of processes started to measure the delay of the first request."""


def url_of(database: Database) -> str:
    return database.url.render_as_string(hide_password=False)


@contextmanager
def driver(database: Database) -> Generator[Any]:
    """Yield a bare connection to the same database, with the store's settings."""
    if not database.file:
        with psycopg.connect(
            database.url.set(drivername="postgresql", query={}).render_as_string(hide_password=False)
        ) as connection:
            yield connection
        return
    with closing(sqlite3.connect(database.file)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        yield connection


def milliseconds(work: Callable[[], Any], rounds: int) -> float:
    """Return the median time of some rounds, without the first."""
    times: list[float] = []
    for _ in range(rounds + 1):
        begun = perf_counter()
        work()
        times.append((perf_counter() - begun) * 1e3)
    return median(times[1:])


def show(what: str, ours: float, bare: float) -> None:
    print(f"{what:44} {ours:8.2f} ms {bare:8.2f} ms  {ours - bare:+8.2f} ms")


async def append(database: Database, editor: Editor, crow: Crow) -> None:
    """Append messages one by one and commit each: with the store, and with a bare INSERT."""
    session = crow.sessions[(await editor.new_session("/")).session_id]
    mark = "?" if database.file else "%s"
    bare_insert = f"INSERT INTO bare (session, parent, at, kind, body) VALUES ({', '.join([mark] * 5)})"
    key = "INTEGER" if database.file else "BIGSERIAL"
    ours: list[float] = []
    bare: list[float] = []
    with driver(database) as connection:
        connection.execute(
            f"CREATE TABLE bare (id {key} PRIMARY KEY, session BIGINT, parent BIGINT, at BIGINT, kind TEXT, body TEXT)"
        )
        connection.commit()
        for n in range(1000):
            entry = some_entry(n)
            begun = perf_counter()
            session.log.append(entry)
            await session.log.written()
            ours.append((perf_counter() - begun) * 1e3)
            begun = perf_counter()
            connection.execute(bare_insert, (1, n, n, entry.get("role"), encode(entry)))
            connection.commit()
            bare.append((perf_counter() - begun) * 1e3)
        connection.execute("DROP TABLE bare")
        connection.commit()
    show("append a message", median(ours[10:]), median(bare[10:]))


async def load(database: Database, editor: Editor, crow: Crow, store: BlockingStore) -> None:
    """Load a long session with its log, prompt and tools; compared with decoding its rows."""
    id = (await editor.new_session("/")).session_id
    session = crow.sessions[id]
    for n in range(LONG):
        session.log.append(some_entry(n))
    await session.log.written()
    await crow.close(session)

    def ours() -> None:
        row = store.acquire(id)
        assert row is not None
        assert len(store.load(row).log) == LONG
        store.release(id)

    def bare() -> None:
        its = f"JOIN sessions ON session = number WHERE sessions.id = '{id}'"
        rows = connection.execute(f"SELECT body FROM messages {its} ORDER BY messages.id")
        assert len([json.loads(body) for (body,) in rows]) == LONG
        connection.rollback()

    with driver(database) as connection:
        show(f"load {LONG:,} messages", milliseconds(ours, 10), milliseconds(bare, 10))


def listing(database: Database, store: BlockingStore) -> None:
    """List the latest 50 of many sessions, in one folder of 20 and in all."""
    rows = [
        {"id": uuid4().hex, "cwd": f"/folder{n % 20}", "title": some_text()[:60], "created": n, "updated": n}
        for n in range(MANY)
    ]
    with database.begin_write() as connection:
        connection.execute(insert(sessions).values(roots="[]", options="{}"), rows)
    columns = "SELECT id, cwd, roots, title, created, updated FROM sessions WHERE deleted IS NULL"
    order = "ORDER BY updated DESC, number DESC LIMIT 50"
    with driver(database) as connection:
        for where, cwd, filtered in ((" of one folder", "/folder7", "AND cwd = '/folder7'"), ("", "", "")):

            def bare(filtered: str = filtered) -> None:
                assert len(connection.execute(f"{columns} {filtered} {order}").fetchall()) == 50
                connection.rollback()

            def ours(cwd: str = cwd) -> None:
                assert len(store.list_sessions(cwd, "", 50).sessions) == 50

            show(f"list 50 of {MANY:,} sessions{where}", milliseconds(ours, 50), milliseconds(bare, 50))


def reading_tool() -> Server:
    """Return a server whose tool returns some lines of Python's standard library."""
    lines = [
        line for file in sorted(Path(asyncio.__file__).parent.glob("*.py")) for line in file.read_text().split("\n")
    ]

    def source() -> Any:
        from fastmcp import FastMCP

        server = FastMCP("files")

        def read(path: str) -> str:
            first = chance.randrange(len(lines))
            return "\n".join(lines[first : first + 120])

        server.tool(read, output_schema=None)
        return server

    schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    return Server("files", source, definitions=[{"name": "read", "inputSchema": schema}], built_in=True, shared=True)


def reply(request: dict[str, Any]) -> Reply:
    if request["messages"][-1]["role"] == "tool":
        return Reply(some_text())
    return Reply("", some_text(), tool_calls=[{"name": "read", "arguments": {"path": f"src/{some_text()[:40]}.py"}}])


async def growth(database: Database) -> None:
    """Run sessions with tools, and compare the growth of the database with the size of the messages as JSON."""
    before, _ = sizes(database)
    said: list[Message] = []
    for _ in range(SESSIONS):
        crow = Crow(ScriptedModel(reply), servers=[reading_tool()]).use(persistence, url=url_of(database))
        async with connect(crow) as editor:
            id = (await editor.new_session("/")).session_id
            for _ in range(TURNS):
                await editor.prompt(id, some_text())
            said += [entry for entry in crow.sessions[id].log if "role" in entry]
    size, (after, _) = sum(len(encode(entry).encode()) for entry in said), sizes(database)
    what = f"{len(said):,} messages and {SESSIONS * TURNS * 2:,} model calls"
    print(f"{what:44} {(after - before) / 1e6:8.2f} MB {size / 1e6:8.2f} MB  {(after - before) / size:8.2f} times")


def first_request(url: str) -> float:
    """Return the milliseconds from a prompt to the first request in a new process; without a store if the URL is ""."""
    command = [sys.executable, __file__, "--start", url]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


async def start(url: str) -> None:
    asked: list[float] = []

    def answer(request: dict[str, Any]) -> Reply:
        asked.append(perf_counter())
        return Reply("Hello.")

    crow = Crow(ScriptedModel(answer))
    async with connect(crow.use(persistence, url=url) if url else crow) as editor:
        id = (await editor.new_session("/")).session_id
        begun = perf_counter()
        await editor.prompt(id, "Hello.")
    print((asked[0] - begun) * 1e3)


async def report(database: Database) -> None:
    with database.begin_read():
        pass  # makes its tables
    print(f"{'':44} {'database':>11} {'JSON':>11}")
    await growth(database)
    print(f"{'':44} {'ours':>11} {'driver':>11}")
    crow, store = Crow(ScriptedModel([])).use(persistence, url=url_of(database)), BlockingStore(url_of(database))
    async with connect(crow) as editor:
        await append(database, editor, crow)
        await load(database, editor, crow, store)
    listing(database, store)
    store.database.close()
    times = [(first_request(url_of(database)), first_request("")) for _ in range(STARTS)]
    ours, without = (median(column) for column in zip(*times, strict=True))
    show("the first request leaves, and without a store", ours, without)
    print()


def main() -> None:
    for name, server in (("SQLite", ""), ("PostgreSQL", os.environ.get("CROW_TEST_POSTGRES", ""))):
        if name == "SQLite" or server:
            print(name)
            with database_on(server) as database:
                asyncio.run(report(database))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--start"]:
        asyncio.run(start(sys.argv[2]))
    else:
        main()
