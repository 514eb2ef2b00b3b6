import subprocess
import sys
from pathlib import Path

BRANCHES = [
    "a962d55fae5c8426570dfd8727b2a323d9fde538",
    "4cd6ac87fc97f09b1c618faa79d3ed6f1f8f7078",
]
"""The commits of both branches before the merge."""

CODE = """
from greet import greet, greet_all

assert greet("Ann") == "Hello, Ann."
assert greet("Ann", polite=True) == "Hello, dear Ann."
assert greet("Ann", language="de") == "Hallo, Ann."
assert greet("Ann", language="fr") == "Bonjour, Ann."
assert greet("Ann", polite=True, language="fr") == "Bonjour, dear Ann."
assert greet("  Ann ", polite=True, language="de") == "Hallo, dear Ann."
assert greet_all(["Ann", "Bob"]) == "Hello, Ann.\\nHello, Bob."
assert greet_all(["Ann", "Bob"], language="de", polite=True) == "Hallo, dear Ann.\\nHallo, dear Bob."
assert greet_all([], polite=True) == ""
try:
    greet("Ann", language="xx")
except ValueError:
    pass
else:
    raise AssertionError("an unknown language raises ValueError")
"""


def merge_is_finished(workspace: Path, answer: str) -> None:
    assert git(workspace, "status", "--porcelain", "--untracked-files=no") == "", "changes are not committed"
    assert not (workspace / ".git" / "MERGE_HEAD").exists(), "the merge is not committed"
    merges = git(workspace, "log", "--merges", "--format=%P", "main").split("\n")
    assert " ".join(BRANCHES) in merges, "no commit of main merges both branches"
    assert "<<<<<<<" not in read(workspace / "greet.py")


def both_changes_work(workspace: Path, answer: str) -> None:
    run_code(workspace, CODE)


def git(workspace: Path, *arguments: str) -> str:
    command = ["git", "-c", "safe.directory=*", *arguments]
    done = subprocess.run(command, cwd=workspace, capture_output=True, encoding="utf-8", errors="replace", timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def read(path: Path) -> str:
    """Read a file of the workspace; raise AssertionError where it is absent, or is not UTF-8."""
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise AssertionError(f"{path.name} cannot be read: {error}") from None


def run_code(workspace: Path, code: str) -> None:
    """Run code in the workspace, in a process of its own; raise AssertionError unless it reaches its end."""
    command = [sys.executable, "-BS", "-c", code + "\nprint('reached the end')"]
    try:
        done = subprocess.run(
            command, cwd=workspace, capture_output=True, encoding="utf-8", errors="replace", timeout=60
        )
    except subprocess.TimeoutExpired:
        raise AssertionError("the code did not end within 60 seconds") from None
    assert done.stdout.endswith("reached the end\n"), done.stderr[-2000:]
