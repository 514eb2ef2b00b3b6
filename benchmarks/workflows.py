"""Measure a prompt as a step of a workflow beside DBOS's own step and the bare prompt.

Run with `uv run python benchmarks/workflows.py [URL of PostgreSQL]`. Each figure is CPU time of this process for one
prompt, the least of several rounds, in which the three take turns. The log grows alike in all.

Measured: SQLite 6.9 ms as a step (4.2 bare, 1.9 the step of DBOS), 0.75 ms over both; PostgreSQL 8.2 ms (5.1, 2.6),
0.5 ms over both.
"""

import argparse
import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import process_time

from crow_agent import Agent
from crow_agent.workflows import open_workflows, workflow
from crow_core.testing import Reply, ScriptedModel

COUNT, ROUNDS = 60, 5


async def measure(call: Callable[[int], Awaitable[object]]) -> float:
    """Milliseconds of CPU time of one call."""
    start = process_time()
    for number in range(COUNT):
        await call(number)
    return 1000 * (process_time() - start) / COUNT


async def compare(url: str, home: Path) -> None:
    env = {"HOME": str(home), "CROW_HOME": str(home / "crow"), "PATH": os.environ["PATH"]}
    agent = Agent(ScriptedModel(lambda request: Reply("Hello.")), tools=[], env=env, store=url or True)

    @workflow
    async def prompts() -> float:
        session = await agent.session()
        await session.prompt("Hello?")
        return await measure(lambda number: session.prompt(f"Hello {number}?"))

    @workflow
    async def steps() -> float:
        from dbos import DBOS

        async def step() -> dict[str, str]:
            return {"text": "Hello."}

        await DBOS.run_step_async({"name": "step"}, step)
        return await measure(lambda number: DBOS.run_step_async({"name": "step"}, step))

    async def bare() -> float:
        async with await agent.session() as session:
            await session.prompt("Hello?", key="first")
            return await measure(lambda number: session.prompt(f"Hello {number}?", key=str(number)))

    found: dict[str, list[float]] = {"as a step": [], "bare": [], "DBOS's step": []}
    async with agent, open_workflows([prompts, steps], url=url or f"sqlite:///{home}/workflows.db"):
        for _ in range(ROUNDS):
            found["as a step"].append(await (await prompts.start()).result())
            found["bare"].append(await bare())
            found["DBOS's step"].append(await (await steps.start()).result())
    least = {name: min(times) for name, times in found.items()}
    more = least["as a step"] - least["bare"] - least["DBOS's step"]
    told = ", ".join(f"{name} {time:.2f} ms" for name, time in least.items())
    print(f"{'PostgreSQL' if url else 'SQLite':10} {told}: {more:+.2f} ms over both")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("postgres", nargs="?", default="")
    postgres = parser.parse_args().postgres
    for url in ["", *filter(None, [postgres])]:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(compare(url, Path(folder)))


if __name__ == "__main__":
    main()
