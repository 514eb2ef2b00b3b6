"""Run first-steps with other agents and crow, on one small model, and write what came of it.

    uv run scripts/lab.py                                             # serves the model, at port 8137
    uv run python benchmarks/small_peers.py crow vibe --tasks read-value create-file --repeat 2 --out peers.json

Each agent is a command that speaks ACP; `PEERS` names the folder with those that are installed there:

    uv venv $PEERS/vibe && uv pip install --python $PEERS/vibe mistral-vibe
    uv venv $PEERS/fastagent && uv pip install --python $PEERS/fastagent fast-agent-acp
    npm install --prefix $PEERS/opencode opencode-linux-x64
    npm install --prefix $PEERS/pi pi-acp@0.0.24 @mariozechner/pi-coding-agent  # later ones of pi-acp need a later pi

Every agent, crow too, has a home of its own, with the settings that it needs to reach the model and nothing else. Each
may do everything without a question. The output is JSON in the form that `scripts/local_models_table.py` reads.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from crow_agent import Agent
from crow_agent.prompt_stream import PromptStream
from crow_core.acp.record import TurnRecord
from crow_eval.checks import Work, run_checks
from crow_eval.tasks import Task, load_dataset
from crow_eval.workspaces import open_workspace

URL = os.environ.get("CROW_LAB_URL", "http://127.0.0.1:8137/v1")
MODEL = "qwen2.5-coder-1.5b"
SAME = 4
"""A run ends if the agent makes the same call so often in a row: the tasks have one to four steps."""
PEERS = Path(os.environ.get("PEERS", Path(tempfile.gettempdir()) / "peers"))


@dataclass(frozen=True)
class Peer:
    """An agent, its settings in its home, and what it needs in its environment."""

    command: list[str]
    files: dict[str, str] = field(default_factory=dict[str, str])
    env: dict[str, str] = field(default_factory=dict[str, str])


VIBE = f"""
active_model = "lab"
enable_telemetry = false
enable_update_checks = false
enable_notifications = false
bypass_tool_permissions = true
[[providers]]
name = "lab"
api_base = "{URL}"
api_key_env_var = "LAB_KEY"
backend = "generic"
[[models]]
name = "{MODEL}"
provider = "lab"
alias = "lab"
"""
CROW = f"""
model = "lab"
permissions.mode = "yolo"
[models.lab]
base_url = "{URL}"
model = "{MODEL}"
parameters = {{ temperature = 0.2, max_tokens = 400 }}
"""
OPENCODE: dict[str, Any] = {
    "autoupdate": False,
    "share": "disabled",
    "model": "lab/lab",
    "small_model": "lab/lab",
    "permission": "allow",
    "provider": {
        "lab": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "lab",
            "options": {"baseURL": URL, "apiKey": "x"},
            "models": {"lab": {"name": MODEL, "tool_call": True, "limit": {"context": 16384, "output": 400}}},
        }
    },
}
PI: dict[str, Any] = {
    "providers": {
        "lab": {
            "baseUrl": URL,
            "api": "openai-completions",
            "apiKey": "x",
            "models": [{"id": MODEL, "contextWindow": 16384, "maxTokens": 400}],
        }
    }
}
PI_SETTINGS: dict[str, Any] = {
    "defaultProvider": "lab",
    "defaultModel": MODEL,
    "compaction": {"reserveTokens": 1024},  # its default is the whole window
}
AGENTS: dict[str, Peer] = {
    "crow": Peer([sys.executable, "-m", "crow_cli", "acp"], {"crow/config.toml": CROW}, {"CROW_HOME": "{HOME}/crow"}),
    "vibe": Peer([str(PEERS / "vibe/bin/vibe-acp")], {".vibe/config.toml": VIBE}, {"LAB_KEY": "x"}),
    "opencode": Peer(
        [str(PEERS / "opencode/node_modules/opencode-linux-x64/bin/opencode"), "acp"],
        {".config/opencode/opencode.json": json.dumps(OPENCODE)},
        {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
    ),
    "fast-agent": Peer(
        [str(PEERS / "fastagent/bin/fast-agent-acp"), "--model", f"generic.{MODEL}", "--no-permissions", "--shell"],
        env={"GENERIC_API_KEY": "x", "GENERIC_BASE_URL": URL},
    ),
    "pi": Peer(
        [str(PEERS / "pi/node_modules/.bin/pi-acp")],
        {".pi/agent/models.json": json.dumps(PI), ".pi/agent/settings.json": json.dumps(PI_SETTINGS)},
        {"PATH": f"{PEERS}/pi/node_modules/.bin:{os.environ.get('PATH', '')}", "PI_OFFLINE": "1"},
    ),
}


def make_home(peer: Peer, home: str) -> dict[str, str]:
    """Write an agent's settings, and return its environment."""
    for name, text in peer.files.items():
        file = Path(home, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
    env = {key: value.replace("{HOME}", home) for key, value in peer.env.items()}
    return {**env, "HOME": home, "XDG_CONFIG_HOME": f"{home}/.config", "XDG_DATA_HOME": f"{home}/.local/share"}


async def run(peer: Peer, task: Task, limit: float) -> dict[str, Any]:
    """Let an agent do a task, and return what came of it. A run that had to be stopped has failed, whatever it did."""
    with tempfile.TemporaryDirectory() as home:
        env = make_home(peer, home)
        began = monotonic()
        async with open_workspace(task) as workspace:
            try:
                agent = Agent.connect(peer.command, permissions="allow", cwd=workspace, env=env)
                async with asyncio.timeout(limit), agent, await agent.session() as session:
                    answer = await read_answer(session.stream(task.prompt))
                stopped = ""
            except Exception as error:  # whatever ends a foreign agent is its outcome
                answer, stopped = "", f"{type(error).__name__}: {error}"
            seconds = monotonic() - began
            did = all(result.passed for result in await run_checks(task, Work(workspace, answer)))
            state = "passed" if did and not stopped else "failed"
            return {"task": task.id, "state": state, "did": did, "seconds": seconds, "answer": stopped or answer}


async def read_answer(stream: PromptStream[str]) -> str:
    """Return the answer of a turn. Raises RuntimeError if the agent makes the same tool call SAME times in a row."""
    record = TurnRecord()
    async with aclosing(aiter(stream)) as updates:
        async for update in updates:
            record.add(update)
            last = [(call.title, str(call.raw_input)) for call in [*record.calls.values()][-SAME:]]
            says = all(arguments != "UNSET" for _, arguments in last)  # fast-agent does not say the arguments
            if says and len(last) == SAME and len(set(last)) == 1:
                raise RuntimeError(f"the same call {SAME} times")
    return stream.result.text if stream.result else ""


async def main() -> None:
    parser = argparse.ArgumentParser(description="Run first-steps with other agents on a small model.")
    parser.add_argument("agents", nargs="+", choices=AGENTS)
    parser.add_argument("--tasks", nargs="*", default=[])
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=1, help="how many runs of an agent at once (lab.py --requests)")
    parser.add_argument("--limit", type=float, default=480, help="seconds for one task")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    tasks = [task for task in load_dataset("first-steps") if not options.tasks or task.id in options.tasks]
    cells: list[dict[str, Any]] = []
    turns = asyncio.Semaphore(options.at_once)

    async def add_cell(name: str, task: Task) -> None:
        async with turns:
            cell = await run(AGENTS[name], task, options.limit)
        cells.append({"variant": name, **cell})
        did = " although it did the task" if cell["did"] and cell["state"] == "failed" else ""
        print(
            f"{name:<12}{task.id:<18}{cell['state']:<8}{cell['seconds']:6.0f} s{did}  {cell['answer'][:100]!r}",
            flush=True,
        )
        options.out.write_text(json.dumps({"cells": cells}, indent=1), "utf-8")

    for name in options.agents:  # one after the other, so that the server's cache holds this agent's prompt
        await asyncio.gather(*(add_cell(name, task) for task in tasks * options.repeat))


asyncio.run(main())
