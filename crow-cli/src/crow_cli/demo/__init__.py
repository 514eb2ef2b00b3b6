"""The material of `crow demo`: a small project with one bug, and a scripted model that finds it with the real tools."""

from pathlib import Path

PROJECT = Path(__file__).parent / "project"


def unpack(folder: Path) -> None:
    """Copy the project into an existing folder, writable, so that the one we ship keeps its bug."""
    for file in PROJECT.iterdir():
        if file.is_file():  # an installer may have left __pycache__ beside them
            (folder / file.name).write_bytes(file.read_bytes())
