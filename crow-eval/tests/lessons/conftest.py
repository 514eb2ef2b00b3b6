"""Thirty sessions with planted faults, written by real agents and by the import of other agents' histories."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from crow_agent import Agent
from crow_core.testing import Reply, ScriptedCall
from crow_eval.histories.importing import import_history
from crow_persistence.database import Database
from crow_persistence.sql_store import BlockingStore

TEXTS = Path(__file__).parent / "corrections"
Planted = set[tuple[str, str, str]]
"""The session, the kind and the words of each planted fault."""


@dataclass
class Talk:
    """What a user says in a session, and what the model calls."""

    prompts: list[str]
    calls: dict[int, list[str | ScriptedCall]] = field(default_factory=dict[int, "list[str | ScriptedCall]"])
    """The calls after a prompt, by its number from 0, one in each reply; a text is a command line."""
    faults: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """The kind and some words of each planted fault."""
    rejects: dict[str, str] = field(default_factory=dict[str, str])
    """The user's words on commands that are rejected."""


def read_texts(name: str) -> tuple[list[str], list[str]]:
    """Return the corrections of a file, and the messages that are none."""
    lines = (TEXTS / name).read_text("utf-8").splitlines()
    return [line[2:] for line in lines if line[0] == "+"], [line[2:] for line in lines if line[0] == "-"]


def make_call(name: str, **arguments: Any) -> ScriptedCall:
    return {"name": name, "arguments": arguments}


def plan_talks(corrections: Iterator[str], others: Iterator[str]) -> Iterator[Talk]:
    """Yield twenty-four conversations."""
    for number in range(12):
        wrong = [next(corrections) for _ in range(1 + (number % 3 == 0))]
        said = [next(others), *wrong, next(others)]
        yield Talk(["Set the project up.", *said], {0: ["echo ready", "ls"]}, [("correction", text) for text in wrong])
    for number in range(3):
        words = next(corrections)
        rejected = f"touch made-{number}"
        yield Talk(["Prepare.", next(others)], {0: [rejected]}, [("rejection", words)], {rejected: words})
    for number in range(3):
        prompt = f"Move part {number} to a package of its own."
        yield Talk(["What is here?", prompt, "/undo yes", "Leave it."], {0: ["ls"]}, [("undone", prompt)])
    missing = "frobnicate --all"
    yield Talk([f"Frobnicate, and {next(others)}"], {0: [missing, "ls", missing, "pwd"]}, [("failure", missing)] * 2)
    yield Talk(["Frobnicate again."], {0: [missing]}, [("failure", missing)])
    detour = ["cat config/site.conf", "cat conf/site.conf", "cat settings/site.conf", "echo site.conf"]
    yield Talk(["Show the settings of the site."], {0: [*detour]}, [("detour", detour[0])])
    look = make_call("file_editor", command="view", path="notes.txt")
    yield Talk(["Read the notes."], {0: [look, look, look, look]}, [("loop", "notes.txt")])
    bad = make_call("file_editor", command="view", path=["a", {"b": 1}])
    yield Talk(["Read a.", next(others)], {0: [bad], 1: [bad]}, [("refused", "file_editor")] * 2)
    yield Talk(["What is new?", next(others)], {0: ["ls", "false", "true"], 1: ["false"]})


async def play(talk: Talk, make_agent: Callable[..., Agent], folder: Path) -> Planted:
    """Play a conversation with a scripted model; return the faults that are planted in its session."""
    replies: list[Reply] = []
    for number, _ in enumerate(said for said in talk.prompts if not said.startswith("/")):
        for call in talk.calls.get(number, []):
            use = make_call("terminal", command=call) if isinstance(call, str) else call
            replies.append(Reply("I call.", tool_calls=[use]))
        replies.append(Reply("Done."))

    async def permit(question: Any) -> Any:
        return talk.rejects.get(question.tool_call.raw_input.get("command"), True)

    async with make_agent(*replies, cwd=folder, permissions=permit) as agent, await agent.session() as session:
        for said in talk.prompts:
            await session.prompt(said)
        return {(session.id, kind, words) for kind, words in talk.faults}


def write_history(agent: str, file: Path, prompts: Sequence[str], folder: Path) -> None:
    """Write a history as another agent does: an answer after each prompt."""
    lines: list[dict[str, Any]] = []
    if agent == "codex":
        lines.append({"type": "session_meta", "payload": {"id": file.stem, "cwd": str(folder)}})
    if agent == "pi":
        lines.append({"type": "session", "id": file.stem, "cwd": str(folder)})
    for text in (said for prompt in prompts for said in (f"user {prompt}", "assistant Done.")):
        role, _, said = text.partition(" ")
        match agent:
            case "claude-code":
                lines.append({"type": role, "cwd": str(folder), "message": {"role": role, "content": said}})
            case "codex":
                part = {"type": "input_text" if role == "user" else "output_text", "text": said}
                lines.append({"type": "response_item", "payload": {"type": "message", "role": role, "content": [part]}})
            case _:
                part = {"type": "text", "text": said}
                lines.append({"type": "message", "message": {"role": role, "content": [part]}})
    file.write_text("\n".join(map(json.dumps, lines)), "utf-8")


def import_talks(database: Database, folder: Path, corrections: Iterator[str], others: Iterator[str]) -> Planted:
    """Import two histories of each of three other agents; return the planted faults."""
    planted = Planted()
    store = BlockingStore(database.url.render_as_string(hide_password=False), database.folder)
    for agent in ("claude-code", "codex", "pi"):
        for number in range(2):
            wrong, file = next(corrections), folder / f"rollout-{agent}-{number}.jsonl"
            write_history(agent, file, ["Begin.", next(others), wrong, next(others)], folder)
            (id,) = import_history(store, agent, file).sessions
            planted.add((id, "correction", wrong))
    store.database.close()
    return planted


@pytest.fixture
def stored(home: Path) -> Iterator[Database]:
    """Yield the database of the agents that `make_agent` makes."""
    (home / "crow").mkdir()
    database = Database(f"sqlite:///{home / 'crow' / 'crow.db'}", home / "crow")
    yield database
    database.close()


@pytest.fixture
async def planted(make_agent: Callable[..., Agent], stored: Database, tmp_path: Path) -> Planted:
    """Write thirty sessions with texts that no pattern was made for; return the faults that are planted in them."""
    corrections, others = map(cycle, read_texts("held_out.txt"))
    (folder := tmp_path / "project").mkdir()
    (folder / "notes.txt").write_text("buy milk\n")
    found = Planted()
    for talk in plan_talks(corrections, others):
        found |= await play(talk, make_agent, folder)
    return found | import_talks(stored, folder, corrections, others)
