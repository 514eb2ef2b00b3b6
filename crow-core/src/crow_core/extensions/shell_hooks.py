"""The user's own commands at the moments of a session: to be told, to refuse a call, to end a turn before it begins."""

import asyncio
import logging
import os
import signal
import tempfile
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from crow_core.acp.schema import StopReason
from crow_core.app import Crow
from crow_core.content import to_text
from crow_core.errors import EndTurn
from crow_core.extensions.commands import first_text
from crow_core.extensions.masking import session_secrets
from crow_core.extensions.subagents import parent_of
from crow_core.masking import mask
from crow_core.mcp.tool import ToolResult
from crow_core.messages import Message, ToolUse, parse_arguments
from crow_core.session import Session
from crow_core.text import to_line

log = logging.getLogger("crow")

SAID = 4_000
"""Bytes of what a command says that are told."""


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
        if objection := await run(before_prompt, session, "before_prompt", prompt=first_text(message)):
            raise EndTurn("end_turn", objection)

    @crow.before_tool
    async def before(session: Session, call: ToolUse) -> ToolResult | None:
        objection = await run(before_tool, session, "before_tool", **told_of(call))
        return ToolResult.error(f"This was not run: {objection}") if objection else None

    @crow.after_tool
    async def after(result: ToolResult, session: Session, call: ToolUse) -> ToolResult | None:
        told = {"result": "\n\n".join(map(to_text, result.content)), "is_error": result.is_error}
        if objection := await run(after_tool, session, "after_tool", **told_of(call), **told):
            return ToolResult([*result.content, {"type": "text", "text": objection}], result.is_error, result.meta)
        return None

    @crow.turn_end
    async def turn(session: Session, outcome: StopReason | Exception) -> None:
        await run(turn_end, session, "turn_end", outcome=str(outcome))

    @crow.session_end
    async def end(session: Session) -> None:
        await run(session_end, session, "session_end")


def told_of(call: ToolUse) -> dict[str, Any]:
    return {"tool": call["function"]["name"], "arguments": parse_arguments(call), "call": call["id"]}


async def run(hooks: Hooks, session: Session, moment: str, **more: Any) -> str:
    """Run commands one after the other; gives what the first says that objects. Of a sub-agent only calls count."""
    if parent_of(session) and "tool" not in more:
        return ""
    told = msgspec.json.encode({"moment": moment, "session": session.id, "cwd": session.cwd, **more})
    for hook in hooks:
        if not fnmatchcase(more.get("tool", ""), hook.tool):
            continue
        try:
            code, said = await execute(hook.command, session.cwd, hook.timeout, told)
        except TimeoutError:
            code, said = 1, f"it took more than {hook.timeout:g} seconds"
        except OSError as error:
            code, said = 1, str(error)
        said = mask(said, session_secrets(session))
        if code == 2:
            return said or "a hook of the user's objects."
        if code:
            failed = f"The {moment} hook {to_line(str(hook.command))} failed: {to_line(said or f'exit code {code}')}"
            if session.known.is_set() and moment != "session_end":
                await session.notice(failed, "warning")
            else:
                log.warning(failed)
    return ""


async def execute(
    command: str | list[str], cwd: str, timeout: float, told: bytes = b"", *, stdout: bool = False
) -> tuple[int, str]:
    """Run a command to its end, at most `timeout` seconds; gives its exit code and the last it wrote to standard error,
    and to standard output if that is wanted. Raises OSError, TimeoutError."""
    line = ["/bin/sh", "-c", command] if isinstance(command, str) else command
    program, *args = map(os.path.expanduser, line)
    with tempfile.TemporaryFile() as said:  # no pipe: what it leaves running may hold it
        process = await asyncio.create_subprocess_exec(
            program, *args, cwd=cwd, stdin=PIPE, stdout=said if stdout else DEVNULL, stderr=said, start_new_session=True
        )
        try:
            async with asyncio.timeout(timeout):
                await process.communicate(told)
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        said.seek(max(said.seek(0, os.SEEK_END) - SAID, 0))
        assert process.returncode is not None
        return process.returncode, said.read().decode(errors="replace").strip()
