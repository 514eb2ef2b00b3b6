"""The state of a session, as a client is told it after the session has opened, and the turns that it has not begun."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

from msgspec import UNSET

from crow_core.acp.connection import ConnectionClosed
from crow_core.acp.schema import Cost, SessionInfoUpdate, SessionUpdate, StopReason, UsageUpdate, UserMessageChunk
from crow_core.content import to_blocks
from crow_core.messages.message import Message, get_id
from crow_core.models.chat_model import get_window
from crow_core.models.token_usage import ASSUMED_WINDOW, SESSION_TOTALS
from crow_core.session.log import new_id
from crow_core.session.session import Session

Outcome = StopReason | Literal["error"]
"""The end of a turn."""


def start_announcing(session: Session, tasks: "set[asyncio.Task[None]]") -> None:
    """Start to announce a session, in a task that is added to `tasks` until it is done."""
    task = asyncio.ensure_future(announce_session(session))
    tasks.add(task)
    task.add_done_callback(tasks.discard)


async def announce_session(session: Session) -> None:
    """Tell the client the commands, title, usage and mode of a session, and what could not be restored."""
    session.turns.id_known.set()
    with suppress(ConnectionClosed):
        await session.announce_commands()
        if session.log.title:
            await session.update(SessionInfoUpdate(title=session.log.title))
        if session.log.damage:
            await session.notice(session.log.damage, "warning")
        totals = session.state[SESSION_TOTALS]
        if totals.used:
            size = get_window(session.model) or ASSUMED_WINDOW
            cost = Cost(amount=totals.cost, currency=totals.currency) if totals.currency else UNSET
            await session.update(UsageUpdate(used=totals.used, size=size, cost=cost))
        for remark in session.options.remarks:
            await session.notice(remark)


def make_begin(message: Message) -> Sequence[SessionUpdate]:
    """Make the updates for the other clients when a prompt begins a turn. The prompt gets an id."""
    message.setdefault("crow", {}).setdefault("id", new_id())
    return [SessionInfoUpdate(meta={"crow": {"turn": "began"}}), *to_chunks(message)]


def make_end(reason: Outcome) -> SessionInfoUpdate:
    """Make the update that tells a client the end of a turn that is not its own."""
    return SessionInfoUpdate(meta={"crow": {"turn": "ended", "stopReason": reason}})


def to_chunks(message: Message) -> Sequence[UserMessageChunk]:
    """Convert a message of the user to the updates that show it."""
    id = get_id(message) or new_id()
    return [UserMessageChunk(content=block, message_id=id) for block in to_blocks(message)]
