"""Sessions of the terminal in the sandbox: what they changed is asked about each time a call for one is answered."""

from dataclasses import replace

from crow_core.mcp.result import ToolResult
from crow_core.mcp.tool import ToolCall
from crow_core.session.session import Session

from crow_permissions.change_decisions import ReviewDecision, record_decision, settle_changes, sort_for
from crow_permissions.command_hosts import any_named, ask_for_hosts, complains
from crow_permissions.judgement import SessionPermissions
from crow_permissions.review import Review, ReviewedCommand, add_note, finish_in_thread, get_name, work_on_files
from crow_permissions.shown_changes import ChangeSet, show_name

MISSES = (
    "In the sandbox, a session reaches no daemon and no server outside; a single command may be allowed to run outside"
)
"""Tells the model what to do where a session has failed for want of these."""
IN_PLAN = "Plan mode: what this session changes is discarded when it ends"


async def review_session(
    review: Review,
    session: Session,
    permissions: SessionPermissions,
    tool_call: ToolCall,
    result: ToolResult,
    command: ReviewedCommand,
    *,
    has_ended: bool,
) -> ToolResult:
    """Decide about what is new in a session of the terminal; discarding ends it."""
    decision, found = None, ChangeSet()
    async with command.looking:
        if command.lasting:
            result = await ask_for_session(review, session, permissions, command, tool_call, result)
            result, found, decision = await settle_session(session, permissions, command, tool_call, result)
        ends = decision is not None and not decision.applies and not decision.failed
        if ends or has_ended:
            review.forget(session, command.tool_call.id)
            await (finish_in_thread(command.remove) if has_ended else end_session(session, command, tool_call))
    if ends and not has_ended:
        result = add_note(result, "The session has ended, as its programs have seen the discarded files")
    if decision:
        await record_decision(session, permissions, tool_call, found, decision)
    return result


async def ask_for_session(
    review: Review,
    session: Session,
    permissions: SessionPermissions,
    command: ReviewedCommand,
    tool_call: ToolCall,
    result: ToolResult,
) -> ToolResult:
    """Ask about the hosts that a session was refused since the last look, and allow them to it from now on."""
    network = command.run.network
    if network is None:
        return result
    refused, mark = command.list_refused(), network.mark()
    asked = replace(command, tool_call=tool_call)
    if not refused and result.meta.get("crow/exit") and complains(result):
        result = add_note(result, MISSES)
    may_ask = permissions.mode != "plan"
    answer = await ask_for_hosts(review, session, permissions, asked, result) if may_ask else None
    command.decisions = mark
    if answer is None or not answer.allowed:
        return asked.add_refused(result, answer.by if answer else "")
    denied = [each for each in command.run.policy.denied if not any_named([each], answer.hosts)]
    command.change_hosts([*(command.run.policy.hosts or ()), *answer.hosts], denied)
    names = ", ".join(each.where for each in refused)
    return add_note(result, f"It asked for {names}, which the user allows to this session now: try again")


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


async def end_session(session: Session, command: ReviewedCommand, tool_call: ToolCall) -> None:
    """End a session of the terminal with its programs, and discard what is not applied."""
    nothing = dict.fromkeys(("command", "input", "wait", "timeout", "cwd"))
    kill = tool_call.change_arguments(**nothing, session=get_name(command), keys="kill")
    await session.toolbox.call(kill, session.meta(kill), session)
    await finish_in_thread(command.remove)
