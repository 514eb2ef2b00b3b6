"""The tools that a program gives an agent: its functions, MCP servers, and crow's own by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from crow_agent.tools import Function, get_name

if TYPE_CHECKING:
    from crow_core.app import Crow
    from crow_core.mcp.result import ToolResult
    from crow_core.mcp.server import Server
    from crow_core.mcp.tool import ToolCall
    from crow_core.session.session import Session

Tool: TypeAlias = "Function | Server | str"
"""A Python function, an MCP server, or some of crow's own tools by name."""

GROUPS: dict[str, tuple[str, ...]] = {
    "read": ("file_editor", "glob", "grep", "tree"),
    "edit": ("file_editor",),
    "terminal": ("terminal",),
    "web": ("fetch", "web_search"),
}
"""crow's own tools by group: `builtin:read`. Without `edit`, `file_editor` can only view."""


@dataclass(frozen=True)
class ChosenTools:
    """The tools of an agent by their kind."""

    functions: "list[Function]"
    servers: "list[Server]"
    builtin: list[str] | None
    """The names of crow's own; None for all of them and the configured MCP servers."""
    only_views: bool
    """True if `file_editor` may view files, and not change them."""


def choose_tools(tools: Sequence[Tool] | None) -> ChosenTools:
    """Sort tools by their kind; None means the configured ones. Raises TypeError, ValueError."""
    from crow_core.mcp.server import Server  # as all of crow_core but ACP, it is loaded when an agent needs it

    if isinstance(tools, str):
        raise TypeError(f"tools is a list: [{tools!r}].")
    for each in tools or ():
        if not (isinstance(each, (Server, str)) or callable(each)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"{each!r} cannot be a tool. Give a Python function, or crow's own tools by name, such as "
                "'builtin:read'. MCP servers are given as `mcp_servers`."
            )
    servers = [each for each in tools or () if isinstance(each, Server)]
    functions: list[Function] = [each for each in tools or () if callable(each) and not isinstance(each, (Server, str))]
    names = [each for each in tools or () if isinstance(each, str)]
    builtin = None if tools is None else choose_builtin_tools(names)
    if taken := sorted({get_name(function) for function in functions} & {*(builtin or ())}):
        raise ValueError(
            f"crow has a tool {taken[0]!r} of its own, and `tools` names both. Give the function another name: "
            "@tool(name=…)."
        )
    only_views = builtin is not None and not {"builtin", "builtin:edit", "builtin:file_editor"} & {*names}
    return ChosenTools(functions, servers, builtin, only_views)


def choose_builtin_tools(wanted: Sequence[str]) -> list[str]:
    """List crow's own tools that are meant by `builtin`, `builtin:GROUP` or `builtin:TOOL`. Raises ValueError."""
    chosen: list[str] = []
    for each in wanted:
        prefix, _, group = each.partition(":")
        every = sorted({name for names in GROUPS.values() for name in names})
        if prefix != "builtin" or (group and group not in GROUPS and group not in every):
            groups = ", ".join(f"builtin:{name}" for name in dict.fromkeys([*GROUPS, *every]))
            raise ValueError(f"There is no tool {each!r}. Give a function, builtin, or one of: {groups}.")
        chosen += GROUPS.get(group, (group,)) if group else every
    return sorted(set(chosen))


def refuse_edits(crow: "Crow") -> None:
    """Let `file_editor` view files only."""
    from crow_core.mcp.result import ToolResult

    @crow.before_tool
    def refuse(session: "Session", tool_call: "ToolCall") -> "ToolResult | None":
        if tool_call.name == "file_editor" and tool_call.kind != "read":
            return ToolResult.error("You can view files, and not change them.")
        return None
