"""crow as an agent of the real `inspect eval`, whose model is a scripted endpoint."""

import asyncio
import json
import os
import sqlite3
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from crow_core.testing import Failure, Reply, ScriptedServer

TASKS = Path(__file__).parent / "python" / "inspect_tasks.py"
MEND = {"command": "str_replace", "path": "calc.py", "old_str": "a - b", "new_str": "a + b"}


def answer(request: dict[str, Any]) -> Reply | Failure:
    """Answer for the model, by the first words of the user and the number of replies so far."""
    said = json.dumps(next(message for message in request["messages"] if message["role"] == "user"))
    replies = sum(message["role"] == "assistant" for message in request["messages"])
    if "Mend add." in said:
        calls: Any = [
            {"name": "file_editor", "arguments": MEND},
            {"name": "terminal", "arguments": {"command": "touch x"}},
        ]
        return Reply("Mended.") if replies else Reply(tool_calls=calls)
    if "Look around." in said:
        return Reply(tool_calls=[{"name": "tree", "arguments": {"depth": 1 + replies}}])
    if "Wait." in said:
        return Reply(hang=True)
    if "Fail." in said:
        return Failure(400, {"error": {"message": "There is no such model."}})
    return Reply("Un oiseau.", reasoning="Is it a bird?")


@dataclass(frozen=True)
class Evaluated:
    """What `inspect eval` has left."""

    output: str
    logs: dict[str, Any]
    """The logs by the names of their tasks."""
    requests: list[dict[str, Any]]
    """What the endpoint was asked."""
    database: Path

    def read(self, statement: str, *values: Any) -> list[Any]:
        """Read from crow's database."""
        connection = sqlite3.connect(self.database)
        try:
            return connection.execute(statement, values).fetchall()
        finally:
            connection.close()

    def find_sample(self, task: str) -> dict[str, Any]:
        return self.logs[task]["samples"][0]


@pytest.fixture(scope="module")
def evaluated(inspect: None, tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    """Run all tasks with crow, in one process, as importing Inspect takes seconds."""
    folder = tmp_path_factory.mktemp("inspect")

    async def run() -> tuple[str, list[dict[str, Any]]]:
        async with ScriptedServer(answer) as server:
            model = {"SCRIPTED_BASE_URL": server.url, "SCRIPTED_API_KEY": "key"}
            env = {"PATH": os.environ["PATH"], "HOME": str(folder), "CROW_HOME": str(folder / "crow"), **model}
            command = ["eval", TASKS.name, "--solver", "crow_agent/crow", "--model", "openai-api/scripted/scripted"]
            options = ["--log-dir", str(folder / "logs"), "--log-format", "json", "--display", "plain", "--no-ansi"]
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "inspect_ai", *command, *options),
                cwd=TASKS.parent,
                env=env,
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
            )
            output, _ = await process.communicate()
            return output.decode(), server.requests

    output, requests = asyncio.run(run())
    found = [json.loads(path.read_text("utf-8")) for path in (folder / "logs").glob("*.json")]
    logs = {log["eval"]["task"]: log for log in found}
    assert len(logs) == 7, output
    return Evaluated(output, logs, requests, folder / "crow" / "crow.db")


def test_crow_solves_a_sample_of_inspect_in_its_sandbox_with_the_model_of_the_task(evaluated: Evaluated):
    log, sample = evaluated.logs["mend"], evaluated.find_sample("mend")
    assert log["status"] == "success"
    assert sample["scores"]["adds"]["value"] == "C"
    assert sample["output"]["choices"][0]["message"]["content"] == "Mended."
    assert [message["role"] for message in sample["messages"]] == [
        "system",
        "user",
        *["assistant", "tool"],
        "tool",
        "assistant",
    ]
    notes = sample["store"]["crow"]
    assert notes["stop_reason"] == "end_turn"
    assert len(notes["denied"]) == 1  # the command, as nobody can be asked
    calls = evaluated.read(
        "SELECT calls.model, input, output FROM calls JOIN sessions ON sessions.number = calls.session "
        "WHERE sessions.id = ?",
        notes["session"],
    )
    used = sample["model_usage"]["openai-api/scripted/scripted"]
    assert [model for model, _, _ in calls] == ["openai-api/scripted/scripted"] * 2
    assert sum(tokens for _, tokens, _ in calls) == used["input_tokens"]
    assert sum(tokens for _, _, tokens in calls) == used["output_tokens"]


def test_the_system_messages_of_a_sample_end_crows_system_prompt(evaluated: Evaluated):
    sample = evaluated.find_sample("question")
    assert sample["scores"]["includes"]["value"] == "C"
    system = sample["messages"][0]
    assert (system["role"], system["content"].splitlines()[-1]) == ("system", "Answer in French.")
    assert sample["messages"][1]["content"] == "What is a crow?"


def test_a_limit_of_inspect_ends_the_turn_and_the_sample_is_scored(evaluated: Evaluated):
    for task in ("tokens", "time"):
        sample = evaluated.find_sample(task)
        assert evaluated.logs[task]["status"] == "success"
        assert sample["limit"]["type"] == task.removesuffix("s")
        assert sample["scores"]["includes"]["value"] == "I"
        [(owner,)] = evaluated.read("SELECT owner FROM sessions WHERE id = ?", sample["store"]["crow"]["session"])
        assert owner is None  # the session was closed


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("down", "There is no such model."),
        ("begun", "crow begins a conversation: a sample with a message of the role assistant is not run."),
        ("elsewhere", 'crow works in the sandbox "local" or in none'),
    ],
)
def test_what_cannot_be_run_is_an_error_of_the_sample(evaluated: Evaluated, task: str, said: str):
    assert said in evaluated.find_sample(task)["error"]["message"].replace("\\'", "'")
    assert not evaluated.find_sample(task)["scores"]
