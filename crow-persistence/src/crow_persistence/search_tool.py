"""The tool `search_sessions`: lets a model search earlier sessions."""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from crow_core.errors import StoreError
from crow_core.mcp.server import Server

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from crow_persistence.database import Database

NAME = "search_sessions"
DESCRIPTION = """\
Search this folder's sessions, also old ones: questions, replies, commands and their output.
A message must contain all words; "words in quotes" must follow each other; word* matches longer words.
Returns the best matches: session, date, role, and a line with ⟦the match⟧."""
WORDS = "a few words that the messages certainly contain"
EVERYWHERE = "search all folders; only if the user wants it"
MARKS = ("private", "untrusted")
"""Kinds of markers, of the extension `taint`, that hold for quotations from a session, too."""

DEFINITION: dict[str, Any] = {
    "name": NAME,
    "description": DESCRIPTION,
    "inputSchema": {
        "additionalProperties": False,
        "properties": {
            "words": {"description": WORDS, "type": "string"},
            "everywhere": {"default": False, "description": EVERYWHERE, "type": "boolean"},
        },
        "required": ["words"],
        "type": "object",
    },
    "annotations": {"readOnlyHint": True, "openWorldHint": False},
    "_meta": {"crow/kind": "search", "fastmcp": {"tags": []}},
}
"""The definition that FastMCP would generate, written out so that FastMCP need not be loaded to list the tool."""


def make_server(open_database: "Callable[[], Database]") -> Server:
    """Return the server that offers the tool. Each call runs `open_database` in a thread."""
    return Server(
        "sessions", lambda: make_mcp_server(open_database), definitions=[DEFINITION], built_in=True, shared=True
    )


def make_mcp_server(open_database: "Callable[[], Database]") -> Any:
    """Return the FastMCP server with the tool."""
    from fastmcp import Context, FastMCP  # FastMCP takes most of a second to import
    from fastmcp.exceptions import ToolError
    from fastmcp.tools.base import ToolResult
    from mcp_types import ToolAnnotations
    from pydantic import Field

    mcp = FastMCP("crow sessions")

    async def search_sessions(
        context: Context,
        words: Annotated[str, Field(description=WORDS)],
        everywhere: Annotated[bool, Field(description=EVERYWHERE)] = False,
    ) -> ToolResult:
        request = context.request_context
        meta = dict((request and request.meta) or {})
        cwd = "" if everywhere else str(meta.get("crow/cwd", ""))
        try:
            found = await asyncio.to_thread(look_up, open_database, words, cwd, str(meta.get("crow/session", "")))
        except StoreError as error:
            raise ToolError(str(error), log_level=logging.DEBUG) from error
        meta = {"crow/private": found.marked.get("private"), "crow/untrusted": found.marked.get("untrusted")}
        return ToolResult(found.text, meta={name: ids for name, ids in meta.items() if ids} or None)

    mcp.tool(
        search_sessions,
        description=DESCRIPTION,
        annotations=ToolAnnotations(read_only_hint=True, open_world_hint=False),
        meta={"crow/kind": "search"},
        output_schema=None,
    )
    return mcp


class Found(NamedTuple):
    """The answer to a search."""

    text: str
    """The hits, for the model."""
    marked: dict[str, list[str]]
    """The other sessions among them that have markers of MARKS, by the markers' kind."""


def look_up(open_database: "Callable[[], Database]", words: str, cwd: str, session_id: str) -> Found:
    """Return the hits. Those from the current turn of the session `session_id` are left out. Raises StoreError."""
    from sqlalchemy import func, select  # imported by the first search

    from crow_persistence.search import search
    from crow_persistence.tables import messages, sessions

    asked = select(func.max(messages.c.id)).join(sessions).where(sessions.c.id == session_id, messages.c.kind == "user")
    with open_database().begin_read() as connection:
        begun = connection.scalar(asked)
        hits = search(connection, words, cwd=cwd)
        earlier = [hit for hit in hits if begun is None or hit.session != session_id or hit.row < begun]
        marked = find_marks(connection, {hit.session for hit in earlier} - {session_id})
    where = f"in the sessions of {cwd}" if cwd else "in any session"
    text = "\n".join(format_hits(earlier, with_folder=not cwd))
    return Found(text or f"Nothing {where} holds all of these words. Try fewer, or others.", marked)


def find_marks(connection: "Connection", ids: Collection[str]) -> dict[str, list[str]]:
    """Return those of these sessions that have markers of MARKS, or were forked from one that has, by the markers'
    kind."""
    from sqlalchemy import select

    from crow_persistence.tables import messages, sessions

    found: dict[str, list[str]] = {}
    for id in sorted(ids):
        line, origin = list[int](), id
        while origin and (row := connection.execute(select(sessions).where(sessions.c.id == origin)).one_or_none()):
            if row.number in line:
                break
            line.append(row.number)
            origin = row.origin
        its = select(messages.c.kind).where(messages.c.session.in_(line), messages.c.kind.in_(MARKS)).distinct()
        for kind in connection.scalars(its):
            found.setdefault(kind, []).append(f"session {id[:8]}")
    return found


def format_hits(hits: Any, *, with_folder: bool) -> Iterator[str]:
    """Yield a line for each hit."""
    for hit in hits:
        date = datetime.fromtimestamp(hit.at / 1000, UTC).astimezone()
        who = f"{hit.kind} ({hit.tool})" if hit.tool else hit.kind
        yield f"{hit.session[:8]} {date:%Y-%m-%d %H:%M} {who}{f' in {hit.cwd}' if with_folder else ''}: {hit.snippet}"
