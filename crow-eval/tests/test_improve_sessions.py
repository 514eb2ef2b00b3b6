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
STRICT = "A quiet answer is not done well."


def answer(request: dict[str, Any]) -> Reply:
    """Answer words, in capitals if the system prompt says so; judge; and propose the sentence that helps."""
    system, asked = request["messages"][0]["content"], request["messages"][1]["content"]
    if system.startswith("You improve a text"):
        match = re.search(r"```\n(.*?)\n```", asked, re.DOTALL)
        assert match
        more = STRICT if match[1].startswith("You judge") else CAPITALS
        return Reply(f"```\n{match[1]} {more}\n```", usage=USAGE)
    if system.startswith("You judge") and "<answer>" in asked:
        is_loud = "WORD" in asked.partition("<answer>")[2] or STRICT not in system
        return Reply(json.dumps({"reason": "So it is.", "verdict": "yes" if is_loud else "no"}), usage=USAGE)
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


async def test_judge_that_always_says_yes_is_named_and_improves(machine: "Machine") -> None:
    async with ScriptedServer(answer) as server:
        machine.ask(server.url)
        for n in range(14):
            word, rating = (f"WORD {n}", "/good") if n % 2 else (f"word {n}", "/bad")
            assert (await machine.crow("run", word)).code == 0
            assert (await machine.crow("run", "-c", rating)).code == 0
        done = await machine.crow("prompts", "improve", "judge", "--on", "rated", "--seed", "1", "--json")
        assert done.code == 0, done.err
        report = json.loads(done.out)
        shown = await machine.crow("eval", "show", report["id"])
        refused = await machine.crow("prompts", "improve", "judge", "--on", "daily")
        promoted = await machine.crow("prompts", "promote", report["best"])
    first, best = report["agreements"]
    assert (first["said_yes"], first["is_chance"]) == (7, True)
    assert (best["agreed"], best["is_chance"]) == (7, False)
    assert f"{report['first']} agrees with {first['agreed']} of 7 ratings" in shown.out
    assert "which is no better than chance: it says yes to 7." in shown.out
    assert "give --on rated, or ids of sessions" in refused.err
    assert promoted.code == 0, promoted.err
    assert STRICT in (machine.home / "crow" / "prompts" / "judge.md.j2").read_text()
