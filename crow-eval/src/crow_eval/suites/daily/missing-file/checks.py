import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory


def missing_file_is_named(workspace: Path, answer: str) -> None:
    for name in ("absent.txt", "no such folder/numbers.txt", "march"):
        done = run_program(workspace, "total.py", name)
        assert done.returncode == 2, f"exit code {done.returncode}"
        assert done.stdout == ""
        assert name in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def other_files_are_summed_up(workspace: Path, answer: str) -> None:
    with TemporaryDirectory() as folder:
        for content, total in (("1\n2\n3.5\n", "6.50"), ("", "0.00"), ("10\n\n-4\n", "6.00")):
            path = Path(folder, "numbers.txt")
            path.write_text(content, "utf-8")
            done = run_program(workspace, "total.py", str(path))
            assert (done.returncode, done.stdout, done.stderr) == (0, f"{total}\n", "")


def run_program(workspace: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program of the workspace; raise AssertionError where it does not end."""
    command = [sys.executable, "-BS", *arguments]
    try:
        return subprocess.run(
            command, cwd=workspace, capture_output=True, encoding="utf-8", errors="replace", timeout=60
        )
    except subprocess.TimeoutExpired:
        raise AssertionError("the program did not end within 60 seconds") from None
