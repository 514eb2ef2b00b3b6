"""Ordinary work in the sandbox: commands do there what they do outside of it, and what they changed can be applied.

The commands are those of ordinary_commands.toml, one after another, and the workflows of developer_workflows.toml.
"""

import asyncio
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
from crow_agent.builtin_tools import make_tool_server
from crow_core.acp.client import OPTION_NAMES, answer_permission
from crow_core.acp.schema import ClientCapabilities, RequestPermissionRequest, RequestPermissionResponse
from crow_core.acp.transports import memory_pair
from crow_core.agent.acp_agent import AcpAgent
from crow_core.app import Crow
from crow_core.testing import Editor, Reply, ScriptedModel
from crow_permissions.extension import permissions
from crow_permissions.judgement import Mode
from crow_permissions.review import ReviewSettings
from crow_sandbox.layers import remove_tree
from crow_sandbox.sandbox import Sandbox
from crow_testing.databases import unable

pytestmark = pytest.mark.anyio


class Step(msgspec.Struct, frozen=True):
    """A command of a workflow."""

    run: str
    says: str = ""
    """What its result must say."""
    exit: int = 0


class Workflow(msgspec.Struct, frozen=True):
    """Commands that belong together, each a tool call."""

    name: str
    steps: tuple[str | Step, ...]
    asks: tuple[int, int] = (0, 0)
    """How many questions are asked at most, in the modes ask and accept-edits."""
    then: str = ""
    """A script that must succeed in the real folder afterwards."""
    needs: tuple[str, ...] = ()
    """Programs, or modules of Python as `python:NAME`, without which it cannot run."""
    expose: tuple[str, ...] = ()
    slow: bool = False


TABLE = tomllib.loads(Path(__file__).with_name("developer_workflows.toml").read_text("utf-8"))
WORKFLOWS = msgspec.convert(TABLE["workflow"], list[Workflow])
INSTALLED = {"uv", "node", "npm", "ruff", "python:pytest", "python:xdist"}
"""What .ci/run installs."""
TOOLS = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "xdist", "execnet")
PROJECT: dict[str, str] = TABLE["project"]
"""The files of the project in which each workflow starts."""


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """Make a folder outside of /tmp, of which the sandbox has its own."""
    with pytest.MonkeyPatch.context() as patch:
        folder = Path(tempfile.mkdtemp(prefix=".crow-test-", dir=Path.home()))
        standing = asyncio.run(Sandbox(folder / "data/sandbox").prove("review"))
        if standing.level != "review":
            remove_tree(folder)
            unable(standing.says)
        settings = folder / "gitconfig"
        settings.write_text("[user]\nname = A\nemail = a@example.com\n[init]\ndefaultBranch = main\n")
        patch.setenv("GIT_CONFIG_GLOBAL", str(settings))
        patch.setenv("GIT_CONFIG_NOSYSTEM", "1")
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        for name in ("VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE", "CI", "PYTEST_ADDOPTS"):
            patch.delenv(name, raising=False)
        others = [each for each in os.environ["PATH"].split(":") if each != os.path.join(sys.prefix, "bin")]
        patch.setenv("PATH", ":".join([str(make_programs(folder)), *others]))
        write_project(folder / "template")
        yield folder
        remove_tree(folder)


@pytest.fixture
def sandbox(place: Path) -> ReviewSettings:
    return ReviewSettings(place / "data/sandbox")


@pytest.fixture
def project(place: Path) -> Iterator[Path]:
    folder = place / "project"
    shutil.copytree(place / "template", folder, symlinks=True)
    yield folder
    remove_tree(folder)


@pytest.fixture
def agent_of_keys(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run an agent with a key."""
    socket, key = place / "agent", tmp_path / "key"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.PIPE)
    assert agent.stdout is not None
    agent.stdout.readline()
    monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
    try:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        subprocess.run(["ssh-add", "-q", str(key)], check=True)
        yield
    finally:
        agent.terminate()
        agent.communicate()


def make_programs(folder: Path) -> Path:
    """Make `python3` with the packages of TOOLS, and `ruff`, where the sandbox shows them; return their folder.

    The environment of the tests may be in /tmp, and crow takes it from its commands.
    """
    packages, programs = folder / "packages", folder / "bin"
    for each in (packages, programs):
        each.mkdir()
    for name in TOOLS:
        for spec in filter(None, [find_spec(name)]):
            source = Path(spec.origin or "")
            if source.name == "__init__.py":
                shutil.copytree(source.parent, packages / name)
            else:
                shutil.copy(source, packages)
    python = programs / "python3"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {os.path.realpath(sys.executable)} "$@"\n')
    (programs / "pytest").write_text(f'#!/bin/sh\nexec {python} -m pytest "$@"\n')
    for each in programs.iterdir():
        each.chmod(0o755)
    if ruff := shutil.which("ruff"):
        shutil.copy(ruff, programs)
    return programs


def write_project(folder: Path) -> None:
    """Write a small project in Python, JavaScript, C and Rust, and commit it."""
    for name, text in PROJECT.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git = "git init -q && git add -A && git commit -qm first && echo more >> notes.txt && git commit -qam second"
    subprocess.run(["sh", "-ec", f"{git} && git branch other"], cwd=folder, check=True)


class Person(Editor):
    """A person who applies what commands change, and lets none run outside of the sandbox."""

    async def on_permission(self, question: RequestPermissionRequest) -> RequestPermissionResponse:
        self.questions.append(question)
        return answer_permission("allow" if question.options[0].name == "Apply" else "reject")


@dataclass
class Talk:
    """A session in which each prompt runs a command."""

    editor: Editor
    session_id: str
    model: ScriptedModel
    next: dict[str, Any]
    """The arguments of the next call."""

    async def run(self, command: str, cwd: str = "") -> tuple[int, str]:
        """Run a command; return its exit status, and what the model was told."""
        self.next = {"command": command, **({"cwd": cwd} if cwd else {})}
        await self.editor.prompt(self.session_id, "go")
        text = [each["content"] for each in self.model.requests[-1]["messages"] if each["role"] == "tool"][-1]
        print(f"$ {command}\n{text}")
        return read_exit(text), text

    @property
    def asked(self) -> list[str]:
        return [question.tool_call.raw_input["command"] for question in self.editor.questions]


def read_exit(text: str) -> int:
    """Return the exit status that a result tells."""
    found = re.search(r"^\[exit code (\d+)\]$", text, re.MULTILINE)
    return int(found[1]) if found else 0


def has(need: str) -> bool:
    """Tell if a program is here, or a module of Python as `python:NAME`."""
    kind, _, module = need.partition(":")
    if module:
        return subprocess.run(["python3", "-c", f"import {module}"], capture_output=True).returncode == 0
    return shutil.which(kind) is not None


@asynccontextmanager
async def talk(project: Path, sandbox: ReviewSettings, mode: Mode) -> AsyncGenerator[Talk]:
    def reply(request: dict[str, Any]) -> Reply:
        if request["messages"][-1]["role"] == "tool":
            return Reply("Done.")
        return Reply(tool_calls=[{"name": "terminal", "arguments": {"timeout": 120, **it.next}}])

    model = ScriptedModel(reply)
    crow = Crow(model)
    crow.servers.append(make_tool_server(crow))
    crow.use(permissions, sandbox=sandbox, mode=mode)
    ours, theirs = memory_pair()
    agent = asyncio.ensure_future(AcpAgent(theirs, crow).serve())
    editor = Person(ours)
    try:
        async with editor.serving():
            await editor.initialize("editor", ClientCapabilities(meta=OPTION_NAMES))
            opened = await editor.new_session(str(project))
            it = Talk(editor, opened.session_id, model, {})
            yield it
    finally:
        await asyncio.wait([agent])
        await crow.shut_down()


def run_bare(command: str, folder: Path) -> tuple[int, str]:
    """Run a command outside of the sandbox; return its exit status and output."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, "UV_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    return done.returncode, done.stdout


def simplify(output: str, folder: Path) -> str:
    """Leave out of an output what differs from run to run: numbers, blanks, the folder, and the notes of crow."""
    output = re.sub(r"^\[.*\]$", "", output.replace(str(folder), "."), flags=re.MULTILINE)
    return re.sub(r"\b[0-9a-f]{7,40}\b|[\d.]*\d(ms|s)?\b|\s+", " ", output)


def read_tree(folder: Path) -> dict[str, bytes]:
    """Read the files of a folder, but for caches and what git and uv keep."""
    left_out = {".git", ".venv", ".pytest_cache", ".ruff_cache", "__pycache__"}
    files = [path for path in folder.rglob("*") if path.is_file() and not left_out & {*path.parts}]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


ORDINARY: list[str] = tomllib.loads(
    (Path(__file__).parents[2] / "crow-permissions/tests/ordinary_commands.toml").read_text("utf-8")
)["commands"]
NEEDS = re.compile(r"\bsandbox\b|network is off|command not found")
"""Finds what a result says that a command needs."""
VARIES = ("ls -la", "date", "ps ", "df ", "du ", "stat ", "env ", "echo $PATH")
"""The beginnings of commands whose output is never the same."""


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "limit"), [("ask", 25), ("accept-edits", 8)])
async def test_day_of_ordinary_commands_succeeds_with_few_questions(
    mode: Mode,
    limit: int,
    sandbox: ReviewSettings,
    project: Path,
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(ORDINARY) == 105
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))  # what is in the cache is reached without a network
    bare = place / mode / "project"
    shutil.copytree(place / "template", bare, symlinks=True)
    wrong = list[tuple[object, ...]]()
    async with talk(project, sandbox, mode) as it:
        for command in ORDINARY:
            expected = await asyncio.to_thread(run_bare, command, bare)
            found = await it.run(command, ".")
            if command.startswith(VARIES):
                is_same = found[0] == expected[0]
            else:
                is_same = (found[0], simplify(found[1], project)) == (expected[0], simplify(expected[1], bare))
            if not is_same and not NEEDS.search(found[1]):
                wrong.append((command, expected, found))
    assert not wrong
    assert read_tree(project) == read_tree(bare)
    print(f"{mode}: {len(it.asked)} questions: {it.asked}")
    assert len(it.asked) <= limit


@pytest.mark.parametrize("mode", ["ask", pytest.param("accept-edits", marks=pytest.mark.slow)])
@pytest.mark.parametrize("workflow", WORKFLOWS, ids=[each.name for each in WORKFLOWS])
async def test_workflow_succeeds(
    workflow: Workflow, mode: Mode, sandbox: ReviewSettings, project: Path, request: pytest.FixtureRequest
) -> None:
    if workflow.slow and not request.config.getoption("slow"):
        pytest.skip("slow; `uv run pytest --slow` runs it, and so does .ci/run")
    if missing := [need for need in workflow.needs if not has(need)]:
        skip = unable if {*missing} & INSTALLED else pytest.skip
        skip(f"not installed here: {', '.join(missing)}")
    if "ssh-agent" in workflow.expose:
        request.getfixturevalue("agent_of_keys")
    async with talk(project, replace(sandbox, expose=workflow.expose), mode) as it:
        for step in workflow.steps:
            step = Step(step) if isinstance(step, str) else step
            status, text = await it.run(step.run)
            assert status == step.exit or (step.exit < 0 < status), text
            assert step.says in text
    status, text = await asyncio.to_thread(run_bare, f"set -e\n{workflow.then}", project)
    assert status == 0, text
    asked = it.asked
    print(f"{mode}: {len(asked)} questions: {asked}")
    assert len(asked) <= workflow.asks[mode != "ask"], asked


def test_workflows_ask_this_often_without_a_rule() -> None:
    assert len(WORKFLOWS) >= 60
    asks, accepts = zip(*(workflow.asks for workflow in WORKFLOWS), strict=True)
    steps = sum(len(workflow.steps) for workflow in WORKFLOWS)
    assert (steps, sum(asks), sum(accepts)) == (202, 149, 41)
