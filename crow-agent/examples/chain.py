"""Chain: the answer to one prompt goes into the next, with a check in between."""

import asyncio
import sys
from dataclasses import dataclass

from crow_agent import Agent


@dataclass
class Outline:
    title: str
    points: list[str]


async def write_article(agent: Agent, subject: str) -> str:
    outline = (await agent.prompt(f"Outline a short article on {subject}.", output=Outline)).output
    if len(outline.points) > 5:  # what a program can check, no model needs to
        outline.points = outline.points[:5]
    article = await agent.prompt(f"Write the article {outline.title!r} with these points: {'; '.join(outline.points)}.")
    translated = await agent.prompt(f"Translate to French, and answer with the translation alone:\n\n{article.text}")
    return translated.text


async def main() -> None:
    async with Agent(tools=[]) as agent:
        print(await write_article(agent, " ".join(sys.argv[1:]) or "crows"))


if __name__ == "__main__":
    asyncio.run(main())
