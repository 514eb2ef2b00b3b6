"""Many agents and many prompts in one process."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from crow_agent import Agent, AgentError
from crow_core.testing import Reply, ScriptedServer


def echo(request: Any) -> Reply:
    return Reply(request["messages"][-1]["content"].upper())


def make_env(home: Path, server: ScriptedServer, **changes: str) -> dict[str, str]:
    env = {"HOME": str(home), "CROW_HOME": str(home / "crow"), "PATH": "/usr/bin:/bin", "OPENAI_API_KEY": "key"}
    return {**env, "OPENAI_BASE_URL": server.url, "CROW_MODEL": "scripted", **changes}


def test_agents_with_equal_endpoints_share_their_connections(home: Path) -> None:
    async def main() -> None:
        async with ScriptedServer(echo) as server:
            env = make_env(home, server)
            connections = server._state.connections
            first, second = Agent(env=env, cwd=home), Agent(env=env, cwd=home)
            async with first:
                for agent in (first, second, first):
                    assert (await agent.prompt("one")).text == "ONE"
                assert len(connections) == 1
                async with Agent(env=make_env(home, server, OPENAI_API_KEY="other"), cwd=home) as other:
                    await other.prompt("two")
                    assert len(connections) == 2, "another key, other connections"
            assert (await second.prompt("three")).text == "THREE", "the pool outlives its first user"
            assert len(server.headers) == 5
            await second.close()
            assert [headers["authorization"] for headers in server.headers].count("Bearer other") == 1
            async with asyncio.timeout(60):
                while connections:
                    await asyncio.sleep(0)

    asyncio.run(main())


def test_agents_of_two_event_loops_do_not_share(home: Path) -> None:
    async def main() -> None:
        async with ScriptedServer(echo) as server, Agent(env=make_env(home, server), cwd=home) as agent:
            assert (await agent.prompt("one")).text == "ONE"

            async def use_another() -> str:
                async with Agent(env=make_env(home, server), cwd=home) as other:
                    return (await other.prompt("two")).text

            assert await asyncio.to_thread(lambda: asyncio.run(use_another())) == "TWO"
            assert (await agent.prompt("three")).text == "THREE"

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["gather", "map"])
def test_a_thousand_prompts_at_once_have_their_own_results(home: Path, how: str) -> None:
    """They are all waiting at once, where the endpoint is slow: the first answers come when 100 have asked."""

    async def main() -> None:
        enough = asyncio.Event()

        async def answer(request: Any) -> Reply:
            if len(server.requests) >= 100:
                enough.set()
            await enough.wait()
            return echo(request)

        async with ScriptedServer(answer) as server:
            async with Agent(env=make_env(home, server), cwd=home, tools=[], store=False) as agent:
                prompts = [f"word {n}" for n in range(1000)]
                if how == "gather":
                    results = await asyncio.gather(*(agent.prompt(prompt) for prompt in prompts))
                else:
                    results = await agent.map(prompts, at_once=1000)
            assert [result.text for result in results] == [f"WORD {n}" for n in range(1000)]
            assert len({result.session_id for result in results}) == 1000
            assert len(server.requests) == 1000

    asyncio.run(main())


@pytest.mark.slow
def test_closing_while_a_thousand_prompts_run_hangs_nothing(home: Path) -> None:
    async def main() -> None:
        async with ScriptedServer([Reply(hang=True)] * 1000) as server, AsyncExitStack() as stack:
            agent = await stack.enter_async_context(Agent(env=make_env(home, server), cwd=home, tools=[], store=False))
            prompts = [asyncio.ensure_future(agent.prompt(f"word {n}")) for n in range(1000)]
            await server.until(lambda: len(server.requests) >= 100)
            await agent.close()
            errors = await asyncio.gather(*prompts, return_exceptions=True)
            assert {isinstance(error, AgentError) for error in errors} == {True}, {type(error) for error in errors}

    asyncio.run(main())
