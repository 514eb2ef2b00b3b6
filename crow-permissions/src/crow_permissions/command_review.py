"""The hooks by which commands run in the sandbox, and what they changed is applied or discarded."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from crow_core.acp.schema import StopReason
from crow_core.app import Crow
from crow_core.mcp.result import ToolResult
from crow_core.mcp.tool import ToolCall
from crow_core.messages.message import Message
from crow_core.session.session import Session

from crow_permissions.call_questions import ask_about_call
from crow_permissions.change_decisions import record_decision, return_to_start, settle_changes
from crow_permissions.command_hosts import any_named, ask_for_hosts, complains
from crow_permissions.decision_record import record
from crow_permissions.judgement import Judgement, SessionPermissions
from crow_permissions.review import Review, ReviewedCommand, add_note, finish_in_thread
from crow_permissions.session_review import review_session

WANTS_MORE = (
    "In the sandbox, this failed for want of the network or of a daemon. Allowed, it runs again, outside of it."
)


def review_commands(
    crow: Crow,
    review: Review,
    get_permissions: Callable[[Session], SessionPermissions],
    judge_outside: Callable[[Session, ToolCall], Awaitable[Judgement]],
) -> None:
    """Decide about what commands in the sandbox changed. `judge_outside` judges a call that runs outside of it."""

    @crow.after_tool
    async def review_changes(result: ToolResult, session: Session, tool_call: ToolCall) -> ToolResult | None:
        """Apply or discard what a command in the sandbox changed, if this result tells that it has ended.

        So is what is new in a session of the terminal in the sandbox, if the result is about one.
        """
        permissions = get_permissions(session)
        if used := review.take_used(session, tool_call, result):
            opened, has_ended = used
            return await review_session(review, session, permissions, tool_call, result, opened, has_ended=has_ended)
        command = review.take_ended(session, tool_call, result)
        if command is None:
            return None
        if command.run.policy.level == "workspace":
            await finish_in_thread(command.run.remove)
            return None
        by = ""
        if command.tool_call.id == tool_call.id and permissions.mode != "plan":
            command, result, by = await repeat_with_hosts(review, session, permissions, command, result)
            if command is None:  # it runs on
                return result
            if result.meta.get("crow/exit") and complains(result) and not command.list_refused():
                await finish_in_thread(command.run.remove)
                return return_to_start(command, await run_outside(session, tool_call, result))
        result = command.add_refused(result, by)
        result, found, decision = await settle_changes(session, permissions, command, result)
        if decision:
            await record_decision(session, permissions, command.tool_call, found, decision)
        return return_to_start(command, result)

    async def run_outside(session: Session, tool_call: ToolCall, result: ToolResult) -> ToolResult:
        """Ask whether a command that has failed for want of a network or a daemon runs outside of the sandbox."""
        permissions = get_permissions(session)
        async with permissions.queue:
            judgement = await judge_outside(session, tool_call)
            if judgement.verdict == "ask":
                remark = "\n\n".join(filter(None, [WANTS_MORE, judgement.remark]))
                judgement = await ask_about_call(session, permissions, tool_call, replace(judgement, remark=remark))
        record(session, tool_call, judgement)
        if judgement.verdict == "deny":
            result.meta["crow/stays"] = []
            said = "It ran in the sandbox, which has no network; what it changed is discarded. Outside of it"
            return add_note(result, f"{said}: {judgement.reason}")
        changes = {"command": judgement.command} if judgement.command else {}
        outside = tool_call.change_arguments(**changes) if changes else tool_call
        return await session.toolbox.call(outside, session.meta(outside), session)

    @crow.after_tool
    async def renew_sessions(result: ToolResult, session: Session, tool_call: ToolCall) -> None:
        """Let the programs of sessions in the sandbox see what a tool has changed."""
        if changes := result.meta.get("crow/changes"):
            await review.renew(session, [change["path"] for change in changes])

    @crow.turn_end
    async def note_applied(session: Session, outcome: StopReason | Exception) -> None:
        await review.note_applied(session)

    @crow.turn_end
    async def drop_cancelled(session: Session, outcome: StopReason | Exception) -> None:
        await review.drop_cancelled(session)

    @crow.before_prompt
    async def finish_earlier(message: Message, session: Session) -> None:
        await review.finish_earlier(session)
        await review.note_applied(session)
        await review.tell_level(session, get_permissions(session).mode)

    crow.session_end(review.close)


async def repeat_with_hosts(
    review: Review, session: Session, permissions: SessionPermissions, command: ReviewedCommand, result: ToolResult
) -> tuple[ReviewedCommand | None, ToolResult, str]:
    """Run a command again as long as the user allows it the hosts that it was refused.

    Return the last run of the command with its result, and the reason why hosts stay refused; None instead of a
    command that has not ended.
    """
    ended: ReviewedCommand | None = command
    while ended and (answer := await ask_for_hosts(review, session, permissions, ended, result)):
        again = await run_again(review, session, permissions, ended, answer.hosts) if answer.allowed else None
        if again is None:
            return ended, result, answer.by
        ended, result = again
    return ended, result, ""


async def run_again(
    review: Review, session: Session, permissions: SessionPermissions, command: ReviewedCommand, hosts: Sequence[str]
) -> tuple[ReviewedCommand | None, ToolResult] | None:
    """Discard what a command changed, and run it again with more hosts; None if it cannot begin.

    Return the command with its result; None for a command that has not ended.
    """
    policy, tool_call = command.run.policy, command.tool_call
    denied = [each for each in policy.denied if not any_named([each], hosts)]
    more = [*(policy.hosts or ()), *hosts]
    if not await review.begin(session, permissions, tool_call, more, denied):
        return None
    await finish_in_thread(command.run.remove)
    result = await session.toolbox.call(tool_call, session.meta(tool_call), session)
    return review.take_ended(session, tool_call, result), result
