"""Permissions: modes, rules, answers for the session, and questions, with the real tools."""

import asyncio
import hashlib
import json
import os
import re
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import crow_mcp_server
import pytest
from crow_core.acp.client import OPTION_NAMES, AcpClient
from crow_core.acp.schema import (
    CancelledOutcome,
    ClientCapabilities,
    DiffContent,
    RequestPermissionRequest,
    RequestPermissionResponse,
    SelectedOutcome,
    ToolCallUpdate,
)
from crow_core.acp.transports import Transport, memory_pair
from crow_core.agent.acp_agent import AcpAgent
from crow_core.app import Crow
from crow_core.mcp.result import ToolResult
from crow_core.mcp.server import Server
from crow_core.mcp.tool import ToolCall
from crow_core.messages.message import INTERRUPTED, NOT_RUN, Message
from crow_core.session.session import Session
from crow_core.testing import Editor, Reply, ScriptedModel, connect
from crow_core.testing.script import ScriptedCall as Use
from crow_core.text import clean_json
from crow_permissions.extension import permissions
from crow_permissions.kept_answers import KeptAnswers
from crow_permissions.rules import parse_rule
from crow_permissions.simple_commands import get_parser
from fastmcp import FastMCP
from msgspec import UNSET

pytestmark = pytest.mark.anyio

Mode = Literal["ask", "accept-edits", "plan", "yolo"]


def built_in() -> Server:
    return Server(
        "crow", crow_mcp_server.create_server, definitions=crow_mcp_server.tools(), built_in=True, shared=True
    )


def run(command: str, **more: Any) -> Use:
    return {"name": "terminal", "arguments": {"command": command, **more}}


def view(path: str) -> Use:
    return {"name": "file_editor", "arguments": {"command": "view", "path": path}}


def create(path: str, text: str = "new\n") -> Use:
    return {"name": "file_editor", "arguments": {"command": "create", "path": path, "file_text": text}}


def together(*uses: Use) -> ScriptedModel:
    """Make a model that makes all these tool calls at once."""
    return ScriptedModel([Reply(tool_calls=list(uses)), Reply("Done.")])


def in_turn(*uses: Use) -> ScriptedModel:
    """Make a model that makes one of these tool calls in each turn."""
    return ScriptedModel([reply for use in uses for reply in (Reply(tool_calls=[use]), Reply("Done."))])


def answers(model: ScriptedModel) -> list[str]:
    """Return the results of the last tool calls, as the model receives them, without the last line feed."""
    answered: list[str] = []
    for message in reversed(model.requests[-1]["messages"]):
        if message["role"] != "tool":
            break
        answered.insert(0, message["content"].removesuffix("\n"))
    return answered


def commands_asked(editor: Editor) -> list[Any]:
    return [question.tool_call.raw_input["command"] for question in editor.questions]  # type: ignore[index, call-overload]


def decisions(crow: Crow) -> list[tuple[str, str]]:
    (session,) = crow.sessions.values()
    return [
        (note["is"], note["by"]) for entry in session.log if (note := entry.get("crow", {})).get("kind") == "decision"
    ]


def crow_with(model: ScriptedModel, *servers: Server, **options: Any) -> Crow:
    return Crow(model, servers=[built_in(), *servers]).use(permissions, **options)


Answer = Callable[[RequestPermissionRequest], Awaitable[RequestPermissionResponse]]


class Person(Editor):
    """An editor that answers each permission question by a function."""

    def __init__(self, transport: Transport, answer: Answer) -> None:
        super().__init__(transport)
        self.answer = answer

    async def on_permission(self, question: RequestPermissionRequest) -> RequestPermissionResponse:
        self.questions.append(question)
        return await self.answer(question)


@asynccontextmanager
async def connect_person(crow: Crow, answer: Answer) -> AsyncGenerator[Person]:
    ours, theirs = memory_pair()
    agent = asyncio.ensure_future(AcpAgent(theirs, crow).serve())
    person = Person(ours, answer)
    async with person.serving():
        await person.initialize("person", ClientCapabilities(meta=OPTION_NAMES))
        yield person
    await agent
    await crow.shut_down()


@pytest.mark.posix("the commands are those of a POSIX shell")
@pytest.mark.parametrize(
    ("mode", "verdicts"),
    [
        ("ask", ["free", "asked", "asked", "asked"]),
        ("accept-edits", ["free", "free", "asked", "asked"]),
        ("plan", ["free", "denied", "denied", "denied"]),
        ("yolo", ["free", "free", "free", "free"]),
    ],
)
async def test_each_mode_asks_as_described(mode: Mode, verdicts: list[str], tmp_path: Path):
    (tmp_path / "a.txt").write_text("one\n")
    server = FastMCP("demo")
    server.tool(lambda: "told", name="tell")
    model = together(view("a.txt"), create("b.txt"), run("test 1"), {"name": "demo_tell", "arguments": {}})
    crow = crow_with(model, Server("demo", lambda: server, shared=True), mode=mode)
    async with connect(crow) as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
        asked = {question.tool_call.tool_call_id for question in editor.questions}
        denied = {id for id, states in editor.calls().items() if states[-1] == "failed"}
        found = ["asked" if id in asked else "denied" if id in denied else "free" for id in editor.calls()]
        assert found == verdicts
        assert [verdict for verdict, _ in decisions(crow)] == ["deny" if v == "denied" else "allow" for v in verdicts]
    assert (tmp_path / "b.txt").exists() == (mode != "plan")


async def test_a_denial_in_plan_mode_tells_the_model_what_to_do_instead(tmp_path: Path):
    model = together(create("b.txt"))
    async with connect(crow_with(model, mode="plan", allow=["file_editor", "terminal"])) as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    (said,) = answers(model)
    assert said.startswith("This was not run: plan mode only reads. Describe the change instead.")


async def test_a_new_mode_holds_from_the_next_tool_call_on(tmp_path: Path):
    model = in_turn(create("a.txt"), create("b.txt"))
    async with connect(crow_with(model, mode="plan")) as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
        await editor.set_mode(session.session_id, "accept-edits")
        await editor.prompt(session.session_id, "go")
    assert not (tmp_path / "a.txt").exists()
    assert (tmp_path / "b.txt").exists()
    assert editor.questions == []


@pytest.mark.posix("the commands are those of a POSIX shell")
@pytest.mark.parametrize(
    ("permit", "runs", "questions"),
    [("allow_once", 2, 2), ("allow_always", 2, 1), ("reject_once", 0, 2), ("reject_always", 0, 1)],
)
async def test_each_answer_has_the_effect_that_it_names(permit: str, runs: int, questions: int, tmp_path: Path):
    command = "echo x >> out.txt"
    model = in_turn(run(command), run(command))
    async with connect(crow_with(model), permit=permit) as editor:
        session = await editor.new_session(str(tmp_path))
        for _ in range(2):
            await editor.prompt(session.session_id, "go")
    assert len(editor.questions) == questions
    assert [option.kind for option in editor.questions[0].options] == [
        "allow_once",
        "allow_always",
        "reject_once",
        "reject_always",
    ]
    assert ((tmp_path / "out.txt").read_text() if runs else "") == "x\n" * runs
    assert answers(model) == (["[no output]"] if runs else [answers(model)[0]])
    if not runs:
        assert answers(model)[0].startswith("This was not run: the user ")


async def test_an_answer_for_the_session_covers_exactly_what_it_names(tmp_path: Path):
    """It covers the same command in the same folder, or all edits, but no other session."""
    (tmp_path / "sub").mkdir()
    uses = [
        run("test 1"),
        run("test 1"),
        run("test 1 "),
        run("test 1 x"),
        run("test 1", cwd="sub"),
        create("a"),
        create("b"),
    ]
    model = in_turn(*uses, run("test 1"))
    async with connect(crow_with(model), permit="allow_always") as editor:
        session = await editor.new_session(str(tmp_path))
        for _ in uses:
            await editor.prompt(session.session_id, "go")
        asked = [question.tool_call.raw_input for question in editor.questions]
        assert asked == [uses[at]["arguments"] for at in (0, 3, 4, 5)]
        names = [question.options[1].name for question in editor.questions]
        commands = ["test 1", "test 1 x", "cd sub && test 1"]
        assert names == [f"Allow for this session: {what}" for what in (*commands, "changes to files here")]
        other = await editor.new_session(str(tmp_path))
        await editor.prompt(other.session_id, "go")
    assert len(editor.questions) == len(asked) + 1


async def test_no_answer_for_the_session_is_offered_if_it_could_not_last(tmp_path: Path):
    """An ask rule and sensitive files lead to a question each time."""
    model = in_turn(run("git push"), create(".envrc"))
    async with connect(crow_with(model, ask=["terminal:git push*"])) as editor:
        session = await editor.new_session(str(tmp_path))
        for _ in range(2):
            await editor.prompt(session.session_id, "go")
    for question in editor.questions:
        assert [option.kind for option in question.options] == ["allow_once", "reject_once"]
    assert len(editor.questions) == 2


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_deny_beats_ask_beats_allow(tmp_path: Path):
    rules = {
        "allow": ["terminal:echo *"],
        "ask": ["terminal:echo b*", "terminal:echo c*"],
        "deny": ["terminal:echo c*"],
    }
    model = together(run("echo a"), run("echo b"), run("echo c"))
    crow = crow_with(model, **rules)
    async with connect(crow) as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
        assert [verdict for verdict, _ in decisions(crow)] == ["allow", "deny", "allow"]  # as they were decided
    assert commands_asked(editor) == ["echo b"]
    first, second, third = answers(model)
    assert (first, second) == ("a", "b")
    assert third.startswith("This was not run: the rule 'terminal:echo c*' says deny.")


async def test_deny_and_ask_rules_hold_in_yolo_mode_too(tmp_path: Path):
    model = together(run("echo a"), run("echo b"), create("secret.txt"))
    rules = {"ask": ["terminal:echo b"], "deny": ["file_editor:secret*"]}
    async with connect(crow_with(model, mode="yolo", **rules)) as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    assert commands_asked(editor) == ["echo b"]
    assert [states[-1] for states in editor.calls().values()] == ["completed", "completed", "failed"]


SIMPLE = [
    "git fetch",
    "  git fetch \n",
    "ls -la src/a_b.py",
    "python3.11 -m pytest -x tests",
    "tool a=b c@d +e ,f :g %h",
]

DANGEROUS = [
    # operators that join commands
    "git fetch; rm -rf x",
    "git fetch;rm -rf x",
    "git fetch && rm -rf x",
    "git fetch || rm -rf x",
    "git fetch | sh",
    "git fetch |& sh",
    "git fetch & rm -rf x",
    "git fetch &",
    "git fetch\nrm -rf x",
    "git fetch\r\nrm -rf x",
    "git fetch\rrm -rf x",
    "\ngit fetch\n;rm x",
    "(rm -rf x)",
    "{ rm -rf x; }",
    "! git fetch",
    "f() { rm x; }",
    "coproc (rm x)",
    # substitution and expansion
    "git fetch $(rm -rf x)",
    "git fetch `rm -rf x`",
    "git fetch $((1+1))",
    "git fetch $[1+1]",
    "git fetch ${x:-y}",
    "git fetch $HOME",
    "git$IFS-status",
    "git fetch $'\\x3b'",
    'git fetch $"x"',
    "git fetch <(rm x)",
    "git fetch >(rm x)",
    "ls *",
    "ls ?",
    "ls [ab]",
    "ls ~",
    "ls ~root",
    "ls {a,b}",
    "echo !!",
    "echo !$",
    "ls ^a^b",
    # redirection
    "git fetch > x",
    "git fetch >x",
    "git fetch >> .bashrc",
    "git fetch 2> x",
    "git fetch &> x",
    "git fetch >| x",
    "git fetch >&2",
    "git fetch < x",
    "git fetch <<< x",
    "git fetch <<EOF\nx\nEOF",
    # quotes, escapes, comments
    "git 'fetch'",
    'git "fetch"',
    "git fetch '; rm x'",
    "git st\\atus",
    "git fetch \\\n; rm x",
    "'rm' -rf x",
    "r\\m -rf x",
    "git fetch #",
    "git fetch 'unclosed",
    # characters that look like others
    "git fetch\trm",
    "git fetch\x0brm x",
    "git fetch\x0crm x",
    "git fetch\x00; rm x",
    "git fetch\x1b[2K",
    "git fetch\x07",
    "git fetch\x7f",
    "git fetch\x85rm x",
    "git fetch\u2028rm x",
    "git fetch\u2029rm x",
    "git\u00a0status",
    "git\u3000status",
    "git fetch\u200b",
    "git fetch\u202e",
    "git fetch\ufeff",
    "git fetch\U000e0041",
    "git fetch\uff1b rm x",
    "g\u0456t status",
    "git sta\u0301tus",
    # variables that change what runs
    "LD_PRELOAD=./x.so git fetch",
    "PATH=. git fetch",
    "GIT_PAGER=x git fetch",
    "PYTHONPATH+=. git fetch",
    "A= git fetch",
    "A=b",
]


@pytest.mark.parametrize("rule", ["terminal:*", "terminal:*git fetch*"])
async def test_an_allow_rule_does_not_match_a_command_that_is_not_simple(rule: str, tmp_path: Path):
    assert len(DANGEROUS) >= 60
    model = together(*map(run, DANGEROUS))
    async with connect(crow_with(model, allow=[rule]), permit="reject_once") as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    assert commands_asked(editor) == [json.loads(clean_json(json.dumps(command).encode())) for command in DANGEROUS]
    assert all(states[-1] == "failed" for states in editor.calls().values())


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_a_simple_command_that_an_allow_rule_matches_is_not_asked_about(tmp_path: Path):
    model = together(*map(run, SIMPLE))
    crow = crow_with(model, allow=["terminal:*"])
    async with connect(crow, permit="reject_once") as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
        assert decisions(crow) == [("allow", "the rule 'terminal:*'")] * len(SIMPLE)
    assert editor.questions == []


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_an_allow_rule_without_a_pattern_allows_every_command(tmp_path: Path):
    model = together(run("echo one; echo two"), run("echo three | cat"))
    crow = crow_with(model, allow=["terminal"])
    async with connect(crow, permit="reject_once") as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
        assert decisions(crow) == [("allow", "the rule 'terminal'")] * 2
    assert editor.questions == []
    assert answers(model) == ["one\ntwo", "three"]


async def test_a_rule_without_a_wildcard_matches_exactly_and_in_the_working_directory_only(tmp_path: Path):
    twins = [
        "git fetch --all",
        "git fetchx",
        "xgit fetch",
        "GIT FETCH",
        "sudo git fetch",
        "./git fetch",
        "git  fetch",
    ]
    model = together(*map(run, twins), run("git fetch", cwd="/"), run("git fetch", cwd="../.."))
    async with connect(crow_with(model, allow=["terminal:git fetch"]), permit="reject_once") as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    assert commands_asked(editor) == [*twins, "git fetch", "git fetch"]


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_every_spelling_of_the_working_directory_means_the_working_directory(tmp_path: Path):
    model = together(run("true", cwd="."), run("true", cwd=str(tmp_path)), run("true", cwd=""))
    async with connect(crow_with(model, allow=["terminal:true"])) as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    assert editor.questions == []


FORBIDDEN = [
    "rm -rf x",
    "  rm -rf x",
    "rm  -rf x",
    "rm\t-rf x",
    "ls; rm -rf x",
    "ls && rm -rf x",
    "ls || rm -rf x",
    "ls | rm -rf x",
    "ls & rm -rf x",
    "ls\nrm -rf x",
    "ls\r\nrm -rf x",
    "echo $(rm -rf x)",
    "echo `rm -rf x`",
    'echo "$(rm -rf x)"',
    "diff <(rm -rf x) y",
    "(rm -rf x)",
    "{ rm -rf x; }",
    "! rm -rf x",
    "if true; then rm -rf x; fi",
    "while true; do rm -rf x; done",
    "A=b rm -rf x",
    "A=b C= rm -rf x",
    "sudo rm -rf x",
    "sudo -n rm -rf x",
    "env A=b rm -rf x",
    "command rm -rf x",
    "time -p rm -rf x",
    "nohup rm -rf x &",
    "timeout 5s rm -rf x",
    "ls | xargs -0 rm -rf x",
    "/bin/rm -rf x",
    "../../bin/rm -rf x",
    "'rm' -rf x",
    '"rm" -rf x',
    "r''m -rf x",
    "\\rm -rf x",
    "r\\m -rf x",
    "r\\\nm -rf x",
    "bash -c 'rm -rf x'",
    "/bin/sh -c 'ls; rm -rf x'",
    "eval 'rm -rf x'",
    "true; " * 50 + "rm -rf x",
    "true; " * 5000 + "rm -rf x",
]


@pytest.mark.parametrize("mode", ["yolo", "ask"])
async def test_a_deny_rule_matches_its_command_inside_other_commands(mode: Mode, tmp_path: Path):
    model = together(*map(run, FORBIDDEN), run("rm -rf x", cwd="/"))
    rules = {"allow": ["terminal"], "deny": ["terminal:rm *"]}
    async with connect(crow_with(model, mode=mode, **rules)) as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    for command, said in zip([*FORBIDDEN, "elsewhere"], answers(model), strict=True):
        assert said.startswith("This was not run: the rule 'terminal:rm *' says deny."), command
    assert editor.questions == []


HIDDEN_PUSHES = [
    "git -C . push",
    "git --git-dir .git push",
    "git --no-pager push",
    "git -P -C . push origin",
    "git send-pack origin",
    "git pu''sh",
    ">/dev/null git push",
    "timeout -s KILL 5 git push",
    "env -u A git push",
    "setsid git push",
    "echo origin | xargs -n 1 git push",
    "find . -exec git push \\;",
    "sh -c 'git -C . push'",
    "echo $(git -C . push)",
]


@pytest.mark.parametrize("mode", ["yolo", "ask"])
@pytest.mark.parametrize("rule", ["terminal", "terminal:git *"])
async def test_a_deny_rule_holds_behind_options_and_other_programs(mode: Mode, rule: str, tmp_path: Path):
    model = together(*map(run, HIDDEN_PUSHES))
    rules = {"allow": [rule], "deny": ["terminal:git push*"]}
    async with connect(crow_with(model, mode=mode, **rules)) as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    for command, said in zip(HIDDEN_PUSHES, answers(model), strict=True):
        assert said.startswith("This was not run: the rule 'terminal:git push*' says deny."), command
    assert editor.questions == []


async def test_a_command_that_cannot_be_known_is_asked_about_where_a_rule_may_deny_it(tmp_path: Path):
    unclear = ["git $A", "git -c alias.p=push p", "$A push", "echo git push | sh", "git --unheard-of x push"]
    clear = ["echo $HOME", "echo 'git push'"]
    model = together(*map(run, [*unclear, *clear]))
    rules = {"allow": ["terminal"], "deny": ["terminal:git push*"]}
    async with connect(crow_with(model, **rules), permit="reject_once") as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    assert commands_asked(editor) == unclear
    content = editor.questions[0].tool_call.content
    assert "the rule 'terminal:git push*' may be about it" in str(content)


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_a_deny_rule_does_not_match_other_commands(tmp_path: Path):
    others = ["echo farm x", "printf 'arm x'", "ls", "true # rmdir"]
    model = together(*map(run, others))
    async with connect(crow_with(model, mode="yolo", deny=["terminal:rm *"])) as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    assert [states[-1] for states in editor.calls().values()] == ["completed"] * len(others)


async def test_rules_compare_the_resolved_path(tmp_path: Path):
    """For links, dots and absolute paths, with relative and absolute rules."""
    project, secrets = tmp_path / "project", tmp_path / "project" / "secrets"
    secrets.mkdir(parents=True)
    (secrets / "key").write_text("hunter2\n")
    (project / "link").symlink_to(secrets)
    paths = ["secrets/key", "./a/../secrets/key", "link/key", str(secrets / "key"), "link/../secrets/key"]
    for rule in ("file_editor:secrets/*", f"file_editor:{secrets.as_posix()}/*", "file_*:*key"):
        model = together(*map(view, paths))
        async with connect(crow_with(model, mode="yolo", deny=[rule])) as editor:
            session = await editor.new_session(str(project))
            await editor.prompt(session.session_id, "go")
        assert all("says deny" in said for said in answers(model)), rule


async def test_a_folder_whose_name_begins_with_the_projects_is_outside_the_project(tmp_path: Path):
    for name in ("proj", "proj2"):
        (tmp_path / name).mkdir()
    model = together(create(str(tmp_path / "proj2" / "a.txt")), create("../proj2/b.txt"))
    async with connect(crow_with(model, mode="accept-edits"), permit="reject_once") as editor:
        session = await editor.new_session(str(tmp_path / "proj"), roots=[])
        await editor.prompt(session.session_id, "go")
    assert len(editor.questions) == 2


async def test_edits_in_additional_folders_are_accepted_like_those_in_the_project(tmp_path: Path):
    for name in ("proj", "proj2"):
        (tmp_path / name).mkdir()
    model = together(create(str(tmp_path / "proj2" / "a.txt")))
    async with connect(crow_with(model, mode="accept-edits")) as editor:
        session = await editor.new_session(str(tmp_path / "proj"), roots=[str(tmp_path / "proj2")])
        await editor.prompt(session.session_id, "go")
    assert editor.questions == []
    assert (tmp_path / "proj2" / "a.txt").exists()


TOUCHY = [
    ".git/hooks/pre-commit",
    ".git/config",
    "sub/.git/config",
    ".GIT/hooks/post-merge",
    "a/../.git/config",
    ".crow/config.toml",
    ".config/crow/config.toml",
    ".local/share/crow/trust.json",
    ".mcp.json",
    ".vscode/tasks.json",
    ".vscode/settings.json",
    ".idea/workspace.xml",
    ".zed/tasks.json",
    ".cursor/mcp.json",
    ".claude/settings.json",
    ".agents/skills/a/SKILL.md",
    ".devcontainer/devcontainer.json",
    ".husky/pre-push",
    ".github/workflows/ci.yml",
    ".ssh/authorized_keys",
    ".bashrc",
    ".bash_profile",
    ".profile",
    ".zshrc",
    ".zshenv",
    ".config/fish/config.fish",
    ".envrc",
    ".env",
    ".gitconfig",
    ".npmrc",
    "link/hooks/pre-commit",
]


async def test_edits_of_files_that_change_what_runs_later_are_always_asked_about(tmp_path: Path):
    """In every mode but yolo, whatever rules and earlier answers allow."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / ".git")
    model = in_turn(create("a.txt"), *map(create, TOUCHY))
    crow = crow_with(model, mode="accept-edits", allow=["file_editor", "file_editor:*"])
    async with connect(crow, permit="reject_once") as editor:
        session = await editor.new_session(str(tmp_path))
        for _ in range(1 + len(TOUCHY)):
            await editor.prompt(session.session_id, "go")
    asked = [question.tool_call.raw_input["path"] for question in editor.questions]  # type: ignore[index, call-overload]
    assert asked == TOUCHY
    assert sorted(os.listdir(tmp_path)) == [".git", "a.txt", "link"]


@pytest.mark.parametrize("here", [True, False])
async def test_edits_in_crows_own_home_are_asked_about_wherever_it_is(tmp_path: Path, here: bool):
    """Also if it is the working directory, and through a link."""
    home, project = tmp_path / "nest", tmp_path / "project"
    home.mkdir()
    project.mkdir()
    (project / "link").symlink_to(home)
    paths = ["extensions/a.py", ".env"] if here else [str(home / "extensions/a.py"), "link/config.toml", "../nest/a"]
    model = together(*map(create, paths))
    crow = crow_with(model, mode="accept-edits", allow=["file_editor"], own=[str(home)])
    async with connect(crow, permit="reject_once") as editor:
        session = await editor.new_session(str(home if here else project), roots=[str(home)])
        await editor.prompt(session.session_id, "go")
    assert len(editor.questions) == len(paths)
    assert os.listdir(home) == []


async def test_a_rule_for_a_path_holds_for_every_tool_that_names_the_path(tmp_path: Path):
    (tmp_path / "secrets").mkdir()
    (tmp_path / "link").symlink_to("secrets")
    (tmp_path / ".env").write_text("KEY=hunter2\n")
    (tmp_path / "a.py").write_text("KEY = 1\n")
    server = FastMCP("demo")

    @server.tool
    def fetch(uri: str = "", path: str = "") -> str:
        return "hunter2"

    def search(tool: str, **arguments: str) -> Use:
        return {"name": tool, "arguments": arguments}

    forbidden = [
        view(".env"),
        search("grep", pattern="KEY", path=".env"),
        search("grep", pattern="KEY", path="link/../.env"),
        search("glob", pattern="*", path="secrets"),
        search("tree", path=str(tmp_path / "link")),
        search("demo_fetch", path="./secrets/key"),
        search("demo_fetch", uri=(tmp_path / ".env").as_uri()),
        search("demo_fetch", uri=(tmp_path / "secrets/../%2eenv").as_uri().replace("%25", "%") + "#1"),
    ]
    free = [view("a.py"), search("grep", pattern="KEY", path="a.py"), search("glob", pattern="*.py")]
    model = together(*forbidden, *free)
    crow = crow_with(model, Server("demo", lambda: server, shared=True), mode="yolo", deny=["*:.env", "*:secrets/*"])
    async with connect(crow) as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    said = answers(model)
    assert ["says deny" in each for each in said] == [True] * len(forbidden) + [False] * len(free)
    assert "hunter2" not in repr(said)


RUN_LATER = [
    ".gitignore",
    ".env",
    ".envrc",
    ".vimrc",
    ".bashrc",
    ".github/workflows/a.yml",
    ".gitlab-ci.yml",
    ".husky/pre-commit",
    ".git/hooks/pre-commit",
    ".git/config",
    ".vscode/tasks.json",
    ".vscode/settings.json",
    ".idea/workspace.xml",
    ".zed/tasks.json",
    ".cursor/rules/a.mdc",
    ".cursorrules",
    ".claude/settings.json",
    ".claude/commands/a.md",
    ".gemini/settings.json",
    ".codex/config.toml",
    ".opencode/a",
    ".crow/config.toml",
    ".mcp.json",
    ".cargo/config.toml",
    ".npmrc",
    ".yarnrc.yml",
    ".pypirc",
    ".venv/bin/python",
    ".venv/lib/a.py",
    "venv/bin/activate",
    "env/bin/python",
    "a/.tox/b",
    "node_modules/.bin/tsc",
    "node_modules/a/index.js",
    "lib/site-packages/a.py",
    "a.pth",
    "b/a.pth",
    "sitecustomize.py",
    "usercustomize.py",
    "a/__pycache__/b.cpython-311.pyc",
    "conftest.py",
    "tests/conftest.py",
    "pytest.ini",
    "tox.ini",
    "noxfile.py",
    "jest.config.js",
    "vitest.config.ts",
    "playwright.config.ts",
    "setup.py",
    "setup.cfg",
    "pyproject.toml",
    "package.json",
    "build.rs",
    "a/build.rs",
    "Makefile",
    "makefile",
    "sub/Makefile",
    "rules.mk",
    "CMakeLists.txt",
    "cmake/a.cmake",
    "configure",
    "meson.build",
    "BUILD.bazel",
    "WORKSPACE",
    "build.gradle",
    "build.gradle.kts",
    "settings.gradle",
    "gradlew",
    "gradle/wrapper/gradle-wrapper.properties",
    "pom.xml",
    "build.sbt",
    "Package.swift",
    "mix.exs",
    "Rakefile",
    "Gemfile",
    "a.gemspec",
    "Podfile",
    "Cargo.toml",
    "crates/a/Cargo.toml",
    "Directory.Build.props",
    "a.csproj",
    "b.targets",
    "dune",
    "flake.nix",
    "default.nix",
    "shell.nix",
    "SConstruct",
    "wscript",
    "justfile",
    "Taskfile.yml",
    "tasks.py",
    "composer.json",
    "deno.json",
    "eslint.config.mjs",
    "prettier.config.js",
    "babel.config.js",
    "webpack.config.js",
    "vite.config.ts",
    "next.config.js",
    "gulpfile.js",
    "Gruntfile.js",
    "a.code-workspace",
    "Jenkinsfile",
    "azure-pipelines.yml",
    "bitbucket-pipelines.yml",
    "cloudbuild.yaml",
    "Earthfile",
    "Dockerfile",
    "Dockerfile.dev",
    "docker-compose.yml",
    "compose.yaml",
    "Vagrantfile",
    "Procfile",
    "a.service",
    "crontab",
    "hooks/pre-commit",
    "lefthook.yml",
    "AGENTS.md",
    "docs/AGENTS.md",
    "agents.md",
    "CLAUDE.md",
    "CLAUDE.local.md",
    "GEMINI.md",
    "copilot-instructions.md",
    "a.instructions.md",
    "skills/a/SKILL.md",
    "skills/a/run.sh",
    "opencode.json",
    "mcp.json",
    "llms.txt",
]


def path_of(question: RequestPermissionRequest) -> str:
    match question.tool_call.raw_input:
        case {"path": str(path)}:
            return path
        case other:
            raise AssertionError(other)


@pytest.mark.parametrize("mode", ["ask", "accept-edits"])
async def test_file_that_runs_later_or_instructs_an_agent_is_asked_about_each_time(mode: Mode, tmp_path: Path):
    model = together(*map(create, RUN_LATER))
    async with connect(crow_with(model, mode=mode, allow=["file_editor"]), permit="reject_once") as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    asked = [path_of(question) for question in editor.questions]
    assert asked == RUN_LATER
    for question in editor.questions:
        assert [option.kind for option in question.options] == ["allow_once", "reject_once"]
        reason, diff = question.tool_call.content
        assert reason.content.text.endswith(".")
        assert Path(diff.path).as_posix().endswith(path_of(question))


MORE_THAT_RUN_LATER = re.findall(
    r"\S+",
    """
uv.lock package-lock.json pnpm-lock.yaml yarn.lock Cargo.lock go.sum go.mod npm-shrinkwrap.json requirements.txt
requirements-dev.txt requirements/dev.in constraints.txt Pipfile pixi.toml environment.yml mise.toml mise.local.toml
devcontainer.json rust-toolchain rust-toolchain.toml docs/conf.py mkdocs.yml docs/_config.yml book.toml
sub/pyproject.toml sub/package.json sub/setup.py tsconfig.json vue.config.js a/karma.conf.ts bb.edn build.zig
stack.yaml x.cabal pubspec.yaml go.work Brewfile Guardfile config.ru cpanfile a.podspec conanfile.py PKGBUILD
debian/rules x.spec main.tf ansible.cfg netlify.toml wrangler.toml vercel.json cdk.json action.yml renovate.json
x.desktop x.plist x.socket githooks/pre-push gitconfig agents/reviewer.md x.chatmode.md memory-bank/a.md launch.json
x.xcconfig alembic.ini gunicorn.conf.py jupyter_server_config.py features/environment.py rails_helper.rb uv.toml
mypy.ini Makefile.am CMakePresets.json a.bzl
""",
)


async def test_further_files_that_run_later_are_asked_about(tmp_path: Path):
    model = together(*map(create, MORE_THAT_RUN_LATER))
    async with connect(crow_with(model, mode="accept-edits", allow=["file_editor"]), permit="reject_once") as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    assert [path_of(question) for question in editor.questions] == MORE_THAT_RUN_LATER


WRITES_UNKNOWN = """
tar xf a.tar
tar -xf a.tar
tar -vxzf a.tgz
tar zxf a.tgz
tar --extract -f a.tar
tar -C sub -xf a.tar
unzip a.zip
unzip -o a.zip
cp -r a b
cp -a a b
cp -Rp a .
rsync -a a/ b/
git init --template=t x
git worktree add x
git config -f x.cfg a.b c
git clone ../other
csplit -f x a.txt 2
curl -K x
curl -OJ http://127.0.0.1:9/x
zstd -d x.zst -o y
zstd -do y x.zst
gunzip a.gz
gzip -d a.gz
xz -dk a.xz
7z x a.7z
cpio -id
patch -p1 -i a.diff
git apply a.diff
split --additional-suffix=.py a.txt conftest
wget -r http://127.0.0.1:9/
unrar x a.rar
jar xf a.jar
pax -rf a.pax
dpkg-deb -x a.deb .
""".strip().split("\n")


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_a_rule_with_a_wildcard_does_not_allow_to_write_files_that_are_not_known(tmp_path: Path):
    uses: list[Use] = [{"name": "terminal", "arguments": {"command": line}} for line in WRITES_UNKNOWN]
    allow = [f"terminal:{program} *" for program in sorted({line.split()[0] for line in WRITES_UNKNOWN})]
    async with connect(crow_with(together(*uses), allow=allow), permit="reject_once") as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    assert [question.tool_call.raw_input["command"] for question in editor.questions] == WRITES_UNKNOWN


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_a_rule_allows_a_command_that_writes_no_unknown_file(tmp_path: Path):
    lines = ["tar tf a.tar", "cp a.txt b.txt", "git config --get user.name", "zstd -l a.zst", "unzip -o exact.zip"]
    uses: list[Use] = [{"name": "terminal", "arguments": {"command": line}} for line in lines]
    allow = ["terminal:tar *", "terminal:cp *", "terminal:git *", "terminal:zstd *", "terminal:unzip -o exact.zip"]
    async with connect(crow_with(together(*uses), allow=allow), permit="reject_once") as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    assert editor.questions == []


@pytest.mark.parametrize(
    "path",
    ["github/a", "crow/a.py", "env.py", "my.bashrc.txt", "src/setup_utils.py", "docs/guide.md", "a/tests/test_a.py"],
)
async def test_files_with_similar_names_do_not_run_later(path: str, tmp_path: Path):
    model = together(create(path))
    async with connect(crow_with(model, mode="accept-edits")) as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    assert editor.questions == []


async def test_project_below_a_folder_with_a_dot_is_edited_without_a_question(tmp_path: Path):
    project = tmp_path / ".cache" / "project"
    project.mkdir(parents=True)
    model = together(create("a.py"), create(str(project / "b.py")))
    async with connect(crow_with(model, mode="accept-edits")) as editor:
        session = await editor.new_session(str(project))
        await editor.prompt(session.session_id, "go")
    assert editor.questions == []


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_allowed_command_that_runs_the_folders_code_is_asked_about_once_after_edits(tmp_path: Path):
    tests, status = run("python3 -m unittest"), run("git status")
    model = in_turn(tests, create("a.py"), status, tests, tests)
    rules = {"allow": ["terminal:python3 -m unittest", "terminal:git status"]}
    async with connect(crow_with(model, mode="accept-edits", **rules)) as editor:
        session = await editor.new_session(str(tmp_path))
        for _ in range(5):
            await editor.prompt(session.session_id, "go")
    (question,) = editor.questions
    assert "python3 may run code of this folder, where this session has changed files" in str(
        question.tool_call.content
    )
    assert [option.kind for option in question.options] == ["allow_once", "reject_once"]


async def test_rejected_command_that_runs_the_folders_code_is_asked_about_again(tmp_path: Path):
    model = in_turn(create("a.py"), run("make"), run("make"))
    async with connect(crow_with(model, mode="accept-edits", allow=["terminal:make"]), permit="reject_once") as editor:
        session = await editor.new_session(str(tmp_path))
        for _ in range(3):
            await editor.prompt(session.session_id, "go")
    assert commands_asked(editor) == ["make", "make"]


@pytest.mark.parametrize("mode", ["ask", "yolo"])
async def test_command_that_runs_the_folders_code_is_asked_about_only_where_edits_were_not(mode: Mode, tmp_path: Path):
    model = in_turn(create("a.py"), run("make"))
    async with connect(crow_with(model, mode=mode, allow=["terminal:make"])) as editor:
        session = await editor.new_session(str(tmp_path))
        for _ in range(2):
            await editor.prompt(session.session_id, "go")
    assert not any("run code" in str(question.tool_call.content) for question in editor.questions)
    assert (tmp_path / "a.py").exists()


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_file_that_a_command_writes_without_a_question_counts_as_an_edit(tmp_path: Path):
    model = in_turn(run("echo x > a.py"), run("make"))
    crow = crow_with(model, mode="accept-edits", allow=["terminal:echo *", "terminal:make"])
    async with connect(crow) as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
        await editor.prompt(session.session_id, "go")
    assert commands_asked(editor) == ["make"]
    assert (tmp_path / "a.py").read_text() == "x\n"


async def test_question_about_a_command_names_the_protected_file_that_it_writes(tmp_path: Path):
    model = together(run("echo x | tee sub/.envrc"))
    async with connect(crow_with(model, allow=["terminal"]), permit="reject_once") as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    (question,) = editor.questions
    (said,) = question.tool_call.content  # type: ignore[misc]
    written = os.path.join(tmp_path, "sub/.envrc")
    assert said.content.text.startswith(f"This writes {written}. **/.*: names that begin with a dot")
    assert [option.kind for option in question.options] == ["allow_once", "reject_once"]


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_rules_that_allow_parts_of_a_command_line_are_recorded(tmp_path: Path):
    model = together(run("echo a && printf 'b c' | cat"))
    crow = crow_with(model, allow=["terminal:echo *", "terminal:printf *", "terminal:cat"])
    async with connect(crow) as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
        rules = "the rules 'terminal:echo *' and 'terminal:printf *' and 'terminal:cat'"
        assert decisions(crow) == [("allow", rules)]
    assert editor.questions == []
    assert answers(model) == ["a\nb c"]


@pytest.mark.parametrize("shell", ["fish", "pwsh", "/usr/bin/nu", "cmd.exe", "xonsh", "zsh", 5])
async def test_no_pattern_allows_a_command_of_a_shell_that_is_not_posix(shell: Any, tmp_path: Path):
    tools = FastMCP("demo")
    tools.tool(lambda command: "done", name="terminal", meta={"crow/kind": "execute", "crow/shell": shell})
    model = together(run("git status"), run("git status && ls"), run("git push"))
    crow = Crow(model, servers=[Server("demo", lambda: tools, built_in=True, shared=True)])
    crow.use(permissions, allow=["terminal:git status", "terminal:ls"], deny=["terminal:git push*"])
    async with connect(crow, permit="reject_once") as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    assert commands_asked(editor) == ["git status", "git status && ls"]
    assert "says deny" in answers(model)[2]


async def test_path_with_backslashes_in_a_command_of_powershell_is_judged_as_with_slashes(tmp_path: Path):
    tools = FastMCP("demo")
    tools.tool(lambda command: "done", name="terminal", meta={"crow/kind": "execute", "crow/shell": "powershell"})
    model = together(run(r"echo a > secrets\key"), run(r"echo a > other\key"))
    crow = Crow(model, servers=[Server("demo", lambda: tools, built_in=True, shared=True)])
    crow.use(permissions, mode="yolo", deny=["file_editor:secrets/*"])
    async with connect(crow) as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    assert ["says deny" in answer for answer in answers(model)] == [True, False]


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({"deny": ["terminal:"]}, "its pattern is empty"),
        ({"deny": ["rm x:"]}, "is no rule"),
        ({"allow": ["terminal:git push | cat"]}, "the commands around '|' are compared one by one"),
        ({"allow": ["terminal:cd a && make"]}, "the commands around '&&' are compared one by one"),
        ({"allow": ["terminal:echo $(date)"]}, "compared one by one"),
        ({"deny": ["*:./secrets/*"]}, "write the path without './'"),
        ({"deny": ["file_editor:~/.ssh/*"]}, "write the path from the root of the file system"),
        ({"ask": ["*:../other/*"]}, "write the path from the root of the file system"),
    ],
)
def test_rule_that_can_never_match_is_an_error_with_the_reason(rules: dict[str, list[str]], reason: str):
    with pytest.raises(ValueError, match=re.escape(reason)):
        crow_with(together(), **rules)


def test_rule_with_backslashes_is_an_error_on_windows():
    with pytest.raises(ValueError, match="can never match: write the path with '/'"):
        parse_rule(r"file_editor:C:\secrets\*", windows=True)
    assert parse_rule(r"terminal:type C:\*", windows=True).pattern == r"type C:\*"


def test_rules_that_deny_or_ask_may_name_a_whole_command_line():
    crow_with(together(), deny=["terminal:git push | cat"], ask=["terminal:./run.sh", "terminal:cd /etc && *"])


async def test_rule_for_a_tool_that_does_not_exist_is_noticed_once(tmp_path: Path):
    model = in_turn(run("true"), run("true"))
    async with connect(crow_with(model, deny=["termnial:rm *", "demo_tool", "fil*"], mode="yolo")) as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
        await editor.prompt(session.session_id, "go")
    notices = [str(update) for update in editor.updates if "never matches" in str(update)]
    assert len(notices) == 1
    assert "'termnial:rm *' never matches: no tool has this name. Is terminal meant?" in notices[0]


@pytest.mark.parametrize("mode", ["ask", "accept-edits"])
@pytest.mark.parametrize("command", ["$( " * 10_000 + "x" + ")" * 10_000, "sudo -n 1 " * 5_000])
async def test_command_that_is_too_much_is_asked_about(command: str, mode: Mode, tmp_path: Path):
    model = together(run(command))
    rules = {"allow": ["terminal", "terminal:echo *"], "deny": ["terminal:git push*", "*:.env"]}
    async with connect(crow_with(model, mode=mode, **rules), permit="reject_once") as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    assert len(editor.questions) == 1


async def test_link_to_a_file_that_runs_later_is_asked_about(tmp_path: Path):
    (tmp_path / ".git").mkdir()
    (tmp_path / "innocent").symlink_to(".git")
    model = together(create("innocent/hook"))
    async with connect(crow_with(model, mode="accept-edits"), permit="reject_once") as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    assert len(editor.questions) == 1


@pytest.mark.posix("links need no permission")
async def test_edit_is_written_where_it_was_judged_wherever_a_link_leads_meanwhile(tmp_path: Path):
    hooks, folder, link = (tmp_path / name for name in (".git/hooks", "real", "d"))
    for each in (hooks, folder):
        each.mkdir(parents=True)
    link.symlink_to("real")
    ended = threading.Event()

    def swap() -> None:
        while not ended.is_set():
            for target in (".git/hooks", "real"):
                (tmp_path / "new").symlink_to(target)
                (tmp_path / "new").replace(link)

    calls = [create(f"d/{number}.sh", "#!/bin/sh\n") for number in range(240)]
    replies = [Reply(tool_calls=calls[at : at + 20]) for at in range(0, 240, 20)]
    crow = crow_with(ScriptedModel([*replies, Reply("Done.")]), mode="accept-edits")
    swapping = asyncio.ensure_future(asyncio.to_thread(swap))
    async with connect(crow, permit="reject_once") as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    ended.set()
    await swapping
    assert [*hooks.iterdir()] == []
    assert [*folder.iterdir()]  # some were written


async def test_users_own_patterns_are_asked_about_too(tmp_path: Path):
    model = together(create("deploy/prod/a.yaml"), create("b.yaml"))
    crow = crow_with(model, mode="accept-edits", protected=["deploy/**"])
    async with connect(crow, permit="reject_once") as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    (question,) = editor.questions
    assert "[permissions] protected names it" in str(question.tool_call.content)


async def test_the_model_is_told_that_nobody_can_answer(tmp_path: Path):
    model = together(run("test 1"))

    async def ignore(_: Any) -> None: ...

    ours, theirs = memory_pair()
    crow = crow_with(model)
    agent = asyncio.ensure_future(AcpAgent(theirs, crow).serve())
    client = AcpClient(ours, {"session/update": ignore})  # answers the question with -32601
    async with client.serving():
        await client.initialize("deaf", ClientCapabilities())
        session = await client.new_session(str(tmp_path))
        answer = await client.prompt(session.session_id, "go")
        assert answer.stop_reason == "end_turn"
        assert decisions(crow) == [("deny", "it needs a permission, and nobody is there to give it")]
    await agent
    await crow.shut_down()
    assert "nobody is there to give it" in answers(model)[0]


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_questions_come_one_at_a_time_in_the_order_of_the_calls(tmp_path: Path):
    open_questions = 0
    commands = [f"expr {number}" for number in range(1, 9)]

    async def answer(question: RequestPermissionRequest) -> RequestPermissionResponse:
        nonlocal open_questions
        open_questions += 1
        assert open_questions == 1
        await asyncio.sleep(0)
        open_questions -= 1
        return RequestPermissionResponse(outcome=SelectedOutcome(option_id="allow"))

    model = together(*map(run, commands))
    async with connect_person(crow_with(model), answer) as person:
        session = await person.new_session(str(tmp_path))
        await person.prompt(session.session_id, "go")
    assert commands_asked(person) == commands
    assert answers(model) == [str(number) for number in range(1, 9)]


async def test_an_answer_for_the_session_settles_the_questions_that_wait(tmp_path: Path):
    model = together(*[run("test 1")] * 5)
    crow = crow_with(model)
    async with connect(crow, permit="allow_always") as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
        assert decisions(crow) == [("allow", "the user")] + [("allow", "the user answered so for this session")] * 4
    assert len(editor.questions) == 1


async def test_the_question_shows_the_whole_command(tmp_path: Path):
    long = "echo harmless" + " " * 4000 + "; rm -rf /tmp/nothing\n# and more"
    model = together(run(long, timeout=5))
    async with connect(crow_with(model), permit="reject_once") as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    (question,) = editor.questions
    assert question.session_id == session.session_id
    assert question.tool_call.tool_call_id in editor.calls()
    assert question.tool_call.raw_input == {"command": long, "timeout": 5}
    assert (question.tool_call.kind, question.tool_call.name) == ("execute", "terminal")


async def test_the_question_about_an_edit_shows_its_diff(tmp_path: Path):
    """The diff is the tool's, not the one of the arguments, and no file is changed."""
    (tmp_path / "a.txt").write_text("one\ntwo\nthree\n")
    arguments = {"command": "str_replace", "path": "a.txt", "old_str": "two", "new_str": "2"}
    model = together({"name": "file_editor", "arguments": arguments})
    seen: list[str] = []

    async def answer(question: RequestPermissionRequest) -> RequestPermissionResponse:
        seen.append((tmp_path / "a.txt").read_text())
        return RequestPermissionResponse(outcome=SelectedOutcome(option_id="allow"))

    async with connect_person(crow_with(model), answer) as person:
        session = await person.new_session(str(tmp_path))
        await person.prompt(session.session_id, "go")
    diff = DiffContent(path=str(tmp_path / "a.txt"), old_text="one\ntwo\nthree\n", new_text="one\n2\nthree\n")
    assert person.questions[0].tool_call.content == [diff]
    assert person.of(ToolCallUpdate)[-1].content == [diff]
    assert seen == ["one\ntwo\nthree\n"]
    assert (tmp_path / "a.txt").read_text() == "one\n2\nthree\n"


async def test_the_question_about_an_edit_that_cannot_succeed_shows_no_diff(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one\n")
    arguments = {"command": "str_replace", "path": "a.txt", "old_str": "two", "new_str": "2"}
    async with connect(crow_with(together({"name": "file_editor", "arguments": arguments}))) as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    (question,) = editor.questions
    assert question.tool_call.content is UNSET
    assert question.tool_call.title == "str_replace a.txt"


async def test_a_tool_that_does_not_edit_is_not_called_before_the_answer(tmp_path: Path):
    called: list[str] = []
    tools = FastMCP("demo")
    tools.tool(lambda: called.append("wipe"), name="wipe")
    crow = Crow(in_turn({"name": "demo_wipe", "arguments": {}}), servers=[Server("demo", lambda: tools, shared=True)])
    async with connect(crow.use(permissions), permit="reject_once") as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    assert len(editor.questions) == 1
    assert called == []


async def test_an_answer_for_the_session_ends_when_the_tools_definition_changes(tmp_path: Path):
    tools = FastMCP("demo")
    tools.tool(lambda: "done", name="wipe", description="Wipe the table.")
    uses: list[Use] = [{"name": "demo_wipe", "arguments": {}}] * 3
    crow = Crow(in_turn(*uses), servers=[Server("demo", lambda: tools, shared=True)]).use(permissions)
    async with connect(crow, permit="allow_always") as editor:
        session = await editor.new_session(str(tmp_path))
        for _ in range(2):
            await editor.prompt(session.session_id, "go")
        assert len(editor.questions) == 1
        (open_session,) = crow.sessions.values()
        (server,) = open_session.toolbox.external_servers()
        tools.local_provider.remove_tool("wipe")
        tools.tool(lambda: "done", name="wipe", description="Wipe the disk.")
        server.mark_changed("tools")
        await editor.prompt(session.session_id, "go")
    assert len(editor.questions) == 2


async def test_without_a_choice_the_mode_is_ask_and_clients_see_it(tmp_path: Path):
    async with connect(Crow(together()).use(permissions)) as editor:
        session = await editor.new_session(str(tmp_path))
        assert session.modes
        assert session.modes.current_mode_id == "ask"


async def test_a_path_that_no_file_can_have_is_judged_and_refused_by_the_tool(tmp_path: Path):
    model = together(view("a\0b"), create("a\0b"))
    async with connect(crow_with(model)) as editor:
        session = await editor.new_session(str(tmp_path))
        assert (await editor.prompt(session.session_id, "go")).stop_reason == "end_turn"
    assert all("is not a path" in answer for answer in answers(model))
    assert len(editor.questions) == 1


async def test_an_allow_rule_names_a_file_outside_of_the_folder_by_its_absolute_path(tmp_path: Path):
    (folder := tmp_path / "project").mkdir()
    model = together(create(str(tmp_path / "a.txt")), create("../b.txt"))
    async with connect(crow_with(model, allow=[f"file_editor:{tmp_path.as_posix()}/*"])) as editor:
        session = await editor.new_session(str(folder))
        await editor.prompt(session.session_id, "go")
    assert editor.questions == []


async def test_a_decision_that_changes_before_the_tool_runs_is_recorded_too(tmp_path: Path):
    crow = crow_with(together(create("a.txt")), mode="yolo")

    @crow.before_announcement
    def change_mode(session: Session, tool_call: ToolCall) -> None:
        next(option for option in session.options if option.id == "mode").set("plan")

    async with connect(crow) as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
        assert decisions(crow) == [("allow", "mode yolo"), PLANS]
    assert not (tmp_path / "a.txt").exists()


async def test_the_answer_cancelled_ends_the_turn_as_cancelled(tmp_path: Path):
    async def answer(question: RequestPermissionRequest) -> RequestPermissionResponse:
        return RequestPermissionResponse(outcome=CancelledOutcome())

    model = ScriptedModel([Reply(tool_calls=[run("test 1"), run("test x")]), Reply("Well.")])
    crow = crow_with(model)
    async with connect_person(crow, answer) as person:
        session = await person.new_session(str(tmp_path))
        ended = await person.prompt(session.session_id, "go")
        assert ended.stop_reason == "cancelled"
        assert [states[-1] for states in person.calls().values()] == ["failed", "failed"]
        (crow_session,) = crow.sessions.values()
        told = [entry.get("content") for entry in crow_session.log if entry.get("role") == "tool"]
        assert told == [NOT_RUN, NOT_RUN]
        ends = [update.meta for update in person.of(ToolCallUpdate) if update.status == "failed"]
        assert ends == [{"crow": {"notRun": True}}] * 2
        ended = await person.prompt(session.session_id, "and now?")
        assert ended.stop_reason == "end_turn"


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_cancel_at_a_question_says_of_each_call_whether_it_may_have_had_effects(tmp_path: Path):
    """One call runs, and the user is asked about another one. Both end with the turn."""
    model = ScriptedModel([Reply(tool_calls=[run("touch began; sleep 60"), run("true x")])])
    crow = crow_with(model, allow=["terminal"], ask=["terminal:true*"])

    async def answer(question: RequestPermissionRequest) -> RequestPermissionResponse:
        while not (tmp_path / "began").exists():
            await asyncio.sleep(0.01)
        return RequestPermissionResponse(outcome=CancelledOutcome())

    async with connect_person(crow, answer) as person:
        opened = await person.new_session(str(tmp_path))
        assert (await person.prompt(opened.session_id, "go")).stop_reason == "cancelled"
        (session,) = crow.sessions.values()
        told = {entry.get("tool_call_id"): entry.get("content") for entry in session.log if entry.get("role") == "tool"}
    assert [told[use["id"]] for entry in session.log for use in entry.get("tool_calls", ())] == [INTERRUPTED, NOT_RUN]


async def test_cancel_at_a_question_says_that_nothing_ran_after_extensions_let_the_call_pass(tmp_path: Path):
    async def answer(question: RequestPermissionRequest) -> RequestPermissionResponse:
        return RequestPermissionResponse(outcome=CancelledOutcome())

    crow = crow_with(ScriptedModel([Reply(tool_calls=[run("expr 1")])]))
    seen: list[str] = []

    @crow.before_tool
    async def look(session: Session, tool_call: ToolCall) -> None:
        seen.append(tool_call.name)

    async with connect_person(crow, answer) as person:
        opened = await person.new_session(str(tmp_path))
        assert (await person.prompt(opened.session_id, "go")).stop_reason == "cancelled"
        (session,) = crow.sessions.values()
        assert [entry.get("content") for entry in session.log if entry.get("role") == "tool"] == [NOT_RUN]
    assert seen == ["terminal"]


ERASE: dict[str, Any] = {"name": "erase", "inputSchema": {"type": "object", "properties": {}}}


def eraser(erased: list[str], *, by_handler: bool, **options: Any) -> Server:
    """Make a server with the tool `erase`, which is a handler, or one of FastMCP's."""
    (other := FastMCP("other")).tool(lambda: erased.append("server"), name="erase")

    def erase(session: Session, tool_call: ToolCall) -> ToolResult:
        erased.append("handler")
        return ToolResult.text("Erased.")

    if by_handler:
        return Server("other", definitions=[ERASE], handlers={"erase": erase}, **options)
    return Server("other", lambda: other, definitions=[ERASE], **options)


@pytest.mark.parametrize("by_handler", [True, False])
async def test_refusal_of_an_extension_comes_before_the_question(by_handler: bool, tmp_path: Path):
    """The extension is used after `permissions`."""
    erased: list[str] = []
    model = in_turn({"name": "other_erase", "arguments": {}})
    crow = crow_with(model, eraser(erased, by_handler=by_handler))

    @crow.before_tool
    async def refuse(session: Session, tool_call: ToolCall) -> ToolResult | None:
        return ToolResult.error("Not today.")

    async with connect(crow, permit="reject_once") as editor:
        opened = await editor.new_session(str(tmp_path))
        await editor.prompt(opened.session_id, "go")
    assert (editor.questions, erased, answers(model)) == ([], [], ["Not today."])


@pytest.mark.parametrize("by_handler", [True, False])
@pytest.mark.parametrize(
    ("permit", "options", "questions", "ran"),
    [
        ("reject_once", {}, 1, False),
        ("allow_once", {}, 1, True),
        ("allow_once", {"deny": ["other_erase"]}, 0, False),
        ("reject_once", {"allow": ["other_erase"]}, 0, True),
        ("allow_once", {"mode": "plan"}, 0, False),
    ],
)
async def test_tool_of_a_handler_is_judged_as_one_of_a_server(
    by_handler: bool, permit: Any, options: dict[str, Any], questions: int, ran: bool, tmp_path: Path
):
    erased: list[str] = []
    model = in_turn({"name": "other_erase", "arguments": {}})
    crow = crow_with(model, eraser(erased, by_handler=by_handler), **options)
    async with connect(crow, permit=permit) as editor:
        opened = await editor.new_session(str(tmp_path))
        await editor.prompt(opened.session_id, "go")
    assert (len(editor.questions), len(erased)) == (questions, ran)
    states = ["pending", "in_progress", "completed"] if ran else ["pending", "failed"]
    assert list(editor.calls().values()) == [states]


async def test_handler_that_edits_does_not_run_for_the_preview_of_a_question(tmp_path: Path):
    erased: list[str] = []
    server = eraser(erased, by_handler=True, built_in=True)
    server.definitions = [{**ERASE, "_meta": {"crow/kind": "edit"}}]
    crow = crow_with(in_turn({"name": "erase", "arguments": {}}), server)
    async with connect(crow, permit="reject_once") as editor:
        opened = await editor.new_session(str(tmp_path))
        await editor.prompt(opened.session_id, "go")
    assert (len(editor.questions), erased) == (1, [])


async def test_an_answer_that_was_not_offered_denies_the_call(tmp_path: Path):
    async def answer(question: RequestPermissionRequest) -> RequestPermissionResponse:
        return RequestPermissionResponse(outcome=SelectedOutcome(option_id="sure, whatever"))

    model = together(run("touch x"))
    async with connect_person(crow_with(model), answer) as person:
        session = await person.new_session(str(tmp_path))
        await person.prompt(session.session_id, "go")
    assert not (tmp_path / "x").exists()


async def test_the_log_has_every_decision_with_its_reason(tmp_path: Path):
    written: list[Message] = []
    model = in_turn(view("a.txt"), run("test 1"), run("false"))
    crow = crow_with(model, deny=["terminal:false"])
    crow.message(lambda session, entry: written.append(entry))
    async with connect(crow) as editor:
        session = await editor.new_session(str(tmp_path))
        for _ in range(3):
            await editor.prompt(session.session_id, "go")
        assert decisions(crow) == [
            ("allow", "reading is allowed"),
            ("allow", "the user"),
            ("deny", "the rule 'terminal:false' says deny"),
        ]
    notes = [entry["crow"] for entry in written if "crow" in entry and entry["crow"].get("kind") == "decision"]
    assert [note["call"] for note in notes] == list(editor.calls())


async def test_rejecting_edits_for_the_session_does_not_reject_reading(tmp_path: Path):
    (tmp_path / "a.txt").write_text("readable")
    edit = {"name": "file_editor", "arguments": {"command": "create", "path": "b.txt", "file_text": "1"}}
    model = in_turn(edit, view("a.txt"), edit)
    async with connect(crow_with(model), permit="reject_always") as editor:
        session = await editor.new_session(str(tmp_path))
        for _ in range(3):
            await editor.prompt(session.session_id, "go")
    assert [states[-1] for states in editor.calls().values()] == ["failed", "completed", "failed"]
    assert len(editor.questions) == 1


async def test_a_decision_names_its_scope_and_a_digest_of_the_arguments(tmp_path: Path):
    edit = {"name": "file_editor", "arguments": {"command": "create", "path": "a.txt", "file_text": "1"}}
    uses = [run("test 1"), run("test 1"), edit, view("a.txt")]
    model = in_turn(*uses, run("touch x"))
    crow = crow_with(model, ask=["terminal:touch*"])
    async with connect(crow, permit="allow_always") as editor:
        session = await editor.new_session(str(tmp_path))
        for _ in uses:
            await editor.prompt(session.session_id, "go")
        editor.permit = "allow_once"
        await editor.prompt(session.session_id, "go")
        (log,) = (session.log for session in crow.sessions.values())
    notes = [entry["crow"] for entry in log if entry.get("crow", {}).get("kind") == "decision"]
    command, files = "session: test 1", "session: changes to files here"
    assert [note["scope"] for note in notes] == [command, command, files, "once", "once"]
    asked = [call["function"]["arguments"] for entry in log for call in entry.get("tool_calls", [])]
    assert [note["arguments"] for note in notes] == [hashlib.sha256(text.encode()).hexdigest() for text in asked]


async def test_a_tool_of_an_external_server_is_asked_about_whatever_its_kind(tmp_path: Path):
    server = FastMCP("demo")
    server.tool(lambda: "done", name="peek", meta={"crow/kind": "read"}, annotations={"readOnlyHint": True})
    model = together({"name": "demo_peek", "arguments": {}})
    crow = Crow(model, servers=[Server("demo", lambda: server, shared=True)]).use(permissions)
    async with connect(crow, permit="reject_once") as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    (question,) = editor.questions
    assert question.options[1].name.startswith("Allow for this session: demo_peek (definition ")


@pytest.mark.parametrize(
    "arguments", ['{"sql": "DROP TABLE birds"}', '{"sql": "\\u0044ROP TABLE birds"}', '{ "sql":"DROP"}']
)
async def test_a_rule_matches_arguments_in_any_json_spelling(arguments: str, tmp_path: Path):
    server = FastMCP("db")

    @server.tool
    def query(sql: str) -> str:
        return "done"

    model = together({"name": "db_query", "arguments": arguments})
    crow = Crow(model, servers=[Server("db", lambda: server, shared=True)])
    crow.use(permissions, mode="yolo", deny=['db_query:{"sql":"DROP*'])
    async with connect(crow) as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    assert "says deny" in answers(model)[0]


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_a_project_can_tighten_the_rules_of_its_sessions(tmp_path: Path):
    def project(cwd: str) -> tuple[Sequence[str], Sequence[str]]:
        return (["terminal:echo a"], ["terminal:echo b"]) if cwd == str(tmp_path) else ((), ())

    uses = [run("echo a"), run("echo b")]
    model = ScriptedModel([Reply(tool_calls=uses), Reply("Done."), Reply(tool_calls=uses), Reply("Done.")])
    async with connect(crow_with(model, mode="yolo", project=project)) as editor:
        here = await editor.new_session(str(tmp_path))
        await editor.prompt(here.session_id, "go")
        assert commands_asked(editor) == ["echo a"]
        assert "says deny" in answers(model)[1]
        there = await editor.new_session("/")
        await editor.prompt(there.session_id, "go")
    assert len(editor.questions) == 1
    assert answers(model) == ["a", "b"]


# Terminals that remember


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_a_folder_below_the_root_is_the_working_directory_for_allow_rules(tmp_path: Path):
    (tmp_path / "root" / "sub").mkdir(parents=True)
    uses = [run("pwd"), run("cd sub && true"), run("pwd"), run("./pwd"), run("cd ../.. && true"), run("pwd")]
    model = in_turn(*uses, run("cd root && true"), run("pwd"))
    crow = crow_with(model, allow=["terminal:pwd", "terminal:true", "terminal:./pwd"])
    async with connect(crow, permit="allow_once") as editor:
        session = await editor.new_session(str(tmp_path / "root"))
        told: list[str] = []
        for _ in range(8):
            await editor.prompt(session.session_id, "go")
            told += answers(model)
        assert (told[2], told[5], told[7]) == (f"{tmp_path}/root/sub", str(tmp_path), f"{tmp_path}/root")
        assert [question.tool_call.title for question in editor.questions] == [
            f"cd {tmp_path}/root/sub && ./pwd",  # another program than the rule means
            f"cd {tmp_path}/root/sub && cd ../.. && true",
            f"cd {tmp_path} && pwd",
        ]


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_answer_about_a_subcommand_holds_in_a_folder_below_the_root(tmp_path: Path):
    (tmp_path / "root" / "sub").mkdir(parents=True)
    model = in_turn(*(run("git commit -m a", cwd=cwd) for cwd in ("", "sub", "..")))
    answers = KeptAnswers(tmp_path / "answers.json")
    crow = crow_with(model, trusted=lambda folder: True, answers=answers)

    async def answer(question: RequestPermissionRequest) -> RequestPermissionResponse:
        option = next((each.option_id for each in question.options if "subcommand" in each.option_id), "reject")
        return RequestPermissionResponse(outcome=SelectedOutcome(option_id=option))

    async with connect_person(crow, answer) as person:
        session = await person.new_session(str(tmp_path / "root"))
        for _ in range(3):
            await person.prompt(session.session_id, "go")
    assert [question.tool_call.raw_input.get("cwd") for question in person.questions] == ["", ".."]  # type: ignore[union-attr]


@pytest.mark.posix("the commands are those of a POSIX shell")
@pytest.mark.parametrize(
    "change", ["export PATH={0}:$PATH", "source ./activate", "export ANYTHING=1; exit 1", "sleep 0 & unset HOME"]
)
async def test_changed_variables_are_asked_about_once_before_a_rule_allows_a_command(change: str, tmp_path: Path):
    (tmp_path / "activate").write_text(f"export PATH={tmp_path}:$PATH\n")
    change = change.format(tmp_path)
    model = in_turn(run("uname"), run(change), run("uname"), run("uname | cat"), run("export A=$RANDOM"), run("uname"))
    crow = crow_with(model, allow=["terminal:uname", "terminal:cat"])
    async with connect(crow, permit="allow_once") as editor:
        session = await editor.new_session(str(tmp_path))
        for _ in range(6):
            await editor.prompt(session.session_id, "go")
    assert commands_asked(editor) == [change, "uname", "export A=$RANDOM", "uname"]
    told = [str(question.tool_call.content) for question in editor.questions]
    assert ["have changed variables" in text for text in told] == [False, True, False, True]
    assert "PATH" in told[1] or "export PATH" not in change


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_program_that_a_changed_path_has_in_place_of_an_allowed_one_does_not_run_unasked(tmp_path: Path):
    (tmp_path / "uname").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    (tmp_path / "uname").chmod(0o755)
    model = in_turn(run(f"export PATH={tmp_path}:$PATH"), run("uname"), run("uname"))
    crow = crow_with(model, allow=["terminal:uname"])

    async def answer(question: RequestPermissionRequest) -> RequestPermissionResponse:
        is_export = "export" in str(question.tool_call.raw_input)
        return RequestPermissionResponse(outcome=SelectedOutcome(option_id="allow" if is_export else "reject"))

    async with connect_person(crow, answer) as person:
        session = await person.new_session(str(tmp_path))
        for _ in range(3):
            await person.prompt(session.session_id, "go")
    assert len(person.questions) == 3
    assert not (tmp_path / "ran").exists()


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_answer_for_the_session_asks_again_after_variables_have_changed(tmp_path: Path):
    model = in_turn(run("expr 1"), run("expr 1"), run("export A=1"), run("expr 1"), run("expr 1"))

    async def answer(question: RequestPermissionRequest) -> RequestPermissionResponse:
        offered = {option.option_id for option in question.options}
        return RequestPermissionResponse(outcome=SelectedOutcome(option_id=max({"allow-session", "allow"} & offered)))

    async with connect_person(crow_with(model), answer) as person:
        session = await person.new_session(str(tmp_path))
        for _ in range(5):
            await person.prompt(session.session_id, "go")
    assert commands_asked(person) == ["expr 1", "export A=1", "expr 1"]


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_rule_without_a_pattern_and_yolo_ask_nothing_after_variables_have_changed(tmp_path: Path):
    for options in ({"allow": ["terminal"]}, {"mode": "yolo"}):
        model = in_turn(run("export A=1"), run("uname"))
        async with connect(crow_with(model, **options), permit="reject_once") as editor:
            session = await editor.new_session(str(tmp_path))
            for _ in range(2):
                await editor.prompt(session.session_id, "go")
        assert editor.questions == []


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_command_that_a_rule_allowed_for_other_variables_does_not_run(tmp_path: Path):
    uses = [run("export A=1"), run("uname")]
    model = ScriptedModel([Reply(tool_calls=uses), Reply(tool_calls=[run("uname")]), Reply("Done.")])
    crow = crow_with(model, allow=["terminal:uname"])
    moved = asyncio.Event()

    @crow.before_tool.last
    async def wait(session: Session, tool_call: ToolCall) -> None:
        """Keep the allowed command until the other one has ended."""
        if tool_call.arguments["command"] == "uname" and not moved.is_set():
            await moved.wait()

    async with connect(crow, permit="allow_once") as editor:
        session = await editor.new_session(str(tmp_path))
        turn = asyncio.ensure_future(editor.prompt(session.session_id, "go"))
        await editor.until(lambda editor: any(states[-1] == "completed" for states in editor.calls().values()))
        moved.set()
        await turn
    assert "another command has changed variables" in str(model.requests[1]["messages"])
    assert commands_asked(editor) == ["export A=1", "uname"]


async def test_nothing_is_kept_of_a_call_that_was_answered(tmp_path: Path):
    model = together(run("true"), run("false"), view("."))
    crow = crow_with(model, mode="yolo")
    async with connect(crow) as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
        (opened,) = crow.sessions.values()
        assert len(editor.calls()) == 3
        assert not [id for id in editor.calls() if id in repr((opened.state, opened.folders))]


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_a_command_runs_in_the_folder_for_which_it_was_decided(tmp_path: Path):
    (tmp_path / "sub").mkdir()
    model = ScriptedModel([Reply(tool_calls=[run("cd sub"), run("pwd")]), Reply("Done.")])
    crow = crow_with(model, allow=["terminal:cd sub"])
    moved = asyncio.Event()

    async def answer(question: RequestPermissionRequest) -> RequestPermissionResponse:
        await moved.wait()
        return RequestPermissionResponse(outcome=SelectedOutcome(option_id="allow"))

    async with connect_person(crow, answer) as person:
        session = await person.new_session(str(tmp_path))
        turn = asyncio.ensure_future(person.prompt(session.session_id, "go"))
        await person.until(lambda person: any(states[-1] == "completed" for states in person.calls().values()))
        moved.set()
        await turn
    assert answers(model)[1] == str(tmp_path)


@pytest.mark.posix("there are no terminal sessions")
@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ({"command": "echo hello", "session": "a"}, True),  # `echo` may be a function there
        ({"session": "a", "input": "echo hello"}, True),
        ({"session": "a", "input": ""}, True),
        ({"session": "a", "keys": "C-c"}, True),
        ({"session": "a", "command": "", "wait": 0.1}, False),
        ({"session": "a", "keys": "kill"}, False),
        ({"session": "a", "keys": "kill", "input": "y"}, True),
    ],
)
async def test_input_for_a_terminal_session_is_asked_about_and_polling_is_not(
    tmp_path: Path, arguments: dict[str, Any], asked: bool
):
    model = together({"name": "terminal", "arguments": arguments})
    crow = crow_with(model, allow=["terminal:echo*"])
    async with connect(crow, permit="allow_once") as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
        assert bool(editor.questions) == asked
        for question in editor.questions:
            assert question.tool_call.raw_input == arguments
            assert [option.kind for option in question.options] == ["allow_once", "reject_once"]


async def test_deny_rules_hold_for_input_to_a_terminal_session(tmp_path: Path):
    typed = {"name": "terminal", "arguments": {"session": "a", "input": "rm -rf x"}}
    model = together(run("rm -rf x", session="a"), typed)  # type: ignore[arg-type]
    crow = crow_with(model, mode="yolo", deny=["terminal:rm *"])
    async with connect(crow) as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    assert all("the rule 'terminal:rm *' says deny" in answer for answer in answers(model))


OTHER_NAMES: list[tuple[str, Use]] = [
    ("terminal:git push*", {"name": "terminal", "arguments": {"cmd": "git push origin"}}),
    ("terminal:git push*", {"name": "terminal", "arguments": {"command": ["git", "push", "origin"]}}),
    ("terminal:git push*", {"name": "terminal", "arguments": {"command": ["bash", "-lc", "git push origin"]}}),
    ("terminal:git push*", {"name": "terminal", "arguments": {"cmd": '["bash", "-c", "[\\"git\\", \\"push\\"]"]'}}),
    ("terminal:git push*", {"name": "terminal", "arguments": {"command": None, "script": "git push"}}),
    ("terminal:git push*", {"name": "terminal", "arguments": {"Command": "git push"}}),
    ("terminal:cd /etc*", {"name": "terminal", "arguments": {"cmd": "touch a", "workdir": "/etc"}}),
    ("file_editor:secret*", {"name": "file_editor", "arguments": {"command": "view", "file_path": "secret.txt"}}),
    ("file_editor:secret*", {"name": "file_editor", "arguments": {"filePath": "secret.txt", "content": "x"}}),
    ("file_editor:secret*", {"name": "file_editor", "arguments": {"command": "Write", "Path": "secret.txt"}}),
    ("file_editor:5", {"name": "file_editor", "arguments": {"command": "view", "path": 5}}),
    ("*:secret/*", {"name": "grep", "arguments": {"query": "key", "dir_path": "secret"}}),
    ("*:secret/*", {"name": "glob", "arguments": {"glob_pattern": "*", "directory": "secret"}}),
    ("fetch:http://evil.example*", {"name": "fetch", "arguments": {"link": "http://evil.example/a"}}),
]


@pytest.mark.parametrize(("rule", "use"), OTHER_NAMES)
async def test_arguments_under_other_names_do_not_get_around_a_rule(tmp_path: Path, rule: str, use: Use):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret.txt").write_text("the key\n")
    model = in_turn(use)
    crow = crow_with(model, mode="yolo", deny=[rule])
    async with connect(crow) as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
        assert decisions(crow) == [("deny", f"the rule {rule!r} says deny")]
    assert "This was not run" in answers(model)[0]
    assert (tmp_path / "secret.txt").read_text() == "the key\n"


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_question_shows_the_arguments_that_the_tool_will_use(tmp_path: Path):
    use: Use = {"name": "terminal", "arguments": {"cmd": ["bash", "-lc", "echo $((6*7))"], "description": "List files"}}
    model = in_turn(use)
    async with connect(crow_with(model), permit="allow_once") as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    (question,) = editor.questions
    assert question.tool_call.raw_input == {"command": "echo $((6*7))"}
    assert question.tool_call.title == "echo $((6*7))"
    assert [answer.rstrip() for answer in answers(model)] == ["42"]


async def test_two_values_of_one_argument_are_refused_without_a_question(tmp_path: Path):
    model = in_turn({"name": "terminal", "arguments": {"command": "ls", "cmd": "rm -r ."}})
    async with connect(crow_with(model), permit="allow_once") as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    assert editor.questions == []
    assert "command and cmd are the same argument with two values" in answers(model)[0]


async def test_kind_of_a_call_follows_from_the_command_that_is_meant(tmp_path: Path):
    (tmp_path / "a").write_text("one\n")
    read: Use = {"name": "file_editor", "arguments": {"command": "read", "file_path": "a"}}
    write: Use = {"name": "file_editor", "arguments": {"command": "write", "file_path": "b", "content": "x"}}
    model = together(read, write)
    async with connect(crow_with(model, mode="plan")) as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    shown, refused = answers(model)
    assert "1\tone" in shown
    assert "plan mode only reads" in refused
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("mode", "deny", "verdict"),
    [
        ("ask", ["terminal:rm *"], "ask"),
        ("accept-edits", [], "ask"),
        ("plan", [], "deny"),
        ("yolo", ["terminal:rm *"], "deny"),
        ("yolo", [], "allow"),
        ("ask", ["terminal"], "deny"),
    ],
)
async def test_command_that_is_too_long_is_not_compared_with_rules(
    mode: Mode, deny: list[str], verdict: str, tmp_path: Path
):
    model = together(run("true #" + " a;" * 50_000))
    crow = crow_with(model, mode=mode, allow=["terminal"], deny=deny)
    async with connect(crow, permit="reject_once") as editor:
        session = await editor.new_session(str(tmp_path))
        before = get_parser.cache_info()
        await editor.prompt(session.session_id, "go")
        assert get_parser.cache_info() == before
    assert [[option.option_id for option in asked.options] for asked in editor.questions] == (
        [["allow", "reject"]] if verdict == "ask" else []
    )
    assert answers(model)[0].startswith("This was not run") == (verdict != "allow")


READS, PLANS = ("allow", "reading is allowed"), ("deny", "plan mode only reads. Describe the change instead")
YOLO, EDITS, USER = ("allow", "mode yolo"), ("allow", "mode accept-edits"), ("allow", "the user")


@pytest.mark.parametrize("mode", ["ask", "accept-edits", "plan", "yolo"])
async def test_each_kind_of_tool_is_decided_as_described_in_each_mode(mode: Mode, tmp_path: Path):
    tools = FastMCP("demo")
    arguments: dict[str, dict[str, Any]] = {
        **{kind: {"path": "a.txt"} for kind in ("read", "search", "edit", "delete", "move")},
        "think": {"text": "Hm."},
        "fetch": {"url": "HTTP://Example.org/a b"},
        "execute": {"command": "\tls  -l\n"},
        "outside": {"path": "/tmp/a.txt"},
        "sensitive": {"path": ".git/hooks/pre-commit"},
        "other": {},
    }
    for name in arguments:
        kind = "edit" if name in ("outside", "sensitive") else name
        tools.tool(lambda path="", text="", url="", command="": "done", name=name, meta={"crow/kind": kind})
    uses: list[Use] = [{"name": name, "arguments": given} for name, given in arguments.items()]
    crow = Crow(in_turn(*uses), servers=[Server("demo", lambda: tools, built_in=True, shared=True)])
    crow.use(permissions, mode=mode)
    expected = dict.fromkeys(arguments, {"plan": PLANS, "yolo": YOLO}.get(mode, USER))
    if mode != "yolo":
        expected |= dict.fromkeys(("read", "search", "think"), READS) | {"fetch": USER}
    if mode == "accept-edits":
        expected["edit"] = EDITS
    async with connect(crow) as editor:
        session = await editor.new_session(str(tmp_path))
        for _ in uses:
            await editor.prompt(session.session_id, "go")
        assert dict(zip(arguments, decisions(crow), strict=True)) == expected
        (open_session,) = crow.sessions.values()
        noted = [notes["tool"] for entry in open_session.log if "is" in (notes := entry.get("crow", {}))]
        assert noted == list(arguments)
    asked = {question.tool_call.name: question for question in editor.questions}
    assert set(asked) == {name for name, decision in expected.items() if decision == USER}
    if mode == "ask":
        assert [asked["execute"].tool_call.title, asked["edit"].tool_call.status] == ["ls  -l", "pending"]
        scopes = {name: [option.name for option in question.options] for name, question in asked.items()}
        assert "fetch from example.org" in str(scopes["fetch"])
        assert "Allow for this session: ls  -l" in scopes["execute"]
        assert "changes to files here" in str(scopes["edit"])
        assert "other" in str(scopes["other"])
        assert asked["edit"].tool_call.locations


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_reasons_of_decisions_are_recorded(tmp_path: Path):
    risky = FastMCP("risky")
    risky.tool(lambda: "gone", name="wipe", annotations={"destructiveHint": True})
    started: Use = run("cat", session="cat", wait=0)
    typed: Use = {"name": "terminal", "arguments": {"session": "cat", "input": "hello", "keys": "enter"}}
    polled: Use = {"name": "terminal", "arguments": {"session": "cat", "wait": 0}}
    killed: Use = {"name": "terminal", "arguments": {"session": "cat", "keys": "kill"}}
    model = in_turn(started, typed, polled, killed, {"name": "risky_wipe", "arguments": {}}, run("true"))
    servers = Server("risky", lambda: risky, shared=True, trust=True)
    crow = crow_with(model, servers, allow=["terminal:cat", "terminal:true"], deny=["terminal:hello *"])
    async with connect(crow) as editor:
        session = await editor.new_session(str(tmp_path))
        for _ in range(6):
            await editor.prompt(session.session_id, "go")
        polls = ("allow", "it only looks at what was started, or ends it")
        denied = ("deny", "the rule 'terminal:hello *' says deny")
        assert decisions(crow) == [USER, denied, polls, polls, USER, ("allow", "the rule 'terminal:true'")]
    assert [question.tool_call.name for question in editor.questions] == ["terminal", "risky_wipe"]
    assert editor.questions[0].tool_call.raw_input == started["arguments"]
