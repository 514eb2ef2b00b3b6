"""The examples run as programs of their own; agents share budget and cancellation."""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crow_agent import Agent, Budget, BudgetSpent, tool
from crow_core.testing import Reply, ScriptedServer

Make = Callable[..., Agent]

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_example(name: str, script: Callable[[dict[str, Any]], Reply], home: Path) -> tuple[str, int]:
    """Run an example and return its output and the number of requests to the model."""

    async def main() -> tuple[str, int]:
        async with ScriptedServer(script) as server:
            env = {
                "PATH": os.environ["PATH"],
                "HOME": str(home),
                "CROW_HOME": str(home / "crow"),
                "OPENAI_API_KEY": "key",
            }
            env |= {"OPENAI_BASE_URL": server.url, "CROW_MODEL": "scripted"}
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, EXAMPLES / f"{name}.py"), env=env, cwd=home, stdout=-1, stderr=-1
            )
            out, errors = await process.communicate()
            assert (process.returncode, errors.decode()) == (0, "")
            return out.decode(), len(server.requests)

    return asyncio.run(main())


def last_text(request: dict[str, Any]) -> str:
    """Return the last message of a request as text."""
    content = request["messages"][-1]["content"]
    return content if isinstance(content, str) else json.dumps(content)


def test_chain(home: Path) -> None:
    def script(request: dict[str, Any]) -> Reply:
        text = last_text(request)
        if "Outline" in text:
            return Reply(json.dumps({"title": "Crows", "points": [f"p{n}" for n in range(9)]}))
        return Reply("Les corbeaux.") if "French" in text else Reply("Crows." if "p4." in text else "too many points")

    assert run_example("chain", script, home) == ("Les corbeaux.\n", 3)


@pytest.mark.slow
def test_parallel(home: Path) -> None:
    def script(request: dict[str, Any]) -> Reply:
        return Reply(json.dumps({"approve": "its speed" in last_text(request), "reason": "so"}))

    out, requests = run_example("parallel", script, home)
    assert out == "security: no, so\nspeed: yes, so\nreadability: no, so\nnot approved\n"
    assert requests == 3


@pytest.mark.slow
def test_router(home: Path) -> None:
    def script(request: dict[str, Any]) -> Reply:
        last = request["messages"][-1]
        if last["role"] == "tool":
            return Reply(last["content"])
        if "something else?" in last_text(request):
            return Reply('"order"')
        return Reply(tool_calls=[{"name": "order_state", "arguments": {"number": 17}}])

    assert run_example("router", script, home) == ("Order 17 was sent yesterday.\n", 3)


@pytest.mark.slow
def test_orchestrator(home: Path) -> None:
    def script(request: dict[str, Any]) -> Reply:
        last = request["messages"][-1]
        if "Split this" in last_text(request):
            return Reply(tool_calls=[{"name": "ask_worker", "arguments": {"question": q}} for q in ("a", "b")])
        return Reply("A package." if last["role"] == "tool" else "Report.")

    assert run_example("orchestrator", script, home) == ("A package.\n2 workers, 4 requests\n", 4)


@pytest.mark.slow
def test_evaluator(home: Path) -> None:
    def script(request: dict[str, Any]) -> Reply:
        text = last_text(request)
        if "Is this good" in text:
            return Reply(json.dumps({"good": "better haiku" in text, "advice": "more wings"}))
        return Reply("A better haiku." if "more wings" in text else "A haiku.")

    assert run_example("evaluator", script, home) == ("A better haiku.\n", 4)


def test_every_example_is_tested_and_fits_a_screen() -> None:
    files = list(EXAMPLES.glob("*.py"))
    assert {file.stem for file in files} == {"chain", "parallel", "router", "orchestrator", "evaluator"}
    for file in files:
        assert f"test_{file.stem}" in globals()
        assert len(file.read_text().splitlines()) <= 45


def test_agents_share_a_budget(make_agent: Make) -> None:
    async def main() -> None:
        budget = Budget(requests=3)

        @tool
        async def delegate(task: str) -> str:
            """Have a worker do it."""
            return (await worker.prompt(task)).text

        ask = Reply(tool_calls=[{"name": "delegate", "arguments": {"task": "part"}}])
        async with (
            make_agent(*[Reply("Done.")] * 9, budget=budget) as worker,
            make_agent(*[ask] * 9, tools=[delegate], budget=budget) as parent,
        ):
            with pytest.raises(BudgetSpent, match="3 of 3 requests"):
                await parent.prompt("Go on and on.")
            with pytest.raises(BudgetSpent):
                await worker.prompt("More.")
        assert len(worker.model.requests) + len(parent.model.requests) == 3

    asyncio.run(main())


def test_cancelled_task_cancels_the_agents_that_it_waits_for(make_agent: Make) -> None:
    """A worker is waited for in a tool of the parent, another directly."""

    async def main() -> None:
        running, ended, waiting = asyncio.Event(), asyncio.Event(), 0

        async def hang(request: Any) -> Reply:
            nonlocal waiting
            waiting += 1
            if waiting == 2:
                running.set()
            try:
                await asyncio.Event().wait()
            finally:
                waiting -= 1
                if waiting == 0:
                    ended.set()
            return Reply("never")

        @tool
        async def delegate(task: str) -> str:
            """Have a worker do it."""
            return (await worker.prompt(task)).text

        ask = Reply(tool_calls=[{"name": "delegate", "arguments": {"task": "part"}}])
        async with (
            make_agent(hang) as worker,
            make_agent(ask, Reply("Next."), tools=[delegate]) as parent,
            await parent.session() as session,
        ):
            both = asyncio.gather(session.prompt("Delegate."), worker.prompt("Directly."))
            await running.wait()
            both.cancel()
            with pytest.raises(asyncio.CancelledError):
                await both
            async with asyncio.timeout(60):
                await ended.wait()
            assert (await session.prompt("Go on.")).text == "Next."

    asyncio.run(main())
