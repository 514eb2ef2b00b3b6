"""Keep a home of this version for the tests: the settings with every table, and a database with one session.

    uv run tests/homes/keep.py

Run it once for a version, before its tag. What it wrote for an earlier version is never changed.
"""

import asyncio
import os
import re
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from crow_core import __version__
from crow_core.testing import Reply, ScriptedServer

ROOT = Path(__file__).parents[2]
TARGET = Path(__file__).parent / __version__


def read_example() -> str:
    """Return the settings in docs/settings.md, which have every table, with the address of the test's model."""
    (example,) = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs" / "settings.md").read_text("utf-8"), re.M | re.S)
    return re.sub(r'base_url = "[^"]*"', 'base_url = "${CROW_TEST_MODEL}"', example, count=1)


async def converse(home: Path, project: Path) -> None:
    """Hold a session in which the model reads a file and answers."""
    call = {"name": "file_editor", "arguments": {"command": "view", "path": str(project / "notes.txt")}}
    async with ScriptedServer([Reply(tool_calls=[call]), Reply("Bread needs four hours.")]) as server:
        env = {"PATH": os.environ["PATH"], "HOME": str(home), "CROW_HOME": str(home), "OPENAI_API_KEY": "key"}
        env |= {"OPENAI_BASE_URL": server.url, "CROW_MODEL": "scripted", "CROW_SANDBOX": "off"}
        command = (sys.executable, "-m", "crow_cli", "run", "How long does bread take?")
        process = await asyncio.create_subprocess_exec(*command, cwd=project, env=env)
        if await process.wait():
            sys.exit("nothing was kept")


def dump_database(file: Path) -> str:
    """Return the statements that make the database; the table `search` reads its rows from others."""
    with closing(sqlite3.connect(file)) as connection:
        return "".join(f"{one}\n" for one in connection.iterdump() if not one.startswith('INSERT INTO "search" '))


def keep() -> None:
    with tempfile.TemporaryDirectory() as folder:
        home, project = Path(folder, "crow"), Path(folder, "project")
        home.mkdir()
        project.mkdir()
        (project / "notes.txt").write_text("Bread needs four hours.\n")
        asyncio.run(converse(home, project))
        TARGET.mkdir(exist_ok=True)
        (TARGET / "config.toml").write_text(read_example(), "utf-8")
        (TARGET / "crow.sql").write_text(dump_database(home / "crow.db"), "utf-8")


if __name__ == "__main__":
    keep()
