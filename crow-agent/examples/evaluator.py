"""Evaluator and optimiser: one session writes, another judges, until the judge is content or the rounds are used up."""

import asyncio
import sys
from dataclasses import dataclass

from crow_agent import Agent


@dataclass
class Verdict:
    good: bool
    advice: str


async def improve(agent: Agent, task: str, rounds: int = 3) -> str:
    async with await agent.session() as writer, await agent.session() as judge:
        draft = (await writer.prompt(task)).text
        for _ in range(rounds):
            question = f"The task was: {task}\n\nIs this good, and what would make it better?\n\n{draft}"
            verdict = (await judge.prompt(question, output=Verdict)).output
            if verdict.good:
                break
            draft = (await writer.prompt(f"Make it better, and answer with the text alone: {verdict.advice}")).text
        return draft


async def main() -> None:
    async with Agent(tools=[]) as agent:
        print(await improve(agent, " ".join(sys.argv[1:]) or "Write a haiku about crows."))


if __name__ == "__main__":
    asyncio.run(main())
