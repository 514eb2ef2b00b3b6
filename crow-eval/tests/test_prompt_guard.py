"""The workflow of docs/improve.md: its commands compare the prompts before and after a pull request."""

import asyncio
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from crow_core.testing import Reply, ScriptedServer
from crow_testing.command_fixtures import CROW
from crow_testing.skipping import unable

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

pytestmark = [pytest.mark.anyio, pytest.mark.posix("the workflow is for a POSIX shell")]
PAGE = Path(__file__).parents[2] / "docs" / "improve.md"
TASK = 'prompt = "word"\n[[checks]]\nkind = "answer"\ncontains = "WORD"\n'


@pytest.mark.parametrize(("words", "code"), [("Shout loudly.", 0), ("Whisper.", 1)])
async def test_workflow_shows_the_table_and_fails_for_a_worse_prompt(machine: "Machine", words: str, code: int):
    if not shutil.which("jq"):
        unable("jq is not installed; the runners of GitHub have it")
    found = re.search(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert found
    script = yaml.safe_load(found[1])["jobs"]["compare"]["steps"][-1]["run"]
    prompt = machine.project / ".crow" / "prompts" / "system.md.j2"
    (machine.project / "tasks" / "say").mkdir(parents=True)
    (machine.project / "tasks" / "say" / "task.toml").write_text(TASK)
    prompt.parent.mkdir(parents=True)
    prompt.write_text("Shout.")
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b.c")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "Begin"], ["branch", "origin/main"]):
        await (await asyncio.create_subprocess_exec(*git, *command, cwd=machine.project)).wait()
    prompt.write_text(words)
    crow = machine.project / "bin" / "crow"
    crow.parent.mkdir()
    crow.write_text(f'#!/bin/sh\nexec {" ".join(CROW)} "$@"\n')
    crow.chmod(0o755)

    def answer(request: dict[str, Any]) -> Reply:
        return Reply("WORD" if "Shout" in request["messages"][0]["content"] else "word")

    summary = machine.project / "summary.md"
    machine.env |= {"GITHUB_BASE_REF": "main", "GITHUB_STEP_SUMMARY": str(summary)}
    machine.env["PATH"] = f"{crow.parent}:{machine.env['PATH']}"
    async with ScriptedServer(answer) as server:
        machine.ask(server.url)
        shell = ("bash", "-eo", "pipefail", "-c", script)
        done = await asyncio.create_subprocess_exec(*shell, cwd=machine.project, env=machine.env)
        await done.wait()
    assert done.returncode == code
    assert "McNemar's exact test p" in summary.read_text()
