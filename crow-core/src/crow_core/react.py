"""The loop: ask the model, act on its tool calls, repeat."""

import asyncio
from functools import partial

from crow_core.acp.schema import StopReason, ToolCallUpdate
from crow_core.content import to_failure, to_tool_message, to_update
from crow_core.errors import ModelError
from crow_core.messages.message import RawToolCall
from crow_core.models.model_call import ModelCall
from crow_core.session.session import Session

STOP_REASONS: dict[str, StopReason] = {"length": "max_tokens", "content_filter": "refusal"}


async def react(session: Session) -> StopReason:
    """Run a turn to its end, and append all that happens to the session's log."""
    while session.turns.requests < session.turns.max_requests:
        session.turns.requests += 1
        try:
            model_call = await ask(session)
        except ModelError as error:
            if await session.hooks.model_error.run(session, error):
                continue
            raise
        raw_calls = model_call.reply.get("tool_calls", [])
        if raw_calls:
            await act(session, raw_calls)
        await session.hooks.after_model.run(session, model_call)
        if raw_calls:
            continue
        stop_reason = STOP_REASONS.get(model_call.finish_reason, "end_turn")
        more = await session.hooks.before_end.run(session, stop_reason)
        if more is None and model_call.interruption:
            raise model_call.interruption
        if more is None:
            return stop_reason
        session.log.append(more)
    return "max_turn_requests"


async def ask(session: Session) -> ModelCall:
    """Ask the model, and show its reply while it streams. The log gets what the client was shown, even if it is cut.

    Raises ModelError if no answer began; if an answer breaks off, its error is in `interruption`.
    """
    model_call = ModelCall(session.model, await session.request())
    whole = False
    try:
        await model_call.run(partial(session.stream.show, model_call=model_call))
        whole = model_call.finish_reason not in STOP_REASONS
    except ModelError as error:
        if not model_call.first_delta or not error.retry:
            raise
        model_call.interruption = error
    finally:
        await session.stream.append(model_call, whole=whole)
    return model_call


async def act(session: Session, raw_calls: list[RawToolCall]) -> None:
    """Run tool calls at the same time. Each gets its answer when it ends, and none is left without one."""
    try:
        async with asyncio.TaskGroup() as group:
            for use in raw_calls:
                group.create_task(use_tool(session, use))
    except BaseExceptionGroup as errors:  # a tool that fails gives a result: here a hook failed, or ended the turn
        raise errors.exceptions[0] from None
    finally:
        session.journal.answer_interrupted(session.journal.begun)


async def use_tool(session: Session, use: RawToolCall) -> None:
    """Run one tool call and append its answer. The client is told its end, whatever happens."""
    tool_call = session.toolbox.parse(use)
    end = None
    await session.hooks.before_announcement.run(session, tool_call)
    await session.journal.write(tool_call)
    try:
        await session.stream.announce(tool_call)
        result = session.toolbox.reject(tool_call)
        if result is None:
            tool_call, result = await session.decide(tool_call)
        if result is None:
            await session.journal.start(tool_call)
            await session.update(ToolCallUpdate(tool_call_id=tool_call.id, status="in_progress"))
            result = await session.toolbox.call_cancellable(tool_call, session.meta(tool_call), session)
        result = await session.hooks.after_tool.run(result, session, tool_call)
        session.log.append(to_tool_message(result, tool_call))
        await session.log.written()
        end = to_update(result, tool_call)
    finally:
        await session.send(end or to_failure(tool_call, begun=tool_call.id in session.journal.begun))
