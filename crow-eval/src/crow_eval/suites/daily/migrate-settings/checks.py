import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

PAIRS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"version": 1, "server": "example.org:8080", "timeout_ms": 2500, "colour": "on", "plugins": "spell, dates"},
        {
            "version": 2,
            "server": {"host": "example.org", "port": 8080},
            "timeout": 2.5,
            "color": True,
            "plugins": ["spell", "dates"],
        },
    ),
    (
        {"version": 1, "server": "localhost", "colour": "off", "plugins": ""},
        {"version": 2, "server": {"host": "localhost", "port": 443}, "color": False, "plugins": []},
    ),
    (
        {"server": "a.b:1", "name": "Zoë", "window": {"colour": "on", "width": [1, 2]}, "timeout_ms": 0},
        {
            "version": 2,
            "server": {"host": "a.b", "port": 1},
            "name": "Zoë",
            "window": {"colour": "on", "width": [1, 2]},
            "timeout": 0,
        },
    ),
    ({}, {"version": 2}),
    ({"version": 1, "plugins": "one"}, {"version": 2, "plugins": ["one"]}),
]


def files_are_migrated(workspace: Path, answer: str) -> None:
    for old, new in PAIRS:
        code, content = migrate(workspace, json.dumps(old, ensure_ascii=False).encode())
        assert code == 0, f"exit code {code} for {old}"
        assert parse(content) == new, f"{old} became {content!r}"
        assert migrate(workspace, content) == (0, content), "a second migration changes the file"


def other_files_stay_as_they_are(workspace: Path, answer: str) -> None:
    current = b'{"version":2,\n\n   "timeout": 1.50, "colour": "on"}'
    assert migrate(workspace, current) == (0, current)
    for content in (b'{"version": 3, "server": "a:1"}', b'{"version": "1", "server": "a:1"}', b'{"version": 0}'):
        code, after = migrate(workspace, content)
        assert after == content, f"{content.decode()} has changed"
        assert code != 0, f"exit code 0 for {content.decode()}"


def parse(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise AssertionError(f"the new file is no JSON: {error}") from None


def migrate(workspace: Path, content: bytes) -> tuple[int, bytes]:
    """Run the program on a file; return its exit code, and what the file holds then."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "settings.json")
        path.write_bytes(content)
        done = run_program(workspace, "migrate.py", str(path))
        assert path.is_file(), "the file is gone"
        return done.returncode, path.read_bytes()


def run_program(workspace: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program of the workspace; raise AssertionError where it does not end."""
    command = [sys.executable, "-BS", *arguments]
    try:
        return subprocess.run(
            command, cwd=workspace, capture_output=True, encoding="utf-8", errors="replace", timeout=60
        )
    except subprocess.TimeoutExpired:
        raise AssertionError("the program did not end within 60 seconds") from None
