"""Ask, act, repeat."""

import asyncio

from msgspec.structs import asdict

from crow_core.acp.schema import StopReason, ToolCallUpdate
from crow_core.content import to_announcement, to_tool_message, to_update
from crow_core.errors import ModelError
from crow_core.messages import INTERRUPTED, Message, ToolUse, answer_tool_call, find_unanswered, unwrap_proxy_call
from crow_core.models.chat import ModelCall
from crow_core.session import Session

STOP_REASONS: dict[str, StopReason] = {"length": "max_tokens", "content_filter": "refusal"}


async def react(session: Session, prompt: Message) -> StopReason:
    """Run one turn; whatever happens is appended to the session's log."""
    session.append(prompt)
    for _ in range(session.max_requests):
        try:
            call = await ask(session)
        except ModelError as error:
            if await session.hooks.model_error.run(session, error):
                continue
            raise
        calls = call.reply.get("tool_calls", [])
        if calls:
            await act(session, calls)
        await session.hooks.after_model.run(session, call)
        if calls:
            continue
        stop_reason = STOP_REASONS.get(call.finish_reason, "end_turn")
        more = await session.hooks.before_end.run(session, stop_reason)
        if more is None and call.interruption:
            raise call.interruption
        if more is None:
            return stop_reason
        session.append(more)
    return "max_turn_requests"


async def ask(session: Session) -> ModelCall:
    """Stream one reply to the client; what the user saw is what the log holds, even when cut short.

    Raises ModelError for an answer that never began; one that broke off says so in `broken`.
    """
    call = ModelCall(session.model, await session.request())
    whole = False
    try:
        await call.run(lambda delta: session.show_delta(delta, call))
        whole = call.finish_reason not in STOP_REASONS
    except ModelError as error:
        if not call.first_delta or not error.retry:
            raise
        call.interruption = error
    finally:
        session.append_reply(call, whole=whole)
        if not whole:
            await session.fail_announced()
    return call


async def act(session: Session, calls: list[ToolUse]) -> None:
    """Run the calls together; each is answered as it ends, and none is left unanswered."""
    try:
        async with asyncio.TaskGroup() as group:
            for call in calls:
                group.create_task(use_tool(session, call))
    except BaseExceptionGroup as errors:  # not a tool's own failure, which is a result: a hook failed or ended the turn
        raise errors.exceptions[0] from None
    finally:
        for call in find_unanswered(session.log):
            session.append(answer_tool_call(call, INTERRUPTED, failed=True))
        await session.fail_announced()


async def use_tool(session: Session, call: ToolUse) -> None:
    """One call from its first sight to its answer; the client sees it end, whatever happens."""
    call = unwrap_proxy_call(call)
    kind, title = session.toolbox.kind(call), session.toolbox.title(call)
    seen = to_announcement(call, kind, session.cwd, title)
    sight = ToolCallUpdate(**asdict(seen)) if call["id"] in session.announced else seen
    end = ToolCallUpdate(tool_call_id=call["id"], status="failed")
    await session.written()
    session.announced.discard(call["id"])
    try:
        await session.send(sight)
        result = session.toolbox.reject(call) or await session.hooks.before_tool.run(session, call)
        if result is None:
            await session.update(ToolCallUpdate(tool_call_id=call["id"], status="in_progress"))
            result = await session.toolbox.call(call, session.meta(call))
        result = await session.hooks.after_tool.run(result, session, call)
        session.append(to_tool_message(result, call, kind, title))
        await session.written()
        end = to_update(result, call, kind)
    finally:
        await session.send(end)
