"""The user's own commands at the moments of a session: to be told, to refuse a call, to end a turn before it begins."""

import logging
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from crow_core.acp.schema import StopReason
from crow_core.app import Crow
from crow_core.content import find_first_text, to_text
from crow_core.errors import EndTurn
from crow_core.masking import mask
from crow_core.mcp.tool import ToolCall, ToolResult
from crow_core.messages import Message
from crow_core.session import Session
from crow_core.shell import run_command
from crow_core.text import to_line

log = logging.getLogger("crow")


class Hook(Struct, forbid_unknown_fields=True):
    """A command for a moment."""

    command: str | list[str]
    """For the shell, or a program and its arguments; it runs in the session's folder."""
    tool: str = "*"
    """A pattern of tools' names; a call of another tool is none of its business."""
    timeout: Annotated[float, Meta(gt=0)] = 60.0
    """Seconds after which it is ended."""


Hooks = Sequence[Hook]


def shell_hooks(
    crow: Crow,
    *,
    session_start: Hooks = (),
    before_prompt: Hooks = (),
    before_tool: Hooks = (),
    after_tool: Hooks = (),
    turn_end: Hooks = (),
    session_end: Hooks = (),
) -> None:
    """Run commands, with the moment as JSON on their standard input.

    Exit code 2 objects, with what was written to standard error: the call is not run, the prompt is not begun, or of a
    result the model is told. Every other failure is a warning for the person.
    """

    @crow.session_start
    async def start(session: Session) -> None:
        await run(session_start, session, "session_start")

    @crow.before_prompt
    async def prompt(message: Message, session: Session) -> None:
        if objection := await run(before_prompt, session, "before_prompt", prompt=find_first_text(message)):
            raise EndTurn("end_turn", objection)

    @crow.before_tool
    async def before(session: Session, tool_call: ToolCall) -> ToolResult | None:
        objection = await run(before_tool, session, "before_tool", **describe_call(tool_call))
        return ToolResult.error(f"This was not run: {objection}") if objection else None

    @crow.after_tool
    async def after(result: ToolResult, session: Session, tool_call: ToolCall) -> ToolResult | None:
        told = {"result": "\n\n".join(map(to_text, result.content)), "is_error": result.is_error}
        if objection := await run(after_tool, session, "after_tool", **describe_call(tool_call), **told):
            return ToolResult([*result.content, {"type": "text", "text": objection}], result.is_error, result.meta)
        return None

    @crow.turn_end
    async def turn(session: Session, outcome: StopReason | Exception) -> None:
        await run(turn_end, session, "turn_end", outcome=str(outcome))

    @crow.session_end
    async def end(session: Session) -> None:
        await run(session_end, session, "session_end")


def describe_call(tool_call: ToolCall) -> dict[str, Any]:
    """Describe a tool call to a command, as JSON."""
    arguments = tool_call.arguments if tool_call.is_valid else None
    return {"tool": tool_call.name, "arguments": arguments, "call": tool_call.id}


async def run(hooks: Hooks, session: Session, moment: str, **more: Any) -> str:
    """Run commands one after the other; gives what the first says that objects. Of a sub-agent only calls count."""
    if session.parent and "tool" not in more:
        return ""
    told = msgspec.json.encode({"moment": moment, "session": session.id, "cwd": session.cwd, **more})
    for hook in hooks:
        if not fnmatchcase(more.get("tool", ""), hook.tool):
            continue
        try:
            code, said = await run_command(hook.command, session.cwd, hook.timeout, told)
        except TimeoutError:
            code, said = 1, f"it took more than {hook.timeout:g} seconds"
        except OSError as error:
            code, said = 1, str(error)
        said = mask(said, session.secrets)
        if code == 2:
            return said or "a hook of the user's objects."
        if code:
            failed = f"The {moment} hook {to_line(str(hook.command))} failed: {to_line(said or f'exit code {code}')}"
            if session.turns.id_known.is_set() and moment != "session_end":
                await session.notice(failed, "warning")
            else:
                log.warning(failed)
    return ""
