import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

FILES = {"a.txt": "one two\nthree\n", "b.txt": "", "c.txt": "\n\nfour five six\nseven\n", "d.txt": "x\n" * 30}


def lines_are_counted(workspace: Path, answer: str) -> None:
    for flag in ("--lines", "-l"):
        assert count(workspace, flag, "a.txt") == "2 a.txt\n"
        assert count(workspace, flag, "a.txt", "b.txt", "c.txt") == "2 a.txt\n0 b.txt\n4 c.txt\n6 total\n"
        assert count(workspace, "d.txt", flag) == "30 d.txt\n"
    assert "--lines" in run_program(workspace, "count.py", "--help").stdout


def words_are_counted(workspace: Path, answer: str) -> None:
    assert count(workspace, "c.txt") == "4 c.txt\n"
    assert count(workspace, "a.txt", "b.txt", "d.txt") == "3 a.txt\n0 b.txt\n30 d.txt\n33 total\n"


def count(workspace: Path, *arguments: str) -> str:
    """Run the program in a folder with the files; return what it prints."""
    with TemporaryDirectory() as folder:
        for name, content in FILES.items():
            Path(folder, name).write_text(content, "utf-8")
        done = run_program(Path(folder), str(workspace / "count.py"), *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_program(workspace: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program of the workspace; raise AssertionError where it does not end."""
    command = [sys.executable, "-BS", *arguments]
    try:
        return subprocess.run(
            command, cwd=workspace, capture_output=True, encoding="utf-8", errors="replace", timeout=60
        )
    except subprocess.TimeoutExpired:
        raise AssertionError("the program did not end within 60 seconds") from None
