"""Add AGENTS.md files to the system prompt, and those of nested folders to tool results: `crow.use(agents)`."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from crow_core.app import Crow
from crow_core.mcp.result import ToolResult
from crow_core.mcp.tool import ToolCall
from crow_core.prompts import Prompt
from crow_core.session import Session

from crow_skills.entries import find_rendered
from crow_skills.files import UnusableFile, find_project_folders, read_text


def agents(
    crow: Crow,
    *,
    names: Sequence[str] = ("AGENTS.md", "CLAUDE.md"),
    user: Sequence[Path] = (),
    limit: int = 40_000,
) -> None:
    """Give the model the instruction files of a project.

    Of each folder, use the first file of `names` that exists; with no names, add nothing. The system prompt has the
    files of the `user` folders and those from the project's root down to the session's folder. The file of a nested
    folder follows the first tool result about a file below that folder. Add at most `limit` characters at once.
    """
    crow.prompts |= {name: Prompt.from_package(name, "crow_skills") for name in ("agents", "nested")}

    @crow.instructions
    def add_to_system_prompt(session: Session) -> str | None:
        folders = find_project_folders(Path(session.cwd))
        root = folders[0] if folders else None
        instructions = [*read_instructions([(folder, None) for folder in user], names, limit)]
        room = limit - sum(len(text) for _, text in instructions)
        # The nearest files matter most: they get the room first.
        nearest = read_instructions([(folder, root) for folder in reversed(folders)], names, room)
        instructions += reversed([*nearest])
        files = [{"path": str(path), "text": text} for path, text in instructions]
        return session.prompts.render(session.prompts.templates["agents"], "agents", files=files) if files else None

    @crow.after_tool
    def add_to_result(result: ToolResult, session: Session, tool_call: ToolCall) -> ToolResult | None:
        roots = {folder: root for path in get_paths(result) for folder, root in find_nested_folders(path, session)}
        files = [path for path in (find_file(folder, names) for folder in roots) if path]
        if not files or result.is_error:
            return None
        known = find_rendered(session, "nested", "path", "shrink")  # a shrink marker cuts the results before it
        more: list[dict[str, str]] = []
        for path in files:
            if str(path) not in known:
                with suppress(UnusableFile):
                    text = read_text(path, limit, roots[path.parent])
                    rendered = session.prompts.render(
                        session.prompts.templates["nested"],
                        "nested",
                        path=str(path),
                        folder=str(path.parent),
                        text=text,
                    )
                    more.append({"type": "text", "text": rendered})
        return ToolResult([*result.content, *more], result.is_error, result.meta) if more else None


def read_instructions(
    folders: Iterable[tuple[Path, Path | None]], names: Sequence[str], room: int
) -> Iterator[tuple[Path, str]]:
    """Yield the path and the text of each folder's file until `room` characters are used.

    Each folder comes with the root that its file may not lead out of, or None. Skip empty and unusable files.
    """
    for folder, root in folders:
        if (path := find_file(folder, names)) and room > 0:
            with suppress(UnusableFile):
                text = read_text(path, room, root)
                room -= len(text)
                if text.strip():
                    yield path, text


def find_file(folder: Path, names: Sequence[str]) -> Path | None:
    """Return the first file of `names` that exists in a folder, or None."""
    with suppress(OSError, ValueError):
        return next((path for name in names if (path := folder / name).is_file()), None)
    return None


def get_paths(result: ToolResult) -> list[str]:
    """Return the paths of the files that a tool result reports as its locations and changes."""
    return [place["path"] for key in ("crow/locations", "crow/changes") for place in result.meta.get(key, [])]


def find_nested_folders(path: str, session: Session) -> Iterator[tuple[Path, Path]]:
    """Yield the folders above a file that the system prompt does not cover, the outermost first, with their root."""
    real = Path(os.path.realpath(path))
    covered = {*find_project_folders(Path(os.path.realpath(session.cwd)))}
    for root in map(Path, map(os.path.realpath, session.folders.roots)):
        if real.is_relative_to(root):
            above = [folder for folder in real.parents if folder.is_relative_to(root)]
            yield from ((folder, root) for folder in reversed(above) if folder not in covered)
            return
