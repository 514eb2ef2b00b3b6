"""Durable workflows: what has ended is not done again, whatever happens to the process."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from crow_agent import Agent
from crow_agent.workflows import (
    WorkflowCancelled,
    WorkflowChanged,
    WorkflowConflict,
    WorkflowError,
    WorkflowFailed,
    WorkflowQueue,
    answer,
    approve,
    fork,
    list_waiting,
    list_workflows,
    open_workflows,
    resume,
    sleep,
    step,
    workflow,
)
from crow_agent.workflows.values import to_seconds
from crow_core.errors import ModelError
from crow_core.messages.message import INTERRUPTED
from crow_core.testing import Reply
from pydantic import BaseModel

Make = Callable[..., Agent]
Open = Callable[..., Any]
PROGRAM = Path(__file__).with_name("workflow_program.py")


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


def test_import_of_workflows_loads_no_engine() -> None:
    program = """
import sys
from crow_agent.workflows import approve, sleep, step, workflow

@step
async def publish(text: str) -> None: ...

@workflow(queue="releases", version="1")
async def release(v: str) -> None: ...

print([name for name in ("dbos", "sqlalchemy", "stamina") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


class Plan(BaseModel):
    steps: list[str]


@dataclass
class Published:
    text: str


def test_workflow_prompts_waits_for_approval_and_publishes(make_agent: Make, opened: Open, url: str) -> None:
    async def main() -> None:
        given = Reply(tool_calls=[{"name": "give_result", "arguments": {"steps": ["tag"]}}])
        agent = make_agent(given, Reply("Did it."), tools=[])

        @step
        def publish(text: str) -> Published:
            return Published(text)

        @workflow(queue="releases", version="1")
        async def release(v: str) -> Published | None:
            s = await agent.session()
            assert s.id == "rel-1.2-1"
            plan = await s.prompt(f"Plan {v}", output=Plan)
            assert plan.output == Plan(steps=["tag"])
            if await approve(plan, timeout="3d"):
                return await publish((await s.prompt("Do it")).text)
            return None

        async with agent, opened(release):
            handle = await release.start("1.2", id="rel-1.2")
            await until_waiting(url)
            (waiting,) = await list_waiting(url=url)
            assert (waiting.workflow_id, waiting.value, waiting.seconds) == ("rel-1.2", {"steps": ["tag"]}, 3 * 86400)
            await handle.approve()
            assert await handle.result() == Published("Did it.")
            again = await release.start("1.2", id="rel-1.2")
            assert await again.result() == Published("Did it.")
            with pytest.raises(WorkflowConflict, match=r"The id 'rel-1.2' belongs to a run of release with other"):
                await release.start("1.3", id="rel-1.2")
        assert [(run.id, run.state) for run in await list_workflows(url=url)] == [("rel-1.2", "done")]

    asyncio.run(main())


def test_interrupted_workflow_goes_on_and_repeats_nothing(make_agent: Make, opened: Open, url: str) -> None:
    async def main() -> None:
        done: list[str] = []

        @step
        async def note(text: str) -> str:
            done.append(text)
            return text

        @workflow
        async def work() -> list[str]:
            s = await agent.session()
            first = await s.prompt("First?")
            noted = await note(first.text)
            assert await approve("Go on?")
            second = await s.prompt("Second?")
            return [noted, second.text]

        agent = make_agent(Reply("One."))
        async with agent, opened(work):
            await work.start(id="w")
            await until_waiting(url)
        await answer("w", True, url=url)
        agent = make_agent(Reply("Two."))
        async with agent, opened(work):
            assert await work.retrieve("w").result() == ["One.", "Two."]
            model: Any = agent.model
            assert [message["content"] for message in model.requests[0]["messages"][1:]][-3:] == [
                "First?",
                "One.",
                "Second?",
            ]
        assert done == ["One."]

    asyncio.run(main())


def test_prompt_waits_until_the_model_is_back(make_agent: Make, opened: Open) -> None:
    async def main() -> None:
        down = Reply(error=ModelError("The model is down.", retry=True))
        agent = make_agent(down, Reply("Here I am."))

        @workflow
        async def ask() -> str:
            return (await agent.prompt("Hello?")).text

        async with agent, opened(ask):
            assert await (await ask.start()).result() == "Here I am."

    asyncio.run(main())


def test_error_that_does_not_pass_fails_the_workflow_with_its_sentence(make_agent: Make, opened: Open) -> None:
    async def main() -> None:
        agent = make_agent(Reply(error=ModelError("The key is wrong.")))

        @workflow
        async def ask() -> str:
            return (await agent.prompt("Hello?")).text

        async with agent, opened(ask):
            handle = await ask.start(id="a")
            with pytest.raises(WorkflowFailed, match=r"^Workflow a failed: The key is wrong\.$"):
                await handle.result()
            assert (await handle.status()).state == "failed"

    asyncio.run(main())


def test_prompts_beside_others_have_sessions_that_do_not_depend_on_timing(make_agent: Make, opened: Open) -> None:
    async def main() -> None:
        def reply(request: Any) -> Reply:
            asked = request["messages"][-1]["content"]
            return Reply(f"re {asked}", pace=0.02 if asked.startswith("slow") else 0)

        agent = make_agent(reply)

        async def talk(pace: str) -> list[str]:
            s = await agent.session()
            return [s.id, (await s.prompt(f"{pace} 1")).text, (await s.prompt(f"{pace} 2")).text]

        @workflow
        async def work() -> Any:
            both = await asyncio.gather(talk("slow"), talk("fast"))
            mapped = await agent.map(["slow a", "fast b"], at_once=2)
            return [both, [(each.session_id, each.text) for each in mapped]]

        async with agent, opened(work):
            both, mapped = await (await work.start(id="w")).result()
        assert both == [["w-1.1", "re slow 1", "re slow 2"], ["w-2.1", "re fast 1", "re fast 2"]]
        assert mapped == [["w-3.1", "re slow a"], ["w-4.1", "re fast b"]]

    asyncio.run(main())


def test_approval_that_nobody_gives_in_time_is_a_no(opened: Open) -> None:
    @workflow
    async def ask() -> bool:
        await sleep(0.01)
        return bool(await approve("Go on?", timeout=0.05))

    async def main() -> None:
        async with opened(ask):
            assert await (await ask.start()).result() is False

    asyncio.run(main())


@pytest.mark.parametrize(
    ("given", "seconds"), [("3d", 259200), ("1h 30m", 5400), ("0.5s", 0.5), (2, 2), ("1w", 604800)]
)
def test_durations_are_seconds(given: Any, seconds: float) -> None:
    assert to_seconds(given) == seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("store", "moments"),
    [("sqlite", ["note", "publish", "put"]), ("postgresql", ["note"])],
    indirect=["store"],
)
def test_killed_workflow_completes_once_and_repeats_no_completed_call(
    tmp_path: Path, store: str, moments: list[str]
) -> None:
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "CROW_HOME": str(tmp_path / "crow"), "STORE": store}
    out = ""
    for moment in [*moments, "-"]:
        done = subprocess.run(
            [sys.executable, str(PROGRAM), moment], env=env, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == (0 if moment == "-" else -signal.SIGKILL), (moment, done.stderr)
        out += done.stdout
    assert json.loads(out) == ["rel-1.2-1", f"Turn 1: {INTERRUPTED}", f"published Turn 1: {INTERRUPTED}", "Turn 2: put"]
    effects = [line.split()[0] for line in (tmp_path / "effects").read_text().splitlines()]
    repeated = {"publish", "put"} & {*moments}
    expected = [name for name in ("note", "publish", "put") for _ in range(2 if name in repeated else 1)]
    assert effects == expected, "the step and `put` are repeated if they were interrupted"
    assert (tmp_path / "calls").read_text().splitlines() == ["1 user", "1 tool", "2 user", "2 tool"]


def test_changed_code_fails_with_one_sentence(make_agent: Make, opened: Open, url: str) -> None:
    async def main() -> None:
        @step
        async def one() -> int:
            return 1

        @step
        async def two() -> int:
            return 2

        def define(*steps: Any) -> Any:
            @workflow(name="work")
            async def work() -> list[int]:
                done = [await each() for each in steps]
                await approve("Go on?")
                return done

            return work

        async with opened(work := define(one, two)):
            await work.start(id="w")
            await until_waiting(url)
        async with opened(work := define(two, one)):
            with pytest.raises(WorkflowChanged, match=r"its step 1 was '.*one' and is now '.*two'"):
                await work.retrieve("w").result()

    asyncio.run(main())


def test_run_of_another_version_is_left_to_programs_of_that_version(
    opened: Open, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    def define(version: str) -> Any:
        @workflow(name="work", version=version)
        async def work() -> str:
            return f"{version} {bool(await approve('Go on?'))}"

        return work

    @workflow
    async def other() -> str:
        return "other"

    async def main() -> None:
        async with opened(work := define("1")):
            await work.start(id="w")
            await until_waiting(url)
        async with opened(work := define("2"), other):
            (warning,) = [record.getMessage() for record in caplog.records if record.name == "crow_agent"]
            assert warning.startswith("Workflow w runs version 1 of work, and this program has version 2: let a")
            assert await (await other.start()).result() == "other"
            (status,) = [each for each in await list_workflows(url=url) if each.id == "w"]
            assert (status.state, status.version, status.is_stranded) == ("running", "1", True)
            await answer("w", True, url=url)
            assert await (await work.start(id="v")).status()
        async with opened(work := define("1"), other):  # not the same program as before: it has `other`, too
            assert await work.retrieve("w").result() == "1 True"

    asyncio.run(main())


def test_fork_moves_a_run_to_programs_of_another_version(opened: Open, url: str) -> None:
    done: list[str] = []

    @step
    async def note() -> str:
        done.append("noted")
        return "noted"

    def define(version: str) -> Any:
        @workflow(name="work", version=version)
        async def work() -> str:
            return f"{version} {await note()} {(await approve('Go on?')).note}"

        return work

    async def main() -> None:
        async with opened(work := define("1")):
            await work.start(id="w")
            await until_waiting(url)
        async with opened(define("2")):
            moved = await fork("w", step=2, id="v", version="2", url=url)
            while not await list_waiting("v", url=url):
                await asyncio.sleep(0.02)
            await moved.approve(note="fine")
            assert await moved.result() == "2 noted fine"
            assert (await moved.status()).version == "2"
        assert done == ["noted"]

    asyncio.run(main())


def test_step_is_tried_again_as_often_as_it_says(opened: Open) -> None:
    attempts: list[int] = []

    @step(retries=2, delay=0.01, retry_on=(OSError,))
    async def fetch() -> int:
        attempts.append(1)
        if len(attempts) < 3:
            raise OSError("no route")
        return len(attempts)

    @step(retries=2, delay=0.01, retry_on=(OSError,))
    async def fail() -> None:
        attempts.append(1)
        raise ValueError("never")

    @workflow
    async def work() -> list[Any]:
        first = await fetch()
        try:
            await fail()
        except ValueError as error:
            return [first, len(attempts), str(error)]
        return []

    async def main() -> None:
        async with opened(work):
            assert await (await work.start()).result() == [3, 4, "never"]

    asyncio.run(main())


def test_workflow_starts_others_and_waits_for_them(opened: Open, url: str) -> None:
    @workflow
    async def child(n: int) -> Published:
        return Published(str(n))

    @workflow
    async def parent() -> list[str]:
        handles = [await child.start(n) for n in range(2)]
        return [(await handle.result()).text for handle in handles]

    async def main() -> None:
        async with opened(parent, child):
            handle = await parent.start(id="p")
            assert await handle.result() == ["0", "1"]
            ids = sorted(each.id for each in await list_workflows(url=url) if each.parent == "p")
            assert ids == ["p-1", "p-2"]

    asyncio.run(main())


def test_cancelled_workflow_runs_nothing_more(make_agent: Make, opened: Open, url: str) -> None:
    async def main() -> None:
        agent = make_agent(Reply("Hel", hang=True))

        @workflow
        async def ask() -> str:
            return (await agent.prompt("Hello?")).text

        async with agent, opened(ask):
            handle = await ask.start()
            model: Any = agent.model
            while not model.requests:
                await asyncio.sleep(0.02)
            await handle.cancel()
            with pytest.raises(WorkflowCancelled):
                await handle.result()
            assert (await handle.status()).state == "cancelled"

    asyncio.run(main())


def test_process_beside_another_has_an_executor_of_its_own(opened: Open, url: str, tmp_path: Path) -> None:
    @workflow
    async def work() -> bool:
        return bool(await approve("Go on?"))

    async def main() -> None:
        async with opened(work) as engine:
            assert engine.executor == "local"
            program = f"""
import asyncio
from crow_agent.workflows import approve, open_workflows, workflow

@workflow
async def work() -> bool:
    return bool(await approve("Go on?"))

async def main():
    async with open_workflows(url={url!r}) as engine:
        handle = await work.start(id="w")
        print(engine.executor, (await handle.status()).state)

asyncio.run(main())
"""
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=-1)
            out, _ = await process.communicate()
            assert out == b"local-2 running\n"
        async with opened(work):
            await until_waiting(url)
            await answer("w", True, url=url)
            assert await work.retrieve("w").result() is True

    asyncio.run(main())


@pytest.mark.parametrize("closed_first", ["agent", "engine"])
def test_tasks_that_were_interrupted_go_on_in_their_sessions(
    make_agent: Make, opened: Open, url: str, closed_first: str
) -> None:
    async def main() -> None:
        requests: list[str] = []
        hanging = {"b 1", "c 2"}
        two_hang = asyncio.Event()

        def reply(request: Any) -> Reply:
            asked = request["messages"][-1]["content"]
            requests.append(asked)
            if len(hanging & {*requests}) == 2:
                two_hang.set()
            return Reply(f"re {asked}", hang=asked in hanging)

        async def talk(name: str) -> list[str]:
            s = await agent.session()
            return [s.id, *[(await s.prompt(f"{name} {n}")).text for n in (1, 2)]]

        @workflow
        async def work() -> Any:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(talk(name)) for name in "abc"]
            return [task.result() for task in tasks]

        agent = make_agent(reply)
        async with agent, opened(work):
            handle = await work.start(id="w")
            await two_hang.wait()
            if closed_first == "agent":
                await agent.close()
            assert (await handle.status()).state == "running"
        (status,) = await list_workflows(url=url)
        assert (status.state, status.error) == ("running", "")
        hanging.clear()
        requests.clear()
        agent = make_agent(reply)
        async with agent, opened(work):
            result = await work.retrieve("w").result()
        assert result == [[f"w-{n}.1", f"re {name} 1", f"re {name} 2"] for n, name in enumerate("abc", 1)]
        assert {"b 1", "b 2", "c 2"} <= {*requests} <= {"a 2", "b 1", "b 2", "c 2"}, "what had ended is not asked again"

    asyncio.run(main())


def test_agent_of_another_program_is_asked_at_least_once(opened: Open, url: str, tmp_path: Path) -> None:
    async def main() -> None:
        @workflow
        async def work() -> list[str]:
            s = await agent.session()
            first = await s.prompt("say one")
            assert await approve("Go on?")
            return [first.text, (await s.prompt("say two")).text]

        command = [sys.executable, "-m", "crow_testing.agent_without_model"]
        agent = Agent.connect(command, cwd=tmp_path)
        async with agent, opened(work):
            await work.start(id="w")
            await until_waiting(url)
        await answer("w", True, url=url)
        agent = Agent.connect(command, cwd=tmp_path)
        async with agent, opened(work):
            assert await work.retrieve("w").result() == ["one", "two"]

    asyncio.run(main())


def test_queue_gives_work_by_priority_and_limits_tenants(opened: Open, url: str) -> None:
    began: list[str] = []
    running: list[str] = []
    most: dict[str, int] = {}
    queue = WorkflowQueue("jobs", per_tenant=1)
    first = WorkflowQueue("ordered", concurrency=1)

    @workflow(queue=queue)
    async def job(tenant: str, n: int) -> None:
        running.append(tenant)
        most[tenant] = max(most.get(tenant, 0), running.count(tenant))
        await sleep(0.05)
        running.remove(tenant)

    @workflow(queue=first)
    async def ordered(name: str) -> None:
        began.append(name)

    async def main() -> None:
        async with opened(job, ordered, listen=[]):
            for name, priority in (("low", 9), ("high", 1), ("middle", 5)):
                await ordered.start(name, id=name, priority=priority)
            for n in range(2):
                for tenant in ("a", "b"):
                    await job.start(tenant, n, id=f"{tenant}{n}", tenant=tenant)
            assert {each.state for each in await list_workflows(url=url)} == {"queued"}
        async with opened(job, ordered):
            for name in ("low", "high", "middle"):
                await ordered.retrieve(name).result()
            for name in ("a0", "a1", "b0", "b1"):
                await job.retrieve(name).result()
        assert began == ["high", "middle", "low"]
        assert most == {"a": 1, "b": 1}

    asyncio.run(main())


def test_schedule_starts_a_workflow_by_itself(opened: Open) -> None:
    times: list[datetime] = []
    fired = asyncio.Event()

    @workflow(schedule="* * * * * *")
    async def tick(at: datetime) -> None:
        times.append(at)
        fired.set()

    async def main() -> None:
        async with opened(tick):
            await fired.wait()
        assert times[0].tzinfo is not None
        assert times[0].microsecond == 0

    asyncio.run(main())


def test_resumed_workflow_goes_on_with_the_step_that_failed(opened: Open, url: str) -> None:
    done: list[str] = []

    @step
    async def first() -> None:
        done.append("first")

    @step
    async def second() -> str:
        done.append("second")
        if done.count("second") == 1:
            raise OSError("no route")
        return "there"

    @workflow
    async def work() -> str:
        await first()
        return await second()

    async def main() -> None:
        async with opened(work):
            handle = await work.start(id="w")
            with pytest.raises(WorkflowFailed, match="no route"):
                await handle.result()
            await resume("w", url=url)
            assert await handle.result() == "there"
            with pytest.raises(WorkflowError, match="Workflow w is done"):
                await resume("w", url=url)
        assert done == ["first", "second", "second"]

    asyncio.run(main())


def test_fork_of_a_workflow_has_its_results_and_forks_its_sessions(make_agent: Make, opened: Open, url: str) -> None:
    async def main() -> None:
        def reply(request: Any) -> Reply:
            return Reply(f"re {request['messages'][-1]['content']}")

        def read(request: Any) -> list[str]:
            return [message["content"] for message in request["messages"] if message["role"] != "system"]

        agent = make_agent(reply)

        @workflow
        async def work() -> list[str]:
            s = await agent.session()
            plan = await s.prompt("Plan")
            (other,) = await agent.map(["Beside"])
            word = "Do" if await approve(plan) else "Leave"
            return [s.id, plan.text, other.text, (await s.prompt(word)).text]

        async with agent, opened(work):
            handle = await work.start(id="w")
            await until_waiting(url)
            (waiting,) = await list_waiting("w", url=url)
            await handle.approve(False)
            assert await handle.result() == ["w-1", "re Plan", "re Beside", "re Leave"]
            model: Any = agent.model
            del model.requests[:]
            again = await fork("w", step=int(waiting.label), id="v", url=url)
            while not await list_waiting("v", url=url):
                await asyncio.sleep(0.02)
            await again.approve()
            assert await again.result() == ["v-1", "re Plan", "re Beside", "re Do"]
            assert [read(request) for request in model.requests] == [["Plan", "re Plan", "Do"]]
            assert (await again.status()).forked_from == "w"
            twice = await fork("v", id="u", url=url)
            assert await twice.result() == ["u-1", "re Plan", "re Beside", "re Do"]
            assert len(model.requests) == 1

    asyncio.run(main())


@workflow
async def first_of_two(x: str) -> str:
    return x


@workflow
async def second_of_two(x: str) -> str:
    return x


def test_id_of_another_workflow_is_refused_by_a_sentence(opened: Open) -> None:
    async def main() -> None:
        async with opened(first_of_two, second_of_two):
            assert await (await first_of_two.start("a", id="same")).result() == "a"
            with pytest.raises(WorkflowConflict, match="The id 'same' belongs to a run of another workflow"):
                await second_of_two.start("a", id="same")

    asyncio.run(main())


def test_resumed_and_forked_runs_wait_in_their_queue(opened: Open, url: str) -> None:
    running = most = 0
    fails, hold = True, asyncio.Event()

    @step
    async def work_alone() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            if fails:
                raise OSError("no route")
            for _ in range(5):
                await asyncio.sleep(0.02)
        finally:
            running -= 1

    @workflow(queue=WorkflowQueue("alone", concurrency=1))
    async def work() -> str:
        await hold.wait()
        await work_alone()
        return "done"

    async def main() -> None:
        nonlocal fails
        async with opened(work):
            cancelled = [await work.start(id=f"c{n}") for n in range(4)]
            for each in cancelled:
                await each.cancel()
            hold.set()
            failed = [await work.start(id=f"f{n}") for n in range(3)]
            for each in failed:
                with pytest.raises(WorkflowFailed):
                    await each.result()
            fails = False
            for each in cancelled + failed:
                await resume(each.id, url=url)
            forked = [await fork("f0", step=1, id=f"g{n}", url=url) for n in range(3)]
            for each in (*cancelled, *failed, *forked):
                assert await each.result() == "done"
                assert (await each.status()).queue == "alone"
        assert most == 1

    asyncio.run(main())


def test_database_that_is_down_is_named_by_the_error(opened: Open) -> None:
    async def main() -> None:
        url = "postgresql+psycopg://postgres@127.0.0.1:9/postgres"
        with pytest.raises(WorkflowError, match=r"The database postgresql.* of the workflows cannot be reached: "):
            async with open_workflows([first_of_two], url=url):
                pass

    asyncio.run(main())


def test_resumed_run_of_a_tenant_keeps_its_tenant(opened: Open, url: str) -> None:
    async def main() -> None:
        release = asyncio.Event()

        @workflow(queue=WorkflowQueue("tenants", per_tenant=1))
        async def work() -> str:
            await release.wait()
            return "done"

        async with opened(work):
            handles = [await work.start(id=f"w{n}", tenant="one") for n in range(3)]
            for each in handles:
                await each.cancel()
                await resume(each.id, url=url)
            moved = await fork("w0", id="v", url=url)
            release.set()
            assert [await each.result() for each in (*handles, moved)] == ["done"] * 4

    asyncio.run(main())
