"""`crow prompts improve` as a real process: a scripted model whose success depends on its system prompt."""

import asyncio
import json
import re
import signal
import sys
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
from crow_core.testing import Failure, Reply, ScriptedServer
from crow_eval.commands.improve_command import improve_prompt

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


def write(text: str) -> Reply:
    """Propose a text."""
    return Reply(f"```\n{text}\n```", usage=USAGE)


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
        page = await machine.crow("eval", "show", report["id"], "--html", "report.html")
        listed = await machine.crow("prompts", "diff", report["first"], report["best"])
        promoted = await machine.crow("prompts", "promote", report["best"])
    assert done.code == 0, done.err
    assert "1 candidate, best system@2: 100%, today's 0%" in done.err
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
    assert page.code == 0, page.err
    html = (machine.project / "report.html").read_text()
    assert "<h2>The search</h2>" in html
    assert f'<span class="good">+You work in {{{{ cwd }}}}. {CAPITALS}</span>' in html
    assert "<h2>Pass rates</h2>" not in html
    assert promoted.code == 0, promoted.err
    assert CAPITALS in (machine.home / "crow" / "prompts" / "system.md.j2").read_text()


async def test_killed_search_goes_on_and_pays_for_nothing_twice(machine: "Machine") -> None:
    write_tasks(machine, 12)
    write_prompt(machine)
    hold, numbers, free = asyncio.Event(), count(1), 10
    command = ("prompts", "improve", "system", "--on", "tasks.jsonl", "--json", "--at-once", "2")

    async def answer(request: dict[str, Any]) -> Reply:
        if next(numbers) > free:
            await hold.wait()
        return improve(request)

    async with ScriptedServer(improve) as server:
        machine.ask(server.url)
        whole = json.loads((await machine.crow(*command)).out)
        needed = len(server.requests)
    async with ScriptedServer(answer) as server:
        machine.ask(server.url)
        process = await machine.start(*command)
        await server.until(lambda: len(server.requests) > free)
        process.send_signal(signal.SIGKILL)
        await process.communicate()
        sent = len(server.requests)
        hold.set()
        (stored, _) = json.loads((await machine.crow("eval", "list", "--json")).out)
        unfinished = await machine.crow("eval", "show", stored["id"])
        refused = await machine.crow("eval", "--resume", stored["id"])
        done = await machine.crow("prompts", "improve", "--resume", stored["id"][:8], "--json")
        again = await machine.crow("prompts", "improve", "--resume", stored["id"][:8], "--json")
        assert len(server.requests) - (sent - free) == needed, "only the calls under way are asked again"
    assert (done.code, again.code) == (0, 0), done.err
    assert "The search has not ended." in unfinished.out
    assert f"crow prompts improve --resume {stored['id'][:8]}" in refused.err
    report = json.loads(done.out)
    for name in ("best", "better", "comparison", "candidates", "parts"):
        assert report[name] == whole[name]
    assert json.loads(again.out) == report


async def test_search_that_is_stopped_says_how_it_goes_on(machine: "Machine") -> None:
    write_tasks(machine, 12)
    hold = asyncio.Event()

    async def answer(request: dict[str, Any]) -> Reply:
        await hold.wait()
        return improve(request)

    async with ScriptedServer(answer) as server:
        machine.ask(server.url)
        process = await machine.start("prompts", "improve", "system", "--on", "tasks.jsonl")
        await server.until(lambda: len(server.requests) == 3)
        running = json.loads((await machine.crow("eval", "list", "--json")).out)[0]["id"]
        second = await machine.crow("prompts", "improve", "--resume", running)
        process.send_signal(signal.SIGTERM)
        _, err = await process.communicate()
        hold.set()
        listed = await machine.crow("eval", "list")
    assert process.returncode == 143
    assert f"Stopped. Go on with: crow prompts improve --resume {running[:8]}" in err.decode()
    assert (second.code, "runs in another process" in second.err) == (2, True)
    assert "search: system, 0 candidates" in listed.out


async def test_without_gepa_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("crow_eval.improvement", "crow_eval.gepa_search"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "gepa", None)
    with pytest.raises(SystemExit):
        await improve_prompt("system", ["tasks"], "", {}, as_json=False, at_once=1)
    assert "uv tool install ./crow --with gepa" in capsys.readouterr().err


async def test_too_few_tasks_are_refused_before_anything_runs(machine: "Machine") -> None:
    write_tasks(machine, 3)
    async with ScriptedServer(improve) as server:
        machine.ask(server.url)
        few = await machine.crow("prompts", "improve", "system", "--on", "tasks.jsonl")
        line = (machine.project / "tasks.jsonl").read_text().splitlines()[0]
        twins = [json.dumps({**json.loads(line), "id": n}) for n in range(20)]
        (machine.project / "tasks.jsonl").write_text("\n".join(twins))
        same = await machine.crow("prompts", "improve", "system", "--on", "tasks.jsonl")
        assert not server.requests
    assert (few.code, same.code) == (2, 2)
    assert "There are 3 tasks that tell something, and a search needs 12" in few.err
    assert "There are 1 different tasks" in same.err


FAULTS: dict[str, tuple[Callable[[str], str], str]] = {
    "a template that is broken": (lambda text: f"{text} {{% if %}}", "The template is wrong"),
    "a variable that does not exist": (lambda text: f"{text} {{{{ weather }}}}", "Uses weather, which is not defined"),
    "a variable that is gone": (lambda text: "You work.", "The template has lost {{ cwd }}."),
    "no text": (lambda text: "", "The text is empty."),
}


@pytest.mark.parametrize("case", FAULTS)
async def test_faulty_candidate_is_named_and_not_run(machine: "Machine", case: str) -> None:
    change, said = FAULTS[case]
    write_tasks(machine, 12)
    write_prompt(machine)

    def answer(request: dict[str, Any]) -> Reply:
        return write(change(find_text(request))) if is_proposal(request) else work(request)

    async with ScriptedServer(answer) as server:
        machine.ask(server.url)
        done = await machine.crow("prompts", "improve", "system", "--on", "tasks.jsonl")
        systems = {find_system(request) for request in server.requests if not is_proposal(request)}
    assert done.code == 0, done.err
    assert said in done.out
    assert "No better than today's: no candidate did better on the 3 validation tasks." in done.out
    assert len(systems) == 6, "the first prompt alone, in the folder of each run"


@pytest.mark.parametrize("case", ["nothing", "the prompt"])
async def test_search_goes_on_after_a_reply_without_a_proposal(machine: "Machine", case: str) -> None:
    write_tasks(machine, 12)
    write_prompt(machine)
    proposals = count()

    def answer(request: dict[str, Any]) -> Reply:
        if is_proposal(request) and next(proposals) < 2:  # crow asks once more after the first
            return Reply("" if case == "nothing" else asked(request), usage=USAGE)
        return improve(request)

    async with ScriptedServer(answer) as server:
        machine.ask(server.url)
        done = await machine.crow("prompts", "improve", "system", "--on", "tasks.jsonl", "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert report["better"] is True
    assert [candidate["fault"] for candidate in report["candidates"]] == [None, "The text is empty.", None]


async def test_proposals_without_sense_end_the_search(machine: "Machine") -> None:
    write_tasks(machine, 12)
    write_prompt(machine)

    def answer(request: dict[str, Any]) -> Reply:
        return write(find_text(request)) if is_proposal(request) else work(request)

    async with ScriptedServer(answer) as server:
        machine.ask(server.url)
        done = await machine.crow("prompts", "improve", "system", "--on", "tasks.jsonl", "--json")
        proposals = sum(map(is_proposal, server.requests))
    assert done.code == 0, done.err
    assert proposals == 8
    report = json.loads(done.out)
    assert report["stopped"] == "The last 8 proposals were faulty, or known before."
    assert (report["best"], report["better"], len(report["candidates"])) == ("system@1", False, 1)


async def test_dataset_that_gives_its_answers_away_is_named(machine: "Machine") -> None:
    lines = [
        {"id": f"say-{n}", "prompt": f"Say WORD {n:03}", "checks": [{"kind": "answer", "contains": f"WORD {n:03}"}]}
        for n in range(12)
    ]
    (machine.project / "tasks.jsonl").write_text("\n".join(map(json.dumps, lines)))
    async with ScriptedServer(lambda request: Reply(asked(request), usage=USAGE)) as server:
        machine.ask(server.url)
        done = await machine.crow("prompts", "improve", "system", "--on", "tasks.jsonl")
    assert done.code == 0, done.err
    assert "the prompts of these tasks hold the text that a check expects: say-0, say-1" in done.err
    assert "No better than today's" in done.out


async def test_candidate_that_quotes_answers_is_named(machine: "Machine") -> None:
    write_tasks(machine, 12)
    write_prompt(machine)

    def answer(request: dict[str, Any]) -> Reply:
        if is_proposal(request):
            return write(f"{find_text(request)} {CAPITALS} Say {', '.join(f'WORD {n:03}' for n in range(12))}.")
        return work(request)

    async with ScriptedServer(answer) as server:
        machine.ask(server.url)
        done = await machine.crow("prompts", "improve", "system", "--on", "tasks.jsonl")
    assert done.code == 0, done.err
    assert "system@2 quotes the text that a check expects of 12 tasks" in done.err


async def test_endpoint_that_fails_stops_the_search_which_goes_on_later(machine: "Machine") -> None:
    write_tasks(machine, 12)
    write_prompt(machine)
    is_down = True

    def answer(request: dict[str, Any]) -> Reply | Failure:
        return Failure(401, "no key") if is_down else improve(request)

    async with ScriptedServer(answer) as server:
        machine.ask(server.url)
        stopped = await machine.crow("prompts", "improve", "system", "--on", "tasks.jsonl", "--json")
        is_down = False
        id = json.loads(stopped.out)["id"]
        done = await machine.crow("prompts", "improve", "--resume", id, "--json")
    assert stopped.code == 1
    assert "3 runs ended with an error" in stopped.err
    assert f"Go on with: crow prompts improve --resume {id[:8]}" in stopped.err
    assert json.loads(done.out)["better"] is True, done.err


async def test_half_of_a_limit_is_kept_for_the_report(machine: "Machine") -> None:
    write_tasks(machine, 24)
    write_prompt(machine)

    def answer(request: dict[str, Any]) -> Reply:
        return write(find_text(request) + ".") if is_proposal(request) else work(request)

    async with ScriptedServer(answer) as server:
        machine.ask(server.url)
        done = await machine.crow(
            "prompts", "improve", "system", "--on", "tasks.jsonl", "--json", "--max-requests", "20", "--at-once", "1"
        )
        assert 10 <= len(server.requests) <= 13, "a round that has begun is ended"
        report = json.loads(done.out)
        shown = await machine.crow("eval", "show", report["id"])
        more = await machine.crow("prompts", "improve", "--resume", report["id"], "--json", "--max-requests", "40")
        assert 20 <= len(server.requests) <= 23, "it goes on with a higher limit"
    assert report["stopped"] == "Half of the 20 requests is used; the rest is for the report."
    assert "The search has ended: half of the 20 requests is used" in shown.out
    assert json.loads(more.out)["stopped"] == "Half of the 40 requests is used; the rest is for the report."
    assert (done.code, more.code) == (0, 0), done.err


async def improve_file(machine: "Machine", file: str, text: str, heard: str) -> list[str]:
    """Improve a file of the project, and return the output of the search, of the diff and of `promote`."""
    write_tasks(machine, 12)
    write_prompt(machine, PLAIN + "{% for each in instructions %}\n{{ each }}{% endfor %}")
    (path := machine.project / file).parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)

    def answer(request: dict[str, Any]) -> Reply:
        if is_proposal(request):
            return write(f"{find_text(request)} {CAPITALS}")
        seen = json.dumps(request["messages"])
        assert heard in seen
        return Reply(re.findall(r"word \d+", asked(request))[0].upper() if CAPITALS in seen else "No.", usage=USAGE)

    async with ScriptedServer(answer) as server:
        machine.ask(server.url)
        done = await machine.crow("prompts", "improve", file, "--on", "tasks.jsonl")
        name = "AGENTS.md" if "AGENTS" in file else "skill:words"
        diff = await machine.crow("prompts", "diff", f"{name}@1", f"{name}@2")
        promoted = await machine.crow("prompts", "promote", f"{name}@2")
    assert done.code == 0, done.err
    assert path.read_text() == text
    return [done.out, diff.out, promoted.err]


async def test_instructions_of_a_project_improve(machine: "Machine") -> None:
    done, diff, promoted = await improve_file(machine, "docs/AGENTS.md", "Be brief.", "Be brief.")
    assert "Better than today's." in done
    assert "Use it: crow prompts show AGENTS.md@2 > FILE" in done
    assert f"+Be brief. {CAPITALS}" in diff
    assert "AGENTS.md@2 is a version of a file." in promoted


async def test_skill_improves(machine: "Machine") -> None:
    skill = "---\nname: words\ndescription: Say a word.\nmetadata:\n  triggers: word\n---\nSay it."
    done, diff, _ = await improve_file(machine, ".crow/skills/words/SKILL.md", skill, "Say a word.")
    assert "Better than today's." in done
    assert f"+Say it. {CAPITALS}" in diff
