"""Run the user's own commands as hooks; they can refuse a tool call, or end a turn before it starts."""

import logging
from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from crow_core.acp.schema import StopReason
from crow_core.app import Crow
from crow_core.content import find_first_text, to_text
from crow_core.errors import EndTurn
from crow_core.masking import mask
from crow_core.mcp.limit import Limit
from crow_core.mcp.result import ToolResult
from crow_core.mcp.tool import ToolCall
from crow_core.messages.message import Message
from crow_core.session.session import Session
from crow_core.text import to_line
from msgspec import Meta, Struct

from crow_extensions.shell import run_command

log = logging.getLogger("crow")


class ShellHook(Struct, forbid_unknown_fields=True):
    """A command of the configuration that runs as a hook."""

    command: str | list[str]
    """A shell command, or a program and its arguments. It runs in the working directory of the session."""
    tool: str = "*"
    """A pattern of tool names. For a hook about a tool call: it does not run for other tools."""
    timeout: Annotated[float, Meta(gt=0)] = 60.0
    """Seconds after which it is killed."""
    sandbox: Literal["workspace", "read-only", "off"] = "off"
    """The files that it may change: with `workspace`, the folders of the session and its own temporary files; with
    `read-only`, only the temporary files. In both it sees no credentials."""
    network: bool = False
    """True if it has the network in its sandbox."""


ShellHooks = Sequence[ShellHook]


def shell_hooks(
    crow: Crow,
    *,
    session_start: ShellHooks = (),
    before_prompt: ShellHooks = (),
    before_tool: ShellHooks = (),
    after_tool: ShellHooks = (),
    question: ShellHooks = (),
    turn_end: ShellHooks = (),
    session_end: ShellHooks = (),
    hidden: Collection[str] = (),
    limit: Callable[[ShellHook, Sequence[str]], Limit | None] = lambda hook, roots: None,
) -> None:
    """Run commands; each reads what happens as one JSON object from its standard input.

    Exit code 2 objects, with the text of standard error: the tool call does not run, the turn does not start, or the
    text is added to the tool's result. Any other failure is a warning to the user. The commands do not inherit the
    environment variables that `hidden` names; `limit` starts them in their sandbox, in which they may change folders.
    """
    run = partial(run_hooks, hidden, limit)

    async def start(session: Session) -> None:
        await run(session_start, session, "session_start")

    async def prompt(message: Message, session: Session) -> None:
        if objection := await run(before_prompt, session, "before_prompt", prompt=find_first_text(message)):
            raise EndTurn("end_turn", objection, stopped_by="hook")

    async def before(session: Session, tool_call: ToolCall) -> ToolResult | None:
        objection = await run(before_tool, session, "before_tool", **describe_call(tool_call))
        return ToolResult.error(f"This was not run: {objection}") if objection else None

    async def after(result: ToolResult, session: Session, tool_call: ToolCall) -> ToolResult | None:
        outcome = {"result": "\n\n".join(map(to_text, result.content)), "is_error": result.is_error}
        if objection := await run(after_tool, session, "after_tool", **describe_call(tool_call), **outcome):
            return ToolResult([*result.content, {"type": "text", "text": objection}], result.is_error, result.meta)
        return None

    async def ask(session: Session, text: str) -> None:
        await run(question, session, "question", question=text)

    async def turn(session: Session, outcome: StopReason | Exception) -> None:
        await run(turn_end, session, "turn_end", outcome=str(outcome))

    async def end(session: Session) -> None:
        await run(session_end, session, "session_end")

    if session_start:
        crow.session_start(start)
    if before_prompt:
        crow.before_prompt(prompt)
    if before_tool:
        crow.before_tool(before)
    if after_tool:
        crow.after_tool(after)
    if question:
        crow.question(ask)
    if turn_end:
        crow.turn_end(turn)
    if session_end:
        crow.session_end(end)


def describe_call(tool_call: ToolCall) -> dict[str, Any]:
    """Describe a tool call as the JSON values that a command reads."""
    arguments = tool_call.arguments if tool_call.is_valid else None
    return {"tool": tool_call.name, "arguments": arguments, "call": tool_call.id}


async def run_hooks(
    hidden: Collection[str],
    limit: Callable[[ShellHook, Sequence[str]], Limit | None],
    hooks: ShellHooks,
    session: Session,
    moment: str,
    **more: Any,
) -> str:
    """Run commands one after the other until one objects; return its objection, or "".

    For a sub-agent, only commands about tool calls run.
    """
    if session.parent and "tool" not in more:
        return ""
    stdin = msgspec.json.encode({"moment": moment, "session": session.id, "cwd": session.cwd, **more})
    for hook in hooks:
        if not fnmatchcase(more.get("tool", ""), hook.tool):
            continue
        try:
            limited = limit(hook, session.folders.roots)
            code, said = await run_command(hook.command, session.cwd, hook.timeout, stdin, hidden=hidden, limit=limited)
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
