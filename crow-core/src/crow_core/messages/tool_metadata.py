"""The metadata of tools (MCP, `_meta`) that crow knows: of a result, and of a definition."""

from typing import Any, TypedDict

from crow_core.acp.schema import ToolKind
from crow_core.messages.notes import EditNotes, FilePlace, ShellNotes

# Functional syntax because no key is a name.
ResultMeta = TypedDict(
    "ResultMeta",
    {
        "crow/changes": list[EditNotes],  # what the call changed
        "crow/stays": list[str],  # what of it cannot be undone; missing if that is not known
        "crow/ended": str,  # the id of the call that began the command or session which has ended
        "crow/opened": str,  # the id of the call that opened the session which this is about
        "crow/locations": list[FilePlace],  # what it read or changed
        "crow/plan": list[dict[str, Any]],  # the plan's entries (ACP)
        "crow/shell": ShellNotes,  # the state in which the next command starts
        "crow/folder": str,  # the working directory of the next command
        "crow/terminal": str,  # the id of the client's terminal that has the output
        "crow/title": str,  # the title of the call for the client
        "crow/exit": dict[str, Any],  # `exitCode` or `signal` of a command that failed
        "crow/denied": str,  # why the call was not allowed
        "crow/private": list[str],  # sources of private data in the result
        "crow/untrusted": list[str],  # sources of untrusted content in it
    },
    total=False,
)
"""The metadata of a tool result (MCP, `_meta`). Only that of built-in tools, and of hooks, is used."""

DefinitionMeta = TypedDict(
    "DefinitionMeta",
    {
        "crow/kind": ToolKind | dict[str, ToolKind],  # of its calls (ACP), also by the argument `command`
        "crow/arguments": dict[str, Any] | None,  # other names and forms of arguments that are understood
        "crow/replaces": list[str],  # names of tools of other agents that do the same
        "crow/stands_for": dict[str, Any],  # the `tool` that is called in its place, and `arguments` that are added
        "crow/annotations": dict[str, Any],  # annotations (MCP) by the argument `command`
        "crow/shell": str | None,  # the shell that runs its commands; sh if it is missing, None for an unknown one
        "crow/repeats": bool,  # True if it may be called until its result changes; any server is believed
    },
    total=False,
)
"""The metadata of a tool's definition (MCP, `_meta`). Only that of built-in tools is used, but for one key."""
