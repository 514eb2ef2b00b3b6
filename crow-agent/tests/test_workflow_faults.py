"""Durable workflows while the clock jumps, the model is down, the disk is full or the program is updated."""

import asyncio
import sqlite3
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest
import stamina
from crow_agent import Agent, tool
from crow_agent.workflows import (
    WorkflowQueue,
    answer,
    approve,
    engine,
    fork,
    list_waiting,
    list_workflows,
    open_workflows,
    sleep,
    step,
    workflow,
)
from crow_core.errors import ModelError
from crow_core.testing import Reply
from dbos import _scheduler
from dbos._sys_db import SystemDatabase
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

Make = Callable[..., Agent]
Open = Callable[..., Any]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/workflows.db"


@pytest.fixture
def opened(url: str) -> Open:
    """Open some workflows in a database of the test."""

    @asynccontextmanager
    async def opened(*workflows: Any, **options: Any) -> AsyncGenerator[Any]:
        async with open_workflows(workflows, url=url, **options) as engine:
            yield engine

    return opened


async def until_waiting(url: str) -> None:
    while not await list_waiting(url=url):
        await asyncio.sleep(0.02)


@pytest.fixture
def jump(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that sets the clock of this process forward, or back."""
    read_clock, ahead = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: read_clock() + ahead[0])

    def jump(seconds: float) -> None:
        ahead[0] += seconds

    return jump


def test_approval_is_waited_for_while_the_clock_jumps_forward(
    opened: Open, url: str, jump: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SystemDatabase, "_notification_fallback_polling_interval", 0.02)  # it looks at the clock then

    @workflow
    async def ask(timeout: str) -> bool:
        return bool(await approve("Go on?", timeout=timeout))

    async def main() -> None:
        async with opened(ask):
            handle = await ask.start("1h", id="w")
            await until_waiting(url)
            jump(5 * 3600)
            assert await (await ask.start("0.2s")).result() is False
            await handle.approve()
            assert await handle.result() is True

    asyncio.run(main())


def test_waits_end_in_time_although_the_clock_is_set_back(opened: Open, jump: Callable[[float], None]) -> None:
    began = asyncio.Event()

    @workflow
    async def wait() -> bool:
        asyncio.get_running_loop().call_later(0.2, began.set)
        await sleep(0.4)
        asyncio.get_running_loop().call_later(0.2, began.set)
        return bool(await approve("Go on?", timeout=0.4))

    async def main() -> None:
        async with opened(wait):
            handle = await wait.start()
            for _ in range(2):
                await began.wait()
                began.clear()
                jump(-5 * 3600)
            assert await handle.result() is False

    asyncio.run(main())


class VirtualTime:
    """The time of DBOS's schedules, which goes on by what they wait: its `datetime` and its `threading`."""

    Thread = threading.Thread

    def __init__(self, now: datetime, until: datetime, jumps: dict[datetime, timedelta]) -> None:
        self.now, self.until, self.jumps = now, until, jumps
        virtual = self

        class VirtualDatetime(datetime):
            """The time of schedules."""

            @classmethod
            def now(cls, tz: tzinfo | None = None) -> Any:
                return virtual.now.astimezone(tz)

        class VirtualEvent(threading.Event):
            """Makes time go on where it is waited for with a timeout."""

            def wait(self, timeout: float | None = None) -> bool:
                assert timeout is not None
                if virtual.now + timedelta(seconds=timeout) > virtual.until:
                    return super().wait()
                virtual.now += timedelta(seconds=timeout)
                for at in [at for at in virtual.jumps if at <= virtual.now]:
                    virtual.now += virtual.jumps.pop(at)
                return self.is_set()

        self.Datetime, self.Event = VirtualDatetime, VirtualEvent


@pytest.mark.parametrize("jump", [0, 60, -60])
def test_schedule_starts_each_run_of_three_hours_once(
    jump: float, make_agent: Make, opened: Open, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`jump`: minutes by which the clock is set forward in the second hour."""
    began = datetime(2030, 1, 1, 12, 5, tzinfo=UTC)
    virtual = VirtualTime(began, began + timedelta(hours=3), {began + timedelta(minutes=70): timedelta(minutes=jump)})
    monkeypatch.setattr(_scheduler, "datetime", virtual.Datetime)
    monkeypatch.setattr(_scheduler, "threading", virtual)
    expected = [began + timedelta(minutes=minutes) for minutes in range(5, 180, 10)]

    async def main() -> None:
        times: list[datetime] = []
        agent = make_agent(lambda request: Reply("All is well."))

        @workflow(schedule="*/10 * * * *")
        async def check(at: datetime) -> str:
            times.append(at)
            return (await agent.prompt(f"What about {at:%H:%M}?")).text

        async with agent, opened(check):
            while len(await list_workflows(states=["done"], url=url)) < len(expected):
                await asyncio.sleep(0.05)
        assert sorted(times) == expected
        requests: Any = agent.model
        asked = [request["messages"][-1]["content"] for request in requests.requests]
        assert sorted(asked) == [f"What about {at:%H:%M}?" for at in expected]

    asyncio.run(main())


def test_prompt_waits_for_a_model_that_is_down_for_an_hour(
    make_agent: Make, opened: Open, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits: list[float] = []

    async def wait(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(stamina._core, "_smart_sleep", wait)
    done: list[str] = []

    @tool
    def note(text: str) -> str:
        """Write a note."""
        done.append(text)
        return "noted"

    def reply(request: dict[str, Any]) -> Reply:
        last = request["messages"][-1]
        if last["role"] == "user":
            call: Any = {"name": "note", "arguments": {"text": "here"}}
            return Reply(tool_calls=[call])
        if sum(waits) < 3600:
            return Reply(error=ModelError("The model is down.", retry=True))
        return Reply(f"It is {last['content']}.")

    async def main() -> None:
        agent = make_agent(reply, tools=[note])

        @workflow
        async def ask() -> str:
            return (await agent.prompt("Note it.")).text

        async with agent, opened(ask):
            assert await (await ask.start(id="w")).result() == "It is noted."
            model: Any = agent.model
            assert [each["role"] for each in model.requests[-1]["messages"]] == ["system", "user", "assistant", "tool"]

    asyncio.run(main())
    assert done == ["here"]
    assert waits == sorted(waits[:8]) + waits[8:], "the waits grow"
    assert max(waits) <= 60.25
    assert len(waits) < 80
    told = [record.getMessage() for record in caplog.records if record.name == "crow_agent"]
    assert told == [
        "Workflow w waits, and asks again for up to a day: The model is down.",
        "Workflow w goes on.",
    ]


def test_run_that_waits_goes_on_after_an_update_of_its_code_and_of_the_database(
    make_agent: Make, opened: Open, url: str, home: Path
) -> None:
    agents: list[Agent] = []

    def define(version: str, *words: str) -> Any:
        @workflow(name="work", version=version)
        async def work() -> str:
            session = await agents[-1].session()
            answers = [(await session.prompt(each)).text for each in words]
            given = await approve("Go on?")
            return f"{version} {bool(given)} {answers} {(await session.prompt('Last?')).text}"

        return work

    async def main() -> None:
        agents.append(make_agent(Reply("One.")))
        async with agents[-1], opened(work := define("1", "First?")):
            await work.start(id="w")
            await until_waiting(url)
        with closing(sqlite3.connect(home / "crow" / "crow.db")) as database:  # as an earlier crow has left it
            database.executescript(
                "DROP TABLE cells; DROP TABLE evaluations; UPDATE alembic_version SET version_num = '0004'"
            )
        agents.append(make_agent(Reply("Two."), Reply("Three.")))
        async with agents[-1], opened(new := define("2", "First?", "Second?")):
            moved = await fork("w", step=3, id="v", version="2", url=url)
            while not await list_waiting("v", url=url):
                await asyncio.sleep(0.02)
            await moved.approve()
            assert await moved.result() == "2 True ['One.', 'Two.'] Three."
            assert new.version == "2"
        agents.append(make_agent(Reply("Four.")))
        async with agents[-1], opened(work := define("1", "First?")):
            await answer("w", True, url=url)
            assert await work.retrieve("w").result() == "1 True ['One.'] Four."

    asyncio.run(main())


def test_fork_of_a_run_that_waits_waits_for_an_answer_of_its_own(opened: Open, url: str) -> None:
    @workflow
    async def work() -> bool:
        return bool(await approve("Go on?"))

    async def main() -> None:
        async with opened(work):
            first = await work.start(id="w")
            await until_waiting(url)
            second = await fork("w", url=url)
            while len(await list_waiting(url=url)) < 2:
                await asyncio.sleep(0.02)
            await second.approve(False)
            assert await second.result() is False
            await first.approve()
            assert await first.result() is True

    asyncio.run(main())


def test_scheduled_run_that_was_interrupted_is_finished_by_another_program(opened: Open, url: str) -> None:
    @workflow(schedule="* * * * * *")
    async def tick() -> bool:
        return bool(await approve("Go on?"))

    @workflow
    async def other() -> None: ...

    async def main() -> None:
        async with opened(tick):
            await until_waiting(url)
            id = (await list_waiting(url=url))[0].workflow_id
        async with opened(tick, other):
            await answer(id, True, url=url)
            assert await tick.retrieve(id).result() is True

    asyncio.run(main())


def test_queue_of_a_provider_limits_the_prompts_of_all_workflows(make_agent: Make, opened: Open) -> None:
    begun: list[float] = []

    def reply(request: Any) -> Reply:
        begun.append(time.monotonic())
        return Reply("Yes.")

    @workflow(queue=WorkflowQueue("provider", rate=(2, 1.0)))
    async def ask(words: str) -> str:
        return (await agent.prompt(words)).text

    @workflow
    async def first() -> list[str]:
        return [await (await ask.start(f"{n}?")).result() for n in range(2)]

    @workflow
    async def second() -> list[str]:
        handles = [await ask.start(f"{n}?") for n in range(3)]
        return [await handle.result() for handle in handles]

    agent = make_agent(reply)

    async def main() -> None:
        async with agent, opened(ask, first, second):
            runs = [await first.start(), await second.start()]
            assert [await run.result() for run in runs] == [["Yes."] * 2, ["Yes."] * 3]

    asyncio.run(main())
    assert begun[-1] - begun[0] > 0.5, "five prompts at two a second"


def test_disk_that_is_full_makes_a_workflow_wait(
    opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine, "STORE_INTERVAL", 0.05)
    is_full = False
    done: list[str] = []

    @step
    async def note(text: str) -> str:
        nonlocal is_full
        done.append(text)
        is_full = len(done) == 1
        return text + " " * 20_000

    @workflow
    async def work() -> list[str]:
        return [(await note("one")).strip(), (await note("two")).strip()]

    def limit(connection: Any, *_: Any) -> None:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages if is_full else 1 << 30}")

    async def main() -> None:
        nonlocal is_full
        async with opened(work) as running:
            event.listen(running.instance._sys_db.engine, "checkout", limit)
            handle = await work.start(id="w")
            while not caplog.messages:
                await asyncio.sleep(0.02)
            assert (await handle.status()).state == "running"
            is_full = False
            assert await handle.result() == ["one", "two"]

    asyncio.run(main())
    assert caplog.messages == [
        "Workflow w waits, as its progress cannot be stored (database or disk is full). It goes on by itself."
    ]
    assert done == ["one", "one", "two"], "a step whose result could not be stored runs again"


def test_workflow_waits_where_the_database_is_lost_before_its_first_session(opened: Open, make_agent: Make) -> None:
    agent, faults = make_agent(lambda _: Reply("done")), [2]

    @workflow
    async def work() -> str:
        return (await (await agent.session()).prompt("go")).text

    def lose(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if "forked_from" in statement and "attributes" in statement and statement.count(",") == 1 and faults[0]:
            faults[0] -= 1
            raise OperationalError(None, None, Exception("server closed the connection unexpectedly"))

    async def main() -> None:
        async with opened(work) as running:
            event.listen(running.instance._sys_db.engine, "before_cursor_execute", lose)
            assert await (await work.start()).result() == "done"

    asyncio.run(main())
    assert faults == [0]
