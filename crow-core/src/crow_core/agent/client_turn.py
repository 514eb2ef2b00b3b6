"""A turn that a client of a session begins, or nobody, such as a timer; the session may have other clients."""

import asyncio
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from crow_core.acp.schema import StopReason
from crow_core.agent.announcement import Outcome, make_begin, make_end
from crow_core.app import Crow
from crow_core.errors import ConfigError, ModelError, PromptError, StoreError
from crow_core.messages.message import Message
from crow_core.session.session import Session
from crow_core.session_state import StateKey

if TYPE_CHECKING:
    from crow_core.agent.several_clients import SharedSession


def find_none() -> "SharedSession | None":
    return None


SHARED = StateKey("shared", find_none)
"""The clients of a session, once it has had more than one."""

LOCKS: WeakKeyDictionary[object, WeakValueDictionary[str, asyncio.Lock]] = WeakKeyDictionary()


def lock_session(owner: object, id: str) -> asyncio.Lock:
    """Return the lock under which an app, or one of its clients, opens a stored session."""
    return LOCKS.setdefault(owner, WeakValueDictionary()).setdefault(id, asyncio.Lock())


async def run_turn(agent: Any, crow: Crow, session: Session, message: Message, *, in_order: bool) -> StopReason:
    """Run a turn, and tell the other clients of the session about it.

    With `in_order`, it waits until the prompts of other clients have had their turns. If its client disconnects and
    others are there, the turn goes on.
    """
    shared, following = session.state[SHARED], list[asyncio.Task[None]]()
    outcome: StopReason | Exception = "cancelled"

    def goes_on(turn: "asyncio.Task[StopReason]") -> bool:
        if not (agent.connection.is_closing and agent.list_others(session)):
            return False
        following.append(asyncio.ensure_future(follow_turn(agent, session, turn)))
        return True

    try:
        if shared:
            await shared.begin_turn(agent, message, in_order=in_order)
        outcome = stop_reason = await crow.prompt(session, message, goes_on)
        return stop_reason
    except Exception as error:
        outcome = error
        raise
    finally:
        if shared and in_order:
            shared.end_order(message)
        if not following and (shared := session.state[SHARED]):  # another client may have joined meanwhile
            await shared.end_turn(agent, outcome)


async def follow_turn(agent: Any, session: Session, turn: "asyncio.Task[StopReason]") -> None:
    """Tell the clients of a session the end of a turn whose own client has left."""
    await asyncio.wait([turn])
    if shared := session.state[SHARED]:
        await shared.end_turn(agent, "cancelled" if turn.cancelled() else turn.exception() or turn.result())


async def run_own_turn(crow: Crow, session: Session, message: Message) -> None:
    """Run a turn that no request waits for. Tell all clients its prompt and its end, and the user if it fails."""
    reason: Outcome = "cancelled"
    try:
        if shared := session.state[SHARED]:
            await shared.tell_begun(None, message)
        else:
            for update in make_begin(message):
                await session.send(update)
        reason = await crow.prompt(session, message)
    except (ModelError, StoreError, PromptError, ConfigError) as error:
        reason = "error"
        await session.notice(str(error), "error")
    finally:
        if shared := session.state[SHARED]:
            await shared.end_turn(None, reason)
        else:
            await session.send(make_end(reason))
