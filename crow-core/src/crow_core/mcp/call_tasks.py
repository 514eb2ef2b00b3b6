"""Tool calls that a server runs as tasks, with the extension `io.modelcontextprotocol/tasks` (SEP-2663).

The server answers such a call with the id of a task at once. crow asks for the task until it has ended, also in another
process. Import this module where a task is followed: it imports the MCP SDK, as a connected server has.
"""

import asyncio
from time import monotonic
from typing import Any

from mcp.client.session import ClientRequestContext, ClientSession
from mcp.shared.exceptions import MCPError
from mcp_types import (
    CONNECTION_CLOSED,
    INVALID_PARAMS,
    REQUEST_TIMEOUT,
    CallToolResult,
    ErrorData,
    InputRequest,
    Request,
)
from msgspec import Struct
from pydantic import RootModel, TypeAdapter

from crow_core.acp.decoding import convert_leniently
from crow_core.mcp.result import limit_blocks
from crow_core.mcp.running_calls import TASK_LIMIT, AskingServer, RunningCall

POLL_INTERVAL = 1.0
"""Seconds between two questions about a task whose server names no interval."""
SHORTEST_INTERVAL, LONGEST_INTERVAL = 0.05, 60.0
"""The bounds of the interval that a server may name, in seconds. It is at most half of the timeout of a call."""
ANSWER_TIMEOUT = 30.0
"""Seconds a server may take to answer a question about a task; then its connection counts as broken."""
CANCEL_TIMEOUT = 5.0
"""Seconds a server may take to answer that a task is cancelled."""
FORGOTTEN = (
    "its server does not know the task of this call any more, so its result is lost, and it may have done its work all "
    "the same. Look before you call it again"
)
INPUT_REQUEST: TypeAdapter[InputRequest] = TypeAdapter(InputRequest)


class TaskFailed(Exception):
    """A task that gave no result; the text says why, as the end of a sentence."""


class TaskAnswer(RootModel[dict[str, Any]]):
    """The answer to a request about a task, as the server sent it."""


class TaskRequest(Request[dict[str, Any], str]):
    """A request about a task. Over HTTP, its header `Mcp-Name` has the id of the task."""

    name_param = "taskId"


class TaskState(Struct, rename="camel"):
    """The answer to `tasks/get`. Unknown fields are ignored."""

    status: str
    status_message: str = ""
    poll_interval_ms: float = POLL_INTERVAL * 1000
    input_requests: dict[str, Any] = {}
    result: dict[str, Any] = {}
    error: dict[str, Any] = {}


async def send(session: ClientSession, method: str, task: str, **params: Any) -> dict[str, Any]:
    """Send a request about a task, and return the answer. Raises MCPError, as for a broken connection if none comes."""
    request = TaskRequest(method=method, params={"taskId": task, **params})
    try:
        return (await session.send_request(request, TaskAnswer, ANSWER_TIMEOUT)).root
    except MCPError as error:
        if error.code == REQUEST_TIMEOUT:
            raise MCPError(CONNECTION_CLOSED, "the server did not answer") from error
        raise


async def follow_task(server: AskingServer, session: ClientSession, running: RunningCall) -> CallToolResult:
    """Ask for the task of a call until it has ended, and return the result of the call.

    Shows the messages of the task as progress, and passes its questions to the user or the model. Raises TaskFailed,
    MCPError, ValueError.
    """
    running.deadline, message = max(running.deadline, monotonic() + TASK_LIMIT), ""
    answered: set[str] = set()
    while True:
        state = await get_state(session, running.task)
        running.note_activity()
        match state.status:
            case "completed":
                content = limit_blocks(state.result.get("content") or [])
                return CallToolResult.model_validate({**state.result, "content": content}, by_name=False)
            case "failed":
                raise TaskFailed(str(state.error.get("message") or state.status_message or "its task failed"))
            case "cancelled":
                raise TaskFailed(f"its server has cancelled the task. {state.status_message}".strip())
            case "input_required":
                await answer_questions(session, running.task, state.input_requests, answered)
            case _:
                pass
        if state.status_message not in ("", message) and running.host is not None:
            message = state.status_message
            await running.host.progress(server, 0, None, message, running)
        longest = min(LONGEST_INTERVAL, (running.silence or 2 * LONGEST_INTERVAL) / 2)
        await asyncio.sleep(min(max(state.poll_interval_ms / 1000, SHORTEST_INTERVAL), longest))


async def get_state(session: ClientSession, task: str) -> TaskState:
    """Return the state of a task. Raises TaskFailed if the server does not know it, MCPError, ValueError."""
    try:
        return convert_leniently(await send(session, "tasks/get", task), TaskState)
    except MCPError as error:
        if error.code != INVALID_PARAMS:
            raise
        raise TaskFailed(FORGOTTEN) from error


async def answer_questions(session: ClientSession, task: str, questions: dict[str, Any], answered: set[str]) -> None:
    """Answer those questions of a task that are not in `answered`, one after the other.

    Each goes the way of any request of the server: to the user, to the model, or for the roots.
    """
    for key, question in questions.items():
        if key not in answered:
            answered.add(key)
            request = INPUT_REQUEST.validate_python(question, by_name=False)
            context = ClientRequestContext(session=session, request_id=f"{task}/{key}")
            answer = await session.dispatch_input_request(context, request)
            if isinstance(answer, ErrorData):
                await cancel_task(session, task)
                raise TaskFailed(f"a question of its task had no answer: {answer.message}")
            dump = answer.model_dump(mode="json", by_alias=True, exclude_none=True)
            await send(session, "tasks/update", task, inputResponses={key: dump})


async def cancel_task(session: ClientSession, task: str) -> None:
    """Ask the server to cancel a task. Raises MCPError, TimeoutError."""
    async with asyncio.timeout(CANCEL_TIMEOUT):
        await send(session, "tasks/cancel", task)
