"""Orchestrator and workers: one agent gives questions to others, as many and as often as it likes, through a tool.

The workers share its budget, and their turns are cancelled with its own.
"""

import asyncio
import sys

from crow_agent import Agent, Budget, Result, tool


async def investigate(question: str, folder: str, budget: Budget) -> Result[str]:
    async with Agent(tools=["builtin:read"], cwd=folder, budget=budget) as worker:

        @tool
        async def ask_worker(question: str) -> str:
            """Have a worker find something out in the files of the project. Several calls at once run in parallel."""
            return (await worker.prompt(f"Find out, and report in three sentences: {question}")).text

        async with Agent(tools=[ask_worker], budget=budget) as orchestrator:
            return await orchestrator.prompt(f"Split this among workers, then answer from their reports: {question}")


async def main() -> None:
    budget = Budget(requests=50)
    result = await investigate(" ".join(sys.argv[1:]) or "What does this project do?", ".", budget)
    print(result.text)
    print(f"{len(result.tool_calls)} workers, {budget.spent['requests']:g} requests")


if __name__ == "__main__":
    asyncio.run(main())
