"""docs/files.md names each file that crow writes, each table of a project's settings, and each format of an export."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import msgspec
import pytest
from crow_agent.settings.structs import ProjectConfig
from crow_core.testing import Reply, ScriptedServer
from crow_permissions import kept_answers
from crow_persistence.export import Format
from crow_testing.command_fixtures import forks as forks
from crow_testing.command_fixtures import machine as machine
from crow_testing.command_fixtures import prefork as prefork
from crow_testing.command_fixtures import prepared as prepared

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

PAGE = (Path(__file__).parents[1] / "docs" / "files.md").read_text("utf-8")


def find_names(heading: str) -> set[str]:
    """Return the names in the first column of the table of a section."""
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return {name for row in re.findall(r"^\| (`.+?) \|", section, re.M) for name in re.findall(r"`([^`]+)`", row)}


@pytest.mark.anyio
async def test_files_that_crow_writes_are_on_the_page(machine: "Machine"):
    view = {"command": "create", "path": str(machine.project / "new.txt"), "file_text": "x\n"}
    async with ScriptedServer(
        [Reply(tool_calls=[{"name": "file_editor", "arguments": view}]), Reply("Done.")]
    ) as server:
        machine.configure(f'[models.scripted]\nbase_url = "{server.url}"\nmodel = "scripted"\n')
        machine.env["CROW_MODEL"] = "scripted"
        assert (await machine.crow("run", "--yolo", "Write.")).code == 0
        await machine.crow("trust", ".", stdin="y\n")
    home = Path(machine.env["CROW_HOME"])
    known = find_names("In the folder of data") | find_names("In the folder of settings")
    written = {f"{entry.name}/" if entry.is_dir() else entry.name for entry in os.scandir(home)}
    assert "crow.db" in written
    assert written - known == set()


def test_the_page_names_answers_tables_and_formats():
    assert kept_answers.FILE in find_names("In the folder of data")
    assert find_names("Exports") == {*get_args(Format)}
    row = next(line for line in PAGE.splitlines() if line.startswith("| `.crow/config.toml`"))
    assert {*re.findall(r"`(\w+)`", row)} == {field.name for field in msgspec.structs.fields(ProjectConfig)}
