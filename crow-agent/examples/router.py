"""Router: a cheap prompt decides which agent answers. The agents differ in their tools and system prompts."""

import asyncio
import sys
from typing import Literal

from crow_agent import Agent, Budget, tool

Kind = Literal["order", "other"]


@tool
async def order_state(number: int) -> str:
    """Look up the state of an order."""
    return f"Order {number} was sent yesterday."


async def answer(router: Agent, agents: dict[Kind, Agent], question: str) -> str:
    kind: Kind = (await router.prompt(f"Is this about an order, or something else? {question}", output=Kind)).output
    return (await agents[kind].prompt(question)).text


async def main() -> None:
    budget = Budget(requests=20)  # one for all three
    async with (
        Agent(tools=[], budget=budget) as router,
        Agent(tools=[order_state], budget=budget) as orders,
        Agent(tools=[], system="You answer in one friendly sentence.", budget=budget) as others,
    ):
        question = " ".join(sys.argv[1:]) or "Where is my order 17?"
        print(await answer(router, {"order": orders, "other": others}, question))


if __name__ == "__main__":
    asyncio.run(main())
