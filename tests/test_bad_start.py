"""The first steps on a bare machine: no git, no compiler, no model, an old Python, a folder whose name has blanks."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.posix("a POSIX shell")]
PROGRAMS = ("sh", "bash", "cat", "ls", "mkdir", "rm")


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """An environment with crow and a shell; git, compilers and all else are not on its PATH."""
    (programs := tmp_path / "bin").mkdir()
    for name in PROGRAMS:
        if found := shutil.which(name):
            (programs / name).symlink_to(found)
    return {"HOME": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{programs}", "LANG": "C.UTF-8"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (folder := tmp_path / "my project").mkdir()
    return folder


def run(command: list[str], folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    program = shutil.which(command[0], path=env["PATH"])
    assert program
    return subprocess.run([program, *command[1:]], cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_the_demo_needs_no_git_no_compiler_and_no_model(bare: dict[str, str], folder: Path):
    assert not [name for name in ("git", "cc", "gcc", "clang") if shutil.which(name, path=bare["PATH"])]
    done = run(["crow", "demo"], folder, bare)
    assert done.returncode == 0, done.stderr
    assert "**Fixed.**" in done.stdout


def test_doctor_names_git(bare: dict[str, str], folder: Path):
    done = run(["crow", "doctor"], folder, bare)
    assert "There is no git on PATH. Install it" in done.stdout


@pytest.mark.parametrize("row", ["proxy", "older than 3.11", "C compiler", "no git", "no model", "blanks", "no uv"])
def test_the_first_step_says_what_to_do(row: str):
    step = (ROOT / "docs" / "start.md").read_text("utf-8").split("## 2.")[0]
    assert [line for line in step.splitlines() if line.startswith("| ") and row in line]


@pytest.mark.skipif(not shutil.which("uv"), reason="uv is not installed; `pip install uv` installs it")
def test_an_old_python_is_refused_with_the_version_that_is_needed(tmp_path: Path):
    old = next((each for each in Path.home().glob(".pyenv/versions/3.10.*/bin/python")), None)
    if old is None:
        pytest.skip("no Python 3.10 of pyenv is on this machine")
    env = os.environ | {"UV_PROJECT_ENVIRONMENT": str(tmp_path / "venv")}
    done = run(["uv", "run", "--python", str(old), "crow", "--version"], ROOT, env)
    assert done.returncode != 0
    assert ">=3.11" in done.stderr
