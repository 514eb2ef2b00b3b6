"""Sessions of the terminal in the sandbox: what they changed is asked about each time a call for one is answered."""

from collections.abc import Sequence
from dataclasses import replace

from crow_core.mcp.result import ToolResult
from crow_core.mcp.tool import ToolCall
from crow_core.session.session import Session

from crow_permissions.judgement import SessionPermissions
from crow_permissions.review import (
    ReviewDecision,
    ReviewedCommand,
    add_note,
    finish_in_thread,
    get_name,
    settle_changes,
    sort_for,
    work_on_files,
)
from crow_permissions.shown_changes import ChangeSet, show_name

MISSES = (
    "In the sandbox, a session reaches no daemon and no server outside; a single command may be allowed to run outside"
)
"""Tells the model what to do where a session has failed for want of these."""
IN_PLAN = "Plan mode: what this session changes is discarded when it ends"


async def settle_session(
    session: Session, permissions: SessionPermissions, command: ReviewedCommand, tool_call: ToolCall, result: ToolResult
) -> tuple[ToolResult, ChangeSet, ReviewDecision | None]:
    """Apply or discard what is new in a session, and return the result with what the model and /undo need to know.

    In the mode plan, nothing is decided: what the session changes goes with it. Changes that cannot be read or applied
    now are reported at the next look. Raises EndTurn if the client answers that the turn is cancelled; then the changes
    stay in the session until the next look.
    """
    from crow_sandbox.policy import SandboxError

    assert command.lasting
    result.meta["crow/stays"] = []
    try:
        look = await work_on_files(command.lasting.look)
    except SandboxError as error:
        return add_note(result, f"{show_name(str(error))} It is tried again at the next look"), ChangeSet(), None
    looked = replace(command, look=look, tool_call=tool_call)
    if command.in_plan or permissions.mode == "plan":
        try:
            found = await work_on_files(sort_for, session, permissions, looked)
        finally:
            await finish_in_thread(look.remove)
        return add_note(result, f"{IN_PLAN}: {found.name_files()}") if found.shown else result, ChangeSet(), None
    result, found, decision = await settle_changes(session, permissions, looked, result)
    if not found.shown and decision is None:
        await work_on_files(command.lasting.keep, look)
    return result, found, decision


def change_hosts(command: ReviewedCommand, hosts: Sequence[str], denied: Sequence[str]) -> None:
    """Let a session reach these hosts from now on."""
    command.run.policy = replace(command.run.policy, hosts=tuple(hosts), denied=tuple(denied))
    if command.run.network:
        command.run.network.change(hosts, denied)


async def end_session(session: Session, command: ReviewedCommand, tool_call: ToolCall) -> None:
    """End a session of the terminal with its programs, and discard what is not applied."""
    nothing = dict.fromkeys(("command", "input", "wait", "timeout", "cwd"))
    kill = tool_call.change_arguments(**nothing, session=get_name(command), keys="kill")
    await session.toolbox.call(kill, session.meta(kill), session)
    await finish_in_thread(command.remove)
