import ast
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

DEAD = {
    "do_nothing_yet",
    "pad",
    "shorten",
    "vowels",
    "count_vowels",
    "VOWELS",
    "WIDTH",
    "is_blank",
    "legacy_format",
    "last",
    "textwrap",
    "re",
    "json",
}


def dead_code_is_gone(workspace: Path, answer: str) -> None:
    for path in workspace.rglob("*.py"):
        found: set[str] = set()
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.alias):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
        assert not found & DEAD, f"{path.name} still has {sorted(found & DEAD)}"
    assert not (workspace / "old_format.py").exists(), "nobody needs old_format.py"


def program_works_as_before(workspace: Path, answer: str) -> None:
    with TemporaryDirectory() as folder:
        for arguments, output in (
            (["list"], ""),
            (["add", "buy  milk"], "added buy milk\n"),
            (["add", "  CALL Ann "], "added CALL Ann\n"),
            (["list"], "1 buy milk\n2 CALL Ann\n"),
            (["titles"], "Buy Milk\nCall Ann\n"),
            (["shout"], "BUY MILK!\nCALL ANN!\n"),
            (["count"], "2 notes, 4 words\n"),
            (["remove", "1"], "removed buy milk\n"),
            (["list"], "1 CALL Ann\n"),
            (["export"], "* CALL Ann\n"),
            (["dance"], "commands: add count export list remove shout titles\n"),
        ):
            done = run_program(Path(folder), str(workspace / "notes.py"), *arguments)
            assert (done.stdout, done.stderr) == (output, ""), f"{arguments}: {done.stdout}{done.stderr}"


def run_program(workspace: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program of the workspace; raise AssertionError where it does not end."""
    command = [sys.executable, "-BS", *arguments]
    try:
        return subprocess.run(
            command, cwd=workspace, capture_output=True, encoding="utf-8", errors="replace", timeout=60
        )
    except subprocess.TimeoutExpired:
        raise AssertionError("the program did not end within 60 seconds") from None


def parse(path: Path) -> ast.Module:
    """Parse a file of the workspace; raise AssertionError where it is absent, or is not Python."""
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise AssertionError(f"{path.name} cannot be parsed: {error}") from None
