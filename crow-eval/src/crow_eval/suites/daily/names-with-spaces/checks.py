import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

CASES: list[tuple[str, str, list[str]]] = [
    ("in", "out", ["a.txt", "b.txt"]),
    ("in", "out", []),
    ("my notes", "the copies", ["two words.txt", "  x  .txt", "a.txt"]),
    ("in", "out", ["-n.txt", "--help.txt", "-rf.txt", "plain.txt"]),
    ("in", "out", ["*.txt", "[ab].txt", "a.txt", "?.txt", "$HOME.txt", "back\\slash.txt", "quo\"te's.txt"]),
    ("-in", "-out", ["a.txt"]),
    ("*", "o*t", ["ä ö.txt"]),
]


def all_files_are_copied(workspace: Path, answer: str) -> None:
    for source, target, names in CASES:
        with TemporaryDirectory() as folder:
            start = Path(folder, source)
            start.mkdir()
            for name in names:
                (start / name).write_text(f"This is {name}.\n", "utf-8")
            (start / "other.md").write_text("not collected", "utf-8")
            (start / "folder.txt").mkdir()
            done = collect(workspace, folder, source, target)
            assert done.returncode == 0, done.stderr
            paths = [path for path in Path(folder, target).glob("*") if path.is_file()]
            copies = {path.name: path.read_text("utf-8", "replace") for path in paths}
            listed = copies.pop("LIST", "").splitlines()
            assert copies == {name: f"This is {name}.\n" for name in names}, f"{names}: {done.stderr}"
            assert sorted(listed) == sorted(names), f"LIST has {listed}, for {names}"
            assert done.stdout == f"{len(names)} files\n"


def errors_are_reported(workspace: Path, answer: str) -> None:
    with TemporaryDirectory() as folder:
        done = collect(workspace, folder, "no such folder", "out")
        assert done.returncode == 1
        assert "no such folder" in done.stderr
        assert not Path(folder, "out").exists()


def collect(workspace: Path, folder: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(workspace.absolute() / "collect.sh"), *arguments]
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", errors="replace", timeout=60)
    except subprocess.TimeoutExpired:
        raise AssertionError("the script did not end within 60 seconds") from None
