"""`crow lessons` as a real command: lists, evidence, lines that a person adds, and a model that reads, too."""

import json
import os
import pty
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from crow_core.testing import Reply, ScriptedServer

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

pytestmark = [pytest.mark.anyio, pytest.mark.posix]


async def import_talk(machine: "Machine", *prompts: str, cwd: Path | None = None, results: tuple[str, ...] = ()) -> str:
    """Import a session with these prompts, each with an answer; return its id."""
    file = machine.home / f"talk-{len(list(machine.home.glob('talk-*')))}.jsonl"
    lines: list[dict[str, Any]] = []
    for prompt in prompts:
        lines += [
            {"type": "user", "cwd": str(cwd or machine.project), "message": {"content": prompt}},
            {"type": "assistant", "message": {"content": "Done."}},
        ]
    for number, text in enumerate(results):
        use = {"type": "tool_use", "id": f"c{number}", "name": "Read", "input": {"file_path": ".env"}}
        result = {"type": "tool_result", "tool_use_id": f"c{number}", "content": text}
        lines[2:2] = [
            {"type": "assistant", "message": {"content": [use]}},
            {"type": "user", "message": {"content": [result]}},
        ]
    file.write_text("\n".join(map(json.dumps, lines)))
    done = await machine.crow("import", "claude-code", str(file))
    assert done.code == 0, done.err
    listed = json.loads((await machine.crow("sessions", "list", "--all", "--json")).out)
    return next(one["id"] for one in listed if one["title"].startswith(prompts[0][:20]))


async def read_lessons(machine: "Machine", *args: str) -> list[dict[str, Any]]:
    done = await machine.crow("lessons", "--json", *args)
    assert done.code == 0, done.err
    return json.loads(done.out)


async def test_corrections_of_three_sessions_become_one_lesson_with_a_line_and_quotes(machine: "Machine"):
    said = ["no, use uv", "Use uv instead of pip please.", "again: don't use pip, use uv"]
    ids = [await import_talk(machine, f"Task {number}.", text) for number, text in enumerate(said)]
    (lesson,) = await read_lessons(machine)
    assert (lesson["kind"], lesson["times"], lesson["sessions"]) == ("correction", 3, 3)
    assert {one["session"]: one["quote"] for one in lesson["evidence"]} == dict(zip(ids, said, strict=True))
    assert lesson["line"] == "Do not use pip, use uv."
    assert lesson["file"] == str(machine.project / "AGENTS.md")
    shown = await machine.crow("lessons", lesson["id"][:3])
    assert ("“no, use uv”" in shown.out, ids[0][:8] in shown.out) == (True, True)
    assert "Do not use pip, use uv." in (await machine.crow("lessons")).out


async def test_line_for_several_projects_is_for_the_file_of_the_user(machine: "Machine"):
    (other := machine.home / "other").mkdir()
    await import_talk(machine, "One.", "no, use uv")
    await import_talk(machine, "Two.", "no, use uv", cwd=other)
    assert [one["times"] for one in await read_lessons(machine)] == [1], "this folder alone"
    (lesson,) = await read_lessons(machine, "--all")
    assert lesson["file"].endswith("crow/AGENTS.md")
    assert str(machine.project) not in lesson["file"]


async def test_secrets_private_data_and_names_are_in_no_lesson(machine: "Machine"):
    values = ("hunter-two-99", "ghp_0123456789abcdefghij0123456789")
    await import_talk(
        machine,
        "Log in.",
        f"no, use the login {values[0]} for staging",
        f"No, the token is {values[1]}.",
        f"never write into {machine.project}/src/generated",
        "no, ask tom@example.org first",
        results=(f"LOGIN={values[0]}\n",),
    )
    done = await machine.crow("lessons", "--json")
    assert all(value not in done.out for value in (*values, "tom@example.org", str(machine.project / "src")))
    lines = sorted(one["line"] for one in json.loads(done.out))
    assert lines == ["", "", "", "Never write into src/generated."]


async def test_three_sessions_without_faults_and_no_database_are_no_lessons(machine: "Machine"):
    assert (await machine.crow("lessons", "--json")).out == "[]\n"
    for number in range(3):
        await import_talk(machine, f"Task {number}.", "Thanks.", "Now the docs.")
    done = await machine.crow("lessons")
    assert (done.code, done.out) == (0, "")
    assert "No lessons in 3 sessions of this folder" in done.err
    wrong = await machine.crow("lessons", "--since", "soon")
    assert (wrong.code, "'soon' is no age" in wrong.err) == (2, True)
    assert "There is no lesson 'abc'" in (await machine.crow("lessons", "abc")).err


async def test_line_is_added_to_the_file_only_by_a_person_who_says_yes(machine: "Machine"):
    (machine.project / "AGENTS.md").write_text("# Rules\n\n- Be brief.\n")
    await import_talk(machine, "One.", "no, use uv", "we never push to main")
    refused = await machine.crow("lessons", "--apply", stdin="y\ny\n")
    assert (refused.code, "needs a terminal" in refused.err) == (2, True)
    ours, theirs = pty.openpty()
    process = await machine.start_on(theirs, "lessons", "--apply")
    os.write(ours, b"y\nn\n")
    await process.wait()
    shown = os.read(ours, 20_000).decode()
    os.close(ours)
    assert re.search(r"\+- Use uv\.", shown), shown
    assert (machine.project / "AGENTS.md").read_text() == "# Rules\n\n- Be brief.\n- Use uv.\n"
    assert [one["line"] for one in await read_lessons(machine)] == ["We never push to main."]


def find_ids(request: dict[str, Any], *words: str) -> dict[str, str]:
    """Return the ids of the messages in a request that have these words, with the texts."""
    text = request["messages"][-1]["content"]
    found = re.findall(r'<message id="(\w+)">\n(.*?)\n</message>', text, re.DOTALL)
    return {id: said for id, said in found if any(word in said for word in words or ("",))}


def answer(*corrections: tuple[str, str, str]) -> Reply:
    found = [dict(zip(("id", "quote", "line"), one, strict=True)) for one in corrections]
    return Reply(json.dumps({"corrections": found}))


async def test_model_finds_what_no_pattern_does_and_its_quotes_are_checked(machine: "Machine"):
    id = await import_talk(machine, "One.", "Bitte immer pnpm nehmen.", "That's wrong.", "Thanks.")

    def reply(request: dict[str, Any]) -> Reply:
        assert "Bitte" in request["messages"][-1]["content"]
        ((german, _),) = find_ids(request, "pnpm").items()
        ((wrong, _),) = find_ids(request, "wrong").items()
        ((thanks, _),) = find_ids(request, "Thanks").items()
        return answer(
            (german, "Bitte immer pnpm nehmen.", "Use pnpm."),
            (wrong, "That's wrong.", "Ask before you guess."),
            (thanks, "Thanks for nothing.", "Be better."),
            ("m99", "Hello", "Invent."),
        )

    async with ScriptedServer(reply) as server:
        machine.ask(server.url)
        done = await machine.crow("lessons", "--model", "scripted", "--json")
    assert done.code == 0, done.err
    assert "Left out: 2 answers of the model whose quote is in no message." in done.err
    lessons = json.loads(done.out)
    assert sorted(one["line"] for one in lessons) == ["Ask before you guess.", "Use pnpm."]
    assert {one["evidence"][0]["session"] for one in lessons} == {id}
    versions = json.loads((await machine.crow("prompts", "list", "--json")).out)
    assert "lessons" in [one["name"] for one in versions]
    listed = json.loads((await machine.crow("sessions", "list", "--json")).out)
    assert [one["id"] for one in listed] == [id], "the model's session is none of this folder"


async def test_model_that_always_agrees_is_named_and_not_used(machine: "Machine"):
    for number in range(3):
        await import_talk(machine, f"Write part {number}.", "no, use uv", "Now the docs.")

    def reply(request: dict[str, Any]) -> Reply:
        return answer(*((id, said, "Agree.") for id, said in find_ids(request).items()))

    async with ScriptedServer(reply) as server:
        machine.ask(server.url)
        done = await machine.crow("lessons", "--model", "scripted", "--json")
    assert "The model took 3 of 3 first prompts for corrections" in done.err
    assert [(one["line"], one["times"]) for one in json.loads(done.out)] == [("Use uv.", 3)]


async def test_nonsense_of_a_model_leaves_the_lessons_as_they_are(machine: "Machine"):
    await import_talk(machine, "One.", "no, use uv")
    async with ScriptedServer(lambda request: Reply("I like trains.")) as server:
        machine.ask(server.url)
        done = await machine.crow("lessons", "--model", "scripted", "--json")
    assert (done.code, "1 of the model's answers cannot be used" in done.err) == (0, True), done.err
    assert [one["line"] for one in json.loads(done.out)] == ["Use uv."]
