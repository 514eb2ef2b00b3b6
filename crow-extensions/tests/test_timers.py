"""Timers: /every and /at prompt the model while a session is open, and no turn runs."""

import asyncio
import time
from collections.abc import Generator
from datetime import datetime
from datetime import time as TimeOfDay
from typing import Any

import pytest
from crow_core.acp.schema import ResumeSessionRequest, SessionInfoUpdate, TextBlock, UserMessageChunk
from crow_core.app import Crow
from crow_core.errors import ModelError
from crow_core.mcp.server import Server
from crow_core.testing import Editor, MemoryStore, Reply, ScriptedModel, connect
from crow_extensions.commands import commands
from crow_extensions.timed_turns import find_next, parse_period
from crow_extensions.timers import TURNS, timers
from crow_testing.version_2 import connect_2
from fastmcp import FastMCP

pytestmark = pytest.mark.anyio


def app(model: ScriptedModel, *servers: Server, **options: Any) -> Crow:
    return Crow(model, servers=servers).use(commands).use(timers, **options)


def shown(editor: Editor) -> list[str]:
    return [each.content.text for each in editor.of(UserMessageChunk) if isinstance(each.content, TextBlock)]


def turns(editor: Editor) -> list[str]:
    """Return the beginnings and ends of turns that nobody prompted."""
    metas = [each.meta for each in editor.of(SessionInfoUpdate)]
    return [meta["crow"]["turn"] for meta in metas if isinstance(meta, dict) and "turn" in meta.get("crow", {})]


async def ask(editor: Editor, session: str, *prompts: str) -> str:
    """Send prompts, and return what was answered to the last one."""
    said = editor.text
    for prompt in prompts:
        said = editor.text
        await editor.prompt(session, prompt)
    return editor.text.removeprefix(said)


async def test_timer_prompts_without_a_request_of_the_client_until_it_is_ended():
    def answer(request: Any) -> Reply:
        [session] = crow.sessions.values()
        for timer in session.state[TURNS].open:
            timer.due += 3_600  # else there are more turns on a slow machine
        return Reply("It is green.")

    crow = app(model := ScriptedModel(answer))
    async with connect(crow) as editor:
        session = (await editor.new_session("/")).session_id
        answer = await ask(editor, session, "/every 1s Look at CI.")
        assert answer.startswith("The next turn is at ")
        assert answer.endswith(", if this session is open then. /every lists, /every off ends it.")
        await editor.until(lambda editor: turns(editor) == ["began", "ended"])
        assert shown(editor) == ["Look at CI."]
        assert editor.text.endswith("It is green.")
        assert (await ask(editor, session, "/every")).startswith("1. /every 1s Look at CI. · next at ")
        assert await ask(editor, session, "/every off", "/every") == (
            "There is no timer. To begin one: /every 10m WORDS, or /at 18:00 WORDS"
        )
    assert model.requests[0]["messages"][-1]["content"] == "Look at CI."


async def test_timer_waits_until_no_turn_runs_and_its_turns_follow_each_other():
    server, calling = FastMCP("demo"), Reply(tool_calls=[{"name": "demo_work", "arguments": {}}])
    model = ScriptedModel([calling, Reply("Worked."), Reply("First."), Reply("Second.")])
    crow = app(model, Server("demo", lambda: server, shared=True))

    @server.tool
    async def work() -> str:
        [session] = crow.sessions.values()
        for timer in session.state[TURNS].open:
            timer.due = time.time() - 1_000  # as if the turn took long
        session.state[TURNS].look()
        return "worked"

    async with connect(crow) as editor:
        session = (await editor.new_session("/")).session_id
        await ask(editor, session, "/every 60m one", "/every 60m two", "work")
        await editor.until(lambda editor: turns(editor) == ["began", "ended", "began", "ended"])
        assert shown(editor) == ["one", "two"]
        assert editor.text.endswith("Worked.First.Second.")
        listed = await ask(editor, session, "/every")
        assert listed.count("1 times so far, 1 of 200 requests") == 2


async def test_timer_of_a_time_of_the_day_fires_once():
    model = ScriptedModel([Reply("Good evening.")])
    crow = app(model)
    async with connect(crow) as editor:
        session = (await editor.new_session("/")).session_id
        await ask(editor, session, "/at 18:00 Say good evening.")
        make_due(crow)
        await editor.until(lambda editor: turns(editor) == ["began", "ended"])
        assert (await ask(editor, session, "/at")).startswith("There is no timer.")
    assert editor.text.count("Good evening.") == 1


def make_due(crow: Crow) -> None:
    """Let the time of each timer come."""
    [session] = crow.sessions.values()
    for timer in session.state[TURNS].open:
        timer.due = time.time()
    session.state[TURNS].look()


async def test_timer_ends_at_its_limit_and_one_whose_turn_fails_goes_on():
    model = ScriptedModel([Reply(error=ModelError("The model is away.")), Reply("Here.")])
    crow = app(model, requests=2)
    async with connect(crow) as editor:
        session = (await editor.new_session("/")).session_id
        await ask(editor, session, "/every 10m Look.")
        make_due(crow)
        await editor.until(lambda editor: turns(editor) == ["began", "ended"])
        assert "The model is away." in editor.thoughts
        make_due(crow)
        ended = "/every 10m Look. is ended. The budget is used up: 2 of 2 requests."
        await editor.until(lambda editor: ended in editor.thoughts)
        assert (await ask(editor, session, "/every")).startswith("There is no timer.")


async def test_cancel_ends_the_turn_of_a_timer_and_not_the_timer():
    model = ScriptedModel([Reply("Looked.")])
    crow = app(model)
    async with connect(crow) as editor:
        session = (await editor.new_session("/")).session_id
        await ask(editor, session, "/every 10m Look.")
        make_due(crow)
        await editor.until(lambda editor: turns(editor) == ["began"])
        await editor.cancel(session)
        await editor.until(lambda editor: turns(editor) == ["began", "ended"])
        assert (await ask(editor, session, "/every")).startswith("1. /every 10m Look.")


async def test_timers_end_with_the_session_which_says_so_when_it_is_opened_again():
    store = MemoryStore()

    def restarted() -> Crow:
        crow = app(ScriptedModel([Reply("Hello.")]))
        crow.store = store
        return crow

    async with connect(restarted()) as editor:
        session = (await editor.new_session("/")).session_id
        await ask(editor, session, "hi", "/every 10m Look at CI.")
    async with connect(restarted()) as editor:
        await editor.request("session/resume", ResumeSessionRequest(session_id=session, cwd="/", mcp_servers=[]))
        await editor.until(lambda editor: "Ended with the session: /every 10m Look at CI." in editor.thoughts)
        assert await ask(editor, session, "/every off") == "All timers are ended."
        assert await ask(editor, session, "/every off") == "There is no timer."


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("/every 0s Look.", "'0s' is no usable time: from 1s to 366d there may be between two turns."),
        (
            "/every 999999999999d Look.",
            "'999999999999d' is no usable time: from 1s to 366d there may be between two turns.",
        ),
        ("/every day Look.", "'day' says not how often. Write it as 30s, 10m, 2h, 1h30m or 1d: /every 10m WORDS."),
        ("/at 25:00 Look.", "'25:00' is no time of the day. Write it as 18:00: /at 18:00 WORDS."),
        ("/at 18:00+02:00 Look.", "'18:00+02:00' is no time of the day. Write it as 18:00: /at 18:00 WORDS."),
        ("/every 10m", "Say what to do: /every 10m WORDS."),
        ("/every off 3", "There is no timer 3. /every lists them."),
    ],
)
async def test_what_cannot_be_used_is_told_in_a_sentence(prompt: str, says: str):
    async with connect(app(ScriptedModel([]))) as editor:
        session = (await editor.new_session("/")).session_id
        assert await ask(editor, session, prompt) == says


def test_periods_are_added_up():
    assert (parse_period("1h30m"), parse_period("2D")) == (5_400, 172_800)


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.posix
@pytest.mark.usefixtures("berlin")
@pytest.mark.parametrize(
    ("now", "at", "hours"),
    [
        (datetime(2026, 3, 28, 12), TimeOfDay(12), 23),  # the night has an hour less
        (datetime(2026, 3, 29, 0), TimeOfDay(2, 30), 2.5),  # a time that is left out
        (datetime(2026, 10, 24, 12), TimeOfDay(12), 25),
        (datetime(2026, 10, 25, 2, 30, fold=1), TimeOfDay(2, 30), 24),  # the second 2:30 of the night
        (datetime(2026, 6, 1, 12), TimeOfDay(18), 6),
    ],
)
def test_time_of_the_day_is_that_of_the_local_clock(now: datetime, at: TimeOfDay, hours: float):
    assert find_next(at, now) - now.timestamp() == hours * 3_600


async def test_a_client_of_the_second_version_is_told_that_the_turn_of_a_timer_runs():
    work, calling = FastMCP("demo"), Reply("Looking.", tool_calls=[{"name": "demo_work", "arguments": {}}])
    started, go_on = asyncio.Event(), asyncio.Event()

    @work.tool(name="work")
    async def look() -> str:
        started.set()
        await go_on.wait()
        return "worked"

    crow = app(ScriptedModel([calling, Reply("It is green.")]), Server("demo", lambda: work, shared=True))
    async with connect_2(crow) as client:
        session = await client.open()
        assert await client.prompt(session, "/every 1s Look at CI.") == "end_turn"
        states = len(client.states())
        await started.wait()
        assert client.states()[states:] == ["running"]
        assert client.of("user_message_chunk")[-1]["content"] == {"type": "text", "text": "Look at CI."}
        go_on.set()
        await client.until(lambda client: len(client.ends()) == 2)
        assert client.states()[states : states + 2] == ["running", "idle"]
        assert client.ends()[-1]["stopReason"] == "end_turn"
        assert client.text.endswith("It is green.")
        assert await client.prompt(session, "/every off") == "end_turn"
