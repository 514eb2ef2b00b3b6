"""Tool calls that no reply of the model holds: those of its programs, and of the pages of MCP servers."""

from collections.abc import Awaitable, Callable

from crow_core.acp.schema import ToolCallUpdate
from crow_core.content import to_failure, to_tool_message, to_update
from crow_core.mcp.result import ToolResult
from crow_core.mcp.tool import ToolCall
from crow_core.session.session import Session


async def use_tool(
    session: Session, outer: str, tool_call: ToolCall, run: Callable[[ToolCall], Awaitable[ToolResult]] | None = None
) -> ToolResult:
    """Run a tool call: judge and show it as one of the model's, and append it to the log.

    `outer` is the id of the tool call to which it belongs. `run` runs it; the toolbox by default.
    """
    end = None
    await session.hooks.before_announcement.run(session, tool_call)
    try:
        await session.stream.announce(tool_call)
        result = session.toolbox.reject(tool_call)
        if result is None:
            tool_call, result = await session.decide(tool_call)
        if result is None:
            await session.update(ToolCallUpdate(tool_call_id=tool_call.id, status="in_progress"))
            running = run(tool_call) if run else session.toolbox.call(tool_call, session.meta(tool_call), session)
            result = await running
        result = await session.hooks.after_tool.run(result, session, tool_call)
        answer = to_tool_message(result, tool_call)
        session.log.append({"crow": {"kind": "inner", "call": outer, "use": {**tool_call.use}, "answer": {**answer}}})
        end = to_update(result, tool_call)
    finally:
        await session.send(end or to_failure(tool_call, begun=True))
    return result
