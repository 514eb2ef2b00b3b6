"""`crow prompts improve tool.NAME`, and the system prompt of the profile for small models."""

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from crow_core.testing import Reply, ScriptedServer
from crow_eval.compared_prompts import PromptVersion
from crow_eval.improvement import find_fault

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

pytestmark = pytest.mark.anyio
CAPITALS = "Answer in capitals."
SHORT = ("--max-runs", "12", "--repeat", "1")
USAGE = {"prompt_tokens": 100, "completion_tokens": 5, "total_tokens": 105}


def write_tasks(machine: "Machine", count: int) -> None:
    """Write a dataset of tasks that want a word in capitals."""
    lines = [
        {"id": f"say-{n}", "prompt": f"word {n:03}", "checks": [{"kind": "answer", "contains": f"WORD {n:03}"}]}
        for n in range(count)
    ]
    (machine.project / "tasks.jsonl").write_text("\n".join(map(json.dumps, lines)))


def answer(request: dict[str, Any]) -> Reply:
    """Answer a word in capitals if the system prompt or a tool says so, or propose the sentence."""
    system, asked = (message["content"] for message in request["messages"][:2])
    if system.startswith("You improve a text"):
        (text,) = re.findall(r"```\n(.*?)\n```", asked, re.DOTALL)
        return Reply(f"```\n{text} {CAPITALS}\n```", usage=USAGE)
    is_loud = CAPITALS in system + json.dumps(request.get("tools"))
    return Reply(asked.upper() if is_loud else asked, usage=USAGE)


async def test_description_of_a_tool_improves_and_is_promoted(machine: "Machine") -> None:
    write_tasks(machine, 12)
    async with ScriptedServer(answer) as server:
        machine.ask(server.url)
        done = await machine.crow("prompts", "improve", "tool.terminal", "--on", "tasks.jsonl", *SHORT)
        tools = [request["tools"] for request in server.requests if request.get("tools")]
        questions = [request["messages"][1]["content"] for request in server.requests if not request.get("tools")]
        promoted = await machine.crow("prompts", "promote", "tool.terminal@2")
        server.requests.clear()
        await machine.crow("run", "word 1")
        (used,) = [request["tools"] for request in server.requests]
        pinned = await machine.crow("prompts", "pin", "tool.terminal@1")
    assert done.code == 0, done.err
    assert "Better than today's." in done.out
    assert "crow prompts promote tool.terminal@2" in done.out
    assert "a description of a tool for the model with the name terminal" in questions[0]
    assert {json.dumps(tool["function"]["parameters"]) for each in tools for tool in each} == {
        json.dumps(tool["function"]["parameters"]) for tool in tools[0]
    }
    assert (promoted.code, pinned.code) == (0, 0), promoted.err + pinned.err
    (terminal,) = [tool["function"] for tool in used if tool["function"]["name"] == "terminal"]
    assert terminal["description"].endswith(CAPITALS)


async def test_wrong_names_are_named_with_those_that_there_are(machine: "Machine") -> None:
    write_tasks(machine, 12)
    async with ScriptedServer(answer) as server:
        machine.ask(server.url)
        tool = await machine.crow("prompts", "improve", "tool.termnial", "--on", "tasks.jsonl")
        prompt = await machine.crow("prompts", "improve", "sytem", "--on", "tasks.jsonl")
        dataset = await machine.crow("prompts", "improve", "system", "--on", "taks")
        rated = await machine.crow("prompts", "improve", "system", "--on", "rated")
        assert not server.requests
    assert (tool.code, prompt.code, dataset.code, rated.code) == (2, 2, 2, 2)
    assert "There is no session 'taks'." in dataset.err
    assert "Nor is there a dataset 'taks'." in dataset.err
    assert "No session is rated yet. Rate answers with /good or /bad." in rated.err
    assert "Sessions with this model have no tool termnial, but " in tool.err
    assert "terminal" in tool.err
    assert "There is no prompt sytem. Give one of " in prompt.err


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Run it in {{ cwd }}.", "The template uses cwd, which it is not given."),
        ("Run. " * 2_000, "The description has more than 8,000 characters."),
        ("Run.", ""),
    ],
)
def test_candidates_for_a_description_are_checked(text: str, fault: str) -> None:
    first, candidate = (PromptVersion("tool.terminal@1", "tool.terminal", each) for each in ("Run a command.", text))
    assert find_fault(candidate, first) == fault


async def test_system_prompt_of_a_small_model_is_that_of_its_profile(machine: "Machine") -> None:
    write_tasks(machine, 12)
    async with ScriptedServer(answer) as server:
        machine.configure(f'[models.lab]\nbase_url = "{server.url}"\nmodel = "qwen2.5-coder-1.5b"\napi_key = "k"\n')
        done = await machine.crow("prompts", "improve", "system", "-m", "lab", "--on", "tasks.jsonl", "--json", *SHORT)
        report = json.loads(done.out or "{}")
        promoted = await machine.crow("prompts", "promote", "small@2")
        server.requests.clear()
        await machine.crow("run", "-m", "lab", "word 1")
        system = server.requests[0]["messages"][0]["content"]
    assert done.code == 0, done.err
    assert (report["first"], report["best"], report["better"]) == ("small@1", "small@2", True)
    assert promoted.code == 0, promoted.err
    assert "You are crow, a coding agent" in system
    assert CAPITALS in system
