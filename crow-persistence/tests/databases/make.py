"""Print a database with rows in every table, as SQL: `uv run crow-persistence/tests/databases/make.py URL`.

Run it once for each new revision and each kind of database, into `REVISION.sqlite.sql` and `REVISION.postgresql.sql`
beside this file, and never again: the dumps must stay as that version of crow wrote them. For SQLite, the database is
created anew. A PostgreSQL database must be empty, and `pg_dump` of the server's version must be on the path.
"""

import asyncio
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import crow_mcp_server
from crow_core.acp.schema import DeleteSessionRequest, ForkSessionRequest, ImageBlock, TextBlock
from crow_core.app import Crow
from crow_core.mcp.server import Server
from crow_core.testing import Reply, ScriptedCall, ScriptedModel, connect
from crow_eval import tables as evaluations
from crow_extensions.titles import titles
from crow_permissions.extension import permissions
from crow_persistence.database import Database
from crow_persistence.extension import persistence
from crow_persistence.tables import draft_parts, drafts, sessions
from sqlalchemy import insert, make_url, select

IMAGE = ImageBlock(data="iVBORw0KGgo" * 100, mime_type="image/png")
PROJECT = Path("/tmp/pancakes")


def use(command: str, **arguments: str) -> ScriptedCall:
    return {"name": "file_editor", "arguments": {"command": command, "path": str(PROJECT / "batter.txt"), **arguments}}


def built_in() -> Server:
    return Server(
        "crow", crow_mcp_server.create_server, definitions=crow_mcp_server.tools(), built_in=True, shared=True
    )


async def talk(url: str, folder: Path) -> None:
    """Create two sessions, one forked and one deleted, with tools, an image, a rewind and an unfinished reply."""
    replies = [
        Reply("I begin with the batter.", "They want pancakes.", [use("create", file_text="flour\nmilk\n" * 100)]),
        Reply("The batter is there."),
        Reply(tool_calls=[use("str_replace", old_str="nothing like it", new_str="eggs")]),
        Reply("It could not be changed."),
        Reply("A pancake, I think."),
        Reply("Forgotten."),
        Reply("Then with apples."),
    ]
    crow = Crow(ScriptedModel(replies), servers=[built_in()]).use(permissions, mode="ask").use(titles)
    async with connect(crow.use(persistence, url=url, folder=folder)) as editor:
        id = (await editor.new_session(str(PROJECT))).session_id
        await editor.prompt(id, "Make pancakes — Pfannkuchen, 煎饼")
        await editor.prompt(id, "Put eggs in")
        await editor.prompt(id, [TextBlock(text="What is this?"), IMAGE])
        session = crow.sessions[id]
        stays = next(entry for entry in session.log if entry.get("role") == "assistant" and "tool_calls" not in entry)
        session.rewind(stays["crow"]["id"])  # pyright: ignore[reportTypedDictNotRequiredAccess]
        forgotten = (await editor.new_session(str(PROJECT))).session_id
        await editor.prompt(forgotten, "Forget this")
        fork = await editor.request("session/fork", ForkSessionRequest(session_id=id, cwd=str(PROJECT), mcp_servers=[]))
        await editor.prompt(fork.session_id, "With apples?")
        await crow.close(crow.sessions[forgotten])
        await editor.request("session/delete", DeleteSessionRequest(session_id=forgotten))
    database = Database(url, folder)
    with database.begin_write() as connection:
        number = connection.scalar(select(sessions.c.number).where(sessions.c.id == id))
        body = '{"role":"assistant","content":"And with cinn","crow":{"id":"0123456789abcdef0123456789abcdef"}}'
        connection.execute(insert(drafts).values(session=number, at=1764000000000, body=body))
        parts = ('{"content":"amon"}', '{"content":" on top"}')
        rows = [{"session": number, "number": at, "body": part} for at, part in enumerate(parts, 1)]
        connection.execute(insert(draft_parts), rows)
        counts = {"requests": 2, "input": 300, "output": 20, "cached": 100, "cost": 0.01, "currency": "EUR"}
        times = {"started": 1764000000000, "ended": 1764000001000, "first": 120.5, "total": 950.0}
        cell = {"task": "flip", "variant": 0, "repetition": 1, "session": id, "state": "passed", "outcome": "{}"}
        evaluation = evaluations.store_evaluation(connection, "ab" * 16, "pancakes", '{"models":[]}', 1764000000000)
        evaluations.store_cells(connection, evaluation, [{**cell, **counts, **times}])
    database.close()


def sqlite_dump(file: Path) -> str:
    with closing(sqlite3.connect(file)) as connection:
        # The rows of the full text are in tables that FTS5 keeps beside it.
        return "\n".join(line for line in connection.iterdump() if not line.startswith('INSERT INTO "search" '))


def postgresql_dump(url: str) -> str:
    address = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    command = ["pg_dump", "--inserts", "--no-owner", "--no-privileges", address]
    dump = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return re.sub(r"(?m)^\\(un)?restrict .*\n", "", dump)  # only psql understands these


def main(url: str) -> None:
    PROJECT.mkdir()
    try:
        with TemporaryDirectory() as folder:
            file = Path(folder, "crow.db")
            url = url if url.startswith("postgresql") else f"sqlite:///{file}"
            asyncio.run(talk(url, Path(folder)))
            print(sqlite_dump(file) if file.exists() else postgresql_dump(url))
    finally:
        for file in PROJECT.iterdir():
            file.unlink()
        PROJECT.rmdir()


if __name__ == "__main__":
    main(*sys.argv[1:])
