"""Measure the cells of an evaluation beside as many prompts of `Agent.map`, 50 at once, on the same endpoint.

Run with `uv run python benchmarks/evaluation.py`. The endpoint is a process of its own. The two take turns; each figure
is the best of several rounds, as cells or prompts a second, and CPU milliseconds of this process for each of them.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic, process_time

from crow_agent import Agent
from crow_agent.settings.config import load_config
from crow_agent.settings.home import Home
from crow_eval import evaluation_store as store
from crow_eval import runs
from crow_eval.cells import EvaluationSettings, TaskName
from crow_eval.compared_prompts import load_prompts
from crow_eval.tasks import load_dataset
from crow_persistence.database import Database

COUNT, AT_ONCE, ROUNDS = 300, 50, 3
SERVER = """
import asyncio
from crow_core.testing import Reply, ScriptedServer

async def main():
    async def answer(request):
        await asyncio.sleep(0.2)
        return Reply("Hello.")

    async with ScriptedServer(answer) as server:
        print(server.url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def compare(url: str, home: Path) -> None:
    os.environ |= {"CROW_HOME": str(home), "OPENAI_BASE_URL": url, "OPENAI_API_KEY": "key", "CROW_MODEL": "scripted"}
    env = os.environ
    check = {"kind": "answer", "contains": "Hello"}
    lines = [{"prompt": f"Hello {n}?", "checks": [check], "files": {"a.txt": "a"}} for n in range(COUNT)]
    (home / "tasks.jsonl").write_text("\n".join(map(json.dumps, lines)))
    tasks = load_dataset(str(home / "tasks.jsonl"))
    found = Home.find(env)
    database = Database(f"sqlite:///{home / 'crow.db'}", home)
    settings = EvaluationSettings(
        tasks=[TaskName(task.id, task.digest) for task in tasks],
        prompts=load_prompts([], load_config(found, env), found, database),
        models=[""],
        names=["scripted"],
        repeat=1,
        mode="accept-edits",
    )
    best: dict[str, list[tuple[float, float]]] = {"Agent.map": [], "evaluation": []}
    for _ in range(ROUNDS + 1):
        began, cpu = monotonic(), process_time()
        async with Agent(env=env, cwd=home, mode="accept-edits") as agent:
            results = await agent.map([task.prompt for task in tasks], at_once=AT_ONCE)
        assert all(result.text == "Hello." for result in results)
        best["Agent.map"].append((monotonic() - began, process_time() - cpu))
        evaluation = store.create(database, "tasks", settings)
        began, cpu = monotonic(), process_time()
        await runs.run_evaluation(evaluation, tasks, database, env=env, at_once=AT_ONCE, report=lambda cell: None)
        assert all(cell.state == "passed" for cell in evaluation.cells)
        best["evaluation"].append((monotonic() - began, process_time() - cpu))
    database.close()
    for name, rounds in best.items():
        wall, cpu = (min(values) for values in zip(*rounds[1:], strict=True))
        print(f"{name:<12} {COUNT / wall:6.1f} a second, {1000 * cpu / COUNT:5.2f} ms of CPU each")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
        assert server.stdout
        try:
            asyncio.run(compare(server.stdout.readline().strip(), Path(folder)))
        finally:
            server.terminate()
