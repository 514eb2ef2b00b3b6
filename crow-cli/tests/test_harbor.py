"""Harbor accepts the recipe for Terminal-Bench, and its runner of ACP agents runs a task with `crow acp`."""

import asyncio
import json
import os
import shlex
import subprocess
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from crow_core.testing import Reply, ScriptedServer

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

PYTHON = os.environ.get("CROW_TEST_SCOUT", "")
RECIPE = Path(__file__).parents[2] / "benchmarks" / "terminal-bench"
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.skipif(  # even under CROW_TEST_ALL: a machine with Python 3.11 alone cannot install it
        not PYTHON, reason="Harbor is large, and needs a newer Python; CROW_TEST_SCOUT names a Python that has it."
    ),
]

CHECK = """
import sys, yaml
from pathlib import Path
from harbor.models.agent.acp_source import AcpAgentSource, AcpSourceManifest
from harbor.models.job.config import JobConfig

recipe = Path(sys.argv[1])
manifest = AcpSourceManifest.model_validate_json((recipe / "harbor-agent.json").read_bytes())
job = JobConfig.model_validate(yaml.safe_load((recipe / "job.yaml").read_text()))
source = AcpAgentSource.model_validate(job.agents[0].kwargs["source"])
print(*manifest.runtime.entrypoint, job.datasets[0].name, job.datasets[0].version, source.manifest_path)
"""


async def run(*command: str, **options: Any) -> str:
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=STDOUT, **options)
    out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()
    return out.decode()


async def test_harbor_accepts_the_recipe() -> None:
    said = await run(PYTHON, "-c", CHECK, str(RECIPE))
    assert said.split() == ["crow", "acp", "terminal-bench", "2.0", "benchmarks/terminal-bench/harbor-agent.json"]


def test_the_repository_is_a_source_that_harbor_takes() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-s"], cwd=RECIPE.parents[1], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert len(listed) < 10_000
    assert not [line for line in listed if line.startswith("120000 ")]  # links


async def test_the_runner_of_harbor_runs_a_task_with_crow(machine: "Machine") -> None:
    find = "import harbor.agents.installed as it; print(it.__path__[0])"
    runner = Path((await run(PYTHON, "-c", find)).split()[-1]) / "acp_runner.py"
    (copy := machine.home / "acp_runner.py").write_bytes(runner.read_bytes())  # as in a container: it is alone there
    (launcher := machine.home / "launch.sh").write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m crow_cli acp "$@"\n'
    )
    launcher.chmod(0o755)
    (logs := machine.home / "logs").mkdir()
    call: Any = {"name": "terminal", "arguments": {"command": "echo done > result.txt"}}
    async with ScriptedServer([Reply(tool_calls=[call]), Reply("It is done.")]) as model:
        machine.ask(model.url)
        arguments = ("--instruction=Do it.", f"--logs-dir={logs}", f"--launcher={launcher}")
        await run(PYTHON, str(copy), *arguments, cwd=machine.project, env=machine.env | {"CROW_SANDBOX": "off"})
    summary = json.loads((logs / "acp-summary.json").read_text())
    assert summary["agent_info"]["name"] == "crow"
    assert "error" not in summary
    assert (machine.project / "result.txt").read_text() == "done\n"
