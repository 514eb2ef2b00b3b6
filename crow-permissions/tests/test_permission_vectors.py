"""Commands and edits, with rules and a mode, and the decision about each: permission_vectors.toml, an ordinary day and
hostile commands."""

import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import crow_mcp_server
import pytest
from crow_core.app import Crow
from crow_core.mcp.result import ToolResult
from crow_core.mcp.server import Server
from crow_core.mcp.tool import ToolCall
from crow_core.session.session import Session
from crow_core.testing import Reply, ScriptedModel, connect
from crow_core.testing.script import ScriptedCall
from crow_permissions.extension import permissions
from crow_permissions.judgement import Mode
from crow_permissions.lasting import find_subcommand

pytestmark = pytest.mark.anyio

DATA: dict[str, Any] = tomllib.loads((Path(__file__).parent / "permission_vectors.toml").read_text("utf-8"))
"""`[[group]]`: `about` says why; `rules` names a table of `[rules]`; `modes` lists modes; `ask`, `deny` and `allow`
list the vectors with this verdict. A vector is a command, or a path after `write:` or `read:`."""
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "permissions.md").read_text("utf-8")
EXAMPLES: list[dict[str, list[str]]] = [
    {kind: table["permissions"].get(kind, []) for kind in ("allow", "ask", "deny")}
    for name in ("README.md", "docs/permissions.md", "docs/settings.md")
    for block in re.findall(r"```toml\n(.*?)```", (ROOT / name).read_text("utf-8"), re.DOTALL)
    if "permissions" in (table := tomllib.loads(block))
]
"""The rules that the README and the manual print."""
HOSTILE: dict[str, list[str]] = tomllib.loads((Path(__file__).parent / "hostile_commands.toml").read_text("utf-8"))
FURTHER: dict[str, list[str]] = tomllib.loads((Path(__file__).parent / "further_samples.toml").read_text("utf-8"))
DENIED = {
    "removals": {"deny": ["terminal:rm *"]},
    "named": {"deny": ["*:.env", "*:secrets/*"], "allow": ["terminal"]},
}
ORDINARY: list[str] = tomllib.loads((Path(__file__).parent / "ordinary_commands.toml").read_text("utf-8"))["commands"]


CASES = [(group, mode) for group in DATA["group"] for mode in group["modes"]]


def to_call(text: str) -> ScriptedCall:
    """Convert a vector to a tool call."""
    kind, colon, path = text.partition(":")
    if colon and kind == "write":
        return {"name": "file_editor", "arguments": {"command": "create", "path": path, "file_text": "x\n"}}
    if colon and kind == "read":
        return {"name": "file_editor", "arguments": {"command": "view", "path": path}}
    return {"name": "terminal", "arguments": {"command": text}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with links, and a folder beside it."""
    folder = tmp_path_factory.mktemp("vectors")
    for name in ("project/src", "project/secrets", "project/tests", "project/.git", "outside"):
        (folder / name).mkdir(parents=True)
    for name in ("project/src/a.py", "project/secrets/key", "project/.env", "project/notes.txt", "outside/b.txt"):
        (folder / name).write_text("text\n")
    (folder / "project/link").symlink_to("secrets")
    (folder / "project/dots").symlink_to(".git")
    (folder / "project/out").symlink_to("../outside")
    return folder / "project"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small project with git, and with private files."""
    folder = tmp_path_factory.mktemp("day") / "project"
    for name in ("src", "tests"):
        (folder / name).mkdir(parents=True)
    for name in ("README.md", "notes.txt", "package.json", "pyproject.toml", "src/app.py", "tests/test_app.py", ".env"):
        (folder / name).write_text("{}\n")
    subprocess.run(["git", "-C", str(folder), "init", "-q"], check=True)
    return folder


def run_nothing(crow: Crow) -> None:
    """Refuse every call that is allowed. Use it after `permissions`."""

    @crow.before_tool.last
    def refuse(session: Session, tool_call: ToolCall) -> ToolResult | None:
        return ToolResult.error("It would have run.")


async def decide(folder: Path, mode: str, rules: dict[str, list[str]], texts: Sequence[str]) -> list[str]:
    """Let the model make these calls, of which none runs; return what was decided about each."""
    model = ScriptedModel([Reply(tool_calls=[to_call(text) for text in texts]), Reply("Done.")])
    definitions = crow_mcp_server.tools()
    for definition in definitions:  # the commands are those of a POSIX shell, also on Windows; none of them runs
        definition["_meta"].pop("crow/shell", None)
    server = Server("crow", crow_mcp_server.create_server, definitions=definitions, built_in=True, shared=True)
    crow = Crow(model, servers=[server])
    crow.use(
        permissions, mode=cast(Mode, mode), protected=["deploy/**"], trusted=lambda folder: True, **cast(Any, rules)
    )
    crow.use(run_nothing)
    async with connect(crow, permit="allow_once") as editor:
        opened = await editor.new_session(str(folder))
        await editor.prompt(opened.session_id, "go")
        (session,) = crow.sessions.values()
        notes = [entry.get("crow", {}) for entry in session.log]
        verdicts = {note["call"]: note["is"] for note in notes if note.get("kind") == "decision"}
        asked = {question.tool_call.tool_call_id for question in editor.questions}
        calls = [use["id"] for entry in session.log for use in cast(Any, entry).get("tool_calls", [])]
    return ["ask" if call in asked else verdicts[call] for call in calls]


def list_vectors(group: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each text of a group, and its verdict."""
    for verdict in ("allow", "ask", "deny"):
        for text in group.get(verdict, ()):
            yield text, verdict


@pytest.mark.parametrize(("group", "mode"), CASES, ids=[f"{group['about'][:50]}-{mode}" for group, mode in CASES])
async def test_each_call_is_decided_as_listed(group: dict[str, Any], mode: str, folder: Path) -> None:
    texts, expected = zip(*list_vectors(group), strict=True)
    found = await decide(folder, mode, DATA["rules"][group["rules"]], texts)
    wrong = [each for each in zip(texts, expected, found, strict=True) if each[1] != each[2]]
    assert not wrong, "\n".join(map(str, wrong))


def test_there_are_many_vectors() -> None:
    assert sum(len(list(list_vectors(group))) for group in DATA["group"]) >= 1000


@pytest.mark.parametrize(("mode", "questions"), [("ask", 24), ("accept-edits", 20)])
async def test_day_of_ordinary_commands_asks_this_often(mode: str, questions: int, folder: Path) -> None:
    assert len(DATA["day"]) == 60
    found = await decide(folder, mode, DATA["rules"]["readme"], DATA["day"])
    assert found.count("ask") == questions


async def list_unasked(folder: Path, rules: dict[str, list[str]], commands: list[str], mode: str = "ask") -> list[str]:
    """List the commands that run without a question."""
    found = await decide(folder, mode, rules, commands)
    return [command for command, verdict in zip(commands, found, strict=True) if verdict == "allow"]


async def test_day_of_ordinary_commands_asks_at_most_65_times_without_a_rule(project: Path) -> None:
    assert len(ORDINARY) == 105
    found = await decide(project, "ask", {}, ORDINARY)
    assert found.count("ask") <= 65, found.count("ask")
    assert not {"git push", "npm test", "uv run pytest", "env | grep PATH", "echo $PATH"} & {
        command for command, verdict in zip(ORDINARY, found, strict=True) if verdict == "allow"
    }


@pytest.mark.parametrize("mode", ["ask", "accept-edits"])
async def test_rules_of_the_readme_and_the_manual_allow_no_hostile_command(mode: str, project: Path) -> None:
    assert len(HOSTILE["readme"]) >= 60
    assert len(EXAMPLES) >= 2
    for rules in EXAMPLES:
        assert await list_unasked(project, rules, HOSTILE["readme"], mode) == []


async def test_page_on_permissions_says_what_is_decided(project: Path) -> None:
    verdicts = {"denied": "deny", "asks": "ask", "runs": "allow"}
    (example,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    rules = tomllib.loads(example)["permissions"]
    rows = re.findall(r"^\| (`[^|]+) \| (denied|asks|runs)\b[^|]* \|[^|]+\|$", PAGE, re.MULTILINE)
    cases = [(command, verdicts[word]) for cell, word in rows for command in re.findall("`(.+?)`", cell)]
    assert len(cases) >= 8
    assert await decide(project, "ask", rules, [command for command, _ in cases]) == [verdict for _, verdict in cases]
    rows = re.findall(r"^\| `(terminal:[^|]+)` \| `([^|]+)` \| (denied|asks|runs)", PAGE, re.MULTILINE)
    assert len(rows) >= 4
    for rule, command, word in rows:
        assert await decide(project, "ask", {"allow": [rule]}, [command]) == [verdicts[word]], command


@pytest.mark.parametrize("mode", ["ask", "accept-edits"])
async def test_rule_with_a_wildcard_allows_no_option_that_runs_another_program(mode: str, project: Path) -> None:
    commands = [*HOSTILE["options"], *spell_otherwise(HOSTILE["options"])]
    programs = {shlex.split(command)[0] for command in commands}
    rules = {"allow": [f"terminal:{program} *" for program in sorted(programs)]}
    assert await list_unasked(project, rules, commands, mode) == []


def spell_otherwise(commands: list[str]) -> list[str]:
    """Spell the long options of commands in other ways: abbreviated, and with the value in the next word."""
    found: list[str] = []
    for command in commands:
        if option := re.search(r" (--[\w-]+)(=)?", command):
            shorter = option[1][:-1]
            found.append(command.replace(option[1], shorter, 1))
            if option[2]:
                found.append(command.replace(f"{option[1]}=", f"{option[1]} ", 1))
        found.append(f"ls | {command}")
    return found


async def test_wildcard_ends_where_a_name_ends(project: Path) -> None:
    allow = ["git diff*", "ls*", "uv run pytest*", "npm run test*", "./run.sh*", "./scripts/*", "docker-*", "?it log*"]
    longer = [
        *("git difftool", "git difftool -yx sh --no-index a b", "git diffx", "lsof", "lsblk -a", "uv run pytest-evil"),
        *("uv run pytest3", "npm run test:evil", "npm run testx", "./run.sh.evil", "./run.shx", "./scripts/a/b"),
        *("./scripts/../evil", "docker-x y", "git logx", "git diff-tree-x"),
    ]
    rules = {"allow": [f"terminal:{pattern}" for pattern in allow]}
    assert await list_unasked(project, rules, longer) == []
    same = ["git diff HEAD", "ls", "uv run pytest -q", "npm run test", "./run.sh --any x", "./scripts/a", "docker-x"]
    assert await list_unasked(project, rules, same) == same


async def test_file_that_an_option_writes_is_an_edit(project: Path) -> None:
    allow = ["git *", "sort *", "sed *", "tar *", "uv run pytest*", "tree *", "curl *", "cp *"]
    rules = {"allow": [f"terminal:{pattern}" for pattern in allow]}
    inside = [
        *(
            "git log --output=a.txt",
            "git diff-tree -s --root --output a.txt HEAD",
            "git diff-index --output=a.txt HEAD",
        ),
        *(
            "git show --output=a.txt",
            "git stash show --output=a.txt",
            "git reflog --output=a.txt",
            "sort -o a.txt notes.txt",
        ),
        *("sort --output=a.txt notes.txt", "sort -uoa.txt notes.txt", "sed -i s/a/b/ notes.txt", "tar -czf a.tgz src"),
        *(
            "tar czf a.tgz src",
            "uv run pytest --junitxml=a.xml",
            "tree -o a.txt",
            "curl -so a.txt http://x/a",
            "cp -t src notes.txt",
        ),
    ]
    outside = [command.replace("a.txt", "/tmp/a.txt") for command in inside if "a.txt" in command]
    protected = [command.replace("a.txt", "conftest.py") for command in inside if "a.txt" in command]
    assert await list_unasked(project, rules, [*inside, *outside, *protected]) == []
    assert await list_unasked(project, rules, [*outside, *protected], "accept-edits") == []
    for command in inside:  # each in a session of its own, as the first command after an edit asks
        assert await list_unasked(project, rules, [command], "accept-edits") == [command]


async def test_commands_that_only_read_run_without_a_rule(project: Path) -> None:
    commands = [
        *HOSTILE["readers"],
        *("ls", "cat notes.txt | head -5 | wc -l", "git log --oneline -3 && git status", "rg -n x src"),
    ]
    assert await list_unasked(project, {}, commands) == commands[len(HOSTILE["readers"]) :]


async def test_command_that_reads_what_a_rule_names_asks(project: Path) -> None:
    rules = {"deny": ["*:notes.txt"], "ask": ["file_editor:src/*"]}
    commands = ["cat notes.txt", "head -1 ./notes.txt", "cat src/app.py", "grep -rn x .", "rg x", "grep x README.md"]
    assert await list_unasked(project, rules, commands) == ["grep x README.md"]


async def test_first_command_after_an_edit_that_does_not_only_read_asks_once(project: Path) -> None:
    rules = {
        "allow": [
            "terminal:tool *",
            "terminal:git add*",
            "terminal:uv run pytest*",
            "terminal:gdb x",
            "terminal:echo *",
        ]
    }
    for command in ("tool x", "git add -A", "uv run pytest", "gdb x"):
        found = await decide(
            project, "accept-edits", rules, ["echo x > src/b.py", "git status", "ls | wc -l", command, command]
        )
        assert found == ["allow", "allow", "allow", "ask", "allow"], command


@pytest.fixture(scope="module")
def samples_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small project with private files."""
    folder = tmp_path_factory.mktemp("samples") / "project"
    for name in ("src", "tests", "secrets", ".git"):
        (folder / name).mkdir(parents=True)
    for name in ("README.md", "notes.txt", "package.json", "src/app.py", ".env", "secrets/key"):
        (folder / name).write_text("{}\n")
    (folder / "link").symlink_to("secrets")
    return folder


@pytest.mark.parametrize(
    ("kind", "mode"), [("options", "ask"), ("written", "ask"), ("unpacked", "accept-edits"), ("later", "accept-edits")]
)
async def test_rule_for_a_program_does_not_allow_further_samples(kind: str, mode: str, samples_project: Path) -> None:
    commands = FURTHER[kind]
    rules = {"allow": sorted({f"terminal:{command.split()[0]} *" for command in commands})}
    assert await list_unasked(samples_project, rules, commands, mode) == []


async def test_rule_does_not_allow_a_longer_name(samples_project: Path) -> None:
    for sample in FURTHER["names"]:
        pattern, command = sample.split("|")
        assert await list_unasked(samples_project, {"allow": [f"terminal:{pattern}"]}, [command]) == [], sample


@pytest.mark.parametrize("mode", ["ask", "accept-edits"])
async def test_command_that_does_not_only_read_asks_without_a_rule(mode: str, samples_project: Path) -> None:
    assert await list_unasked(samples_project, {}, FURTHER["readers"], mode) == []


@pytest.mark.parametrize("mode", ["ask", "yolo"])
@pytest.mark.parametrize("kind", DENIED)
async def test_deny_rule_is_not_evaded(kind: str, mode: str, samples_project: Path) -> None:
    assert await list_unasked(samples_project, DENIED[kind], FURTHER[kind], mode) == []


async def test_program_that_crow_does_not_know_may_have_any_option(samples_project: Path) -> None:
    commands = ["./check.sh --fast", "scripts/lint -x --config=a", "our-tool --all a"]
    rules = {"allow": ["terminal:./check.sh *", "terminal:scripts/lint *", "terminal:our-tool *"]}
    assert await decide(samples_project, "ask", rules, commands) == ["allow"] * len(commands)


def test_answer_for_a_subcommand_covers_nothing_that_it_does_not_show() -> None:
    assert [command for command in FURTHER["kept"] if find_subcommand(command)] == []


async def test_folder_that_the_shell_may_read_in_another_way_asks(samples_project: Path) -> None:
    (samples_project / "src" / "deep").mkdir()
    for name, target in (("far", "src/deep"), ("up", "src/.."), ("away", "/usr")):
        (samples_project / name).symlink_to(target)
    commands = """
    cd far/.. && ls
    cd ./far/../tests && git diff
    cd src/../far/../deep && ls
    cd far/../.. && ls
    cd $PWD/far/.. && ls
    cd ~+/far/.. && ls
    cd up/.. && ls
    cd away && ls
    cd away/../tmp && ls
    cd .. && ls
    cd / && ls
    cd && ls
    cd ~ && ls
    cd - && ls
    cd -P src && ls
    cd -- src && ls
    cd src; ls
    cd src | ls
    cd src || ls
    cd src && cd .. && ls
    (cd src && ls)
    pushd src && ls
    cd secrets/../.. && ls
    CDPATH=/usr cd bin && ls
    cd src && cat ../.env
    cd secrets && cat ../link/../.env
    """.strip().split("\n    ")
    assert await list_unasked(samples_project, {"allow": ["terminal:git diff*"]}, commands) == []
    ordinary = ["cd src && ls", "cd ./src && git status", "cd src/../tests && ls", "cd link/.. && ls"]
    assert await list_unasked(samples_project, {}, ordinary) == ordinary
