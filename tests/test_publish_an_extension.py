"""Each step of docs/publish-an-extension.md runs, from an empty folder to a package that crow uses."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from crow_core.testing import Reply, ScriptedServer

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "publish-an-extension.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.M | re.S)

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.posix("a POSIX shell")]


def run(code: str, folder: Path, env: dict[str, str]) -> str:
    done = subprocess.run(["bash", "-ec", code], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{code}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


async def test_every_step_of_the_page_runs(tmp_path: Path):
    folder = tmp_path / "crow-glossary"
    folder.mkdir()
    left_out = {"VIRTUAL_ENV", "PYTHONPATH", "UV_PROJECT_ENVIRONMENT", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"}
    printed, asked = "", 0
    async with ScriptedServer([Reply("It is up.")]) as server:
        env = {key: value for key, value in os.environ.items() if key not in left_out} | {
            "CROW": str(ROOT), "CROW_HOME": str(tmp_path / "home"), "CROW_MODEL": "scripted",
            "OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "key", "UV_PYTHON": sys.executable,
            "UV_TOOL_DIR": str(tmp_path / "tools"), "UV_TOOL_BIN_DIR": str(tmp_path / "bin"),
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        }  # fmt: skip
        for language, code in BLOCKS:
            if language in ("python", "toml"):
                name, _, _ = code.removeprefix("# ").partition("\n")
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(code)
            elif language == "sh" and "mkdir" not in code:
                printed, asked = await asyncio.to_thread(run, code, folder, env), asked + ("crow run" in code)
            elif language == "text":
                for line in code.splitlines():
                    assert line.strip("…") in printed, printed
    assert len(server.requests) == asked == 1
    assert server.requests[0]["messages"][-1]["content"].endswith("nest: our build server")
