"""`crow prompts improve` as a real process: a scripted model whose success depends on its system prompt."""

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from crow_core.testing import Reply, ScriptedServer

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

pytestmark = pytest.mark.anyio
USAGE = {"prompt_tokens": 100, "completion_tokens": 5, "total_tokens": 105}
PLAIN = "You work in {{ cwd }}."
CAPITALS = "Answer in capitals."


def write_tasks(machine: "Machine", count: int) -> None:
    """Write a dataset of tasks that want a word in capitals."""
    lines = [
        {"id": f"say-{n}", "prompt": f"word {n:03}", "checks": [{"kind": "answer", "contains": f"WORD {n:03}"}]}
        for n in range(count)
    ]
    (machine.project / "tasks.jsonl").write_text("\n".join(map(json.dumps, lines)))


def write_prompt(machine: "Machine", template: str = PLAIN) -> None:
    """Make a template the user's system prompt."""
    file = machine.home / "crow" / "prompts" / "system.md.j2"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(template)


def find_system(request: dict[str, Any]) -> str:
    """Return the system prompt of a request."""
    return request["messages"][0]["content"]


def asked(request: dict[str, Any]) -> str:
    """Return the prompt of a request."""
    return next(message["content"] for message in request["messages"] if message["role"] == "user")


def is_proposal(request: dict[str, Any]) -> bool:
    """Return True if a request asks for another candidate."""
    return find_system(request).startswith("You improve a text")


def find_text(request: dict[str, Any]) -> str:
    """Return the candidate that a request wants improved."""
    match = re.search(r"```\n(.*?)\n```", asked(request), re.DOTALL)
    assert match
    return match[1]


def work(request: dict[str, Any]) -> Reply:
    """Answer a task: in capitals if the system prompt says so."""
    word = asked(request)
    return Reply(word.upper() if CAPITALS in find_system(request) else word, usage=USAGE)


def improve(request: dict[str, Any]) -> Reply:
    """Do tasks, and propose the sentence that helps."""
    if is_proposal(request):
        return Reply(f"It has to shout.\n```\n{find_text(request)} {CAPITALS}\n```", usage=USAGE)
    return work(request)


async def test_a_sentence_that_helps_is_found_and_proven_on_tasks_that_the_search_never_saw(machine: "Machine") -> None:
    write_tasks(machine, 24)
    write_prompt(machine)
    async with ScriptedServer(improve) as server:
        machine.ask(server.url)
        done = await machine.crow("prompts", "improve", "system", "--on", "tasks.jsonl", "--json")
        asked_of_proposals = [asked(request) for request in server.requests if is_proposal(request)]
        report = json.loads(done.out)
        shown = await machine.crow("eval", "show", report["id"][:8])
        listed = await machine.crow("prompts", "diff", report["first"], report["best"])
        promoted = await machine.crow("prompts", "promote", report["best"])
    assert done.code == 0, done.err
    assert report["better"] is True
    assert (report["first"], report["best"]) == ("system@1", "system@2")
    assert report["comparison"]["pairs"]["only_b"] == 24, "12 unseen tasks, run twice"
    assert report["unchanged"] == {"pairs": 12, "differing": 0}
    assert [each["parent"] for each in report["candidates"]] == [None, "system@1"]
    parts = report["parts"]
    assert {name: len(ids) for name, ids in parts.items()} == {"train": 6, "validation": 6, "test": 12}
    numbers = [re.search(r"\d+", id) for id in parts["test"]]
    assert not [n for n in numbers if n and any(f"word {n[0]:>03}" in each for each in asked_of_proposals)]
    assert "Better than today's. On 12 tasks that the search never saw" in shown.out
    assert f"+ {CAPITALS}" in listed.out or CAPITALS in listed.out
    assert promoted.code == 0, promoted.err
    assert CAPITALS in (machine.home / "crow" / "prompts" / "system.md.j2").read_text()
