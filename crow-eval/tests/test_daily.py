"""The tasks of the suite `daily`: the checks of each fail on the start of its workspace, and pass on its solution."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import crow_eval
import pytest

DAILY = Path(crow_eval.__file__).parent / "suites" / "daily"
TASKS = sorted(path.parent.name for path in DAILY.glob("*/task.toml"))
CACHE = shutil.ignore_patterns("__pycache__")


def read_task(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "task.toml").read_text("utf-8"))


def run(command: str, workspace: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in the workspace with this Python as `python`, and a git that reads no settings of the machine."""
    env = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
    }
    return subprocess.run(command, shell=True, cwd=workspace, env=env, capture_output=True, text=True, timeout=60)


def prepare(folder: Path, workspace: Path) -> None:
    """Make the start of a task's workspace."""
    shutil.copytree(folder / "files", workspace, ignore=CACHE)
    for command in read_task(folder).get("setup", []):
        done = run(command, workspace)
        assert done.returncode == 0, done.stderr


def solve(folder: Path, workspace: Path) -> str:
    """Lay the solution over the workspace; return the reference answer."""
    solution, answer = folder / "solution", ""
    if (solution / "answer.txt").exists():
        answer = (solution / "answer.txt").read_text("utf-8")
    not_copied = shutil.ignore_patterns("__pycache__", "answer.txt", "run.sh")
    shutil.copytree(solution, workspace, ignore=not_copied, dirs_exist_ok=True)
    if (solution / "run.sh").exists():
        done = run(f"sh -e {solution / 'run.sh'}", workspace)
        assert done.returncode == 0, done.stderr
    return answer


def run_checks(task_folder: Path, workspace: Path, answer: str) -> list[str]:
    """Run all checks of a task; return what is wrong, a line for each check that fails."""
    failures: list[str] = []
    for check in read_task(task_folder)["checks"]:
        try:
            run_check(check, task_folder, workspace, answer)
        except AssertionError as error:
            failures.append(f"{check.get('function') or check['kind']}: {error}")
    return failures


def run_check(check: dict[str, Any], task_folder: Path, workspace: Path, answer: str) -> None:
    """Run one check; raise AssertionError where it fails."""
    match check["kind"]:
        case "command":
            done = run(check["run"], workspace)
            assert done.returncode == 0, done.stdout + done.stderr
        case "file":
            path = workspace / check["path"]
            assert path.exists() == ("absent" not in check), f"{path.name} exists: {path.exists()}"
            if "equals" in check or "contains" in check or "matches" in check:
                compare(path.read_text("utf-8"), check)
        case "answer":
            compare(answer, check)
        case "python":
            file, name = check["function"].split(":")
            spec = spec_from_file_location(f"checks_of_{task_folder.name}", task_folder / file)
            assert spec is not None
            assert spec.loader is not None
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
            getattr(module, name)(workspace, answer)
        case kind:
            raise ValueError(f"{task_folder.name} has a check of the unknown kind {kind}")


def compare(text: str, check: dict[str, Any]) -> None:
    assert text == check.get("equals", text)
    assert check.get("contains", "") in text
    assert re.search(check.get("matches", ""), text), f"{check['matches']} does not match {text}"


def test_the_suite_has_thirty_tasks():
    levels = [read_task(DAILY / name)["description"].partition(".")[0] for name in TASKS]
    assert {level: levels.count(level) for level in levels} == {"Easy": 8, "Middling": 14, "Hard": 8}


@pytest.mark.parametrize("name", TASKS)
def test_checks_fail_on_the_start_and_pass_on_the_solution(name: str, tmp_path: Path):
    folder, workspace = DAILY / name, tmp_path / name
    prepare(folder, workspace)
    assert run_checks(folder, workspace, "")
    answer = solve(folder, workspace)
    assert run_checks(folder, workspace, answer) == []


@pytest.mark.parametrize("name", TASKS)
def test_checks_fail_where_files_are_gone_or_programs_end_at_once(name: str, tmp_path: Path):
    """They fail, and raise no other error than AssertionError."""
    folder, workspace = DAILY / name, tmp_path / name
    prepare(folder, workspace)
    files = [path for path in workspace.rglob("*") if path.is_file() and ".git" not in path.parts]
    for path in files:
        if path.suffix == ".py":
            path.write_text("import os\nos._exit(0)\n", "utf-8")
    assert run_checks(folder, workspace, "")
    for path in files:
        path.unlink()
    assert run_checks(folder, workspace, "")
