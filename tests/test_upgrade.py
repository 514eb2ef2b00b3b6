"""A home of each version goes on with this version: its settings are valid, its session is found and continues."""

import asyncio
import os
import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest
from crow_core import __version__
from crow_core.testing import Reply, ScriptedServer

HOMES = Path(__file__).parent / "homes"
VERSIONS = sorted(folder.name for folder in HOMES.iterdir() if folder.is_dir() and folder.name != "__pycache__")
VARIABLES = {"SOME_KEY": "key", "OPENAI_API_KEY": "key"}


async def run_crow(*arguments: str, home: Path, url: str) -> str:
    """Run the command on a home, with no other settings, and return its output."""
    env = {name: os.environ[name] for name in ("PATH", "SYSTEMROOT") if name in os.environ}
    env |= {"HOME": str(home), "CROW_HOME": str(home), "CROW_SANDBOX": "off"}
    env |= VARIABLES | {"CROW_TEST_MODEL": url, "OPENAI_BASE_URL": url, "CROW_MODEL": "scripted"}
    command = (sys.executable, "-m", "crow_cli", *arguments)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, cwd=home, env=env, stdout=pipe, stderr=pipe)
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


def restore_database(version: str, home: Path) -> str:
    """Write the database of a version, and return the id of its session."""
    with closing(sqlite3.connect(home / "crow.db")) as connection:
        connection.executescript((HOMES / version / "crow.sql").read_text("utf-8"))
        return connection.execute("SELECT id FROM sessions").fetchone()[0]


def test_this_version_has_a_home() -> None:
    assert __version__ in VERSIONS, "run tests/homes/keep.py"


@pytest.mark.anyio
@pytest.mark.parametrize("version", VERSIONS)
async def test_session_of_every_version_is_found_and_continues(version: str, tmp_path: Path) -> None:
    id = restore_database(version, tmp_path)
    async with ScriptedServer([Reply("With cinnamon, five.")]) as server:
        found = await run_crow("sessions", "search", "four hours", "--everywhere", home=tmp_path, url=server.url)
        answer = await run_crow("run", "-r", id, "And with cinnamon?", home=tmp_path, url=server.url)
        (request,) = server.requests
    assert id[:8] in found
    assert answer.strip() == "With cinnamon, five."
    asked = [message["content"] for message in request["messages"] if message["role"] == "user"]
    assert asked[0].endswith("How long does bread take?")
    assert asked[-1].endswith("And with cinnamon?")
    assert [message["role"] for message in request["messages"]][-5:] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]


@pytest.mark.anyio
@pytest.mark.parametrize("version", VERSIONS)
async def test_settings_of_every_version_are_valid(version: str, tmp_path: Path) -> None:
    shutil.copy(HOMES / version / "config.toml", tmp_path)
    shown = await run_crow("config", "show", home=tmp_path, url="http://127.0.0.1:9/v1")
    assert "http://127.0.0.1:9/v1" in shown
