"""Parallel: several agents look at one thing from different sides, and their votes are counted."""

import asyncio
import sys
from dataclasses import dataclass

from crow_agent import Agent

SIDES = ("security", "speed", "readability")


@dataclass
class Review:
    approve: bool
    reason: str


async def review(agent: Agent, code: str) -> dict[str, Review]:
    """Review code from all sides at once; an error of one side is raised when all are done."""
    prompts = [f"Review this code for its {side} alone:\n\n{code}" for side in SIDES]
    results = await agent.map(prompts, output=Review)
    return {side: result.output for side, result in zip(SIDES, results, strict=True)}


async def main() -> None:
    async with Agent(tools=[]) as agent:
        reviews = await review(agent, " ".join(sys.argv[1:]) or "eval(input())")
    for side, found in reviews.items():
        print(f"{side}: {'yes' if found.approve else 'no'}, {found.reason}")
    approved = sum(found.approve for found in reviews.values()) > len(SIDES) / 2
    print("approved" if approved else "not approved")


if __name__ == "__main__":
    asyncio.run(main())
