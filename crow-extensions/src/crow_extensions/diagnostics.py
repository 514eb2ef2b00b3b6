"""Tell the model which problems its edits made: the commands of `[diagnostics]` run before and after each edit.

Only the hooks are here. `problems` runs the commands, and is imported at the first edit that one of them is for.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from crow_core.app import Crow
from crow_core.mcp.result import ToolResult
from crow_core.mcp.tool import ToolCall
from crow_core.messages.message import Message
from crow_core.session.session import Session
from crow_core.session_state import StateKey

from crow_extensions.diagnostic_settings import Diagnostics

if TYPE_CHECKING:
    from crow_extensions.problems import Checks

READING_KINDS = ("read", "search", "think", "fetch")
"""The kinds of tool calls that change no file."""


CHECKS = StateKey["list[Checks] | None"]("diagnostics", lambda: None)
"""The problems of each folder that this turn knows; None until its first edit."""
TOLD = StateKey[set[str]]("diagnostics told", set)
"""The commands that fail to the user's knowledge."""


def diagnostics(crow: Crow, *, find: Callable[[Session], Awaitable[Sequence[Diagnostics]]]) -> None:
    """Add the problems that are new since before an edit to its result. `find` is asked at the first edit of a turn."""

    async def get_checks(session: Session) -> "list[Checks]":
        checks = session.state[CHECKS]
        if checks is None:
            checks = session.state[CHECKS] = []
            if found := [one for one in await find(session) if one.commands]:
                from crow_extensions.problems import Checks  # imported here: most folders have no such commands

                checks += [Checks(one, session.cwd) for one in found]
        return checks

    async def tell(session: Session, checks: "list[Checks]") -> None:
        """Tell the user once of each command that failed."""
        for command, why in [failed for one in checks for failed in one.failed.items()]:
            if command not in session.state[TOLD]:
                session.state[TOLD].add(command)
                await session.notice(why, "warning")

    @crow.before_prompt
    def forget(message: Message, session: Session) -> None:
        if not session.parent:  # the user may have changed files
            session.state.pop(CHECKS)

    @crow.before_tool.last
    async def look_before(session: Session, tool_call: ToolCall) -> None:
        path = tool_call.arguments.get("path")
        if tool_call.kind == "edit" and isinstance(path, str):
            session = find_root(session)
            checks = await get_checks(session)
            for one in checks:
                await one.look(path)
            await tell(session, checks)

    @crow.after_tool
    async def look_after(result: ToolResult, session: Session, tool_call: ToolCall) -> ToolResult | None:
        if tool_call.kind in READING_KINDS:
            return None
        root = find_root(session)
        if not (checks := root.state[CHECKS]):
            return None
        if tool_call.kind != "edit":
            for one in checks:
                one.forget()
            return None
        paths = [change["path"] for change in result.meta.get("crow/changes", ())]
        texts = [text for path in paths for one in checks if (text := await one.compare(path, session.secrets))]
        await tell(root, checks)
        blocks = [{"type": "text", "text": text} for text in texts]
        return ToolResult([*result.content, *blocks], result.is_error, result.meta) if blocks else None


def find_root(session: Session) -> Session:
    """Return the session that a sub-agent works for; any other session itself."""
    while session.parent:
        session = session.parent
    return session
