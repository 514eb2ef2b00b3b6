"""Measure the SDK: its import, the first prompt, each further prompt, each further agent.

Run with `uv run python benchmarks/sdk.py`. Each figure is CPU time, the least of several runs, beside what it is
compared with in the same run: a busy machine slows both.

Measured, on a busy machine: the import 75 ms (asyncio alone 42); a program with one prompt 524 ms (`crow run` 506); a
prompt 1.6 ms (1.3 without the SDK); each of 500 further agents, with all tools and a stored session, 735 KiB.
"""

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Awaitable, Callable
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from time import process_time

import serve
from crow_agent import Agent
from crow_core.testing import Reply, ScriptedModel, connect

PROGRAM = """
import asyncio
import gc
from crow_agent import Agent

async def main():
    async with Agent() as agent:
        print((await agent.prompt("Say 10 words.")).text)

asyncio.run(main())
gc.freeze()  # as `crow run` does: without this, the interpreter collects garbage at exit
"""


def measure_import(code: str, repeat: int = 7) -> float:
    """Milliseconds of CPU time of an import in a new process."""
    program = f"import time\na = time.process_time()\n{code}\nprint(time.process_time() - a)"
    runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True) for _ in range(repeat)]
    return 1000 * min(float(run.stdout) for run in runs)


def measure_process(command: list[str], env: dict[str, str], repeat: int = 5) -> float:
    """Milliseconds of CPU time of a whole process."""
    times: list[float] = []
    for _ in range(repeat):
        before = getrusage(RUSAGE_CHILDREN)
        subprocess.run(command, env=env, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, check=True)
        after = getrusage(RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return 1000 * min(times)


def resident() -> float:
    """MiB of memory that this process holds."""
    found = re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else 0


async def measure_prompts(prompt: Callable[[], Awaitable[object]], count: int) -> float:
    """Milliseconds of CPU time of one prompt: the least of five rounds."""
    rounds: list[float] = []
    for _ in range(5):
        start = process_time()
        for _ in range(count):
            await prompt()
        rounds.append((process_time() - start) / count)
    return 1000 * min(rounds)


async def compare_prompts(home: Path, count: int) -> None:
    """Compare a prompt of the SDK with one of the bare loop: the same app, and an ACP client that only records."""
    env = {"HOME": str(home), "CROW_HOME": str(home / "crow")}
    agent = Agent(ScriptedModel(lambda _: Reply("Four.")), tools=[], store=False, env=env, cwd=home)
    async with agent, await agent.session() as session:
        sdk = await measure_prompts(lambda: session.prompt("2 + 2?"), count)
    crow = await Agent(ScriptedModel(lambda _: Reply("Four.")), tools=[], store=False, env=env, cwd=home)._build()
    async with connect(crow) as editor:
        id = (await editor.new_session(str(home))).session_id
        loop = await measure_prompts(lambda: editor.prompt(id, "2 + 2?"), count)
    print(f"a prompt: {sdk:.2f} ms with the SDK, {loop:.2f} ms without")


async def measure_agents(home: Path, count: int) -> None:
    """Measure the memory of further agents, each with a session that has had a turn."""
    env = {"HOME": str(home), "CROW_HOME": str(home / "crow")}
    agents = [Agent(ScriptedModel(lambda _: Reply("Four.")), env=env, cwd=home) for _ in range(count + 10)]
    sessions = [await agent.session() for agent in agents[:10]]
    for session in sessions:
        await session.prompt("2 + 2?")
    before, start = resident(), process_time()
    for agent in agents[10:]:
        session = await agent.session()
        await session.prompt("2 + 2?")
        sessions.append(session)
    each, took = (resident() - before) / count, (process_time() - start) / count
    print(f"a further agent: {each * 1024:.0f} KiB, {1000 * took:.1f} ms; {before:.0f} MiB with ten")
    await asyncio.gather(*(agent.close() for agent in agents))


async def compare_programs(home: Path) -> None:
    """Compare a program with one prompt with `crow run`."""
    model = await asyncio.create_subprocess_exec(sys.executable, serve.__file__, "--model", stdout=PIPE, stderr=DEVNULL)
    assert model.stdout
    url = f"http://127.0.0.1:{(await model.stdout.readline()).decode().strip()}/v1"
    try:
        env = {"PATH": os.environ["PATH"], "HOME": str(home), "CROW_HOME": str(home / "crow"), "OPENAI_BASE_URL": url}
        env |= {"CROW_MODEL": "m", "OPENAI_API_KEY": "key"}
        run = [sys.executable, "-m", "crow_cli", "run", "Say 10 words."]
        program = await asyncio.to_thread(measure_process, [sys.executable, "-c", PROGRAM], env)
        command = await asyncio.to_thread(measure_process, run, env)
    finally:
        model.kill()
        await model.wait()
    print(f"a program with one prompt: {program:.0f} ms, `crow run`: {command:.0f} ms")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=500)
    parser.add_argument("--prompts", type=int, default=200)
    args = parser.parse_args()
    sdk, base = measure_import("from crow_agent import Agent, tool"), measure_import("import asyncio")
    print(f"from crow_agent import Agent, tool: {sdk:.0f} ms, import asyncio: {base:.0f} ms")
    with tempfile.TemporaryDirectory() as name:
        await compare_programs(Path(name))
        await compare_prompts(Path(name), args.prompts)
        await measure_agents(Path(name), args.agents)


if __name__ == "__main__":
    asyncio.run(main())
