"""Every command of `crow` that a page shows runs, in the order of the page and in one empty home a page.

A command that waits for a person, a network or another program is only parsed here; the file that runs it is named.
"""

import re
import shlex
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest
from crow_cli.cli import cli
from crow_core.testing import Reply, ScriptedServer
from crow_testing.command_fixtures import forks as forks
from crow_testing.command_fixtures import machine as machine
from crow_testing.command_fixtures import prefork as prefork
from crow_testing.command_fixtures import prepared as prepared

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

pytestmark = [pytest.mark.anyio, pytest.mark.posix("the commands are for a POSIX shell")]

ROOT = Path(__file__).parents[1]
RUN_ELSEWHERE = ("cli.md", "publish-an-extension.md", "start.md")
PAGES = [
    *("README.md", "CONTRIBUTING.md", "SECURITY.md", "AGENTS.md"),
    *sorted(f"docs/{file.name}" for file in ROOT.glob("docs/*.md") if file.name not in RUN_ELSEWHERE),
    *sorted(f"{file.parent.name}/README.md" for file in ROOT.glob("crow-*/README.md")),
]
"""All pages but docs/cli.md, which is generated, and the two tutorials, which have tests of their own."""
PARSED = {
    r"crow( -c| -r ID)?$|crow chat": "crow-cli/tests/test_chat.py",
    r"crow (-w|worktrees)": "crow-cli/tests/test_worktree.py",
    r"crow setup(?! --list)": "crow-cli/tests/test_setup.py",
    r"crow serve": "crow-cli/tests/test_serve.py",
    r"crow acp( --unstable)?$": "crow-cli/tests/test_acp_process.py",
    r"crow acp (check|record|replay)|crow-acp-tools": "crow-acp-tools/tests/test_check.py",
    r"crow eval": "crow-eval/tests/test_evaluation.py",
    r"crow prompts improve": "crow-eval/tests/test_improve.py",
    r"crow mcp login": "crow-cli/tests/test_mcp_login.py",
    r"crow (mcp test|mcp list --check|mcp add NAME)": "crow-cli/tests/test_mcp.py",
    r"crow doctor": "crow-cli/tests/test_doctor.py",
    r"crow batch": "crow-cli/tests/test_batch.py",
    r"crow db (restore|repair)": "crow-cli/tests/test_db.py",
    r"crow trust (\.|revoke)": "crow-cli/tests/test_trust.py",
    r"crow mcp (add https|search)": "crow-cli/tests/test_mcp_discovery.py",
    r"crow run .*--output-schema": "crow-cli/tests/test_run.py",
    r"crow run .*--(goal|until)": "crow-cli/tests/test_run_goal.py",
    r"crow memory (edit|forget)": "crow-cli/tests/test_memory_commands.py",
}
"""Commands that are only parsed here, and the file that runs them."""
CROW = re.compile(r"(^|\| )crow( |$)")
ELSEWHERE = re.compile(r"(pip|uv|just|ssh|\.ci/run|CROW_TEST_\w+=\S+ uv|cd|crow-mcp-server|uvx|git|python3) ?|podman")
"""Programs that are not crow's command."""


def find_commands(page: str) -> list[str]:
    """Return the lines of a page's shell blocks without their comments."""
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", (ROOT / page).read_text("utf-8"), re.M | re.S)
    lines = (re.split(r"(?:^|\s)#\s", line)[0].strip() for block in blocks for line in block.splitlines())
    return [line for line in lines if line]


def split(line: str) -> tuple[str, list[str]]:
    """Return what a line gives to crow on standard input, and crow's arguments."""
    before, _, command = line.rpartition("| ")
    return "three lines\n" if before else "", shlex.split(command)[1:]


def check_options(words: list[str]) -> None:
    """Raise click.NoSuchOption if a command of crow lacks an option. `crow -p` and `crow eval` are short for `run`."""
    if words[:1] == ["-p"]:
        words = ["run", *words[1:]]
    command: click.Command = cli
    context = click.Context(cli, info_name="crow")
    while isinstance(command, click.Group) and words:
        found = command.get_command(context, words[0]) if not words[0].startswith("-") else None
        if found is None and command.name != "eval":
            break
        command, words = (found, words[1:]) if found else (command.commands["run"], words)
        context = click.Context(command, parent=context, info_name=command.name)
    options = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    for word in words[: words.index("--") if "--" in words else None]:
        if word.startswith("--") and word.partition("=")[0] not in options | {"--help"}:
            raise click.NoSuchOption(word, ctx=context)


def iterate_lines() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for line in find_commands(page):
            yield page, line


def test_every_line_is_a_command_of_crow_or_a_known_program() -> None:
    unknown = [
        f"{page}: {line}"
        for page, line in iterate_lines()
        if not re.search(r"(^|\| )crow(-acp-tools)?( |$)", line) and not ELSEWHERE.match(line)
    ]
    assert unknown == []


def test_commands_that_are_only_parsed_are_run_by_a_file_that_exists() -> None:
    assert [file for file in PARSED.values() if not (ROOT / file).exists()] == []
    lines = [line.rpartition("| ")[2] for _, line in iterate_lines()]
    assert [pattern for pattern in PARSED if not any(re.match(pattern, line) for line in lines)] == []


def test_an_unknown_option_in_a_page_is_noticed() -> None:
    check_options(["sessions", "search", "docker compose", "--everywhere"])
    with pytest.raises(click.NoSuchOption):
        check_options(["sessions", "search", "docker compose", "--nowhere"])


@pytest.fixture
async def server(machine: "Machine") -> AsyncIterator[ScriptedServer]:
    """A model that answers everything; it has written a file and answered twice in a session of the project."""
    path = str(machine.project / "new.txt")
    call = {"name": "file_editor", "arguments": {"command": "create", "path": path, "file_text": "docker compose\n"}}
    replies = [Reply(tool_calls=[call]), *[Reply("It is a project with docker compose.")] * 60]
    async with ScriptedServer(replies) as server:
        free = "prices = { input = 0, output = 0 }"
        machine.configure(f'[models.scripted]\nbase_url = "{server.url}"\nmodel = "scripted"\n{free}\n')
        machine.env["CROW_MODEL"] = "scripted"
        for words in (["run", "--yolo", "Write."], ["run", "-c", "And?"], ["run", "-c", "And now?"]):
            assert (await machine.crow(*words)).code == 0
        (machine.project / "expectations.txt").write_text("ask terminal:git push\n")
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({page for page, line in iterate_lines() if CROW.search(line)}))
async def test_commands_of_a_page_run(page: str, machine: "Machine", server: ScriptedServer) -> None:
    for line in find_commands(page):
        if not CROW.search(line):
            continue
        stdin, words = split(line)
        check_options(words)
        if any(re.match(pattern, line.rpartition("| ")[2]) for pattern in PARSED):
            continue
        if "ID" in words:
            listed = (await machine.crow("calls" if "calls" in words else "sessions", "list")).out.splitlines()
            words[words.index("ID")] = listed[1].split()[0]
        done = await machine.crow(*words, stdin=stdin or "y\n")
        assert done.code == 0, f"{line}\n{done.out}{done.err}"
