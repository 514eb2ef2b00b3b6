"""Answers of persons: list what waits for one, show it to a client over ACP, store the answer, and give it."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from crow_core.acp.schema import PermissionOption, RequestPermissionRequest, ToolCall, ToolCallFields, ToolCallUpdate
from crow_core.errors import ElicitationError, EndTurn
from crow_core.hooks import call_function
from msgspec.structs import asdict

from crow_agent.workflows.approvals import Approval, WaitingApproval
from crow_agent.workflows.errors import WorkflowError
from crow_agent.workflows.location import find_url

if TYPE_CHECKING:
    from crow_core.session.session import Session

logger = logging.getLogger("crow_agent")
POLL_INTERVAL = 1.0
"""Seconds between two looks at what waits."""
ASK_AGAIN = 30.0
"""Seconds after which a question is shown again whose answer could not be stored."""
APPROVE, REJECT = "approve", "reject"
"""Ids of the options of a question."""


Ask = Callable[[RequestPermissionRequest], Awaitable[Any] | Any]
"""Shows a question, and returns the answer: an Approval, True, False, a note as text, which rejects, or None if there
is no answer, so that the workflow waits on."""


async def list_waiting(
    workflow_id: str = "", *, url: str = "", env: Mapping[str, str] | None = None
) -> list[WaitingApproval]:
    """List what waits for a person's answer, of one run or of all."""
    return [each for each in await list_asked(workflow_id, url=url, env=env) if each.answer is None]


async def list_asked(
    workflow_id: str = "", *, url: str = "", env: Mapping[str, str] | None = None
) -> list[WaitingApproval]:
    """Like `list_waiting`, with what has an answer that no program has taken yet."""
    from crow_agent.workflows import engine, place

    asked: list[WaitingApproval] = []
    async with engine.open_store(url or find_url(env)[0]) as store:
        ids = [workflow_id] if workflow_id else None
        for stored in await store.list_workflows_async(workflow_ids=ids, status=engine.UNFINISHED, load_input=False):
            events = await engine.read_waiting(store, stored)
            topics = [key for key, value in events.items() if key.startswith(place.WAITING) and value is not None]
            given = await engine.read_messages(store, stored.workflow_id) if topics else {}
            for topic in topics:
                answered = Approval(given[topic]["approved"], given[topic]["note"]) if topic in given else None
                label, event = topic.removeprefix(place.WAITING), events[topic]
                asked.append(WaitingApproval(stored.workflow_id, label, event["value"], event["seconds"], answered))
    return asked


async def answer(
    workflow_id: str,
    approved: bool,
    note: str = "",
    *,
    label: str = "",
    url: str = "",
    env: Mapping[str, str] | None = None,
    by: str = "the program",
) -> None:
    """Answer what a run waits for, from any process; the first answer counts. It needs no running engine.

    The answer is stored in the audit log first, as given by `by`. `label`: the step, if it waits for more than one
    answer. Raises WorkflowError if it waits for none, has another answer already, or if the audit log cannot be
    written.
    """
    refuse_below_crow(env)
    from crow_agent.workflows import engine, place

    url = url or find_url(env)[0]
    waiting = [each for each in await list_waiting(workflow_id, url=url) if not label or each.label == label]
    async with engine.open_store(url) as store:
        if not waiting:
            given = await engine.read_messages(store, workflow_id)
            stands = given.get(place.WAITING + label) if label else next(reversed(given.values()), None)
            raise WorkflowError(f"Workflow {workflow_id} waits for no approval.{describe_answer(stands)}")
        if len(waiting) > 1:
            labels = ", ".join(each.label for each in waiting)
            raise WorkflowError(f"Workflow {workflow_id} waits for several approvals: name the step, one of {labels}.")
        message = {"approved": approved, "note": note, "by": by, "id": uuid4().hex}
        topic = place.WAITING + waiting[0].label
        await asyncio.to_thread(record_answer, waiting[0], Approval(approved, note), by, env)
        await store.send_async(workflow_id, message, topic, idempotency_key=f"{workflow_id}/{topic}")
        stands = (await engine.read_messages(store, workflow_id)).get(topic, message)
    if stands.get("id") != message["id"]:  # another process has answered between the look and the answer
        sentence = f"This answer does not count.{describe_answer(stands)}"
        standing = Approval(stands["approved"], sentence)
        await asyncio.to_thread(record_answer, waiting[0], standing, by, env)
        raise WorkflowError(f"Workflow {workflow_id} has an answer already. {sentence}")


def describe_answer(given: Mapping[str, Any] | None) -> str:
    """Make a sentence about the answer that counts; empty if there is none."""
    if given is None:
        return ""
    note = f" ({given['note']})" if given["note"] else ""
    by = f", by {given['by']}" if given.get("by") else ""
    return f" The answer that counts: {'approved' if given['approved'] else 'rejected'}{by}{note}."


def refuse_below_crow(env: Mapping[str, str] | None = None) -> None:
    """Raise WorkflowError if crow has started this process, as a command of a model or as an MCP server.

    A program without a terminal may answer, whatever has started it: that is what it is for.
    """
    import os

    from crow_permissions.running import find_sign_of_crow

    from crow_agent.settings.config import Home

    if sign := find_sign_of_crow(Home.find(os.environ if env is None else env).data):
        raise WorkflowError(
            f"crow has started this process ({sign}), and a model must not approve or change its own workflows."
        )


def record_answer(waiting: WaitingApproval, given: Approval, by: str, env: Mapping[str, str] | None) -> None:
    """Store an answer in the audit log of crow's database. Raises WorkflowError."""
    import os

    from crow_core.errors import ConfigError, StoreError
    from crow_persistence.audit import record_decision
    from crow_persistence.database import Database

    from crow_agent.settings.config import Home, get_database_url, load_config

    env = os.environ if env is None else env
    try:
        home = Home.find(env)
        database = Database(get_database_url(load_config(home, env), home), home.data)
        try:
            record_decision(
                database,
                session=waiting.workflow_id,
                call=f"{waiting.workflow_id}/{waiting.label}",
                tool="approve",
                allowed=given.approved,
                by=f"{by}: {given.note}" if given.note else by,
                arguments=waiting.value,
            )
        finally:
            database.close()
    except (ConfigError, StoreError) as error:
        raise WorkflowError(f"The answer was not given, as it could not be stored in the audit log: {error}") from error


async def show_waiting(
    ask: Ask, workflow_id: str = "", *, url: str = "", env: Mapping[str, str] | None = None, by: str = "the program"
) -> None:
    """Show what a workflow waits for, or what all wait for, and give the answers, until this is cancelled.

    It works in any process; the first answer counts, wherever it comes from. A question that has its answer is
    withdrawn: its call of `ask` is cancelled. `by` says in the audit log who answered.
    """

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
