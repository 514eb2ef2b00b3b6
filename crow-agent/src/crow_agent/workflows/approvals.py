"""The answer of a person to what a workflow asked with `approve`, and how a client over ACP is asked for it."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from crow_core.acp.schema import PermissionOption, RequestPermissionRequest, ToolCall, ToolCallFields, ToolCallUpdate
from crow_core.errors import ElicitationError, EndTurn
from crow_core.hooks import call_function
from msgspec.structs import asdict

from crow_agent.workflows.errors import WorkflowError

if TYPE_CHECKING:
    from crow_core.session import Session

logger = logging.getLogger("crow_agent")
POLL_INTERVAL = 1.0
"""Seconds between two looks at what waits."""
ASK_AGAIN = 30.0
"""Seconds after which a question is shown again whose answer could not be stored."""
APPROVE, REJECT = "approve", "reject"
"""Ids of the options of a question."""


@dataclass(frozen=True)
class Approval:
    """An answer; it is true if it approves."""

    approved: bool
    note: str = ""
    """The person's note; empty if there is none, or if no answer came in time."""

    def __bool__(self) -> bool:
        return self.approved


@dataclass
class WaitingApproval:
    """A run that waits for a person."""

    workflow_id: str
    label: str
    """The step."""
    value: Any
    """The value to approve, as JSON values."""
    seconds: float
    """The seconds for which it waits."""


Ask = Callable[[RequestPermissionRequest], Awaitable[Any] | Any]
"""Shows a question, and returns the answer: an Approval, True, False, a note as text, which rejects, or None if there
is no answer, so that the workflow waits on."""


async def show_waiting(
    ask: Ask, workflow_id: str = "", *, url: str = "", env: Mapping[str, str] | None = None, by: str = "the program"
) -> None:
    """Show what a workflow waits for, or what all wait for, and give the answers, until this is cancelled.

    It works in any process; the first answer counts, wherever it comes from. A question that has its answer is
    withdrawn: its call of `ask` is cancelled. `by` says in the audit log who answered.
    """
    from crow_agent.workflows.workflow import answer, list_waiting

    async def show(waiting: WaitingApproval) -> None:
        try:
            given = await call_function(ask, make_question(waiting))
            if isinstance(given, str):
                given = Approval(False, given)
            if given is None:
                return
            note = given.note if isinstance(given, Approval) else ""
            await answer(waiting.workflow_id, bool(given), note, label=waiting.label, url=url, env=env, by=by)
        except WorkflowError as error:  # it was answered elsewhere, or the audit log cannot be written
            logger.warning("%s", error)
            await asyncio.sleep(ASK_AGAIN)
            shown.pop((waiting.workflow_id, waiting.label), None)
        except Exception:
            logger.exception("What workflow %s waits for could not be shown", waiting.workflow_id)

    shown: dict[tuple[str, str], asyncio.Task[None]] = {}
    fault = ""
    try:
        while True:
            try:
                waiting = await list_waiting(workflow_id, url=url, env=env)
            except Exception as error:  # the database does not answer, or has no tables yet
                if fault != (fault := str(error)):
                    logger.info("What workflows wait for cannot be read: %s", fault)
            else:
                found = {(each.workflow_id, each.label): each for each in waiting}
                for key in shown.keys() - found.keys():
                    shown.pop(key).cancel()
                for key in found.keys() - shown.keys():
                    shown[key] = asyncio.ensure_future(show(found[key]))
            await asyncio.sleep(POLL_INTERVAL)
    finally:
        for task in shown.values():
            task.cancel()
        await asyncio.gather(*shown.values(), return_exceptions=True)


def make_question(waiting: WaitingApproval) -> RequestPermissionRequest:
    """Make the question that a client is asked, about a tool call that stands for the workflow's step."""
    value = waiting.value if isinstance(waiting.value, str) else json.dumps(waiting.value, ensure_ascii=False)
    about = ToolCallFields(
        tool_call_id=f"{waiting.workflow_id}/{waiting.label}",
        title=f"Workflow {waiting.workflow_id} asks: {value}",
        kind="other",
        status="pending",
        raw_input={"workflow": waiting.workflow_id, "step": waiting.label, "value": waiting.value},
    )
    options = [
        PermissionOption(option_id=APPROVE, name="Approve", kind="allow_once"),
        PermissionOption(option_id=REJECT, name="Reject", kind="reject_once"),
    ]
    return RequestPermissionRequest(session_id="", tool_call=about, options=options)


def through_client(session: "Session") -> Ask:
    """Make a function that asks the client of a session, as it is asked for permissions."""

    async def ask(question: RequestPermissionRequest) -> Approval | None:
        fields = question.tool_call
        await session.send(ToolCall(**asdict(fields)))
        answered = None
        try:
            choice = await session.user.ask_permission(fields, question.options)
            if choice.option_id in (APPROVE, REJECT):
                answered = Approval(choice.option_id == APPROVE, choice.reason)
        except (ElicitationError, EndTurn):
            pass
        finally:
            status = "completed" if answered else "failed"
            with suppress(Exception):  # the client may be gone
                await session.send(ToolCallUpdate(tool_call_id=fields.tool_call_id, status=status))
        return answered

    return ask
