"""`crow.use(agents)`: AGENTS.md, told at a session's start, and that of a deeper folder when work gets there."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from crow_core.app import Crow
from crow_core.mcp.result import ToolResult
from crow_core.mcp.tool import ToolCall
from crow_core.prompts import Prompt
from crow_core.session import Session

from crow_skills.extension import disclosed
from crow_skills.files import Unreadable, project, read


def agents(
    crow: Crow,
    *,
    names: Sequence[str] = ("AGENTS.md", "CLAUDE.md"),
    user: Sequence[Path] = (),
    limit: int = 40_000,
) -> None:
    """Tell the model what stands in the first of `names` of each folder: those in the `user`'s folders and from the
    project's root down to the session's folder in the system prompt, a deeper one with the first result that concerns a
    file below it. No names: nothing. At most `limit` characters at once.
    """
    crow.prompts |= {name: Prompt.packaged(name, "crow_skills") for name in ("agents", "nested")}

    @crow.instructions
    def tell(session: Session) -> str | None:
        folders = project(Path(session.cwd))
        root = folders[0] if folders else None
        found = [*texts([(folder, None) for folder in user], names, limit)]
        room = limit - sum(len(text) for _, text in found)
        nearest = texts([(folder, root) for folder in reversed(folders)], names, room)  # they matter most
        found += reversed([*nearest])
        files = [{"path": str(path), "text": text} for path, text in found]
        return session.prompts.render(session.prompts.templates["agents"], "agents", files=files) if files else None

    @crow.after_tool
    def tell_deeper(result: ToolResult, session: Session, tool_call: ToolCall) -> ToolResult | None:
        inner = {folder: root for path in touched(result) for folder, root in deeper(path, session)}
        files = [path for path in (first(folder, names) for folder in inner) if path]
        if not files or result.is_error:
            return None
        known = disclosed(session, "nested", "path", "shrink")  # which cuts old results
        more: list[dict[str, str]] = []
        for path in files:
            if str(path) not in known:
                with suppress(Unreadable):
                    text = read(path, limit, inner[path.parent])
                    rendered = session.prompts.render(
                        session.prompts.templates["nested"],
                        "nested",
                        path=str(path),
                        folder=str(path.parent),
                        text=text,
                    )
                    more.append({"type": "text", "text": rendered})
        return ToolResult([*result.content, *more], result.is_error, result.meta) if more else None


def texts(folders: Iterable[tuple[Path, Path | None]], names: Sequence[str], room: int) -> Iterator[tuple[Path, str]]:
    """The file of each folder that has one, and what it says, as long as there is room for it."""
    for folder, inside in folders:
        if (path := first(folder, names)) and room > 0:
            with suppress(Unreadable):
                text = read(path, room, inside)
                room -= len(text)
                if text.strip():
                    yield path, text


def first(folder: Path, names: Sequence[str]) -> Path | None:
    with suppress(OSError, ValueError):
        return next((path for name in names if (path := folder / name).is_file()), None)
    return None


def touched(result: ToolResult) -> list[str]:
    """The files that a result is about, as the tool itself says."""
    return [place["path"] for key in ("crow/locations", "crow/changes") for place in result.meta.get(key, [])]


def deeper(path: str, session: Session) -> Iterator[tuple[Path, Path]]:
    """The folders above a file that the system prompt does not speak for, the outermost first, each with its root."""
    real, told = Path(os.path.realpath(path)), {*project(Path(os.path.realpath(session.cwd)))}
    for root in map(Path, map(os.path.realpath, session.folders.roots)):
        if real.is_relative_to(root):
            above = [folder for folder in real.parents if folder.is_relative_to(root)]
            yield from ((folder, root) for folder in reversed(above) if folder not in told)
            return
