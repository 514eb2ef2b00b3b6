"""The extension `approvals`: clients show their users what durable workflows wait for."""

import asyncio
import logging

from crow_core.app import Crow
from crow_core.session.session import Session

from crow_agent.workflows.answers import show_waiting, through_client
from crow_agent.workflows.errors import WorkflowError
from crow_agent.workflows.workflow import import_engine

logger = logging.getLogger("crow_agent")


def approvals(crow: Crow) -> None:
    """Show the clients of all sessions what durable workflows wait for, as questions for permission."""
    watching: dict[str, asyncio.Task[None]] = {}

    async def watch(session: Session) -> None:
        try:
            await asyncio.to_thread(import_engine)  # it takes long
        except WorkflowError as error:
            logger.warning("[extensions.approvals] %s", error)
        else:
            await show_waiting(through_client(session), by="the user, in a client")

    @crow.session_start
    def begin(session: Session) -> None:
        if not session.parent:
            watching[session.id] = asyncio.ensure_future(watch(session))

    @crow.session_end
    async def end(session: Session) -> None:
        if task := watching.pop(session.id, None):
            task.cancel()
            await asyncio.wait([task])
