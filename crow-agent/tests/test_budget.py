"""A budget holds for prompts that run at once, and a limit that nothing can count is refused."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from crow_agent import Agent, AgentError, Budget, BudgetSpent, sync
from crow_agent.budget import limit_spending
from crow_core.app import Crow
from crow_core.errors import EndTurn
from crow_core.messages.message import Delta
from crow_core.models.chat_model import ChatModel
from crow_core.models.model_call import Prices
from crow_core.session.session import Session
from crow_core.testing import Reply, ScriptedServer

Make = Callable[..., Agent]
pytestmark = pytest.mark.anyio
USAGE = {"prompt_tokens": 90, "completion_tokens": 10}
"""The tokens of a call, which costs 0.1 with PRICES."""
PRICES = Prices(input=1000, output=1000)


async def answer(request: dict[str, Any]) -> Reply:
    """Answer a moment later, so that the calls overlap."""
    for _ in range(20):
        await asyncio.sleep(0)
    return Reply("Done.", usage=USAGE)


@pytest.mark.parametrize(
    ("budget", "most"), [(Budget(requests=10), 10), (Budget(tokens=1000), 10), (Budget(money=0.7), 7)]
)
async def test_budget_holds_for_fifty_prompts_at_once(make_agent: Make, budget: Budget, most: int) -> None:
    async with ScriptedServer(answer) as server:
        agent = make_agent(tools=[], budget=budget, store=False)
        agent.model = ChatModel(name="m", base_url=server.url, prices=PRICES)
        async with agent:
            results = await asyncio.gather(*(agent.prompt("Go.") for _ in range(50)), return_exceptions=True)
        assert len(server.requests) == most
    assert sum(isinstance(result, BudgetSpent) for result in results) == 50 - most


async def test_agents_that_share_a_budget_make_no_more_requests_together(make_agent: Make) -> None:
    budget = Budget(requests=6)
    async with make_agent(answer, budget=budget) as one, make_agent(answer, budget=budget) as two:
        prompts = (agent.prompt("Go.") for agent in (one, two) for _ in range(6))
        await asyncio.gather(*prompts, return_exceptions=True)
        made: Any = [one.model, two.model]
        assert sum(len(model.requests) for model in made) == 6


def test_agents_in_threads_share_a_budget(make_agent: Make) -> None:
    budget = Budget(tokens=500)

    def work(_: int) -> int:
        agent = make_agent(answer, budget=budget, tools=[], store=False)
        with sync(agent) as blocking, suppress(BudgetSpent):
            blocking.prompt("Go.")
        made: Any = agent.model
        return len(made.requests)

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(8))) == 5


async def test_prompt_that_was_cancelled_while_it_waited_leaves_its_room_to_others(make_agent: Make) -> None:
    began, go = asyncio.Event(), asyncio.Event()

    async def hold(request: dict[str, Any]) -> Reply:
        began.set()
        await go.wait()
        return Reply("Done.", usage=USAGE)

    async with make_agent(hold, budget=Budget(tokens=250)) as agent:
        first = asyncio.ensure_future(agent.prompt("Go."))
        await began.wait()
        waits = asyncio.ensure_future(agent.prompt("Go."))
        await asyncio.sleep(0)
        waits.cancel()
        go.set()
        await first
        with pytest.raises(asyncio.CancelledError):
            await waits
        assert (await agent.prompt("Go.")).text == "Done."


async def test_turn_that_ends_before_its_request_gives_back_what_it_reserved(make_agent: Make) -> None:
    def refuse(crow: Crow) -> None:
        crow.use(limit_spending, budget=budget)

        @crow.before_model
        def end(request: Any, session: Session) -> None:
            if "End." in str(request["messages"][-1]):
                raise EndTurn("end_turn", "Ended.")

    budget = Budget(requests=1)
    async with make_agent(answer, extensions=[refuse]) as agent:
        await agent.prompt("End.")
        assert (await agent.prompt("Go.")).text == "Done."


async def test_money_without_prices_is_refused_before_the_first_request(make_agent: Make) -> None:
    async with ScriptedServer(answer) as server:
        agent = make_agent(budget=Budget(money=1), tools=[])
        agent.model = ChatModel(name="mute", base_url=server.url)
        with pytest.raises(AgentError, match=r"Budget\(money=…\) needs the prices of mute. Set `prices`"):
            await agent.prompt("Go.")
        assert not server.requests


async def test_money_is_refused_for_a_model_class_without_prices(make_agent: Make) -> None:
    class OwnModel:
        name = "own"
        window: int | None = None

        async def stream(self, request: dict[str, Any]) -> AsyncIterator[Delta]:
            yield {"content": "never"}

    agent = make_agent(budget=Budget(money=1))
    agent.model = OwnModel()
    with pytest.raises(AgentError, match="needs the prices of own"):
        await agent.prompt("Go.")


async def test_money_is_refused_when_a_session_changes_to_a_model_without_prices(make_agent: Make) -> None:
    async with ScriptedServer(answer) as server:
        priced = ChatModel(name="priced", base_url=server.url, prices=PRICES)

        def change(crow: Crow) -> None:
            @crow.before_prompt
            def switch(message: Any, session: Session) -> None:
                session.model = ChatModel(name="mute", base_url=server.url)

        agent = make_agent(budget=Budget(money=1), tools=[], extensions=[change])
        agent.model = priced
        async with agent:
            with pytest.raises(AgentError, match="needs the prices of mute"):
                await agent.prompt("Go.")
        assert not server.requests
