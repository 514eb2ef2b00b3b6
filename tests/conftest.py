"""What the judges from outside need: programs that others wrote, on a machine of their own."""

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest
from crow_core.acp.schema import McpServer

NPM = Path(__file__).parent / "node"
NODE = NPM / "node_modules" / "node" / "bin" / "node"


def unable(reason: str) -> NoReturn:
    """Skip a test that cannot run here; where CROW_TEST_ALL=1 says that all must run, fail it."""
    if os.environ.get("CROW_TEST_ALL") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@dataclass(frozen=True)
class Finished:
    """What a program left behind."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Node:
    """Runs a program from `tests/node` in a project and with an empty home."""

    project: Path
    env: dict[str, str]
    """All that the program, and the agent it starts, find in their environment."""
    crow = (sys.executable, "-m", "crow_cli", "acp")
    """The command line of the agent."""

    def server(self, name: str, program: str, *args: str) -> McpServer:
        """An MCP server from `tests/node`."""
        return McpServer(name=name, command=str(NODE), args=[str(NPM / program), *args], env=[])

    async def run(self, url: str, program: str, *args: str) -> Finished:
        """Run a program to its end; crow's model is at this address."""
        env = self.env | {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "key", "CROW_MODEL": "scripted"}
        process = await asyncio.create_subprocess_exec(
            NODE, NPM / program, *args, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=env, cwd=self.project
        )
        out, err = await process.communicate()
        assert process.returncode is not None
        return Finished(process.returncode, out.decode(), err.decode())


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    if not NODE.exists():
        unable("The clients from npm are not installed; `npm ci --prefix tests/node` installs them.")
    home, project = tmp_path / "home", tmp_path / "project"
    home.mkdir()
    project.mkdir()
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "CROW_HOME": str(home / "crow"), "LANG": "C.UTF-8"}
    return Node(project, env)


@pytest.fixture
def next_sdk() -> str:
    """A Python that has the next official SDK."""
    python = os.environ.get("CROW_TEST_NEXT_SDK", "")
    if not python:
        unable("No next SDK to judge with; CROW_TEST_NEXT_SDK names a Python with agent-client-protocol==1.0.0rc3.")
    return python
