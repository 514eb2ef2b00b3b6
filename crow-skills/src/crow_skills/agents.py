"""Add AGENTS.md files to the system prompt, and those of nested folders to tool results: `crow.use(agents)`."""

import asyncio
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from crow_core.app import Crow
from crow_core.mcp.result import ToolResult
from crow_core.mcp.tool import ToolCall
from crow_core.messages.message import Message
from crow_core.session.prompts import Prompt
from crow_core.session.session import Session
from crow_core.session_state import StateKey
from crow_core.text import to_line
from crow_system.files import UnusableFile, is_inside

from crow_skills.log_entries import find_rendered
from crow_skills.text_files import find_project_folders, read_text

IS_CHECKED = StateKey("instructions_checked", bool)
LEFT_OUT = StateKey("instructions_left_out", set[Path])
"""The files that the user was told are not read."""


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

    A file may be a link to a file below its own folder, or to another of these `names` in the same git repository.
    Any other link of a project is left out, with a notice.
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

    @crow.before_prompt
    async def name_left_out(message: Message, session: Session) -> None:
        if not session.state[IS_CHECKED]:
            session.state[IS_CHECKED] = True
            folders = await asyncio.to_thread(find_project_folders, Path(session.cwd))
            await report_left_out(session, [(folder, folders[0]) for folder in folders], names)

    @crow.after_tool
    async def add_to_result(result: ToolResult, session: Session, tool_call: ToolCall) -> ToolResult | None:
        roots = {folder: root for path in get_paths(result) for folder, root in find_nested_folders(path, session)}
        if not roots:
            return None
        files = [path for path in (find_file(folder, names, root) for folder, root in roots.items()) if path]
        await report_left_out(session, roots.items(), names)
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
        if (path := find_file(folder, names, root)) and room > 0:
            with suppress(UnusableFile):
                text = read_text(path, room, root)
                room -= len(text)
                if text.strip():
                    yield path, text


def find_file(folder: Path, names: Sequence[str], root: Path | None) -> Path | None:
    """Return the first file of `names` in a folder that may be read, or None. `root` is None for a user's folder."""
    with suppress(OSError, ValueError):
        paths = (folder / name for name in names)
        return next((path for path in paths if (not root or is_own(path, names, root)) and path.is_file()), None)
    return None


def is_own(path: Path, names: Sequence[str], root: Path) -> bool:
    """Test whether a path is a plain one, or a link to a file below its folder or to one of `names` in its git
    repository."""
    if not path.is_symlink() or is_inside(path, path.parent):
        return True
    return path.resolve().name in names and (root / ".git").exists() and is_inside(path, root)


async def report_left_out(session: Session, folders: Iterable[tuple[Path, Path]], names: Sequence[str]) -> None:
    """Tell the user, once for each, about files of `names` that are not read."""
    reported = session.state[LEFT_OUT]
    for path, reason in await asyncio.to_thread(lambda: list(find_left_out(folders, names))):
        if path not in reported:
            reported.add(path)
            await session.notice(f"{to_line(str(path))} was left out: it is {reason}.", "warning")


def find_left_out(folders: Iterable[tuple[Path, Path]], names: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """Yield the paths of `names` that are not files of the project, with the reason."""
    for path, root in ((folder / name, root) for folder, root in folders for name in names):
        with suppress(OSError, ValueError):
            if not is_own(path, names, root):
                yield path, "a link to a file that is not the project's"
            elif path.exists() and not path.is_file() and not path.is_dir():
                yield path, "no regular file"


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
