"""Archived sessions, titles that a client sets, and the state of a session: unstable parts of ACP."""

from pathlib import Path
from typing import Any

import pytest
from crow_core.acp.schema import INVALID_PARAMS, INVALID_REQUEST, METHOD_NOT_FOUND, NOT_FOUND
from crow_core.app import Crow
from crow_core.testing import Reply, ScriptedModel
from crow_core.testing.wire import RawClient, connect_raw
from crow_extensions.titles import titles
from crow_persistence.checks import check
from crow_persistence.database import Database
from crow_persistence.extension import persistence

pytestmark = pytest.mark.anyio

HI = [{"type": "text", "text": "hi"}]


def app(database: Database, *replies: Reply) -> Crow:
    """Return an app as in another process."""
    crow = Crow(ScriptedModel(replies or (lambda request: Reply("Well.")))).use(titles)
    return crow.use(persistence, url=database.url.render_as_string(hide_password=False), folder=database.folder)


async def open_session(wire: RawClient, cwd: Path, *, prompted: bool = True) -> str:
    id = (await wire.ask("session/new", {"cwd": str(cwd), "mcpServers": []}))["result"]["sessionId"]
    if prompted:
        await wire.ask("session/prompt", {"sessionId": id, "prompt": HI})
    return id


async def reopen(wire: RawClient, id: str, cwd: Path, method: str = "session/resume") -> dict[str, Any]:
    return await wire.ask(method, {"sessionId": id, "cwd": str(cwd), "mcpServers": []})


async def list_sessions(wire: RawClient, **params: Any) -> dict[str, Any]:
    """Return which sessions are listed, and whether each is archived."""
    listed = (await wire.ask("session/list", params))["result"]["sessions"]
    return {info["sessionId"]: info.get("archived", "not told") for info in listed}


async def test_archived_session_is_listed_only_if_it_is_asked_for(database: Database, tmp_path: Path):
    async with connect_raw(app(database), unstable=True) as wire:
        kept, archived = [await open_session(wire, tmp_path) for _ in range(2)]
        assert (await wire.ask("session/archive", {"sessionId": archived}))["result"] == {}
        for params in ({}, {"archived": None}, {"archived": "exclude"}, {"cwd": str(tmp_path)}):
            assert await list_sessions(wire, **params) == {kept: False}
        assert await list_sessions(wire, archived="include") == {kept: False, archived: True}
        assert await list_sessions(wire, archived="only") == {archived: True}
        assert await list_sessions(wire, archived="only", cwd="/elsewhere") == {}
        wrong = await wire.ask("session/list", {"archived": "sometimes"})
        assert wrong["error"]["code"] == INVALID_PARAMS
    async with connect_raw(app(database), unstable=True) as wire:  # another process
        assert (await wire.ask("session/archive", {"sessionId": archived}))["result"] == {}
        assert await list_sessions(wire, archived="only") == {archived: True}
        for _ in range(2):
            assert (await wire.ask("session/unarchive", {"sessionId": archived}))["result"] == {}
        assert await list_sessions(wire) == {kept: False, archived: False}
    assert check(database) == []


async def test_archive_ends_the_running_turn_and_keeps_the_history(database: Database, tmp_path: Path):
    crow = app(database, Reply("I think", hang=True), Reply("Well."))
    async with connect_raw(crow, unstable=True) as wire:
        id = await open_session(wire, tmp_path, prompted=False)
        wire.send("turn", "session/prompt", {"sessionId": id, "prompt": HI})
        while "ink" not in str(await wire.receive()):
            pass
        assert (await wire.ask("session/archive", {"sessionId": id}))["result"] == {}
        (ended,) = (message for message in wire.received if message.get("id") == "turn")
        assert ended["result"]["stopReason"] == "cancelled"
        assert not crow.sessions
        assert (await wire.ask("session/prompt", {"sessionId": id, "prompt": HI}))["error"]["code"] == NOT_FOUND
        assert "result" in await reopen(wire, id, tmp_path, "session/load")
        assert len(crow.sessions[id].log) > 2


async def test_session_stays_archived_while_it_goes_on_until_it_is_unarchived(database: Database, tmp_path: Path):
    async with connect_raw(app(database), unstable=True) as wire:
        id = await open_session(wire, tmp_path)
        await wire.ask("session/archive", {"sessionId": id})
        await reopen(wire, id, tmp_path)
        await wire.ask("session/prompt", {"sessionId": id, "prompt": HI})
        assert await list_sessions(wire, archived="include") == {id: True}
        await wire.ask("session/unarchive", {"sessionId": id})
        await wire.ask("session/prompt", {"sessionId": id, "prompt": HI})
        assert await list_sessions(wire) == {id: False}


async def test_fork_of_an_archived_session_is_not_archived(database: Database, tmp_path: Path):
    async with connect_raw(app(database), unstable=True) as wire:
        id = await open_session(wire, tmp_path)
        await wire.ask("session/archive", {"sessionId": id})
        fork = (await reopen(wire, id, tmp_path, "session/fork"))["result"]["sessionId"]
        await wire.ask("session/prompt", {"sessionId": fork, "prompt": HI})
        assert await list_sessions(wire, archived="include") == {fork: False, id: True}


async def test_archived_sessions_are_listed_in_pages(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("crow_core.agent.acp_agent.PAGE_SIZE", 2)
    async with connect_raw(app(database), unstable=True) as wire:
        ids = [await open_session(wire, tmp_path) for _ in range(6)]
        for id in ids[::2]:
            await wire.ask("session/archive", {"sessionId": id})
        found: list[str] = []
        params: dict[str, Any] = {"archived": "only"}
        while True:
            page = (await wire.ask("session/list", params))["result"]
            found += [info["sessionId"] for info in page["sessions"]]
            if not (cursor := page.get("nextCursor")):
                break
            params["cursor"] = cursor
    assert found == ids[::2][::-1]


async def test_session_of_another_process_is_not_archived_under_it(database: Database, tmp_path: Path):
    async with connect_raw(app(database), unstable=True) as one, connect_raw(app(database), unstable=True) as other:
        id = await open_session(one, tmp_path)
        error = (await other.ask("session/archive", {"sessionId": id}))["error"]
        assert error["code"] == INVALID_REQUEST
        assert "Close it there" in error["data"]["details"]
        assert await list_sessions(one) == {id: False}


@pytest.mark.parametrize(
    ("method", "more"),
    [("session/archive", {}), ("session/unarchive", {}), ("session/status", {}), ("session/set_title", {"title": "x"})],
)
async def test_unknown_and_deleted_sessions_are_not_found(
    method: str, more: dict[str, Any], database: Database, tmp_path: Path
):
    async with connect_raw(app(database), unstable=True) as wire:
        id = await open_session(wire, tmp_path)
        await wire.ask("session/delete", {"sessionId": id})
        for unknown in (id, "unknown", ""):
            error = (await wire.ask(method, {"sessionId": unknown, **more}))["error"]
            assert error["code"] == NOT_FOUND
            assert error["data"]["sessionId"] == unknown
        assert (await wire.ask(method, {**more}))["error"]["code"] == INVALID_PARAMS


async def get_title(wire: RawClient, id: str) -> str | None:
    listed = (await wire.ask("session/list", {"archived": "include"}))["result"]["sessions"]
    return next((info.get("title") for info in listed if info["sessionId"] == id), None)


async def test_title_of_the_client_is_stored_before_the_answer_and_stays(database: Database, tmp_path: Path):
    async with connect_raw(app(database), unstable=True) as wire:
        id = await open_session(wire, tmp_path)
        set_to = await wire.ask("session/set_title", {"sessionId": id, "title": "  All about\n crows\x1b[31m "})
        title = set_to["result"]["title"]
        assert title.startswith("All about crows")
        assert title.isprintable()
        assert await get_title(wire, id) == title
        await wire.ask("session/prompt", {"sessionId": id, "prompt": HI})
        await wire.ask("session/close", {"sessionId": id})
        assert await get_title(wire, id) == title
        await wire.ask("session/set_title", {"sessionId": id, "title": "Closed"})
        assert await get_title(wire, id) == "Closed"
        await reopen(wire, id, tmp_path)
        await wire.ask("session/prompt", {"sessionId": id, "prompt": HI})
        assert await get_title(wire, id) == "Closed"


async def test_title_that_is_set_before_the_first_message_is_not_replaced(database: Database, tmp_path: Path):
    async with connect_raw(app(database), unstable=True) as wire:
        id = await open_session(wire, tmp_path, prompted=False)
        assert (await wire.ask("session/set_title", {"sessionId": id, "title": "Mine"}))["result"] == {"title": "Mine"}
        await wire.ask("session/prompt", {"sessionId": id, "prompt": HI})
        assert await get_title(wire, id) == "Mine"


@pytest.mark.parametrize("title", ["", " \n\t", None, 7, ["x"]])
async def test_unusable_title_is_refused(title: Any, database: Database, tmp_path: Path):
    async with connect_raw(app(database), unstable=True) as wire:
        id = await open_session(wire, tmp_path)
        before = await get_title(wire, id)
        answer = await wire.ask("session/set_title", {"sessionId": id, "title": title})
        assert answer["error"]["code"] == INVALID_PARAMS
        assert await get_title(wire, id) == before


async def test_long_title_is_shortened_and_the_stored_one_is_returned(database: Database, tmp_path: Path):
    async with connect_raw(app(database), unstable=True) as wire:
        id = await open_session(wire, tmp_path)
        answer = await wire.ask("session/set_title", {"sessionId": id, "title": "crow " * 1000})
        assert len(answer["result"]["title"]) <= 200
        assert await get_title(wire, id) == answer["result"]["title"]


async def test_status_says_whether_a_session_is_open_and_changes_nothing(database: Database, tmp_path: Path):
    crow = app(database)
    async with connect_raw(crow, unstable=True) as wire, connect_raw(crow, unstable=True) as other:
        id = await open_session(wire, tmp_path)
        for client in (wire, other):
            assert (await client.ask("session/status", {"sessionId": id}))["result"] == {"status": "open"}
        await wire.ask("session/close", {"sessionId": id})
        assert (await other.ask("session/status", {"sessionId": id}))["result"] == {"status": "saved"}
        assert not crow.sessions
        await wire.ask("session/archive", {"sessionId": id})
        assert (await other.ask("session/status", {"sessionId": id}))["result"] == {"status": "saved"}


async def test_stable_client_sees_no_archived_sessions_and_has_no_methods_for_them(database: Database, tmp_path: Path):
    async with connect_raw(app(database), unstable=True) as wire:
        kept, archived = [await open_session(wire, tmp_path) for _ in range(2)]
        await wire.ask("session/archive", {"sessionId": archived})
        for id in (kept, archived):
            await wire.ask("session/close", {"sessionId": id})
    async with connect_raw(app(database)) as wire:
        assert await list_sessions(wire, archived="include") == {kept: "not told"}
        for method in ("session/archive", "session/unarchive", "session/set_title", "session/status", "auth/status"):
            answer = await wire.ask(method, {"sessionId": kept, "title": "x"})
            assert answer["error"]["code"] == METHOD_NOT_FOUND
        assert "result" in await reopen(wire, archived, tmp_path, "session/load")
