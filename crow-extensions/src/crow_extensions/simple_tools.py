"""The simple tools that stand for crow's own in sessions with small models."""

from typing import Any

from crow_core.mcp.tool import ToolCall
from msgspec.json import encode


def make_definition(
    name: str, description: str, tool: str, arguments: dict[str, Any], types: dict[str, str], required: list[str]
) -> dict[str, Any]:
    """Make the definition of a tool that stands for another one with some of its arguments."""
    properties = {key: {"type": kind} for key, kind in types.items()}
    return {
        "name": name,
        "description": description,
        "inputSchema": {"type": "object", "properties": properties, "required": required},
        "_meta": {"crow/stands_for": {"tool": tool, "arguments": arguments}},
    }


LINES = {"path": "string", "start_line": "integer", "end_line": "integer"}
DEFINITIONS: list[dict[str, Any]] = [
    make_definition("read", "Read a file.", "file_editor", {"command": "view"}, LINES, ["path"]),
    make_definition(
        "write",
        "Create a file with this content.",
        "file_editor",
        {"command": "create"},
        {"path": "string", "content": "string"},
        ["path", "content"],
    ),
    make_definition(
        "replace",
        "Change a file: put new_text in the place of old_text, a whole line or several.",
        "file_editor",
        {"command": "str_replace"},
        {"path": "string", "old_text": "string", "new_text": "string"},
        ["path", "old_text", "new_text"],
    ),
    make_definition(
        "append",
        "Add lines at the end of a file.",
        "file_editor",
        {"command": "insert"},
        {"path": "string", "text": "string"},
        ["path", "text"],
    ),
    make_definition("list", "List the names of the files in a folder.", "tree", {}, {"path": "string"}, []),
    make_definition(
        "search",
        "Search for text inside files.",
        "grep",
        {"ignore_case": True},
        {"pattern": "string", "path": "string"},
        ["pattern"],
    ),
    make_definition("run", "Run a shell command.", "terminal", {}, {"command": "string"}, ["command"]),
]
REQUIRED: dict[str, list[str]] = {d["name"]: d["inputSchema"]["required"] for d in DEFINITIONS}
"""The arguments that each tool must have, by its name."""
MAX_SHOWN = 200
"""Characters of the longest argument that is repeated in an error."""


def find_name(tool_call: ToolCall) -> str | None:
    """Return the name of the simple tool that a call is one of; None if it is another call."""
    for definition in DEFINITIONS:
        meant = definition["_meta"]["crow/stands_for"]
        if tool_call.name == definition["name"]:
            return tool_call.name
        if tool_call.name == meant["tool"] and meant["arguments"].items() <= tool_call.arguments.items():
            return definition["name"]
    return None


def suggest_call(name: str, given: dict[str, Any]) -> str:
    """Return the call to make after one that failed: with the given values, since small models copy what they read."""
    if name == "replace" and "path" in given:
        name = "read"
    elif name == "read" and "path" in given:
        return encode({"name": "list", "arguments": {}}).decode()
    short = {key: value for key, value in given.items() if len(str(value)) <= MAX_SHOWN}
    arguments = {key: short.get(key, f"<{key}>") for key in REQUIRED[name]}
    return encode({"name": name, "arguments": arguments}).decode()


def limit_lines(tool: dict[str, Any], files: dict[str, list[str]]) -> list[dict[str, Any]]:
    """Return the definition of `replace` once for each file, with the lines that it can replace."""
    function = tool["function"]
    return [
        {
            **function,
            "parameters": {
                **function["parameters"],
                "properties": {
                    **function["parameters"]["properties"],
                    "path": {"enum": [path]},
                    "old_text": {"enum": lines},
                },
            },
        }
        for path, lines in files.items()
    ]
