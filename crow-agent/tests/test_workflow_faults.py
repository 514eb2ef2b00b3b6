"""Durable workflows while the clock jumps, the model is down, the disk is full or the program is updated."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest
import stamina
from crow_agent import Agent, tool
from crow_agent.workflows import approve, list_waiting, list_workflows, open_workflows, sleep, workflow
from crow_core.errors import ModelError
from crow_core.testing import Reply
from dbos import _scheduler
from dbos._sys_db import SystemDatabase

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
