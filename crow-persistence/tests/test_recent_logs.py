"""The entries of many sessions are read at once, undone ones included."""

from collections.abc import Sequence

import pytest
from crow_core.app import Crow
from crow_core.messages.message import marker_kind
from crow_core.testing import Editor, Reply, ScriptedModel, connect
from crow_extensions.commands import commands
from crow_extensions.undo import undo
from crow_persistence.database import Database
from crow_persistence.extension import persistence
from crow_persistence.recent_logs import RecentLog, load_recent_logs
from crow_persistence.tables import cells, evaluations, messages, sessions
from sqlalchemy import insert, select, update

pytestmark = pytest.mark.anyio


def app(database: Database, replies: int) -> Crow:
    url = database.url.render_as_string(hide_password=False)
    crow = Crow(ScriptedModel([Reply("Done.")] * replies))
    return crow.use(persistence, url=url, folder=database.folder).use(commands).use(undo)


async def talk(editor: Editor, folder: str, *prompts: str) -> str:
    """Say these in a new session; return its id."""
    id = (await editor.new_session(folder)).session_id
    for prompt in prompts:
        await editor.prompt(id, prompt)
    return id


def read(database: Database, since: int = 0, cwd: str = "", ids: Sequence[str] = ()) -> list[RecentLog]:
    with database.begin_read() as connection:
        return list(load_recent_logs(connection, since, cwd, ids))


async def test_undone_entries_are_read_in_the_order_in_which_they_were_written(database: Database) -> None:
    async with connect(app(database, 2)) as editor:
        id = await talk(editor, "/tmp", "One.", "Two.", "/undo yes")
    (log,) = read(database)
    assert (log.id, log.cwd) == (id, "/tmp")
    assert [entry.get("content") for entry in log.entries if entry.get("role") == "user"] == ["One.", "Two."]
    assert marker_kind(log.entries[-1]) == "rewind"
    (render,) = [entry for entry in log.entries if entry.get("crow", {}).get("purpose") == "system"]
    assert render.get("crow", {}).get("variables", {}).get("cwd") == "/tmp"


async def test_sessions_are_chosen_by_folder_time_and_id_and_not_those_of_evaluations(database: Database) -> None:
    async with connect(app(database, 3)) as editor:
        ids = [await talk(editor, folder, "Hello.") for folder in ("/tmp", "/var", "/usr")]
    with database.begin_write() as connection:
        connection.execute(update(sessions).where(sessions.c.id == ids[0]).values(updated=1))
        row = {"id": "e", "dataset": "d", "settings": "{}", "created": 1, "number": 1}
        connection.execute(insert(evaluations), row)
        counts = dict.fromkeys(
            ("variant", "repetition", "started", "ended", "requests", "input", "output", "cached"), 1
        )
        cell = {"evaluation": 1, "task": "t", "session": ids[2], "state": "passed", "outcome": "{}", **counts}
        connection.execute(insert(cells), cell)
    assert [log.id for log in read(database)] == ids[:2]
    assert [log.id for log in read(database, since=2)] == ids[1:2]
    assert [log.id for log in read(database, cwd="/tmp")] == ids[:1]
    assert [log.id for log in read(database, ids=ids[1:])] == ids[1:2]


async def test_damaged_entries_are_left_out(database: Database) -> None:
    async with connect(app(database, 1)) as editor:
        await talk(editor, "/tmp", "One.")
    with database.begin_write() as connection:
        row = connection.scalars(select(messages.c.id).where(messages.c.kind == "user")).one()
        connection.execute(update(messages).where(messages.c.id == row).values(body="{"))
    (log,) = read(database)
    assert [entry.get("role") for entry in log.entries if "role" in entry] == ["assistant"]
