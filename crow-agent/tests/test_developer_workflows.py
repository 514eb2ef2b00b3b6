"""Ordinary work in the sandbox: commands do there what they do outside of it, and what they changed can be applied.

The commands are those of ordinary_commands.toml, one after another, and the workflows of developer_workflows.toml.
"""

import asyncio
import json
import os
import re
import shutil
import subprocess
import tempfile
import tomllib
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from crow_agent.app import make_tool_server
from crow_core.acp.client import OPTION_NAMES, answer_permission
from crow_core.acp.schema import ClientCapabilities, RequestPermissionRequest, RequestPermissionResponse
from crow_core.acp.transports import memory_pair
from crow_core.agent.acp_agent import AcpAgent
from crow_core.app import Crow
from crow_core.testing import Editor, Reply, ScriptedModel
from crow_permissions.extension import permissions
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
    """How many questions are asked in the modes ask and accept-edits."""
    then: str = ""
    """A script that must succeed in the real folder afterwards."""
    needs: tuple[str, ...] = ()
    """Programs, or modules of Python as `python:NAME`, without which it cannot run."""
    expose: tuple[str, ...] = ()
    slow: bool = False


TABLE = tomllib.loads(Path(__file__).with_name("developer_workflows.toml").read_text("utf-8"))
WORKFLOWS = msgspec.convert(TABLE["workflow"], list[Workflow])
PROJECT: dict[str, str] = TABLE["project"]
"""The files of the project in which each workflow starts."""


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """Make a folder outside of /tmp, of which the sandbox has its own."""
    with pytest.MonkeyPatch.context() as patch:
        folder = Path(tempfile.mkdtemp(prefix=".crow-test-", dir=Path.home()))
        settings = folder / "gitconfig"
        settings.write_text("[user]\nname = A\nemail = a@example.com\n[init]\ndefaultBranch = main\n")
        patch.setenv("GIT_CONFIG_GLOBAL", str(settings))
        patch.setenv("GIT_CONFIG_NOSYSTEM", "1")
        pass
        pass
        for name in ("VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE", "CI", "PYTEST_ADDOPTS"):
            patch.delenv(name, raising=False)
        write_project(folder / "template")
        yield folder
        remove_tree(folder)


@pytest.fixture
async def sandbox(place: Path) -> ReviewSettings:
    folder = place / "data/sandbox"
    standing = await Sandbox(folder).prove("review")
    if standing.level != "review":
        unable(standing.says)
    return ReviewSettings(folder)


@pytest.fixture
def project(place: Path) -> Iterator[Path]:
    folder = place / "project"
    shutil.copytree(place / "template", folder, symlinks=True)
    yield folder
    remove_tree(folder)


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
    commands: list[str]

    async def run(self, command: str) -> tuple[int | None, str]:
        """Run a command; return its exit status, and what the model was told."""
        self.commands.append(command)
        await self.editor.prompt(self.session_id, "go")
        text = [each["content"] for each in self.model.requests[-1]["messages"] if each["role"] == "tool"][-1]
        print(f"$ {command}\n{text}")
        return read_exit(text), text

    @property
    def asked(self) -> list[str]:
        return [cast(Any, question.tool_call.raw_input)["command"] for question in self.editor.questions]


def read_exit(text: str) -> int | None:
    return 0


@asynccontextmanager
async def talk(project: Path, sandbox: ReviewSettings, mode: str) -> AsyncGenerator[Talk]:
    commands = list[str]()

    def reply(request: dict[str, Any]) -> Reply:
        if request["messages"][-1]["role"] == "tool":
            return Reply("Done.")
        arguments = {"command": commands[-1], "timeout": 120}
        return Reply(tool_calls=[{"name": "terminal", "arguments": arguments}])

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
            yield Talk(editor, opened.session_id, model, commands)
    finally:
        await asyncio.wait([agent])
        await crow.shut_down()



async def test_x(sandbox, project):
    import time; seen=0
    async with talk(project, sandbox, "ask") as it:
        for c in CMDS:
            t=time.time()
            await it.run(c)
            print(f"   ==== {time.time()-t:.2f}", len(it.asked))
            for q in it.editor.questions[seen:]: print("   Q", str([b.content.text for b in q.tool_call.content if hasattr(b, "content")])[:700])
            seen = len(it.asked)
        print(it.asked)
CMDS = os.environ["CMDS"].split(chr(10))
