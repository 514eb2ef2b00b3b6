"""`crow prompts improve --on` stored sessions: each is asked again, and a judge compares the replies that changed."""

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


def answer(request: dict[str, Any]) -> Reply:
    """Answer words, in capitals if the system prompt says so; judge; and propose the sentence that helps."""
    system, asked = request["messages"][0]["content"], request["messages"][1]["content"]
    if system.startswith("You improve a text"):
        match = re.search(r"```\n(.*?)\n```", asked, re.DOTALL)
        assert match
        return Reply(f"```\n{match[1]} {CAPITALS}\n```", usage=USAGE)
    if system.startswith("You judge"):
        new = re.findall(r"<new reply>\n(.*?)\n</new reply>", asked, re.DOTALL)
        verdict = {"reason": "It is loud.", "verdict": "yes" if "WORD" in new[0] else "no"}
        return Reply(json.dumps(verdict), usage=USAGE)
    return Reply(asked.upper() if CAPITALS in system else asked, usage=USAGE)


async def make_sessions(machine: "Machine", count: int, rating: str = "/bad It is too quiet.") -> None:
    """Store sessions that were rated."""
    (machine.home / "crow" / "prompts").mkdir(parents=True, exist_ok=True)
    (machine.home / "crow" / "prompts" / "system.md.j2").write_text(PLAIN)
    for n in range(count):
        assert (await machine.crow("run", f"word {n}")).code == 0
        rated = await machine.crow("run", "-c", rating)
        assert rated.code == 0, rated.err


async def test_sessions_that_were_rated_as_bad_improve(machine: "Machine") -> None:
    async with ScriptedServer(answer) as server:
        machine.ask(server.url)
        await make_sessions(machine, 12)
        before = len(server.requests)
        done = await machine.crow("prompts", "improve", "system", "--on", "rated", "--json")
        paid = len(server.requests) - before
        again = await machine.crow("prompts", "improve", "--resume", json.loads(done.out)["id"], "--json")
        assert len(server.requests) - before == paid
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert report["dataset"] == "stored sessions"
    assert (report["better"], report["comparison"]["pairs"]["only_b"]) == (True, 12), report
    assert report["took"]["test"]["requests"] == 24
    assert json.loads(again.out) == report


async def test_few_sessions_and_an_unknown_one_are_refused(machine: "Machine") -> None:
    async with ScriptedServer(answer) as server:
        machine.ask(server.url)
        await make_sessions(machine, 1, "/good")
        few = await machine.crow("prompts", "improve", "system", "--on", "rated")
        unknown = await machine.crow("prompts", "improve", "system", "--on", "aaaa", "--on", "bbbb")
    assert (few.code, unknown.code) == (2, 2)
    assert "There are 1 tasks that tell something, and a search needs 12" in few.err
    assert "aaaa" in unknown.err
