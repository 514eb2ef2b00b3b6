"""Each command in SECURITY.md runs tests that exist."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMANDS = re.findall(r"`uv run pytest ([^`]+)`", (ROOT / "SECURITY.md").read_text("utf-8"))


def find_tests(path: Path) -> list[str]:
    """Return the names of the tests in a file, or in the files of a folder."""
    files = [path] if path.is_file() else path.glob("**/test_*.py")
    return [name for file in files for name in re.findall(r"def (test_\w+)\(", file.read_text("utf-8"))]


@pytest.mark.parametrize("command", COMMANDS)
def test_command_runs_tests_that_exist(command: str):
    words = shlex.split(command)
    wanted = words[words.index("-k") + 1].split(" or ") if "-k" in words else [""]
    paths = [word for word in words if "/" in word or word.startswith("crow-")]
    assert paths
    tests = [name for path in paths for name in find_tests(ROOT / path)]
    assert [part for part in wanted if not any(part in name for name in tests)] == []


def test_page_has_commands_for_its_promises():
    rows = re.findall(r"^\| (?!promise|attacker|---)(.*) \|$", (ROOT / "SECURITY.md").read_text("utf-8"), re.M)
    promises = [row for row in rows if "`uv run pytest" in row]
    assert len(promises) == len(COMMANDS) > 20
