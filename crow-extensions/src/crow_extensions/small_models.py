"""Give small models few and simple tools, a short system prompt, and results that say what to do next."""

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from crow_core.acp.schema import StopReason
from crow_core.app import Crow
from crow_core.errors import ConfigError
from crow_core.mcp.result import ToolResult
from crow_core.mcp.server import Handler, Server
from crow_core.mcp.tool import ToolCall
from crow_core.messages.message import Function, Message, to_parts
from crow_core.models.call_forms import make_step_format
from crow_core.models.chat_model import ChatModel
from crow_core.models.model_call import ModelCall, ModelRequest
from crow_core.session.prompts import Prompt
from crow_core.session.session import Session
from crow_core.session_state import StateKey
from crow_system.shortening import leave_out
from msgspec.json import encode

from crow_extensions.simple_tools import DEFINITIONS, REQUIRED, find_name, limit_lines, suggest_call

SMALL = StateKey("small_models", bool)
"""True if the session has the tools for small models."""
SEEN = StateKey("small_models_seen", set[str])
"""The paths of the files that the model has read or written."""
SHOWN = StateKey("small_models_shown", set[str])
"""The calls that were answered with the file that they would have changed."""
FILE_LINES = StateKey("small_models_lines", dict[str, list[str]])
"""The lines of the short files among them, by path, each line once."""
WORKED = StateKey("small_models_worked", bool)
"""True if a call of the turn has changed a file, or run a command."""
CLAIMS = StateKey("small_models_claims", bool)
"""True if the last reply says that something was changed."""
TASK = StateKey("small_models_task", str)
"""The beginning of the last prompt."""
FRAGMENTS = StateKey("small_models_fragments", set[tuple[str, str]])
"""The files and the parts of lines for which the model was asked for whole lines."""
NOTICE = (
    "{} is a small model, or its window is: it is offered seven simple tools and a short system prompt. "
    'profile = "full" in [models.NAME.quirks] switches this off.'
)


LOOKED = "[If this is enough, answer the user now. Call another tool only if the task needs it.]"
CHANGED = "[If this is all that the user asked for, answer the user now in one sentence. If it is wrong, correct it.]"
FIRST_LOOK = "Nothing was changed yet: look at the file first."
CHANGE_NOW = {
    "replace": "[The task: {}\nNow call replace. Copy old_text from the file, a whole line; new_text is that line as "
    "it shall be.]",
    "write": "[The task: {}\nThe file has this text. Now call append to add lines at its end, replace to change a "
    "line, or write with all of its new text.]",
}
"""The next step for the model after it was shown a file in place of its first change, by the tool of that change."""
NEXT: dict[str, str] = {
    **dict.fromkeys(("read", "list", "search", "run"), LOOKED),
    **dict.fromkeys(("write", "replace", "append"), CHANGED),
}
"""The advice after a call."""
SAME = (
    "Nothing was changed: new_text is the same as old_text.",
    "[The task: {}\nNow call replace with the line as it shall be as new_text. Answer the user if the file is right.]",
)
PART_OF_A_LINE = "Nothing was changed: old_text has to be a whole line of the file. It is a part of:"
WHOLE_LINE = "[Now call replace with such a line as old_text. new_text is the same line, changed.]"
CLAIM = re.compile(
    r"\b(?:been|was|were|have|I|is now) (?:successfully |now )?(?:added|changed|corrected|created|deleted|fixed"
    r"|inserted|removed|renamed|replaced|set|updated|written)\b"
)
"""Matches an answer that says that something was changed."""
DOUBT = "But no file was changed. If the task needs a change, make it now. Otherwise answer without saying that."
MAX_TASK = 300
"""Characters of the prompt that a result repeats."""
MAX_LINES = 20
"""Lines that the model is shown of those that have its old_text."""
MAX_CHOICES = 200
"""Lines of the longest file from which the model chooses the line to replace."""
SHORT_FILE = 40
"""Lines of the longest file that the model always reads as a whole."""
NUMBERED = re.compile(r"^ *\d+\t(.*)$", re.M)
"""Matches a line of a file as `read` shows it."""
LINE_COUNT = re.compile(r"\(([\d,]+) lines?\b")
"""Matches the number of lines that `read` says a file has."""
HIT = re.compile(r"^\d+:", re.M)
"""Matches the beginning of a line that `search` has found."""


def small_models(crow: Crow) -> None:
    """Offer a model whose quirk `profile` is `small` seven tools of at most three arguments, and a short system prompt.

    Each tool stands for a call of crow's own tools, so permissions, diffs and undo are the same. The tools of MCP
    servers that the user has configured stay. The profile is chosen before the first prompt.
    """
    crow.prompts["small"] = Prompt.from_package("small")

    @crow.before_prompt
    def note_task(message: Message, session: Session) -> None:
        session.state[TASK] = leave_out(join_text(to_parts(message.get("content"))), MAX_TASK)

    @crow.tools
    async def choose(schemas: list[dict[str, Any]], session: Session) -> list[dict[str, Any]] | None:
        if SMALL not in session.state:
            session.state[SMALL] = isinstance(session.model, ChatModel) and session.model.is_small
            if session.state[SMALL]:
                schemas = [*schemas, *await begin(session)]
        if not session.state[SMALL]:
            return None
        offered = {schema["function"]["name"] for schema in schemas}
        ours = {d["name"] for d in DEFINITIONS if d["_meta"]["crow/stands_for"]["tool"] in offered}
        tools = session.toolbox.tools
        return [
            schema
            for schema in schemas
            if (name := schema["function"]["name"]) in ours or not ((server := tools[name].server) and server.built_in)
        ]

    @crow.after_tool
    async def say_next(result: ToolResult, session: Session, tool_call: ToolCall) -> ToolResult | None:
        if not session.state[SMALL]:
            return None
        name = find_name(tool_call)
        if name is None and tool_call.tool is not None:
            return None
        if name is None:
            return ToolResult.error(f"There is no tool {tool_call.name[:100]!r}. The tools are: {', '.join(REQUIRED)}.")
        if not result.is_error and name in ("read", "write", "replace", "append"):
            await note_lines(session, tool_call)
        if tool_call.id in session.state[SHOWN]:
            return None
        if not result.is_error and name in ("write", "replace", "append", "run"):
            session.state[WORKED] = True
        hint = f"A correct call: {suggest_call(name, tool_call.original)}" if result.is_error else NEXT[name]
        content = [adapt_part(part, session.cwd) for part in result.content]
        text = join_text(content)
        if name == "search" and text.startswith("Nothing matches"):
            path = tool_call.arguments.get("path", ".")
            shown = await use_tool(session, tool_call, "list", path) or await use_tool(session, tool_call, "read", path)
            content += [adapt_part(part, session.cwd) for part in shown]
        elif name == "search" and "shows more]" not in text:
            count = len(HIT.findall(text))
            content.append({"type": "text", "text": f"[{count} line{' matches' if count == 1 else 's match'}.]"})
        return ToolResult([*content, {"type": "text", "text": hint}], result.is_error, result.meta)

    @crow.after_model
    async def note_claim(session: Session, model_call: ModelCall) -> None:
        session.state[CLAIMS] = CLAIM.search(str(model_call.reply.get("content"))) is not None

    @crow.before_end
    def doubt(session: Session, stop_reason: StopReason) -> Message | None:
        """Ask a model once that says that it has changed something, and has not."""
        is_true = session.state[WORKED] or not session.state[CLAIMS]
        if not session.state[SMALL] or stop_reason != "end_turn" or is_true:
            return None
        session.state[WORKED] = True  # it is asked once
        return {"role": "user", "content": DOUBT, "crow": {"hidden": True}}

    @crow.turn_end
    def forget(session: Session, outcome: StopReason | Exception) -> None:
        session.state.pop(WORKED)

    @crow.before_tool
    async def show_first(session: Session, tool_call: ToolCall) -> ToolResult | None:
        """Show a file in place of its first change: small models write what they expect there.

        A file that does not exist cannot be read, and is written at once.
        """
        name = find_name(tool_call)
        if (
            not session.state[SMALL]
            or name not in CHANGE_NOW
            or str(tool_call.arguments.get("path")) in session.state[SEEN]
        ):
            return None
        if not (shown := await note_lines(session, tool_call)):
            return None
        session.state[SHOWN].add(tool_call.id)
        content = [adapt_part(part, session.cwd) for part in shown]
        return ToolResult(
            [
                {"type": "text", "text": FIRST_LOOK},
                *content,
                {"type": "text", "text": CHANGE_NOW[name].format(session.state[TASK])},
            ]
        )

    @crow.before_model
    def offer_lines(request: ModelRequest, session: Session) -> ModelRequest | None:
        """Let the model choose the line to replace among those of the files that it was shown (form `schema`)."""
        model, files = session.model, session.state[FILE_LINES]
        is_held = isinstance(model, ChatModel) and model.quirks.call_form == "schema"
        if not is_held or not files or not request.get("tools") or {"tool_choice", "response_format"} & request.keys():
            return None
        functions = [
            choice
            for tool in request["tools"]
            for choice in ([tool["function"]] if tool["function"]["name"] != "replace" else limit_lines(tool, files))
        ]
        return {"response_format": make_step_format(functions, request["messages"]), **request}

    @crow.before_tool
    async def take_whole_lines(session: Session, tool_call: ToolCall) -> ToolResult | ToolCall | None:
        """Ask once for the whole line where a part of it would be replaced: small models name what they change.

        A line whose new text is empty is removed, with its end. No line break is added behind the new text.
        """
        if not session.state[SMALL] or find_name(tool_call) != "replace":
            return None
        path, old, new = (str(tool_call.arguments.get(key) or "") for key in ("path", "old_str", "new_str"))
        lines: list[str] = NUMBERED.findall(join_text(await use_tool(session, tool_call, "read", path)))
        wanted = old.strip()
        if wanted in map(str.strip, lines):
            if wanted == new.strip():
                session.state[SHOWN].add(tool_call.id)
                return ToolResult([{"type": "text", "text": text.format(session.state[TASK])} for text in SAME])
            if new.strip():
                ends_too_early = new.endswith("\n") and not old.endswith("\n")
                return tool_call.change_arguments(new_str=new.rstrip("\n")) if ends_too_early else None
            line = find_whole_line(lines, wanted)
            return None if line == old else tool_call.change_arguments(old_str=line, new_str="")
        found = [line for line in lines if wanted and wanted in line]
        if not found or (path, wanted) in session.state[FRAGMENTS]:
            return None
        session.state[FRAGMENTS].add((path, wanted))
        session.state[SHOWN].add(tool_call.id)
        shown = [PART_OF_A_LINE, *found[:MAX_LINES], "", WHOLE_LINE]
        return ToolResult.error("\n".join(shown))

    @crow.before_tool
    async def read_all(session: Session, tool_call: ToolCall) -> ToolCall | None:
        """Read all of a short file where a model wants some of its lines: it would take them for the whole."""
        if not session.state[SMALL] or find_name(tool_call) != "read" or "view_range" not in tool_call.arguments:
            return None
        lines = NUMBERED.findall(
            join_text(await use_tool(session, tool_call, "read", str(tool_call.arguments.get("path"))))
        )
        rest = {key: value for key, value in tool_call.arguments.items() if key != "view_range"}
        return replace(tool_call, arguments=rest, is_changed=True) if 0 < len(lines) <= SHORT_FILE else None

    @crow.before_tool
    async def find_end(session: Session, tool_call: ToolCall) -> ToolCall | None:
        """Append behind the last line of a file; create one that does not exist."""
        if not session.state[SMALL] or find_name(tool_call) != "append" or "insert_line" in tool_call.arguments:
            return None
        shown = join_text(await use_tool(session, tool_call, "read", str(tool_call.arguments.get("path"))))
        if not shown:
            return tool_call.change_arguments(command="create")
        found = LINE_COUNT.search(shown.partition("\n")[0])
        return tool_call.change_arguments(insert_line=int(found[1].replace(",", "")) if found else 0)

    @crow.before_tool
    def search_everywhere(session: Session, tool_call: ToolCall) -> ToolCall | None:
        """Search the whole folder where a model has invented the place."""
        path = tool_call.arguments.get("path")
        if not session.state[SMALL] or tool_call.name not in ("grep", "tree") or not isinstance(path, str):
            return None
        return None if Path(session.cwd, path).exists() else tool_call.change_arguments(path=".")


async def begin(session: Session) -> list[dict[str, Any]]:
    """Give a session the simple tools and the short system prompt, and return the schemas of these tools."""
    handlers: dict[str, Handler] = {definition["name"]: refuse for definition in DEFINITIONS}
    try:
        session.toolbox.add([Server("small", definitions=DEFINITIONS, handlers=handlers, built_in=True)])
    except ConfigError as error:  # another extension has a tool of the same name
        session.state[SMALL] = False
        await session.notice(str(error), "warning")
        return []
    if session.prompts.templates["system"] == Prompt.from_package("system"):
        session.prompts.templates["system"] = session.prompts.templates["small"]
    await session.notice(NOTICE.format(session.model.name))
    return [schema for schema in session.toolbox.schemas() if schema["function"]["name"] in REQUIRED]


async def note_lines(session: Session, tool_call: ToolCall) -> list[dict[str, Any]]:
    """Note the lines that the file of a call has now, and return the file as the model reads it."""
    path = str(tool_call.arguments.get("path"))
    session.state[SEEN].add(path)
    shown = await use_tool(session, tool_call, "read", path)
    lines = [line for line in dict.fromkeys(NUMBERED.findall(join_text(shown))) if line.strip()]
    if 0 < len(lines) <= MAX_CHOICES:
        session.state[FILE_LINES][path] = lines
    else:
        session.state[FILE_LINES].pop(path, None)
    return shown


async def use_tool(session: Session, cause: ToolCall, name: str, path: str) -> list[dict[str, Any]]:
    """Read a file, or list a folder, for a call that needs it; return nothing if that fails."""
    function: Function = {"name": name, "arguments": encode({"path": path}).decode()}
    tool_call = session.toolbox.parse({"id": cause.id, "type": "function", "function": function})
    if tool_call.tool is None:
        return []
    result = await session.toolbox.call(tool_call, session.meta(tool_call), session)
    return [] if result.is_error else result.content


def join_text(content: Sequence[dict[str, Any]]) -> str:
    return "\n".join(str(part["text"]) for part in content if part.get("type") == "text")


def find_whole_line(lines: list[str], wanted: str) -> str:
    """Return a line of a file with the line break after it, or before it if it is the last."""
    at = [line.strip() for line in lines].index(wanted)
    return f"{lines[at]}\n" if at + 1 < len(lines) else f"\n{lines[at]}"


def adapt_part(part: dict[str, Any], cwd: str) -> dict[str, Any]:
    """Return a part of a result with paths and names of arguments as the model writes them."""
    if part.get("type") != "text":
        return part
    folder = re.escape(cwd.rstrip(os.sep))
    said = part["text"].replace("old_str", "old_text").replace("new_str", "new_text")
    return {**part, "text": re.sub(rf"{folder}(?:[/\\](?=[^\s/\\])|[/\\]?(?![^\s.:]))", replace_folder, said)}


def replace_folder(found: re.Match[str]) -> str:
    """Return what stands for the folder: nothing before the rest of a path, else a point."""
    is_before_path = found[0][-1] in "/\\" and found.string[found.end() : found.end() + 1].strip()
    return "" if is_before_path else "."


def refuse(session: Session, tool_call: ToolCall) -> ToolResult:
    """Answer a call of a tool that stands for one that this session does not have."""
    return ToolResult.error(f"{tool_call.name} cannot be used here. Do without it.")
