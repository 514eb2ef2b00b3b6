"""The tool `search_sessions`: lets a model search earlier sessions."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

from crow_core.errors import StoreError
from crow_core.mcp.server import Server

if TYPE_CHECKING:
    from crow_persistence.database import Database

NAME = "search_sessions"
DESCRIPTION = """\
Search this folder's sessions, also old ones: questions, replies, commands and their output.
A message must contain all words; "words in quotes" must follow each other; word* matches longer words.
Returns the best matches: session, date, role, and a line with ⟦the match⟧."""
WORDS = "a few words that the messages certainly contain"
EVERYWHERE = "search all folders; only if the user wants it"

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
    from mcp_types import ToolAnnotations
    from pydantic import Field

    mcp = FastMCP("crow sessions")

    async def search_sessions(
        context: Context,
        words: Annotated[str, Field(description=WORDS)],
        everywhere: Annotated[bool, Field(description=EVERYWHERE)] = False,
    ) -> str:
        request = context.request_context
        meta = dict((request and request.meta) or {})
        cwd = "" if everywhere else str(meta.get("crow/cwd", ""))
        try:
            return await asyncio.to_thread(look_up, open_database, words, cwd, str(meta.get("crow/session", "")))
        except StoreError as error:
            raise ToolError(str(error), log_level=logging.DEBUG) from error

    mcp.tool(
        search_sessions,
        description=DESCRIPTION,
        annotations=ToolAnnotations(read_only_hint=True, open_world_hint=False),
        meta={"crow/kind": "search"},
        output_schema=None,
    )
    return mcp


def look_up(open_database: "Callable[[], Database]", words: str, cwd: str, session_id: str) -> str:
    """Return the hits as text for the model. Hits from the current turn of the session `session_id` are left out.
    Raises StoreError."""
    from sqlalchemy import func, select  # imported by the first search

    from crow_persistence.search import search
    from crow_persistence.tables import messages, sessions

    asked = select(func.max(messages.c.id)).join(sessions).where(sessions.c.id == session_id, messages.c.kind == "user")
    with open_database().begin_read() as connection:
        begun = connection.scalar(asked)
        hits = search(connection, words, cwd=cwd)
    earlier = [hit for hit in hits if begun is None or hit.session != session_id or hit.row < begun]
    where = f"in the sessions of {cwd}" if cwd else "in any session"
    return (
        "\n".join(format_hits(earlier, with_folder=not cwd))
        or f"Nothing {where} holds all of these words. Try fewer, or others."
    )


def format_hits(hits: Any, *, with_folder: bool) -> Iterator[str]:
    """Yield a line for each hit."""
    for hit in hits:
        date = datetime.fromtimestamp(hit.at / 1000).astimezone()
        who = f"{hit.kind} ({hit.tool})" if hit.tool else hit.kind
        yield f"{hit.session[:8]} {date:%Y-%m-%d %H:%M} {who}{f' in {hit.cwd}' if with_folder else ''}: {hit.snippet}"
