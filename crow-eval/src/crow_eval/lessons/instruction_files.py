"""Files of instructions for agents: where a lesson's line belongs, and how it gets there."""

from collections.abc import Collection
from contextlib import suppress
from difflib import unified_diff
from pathlib import Path

from crow_skills.text_files import find_project_folders

NAMES = ("AGENTS.md", "CLAUDE.md")
"""The names of a project's file; the first that exists is read."""
SKILL = "SKILL.md"


def find_instruction_file(folders: Collection[str], skills: Collection[str], config: Path) -> Path:
    """Return the file for a line that comes from sessions in these folders, with these folders of skills ("" for a turn
    without one). It is the file of the skill, of the project, or of the user if there are several projects."""
    if len(skills) == 1 and (skill := next(iter(skills))) and (Path(skill) / SKILL).is_file():
        return Path(skill) / SKILL
    projects = {find_project(Path(folder)): Path(folder) for folder in folders}
    if len(projects) > 1:
        return config / NAMES[0]
    project, folder = next(iter(projects.items()))
    paths = (above / name for above in reversed(find_project_folders(folder)) for name in NAMES)
    return next((path for path in paths if path.is_file()), project / NAMES[0])


def find_project(folder: Path) -> Path:
    """Return the root of the git repository of a folder; the folder itself if it is in none."""
    root = next(iter(find_project_folders(folder)), folder)
    return root if (root / ".git").exists() else folder


def read_instructions(file: Path) -> str:
    """Return the text of a file of instructions; "" if there is none. Raises OSError, UnicodeDecodeError."""
    return file.read_bytes().decode() if file.exists() else ""


def knows_line(file: Path, line: str) -> bool:
    """Return whether a file has a line, perhaps as an item of a list; False for one that cannot be read."""
    with suppress(OSError, UnicodeDecodeError):
        return line in (
            each.strip().removeprefix("- ").removeprefix("* ") for each in read_instructions(file).splitlines()
        )
    return False


def add_line(text: str, line: str) -> str:
    """Return a text with one more item of a list at its end."""
    text = text.rstrip()
    gap = "" if not text else "\n" if ends_with_item(text) else "\n\n"
    return f"{text}{gap}- {line}\n"


def ends_with_item(text: str) -> bool:
    """Return whether the last line of a text is an item of a list."""
    return text.rpartition("\n")[2].lstrip().startswith(("- ", "* "))


def make_diff(file: Path, before: str, after: str) -> str:
    """Return the edit to a file as a unified diff."""
    lines = unified_diff(before.splitlines(), after.splitlines(), str(file), str(file), lineterm="")
    return "\n".join(lines)
