"""Steering: the user's words join the running turn before its next model call, without cancelling it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from crow_core.acp.connection import RpcError
from crow_core.acp.decoding import convert_leniently
from crow_core.acp.schema import INVALID_PARAMS, ContentBlock, StopReason, UserMessageChunk
from crow_core.acp.shared_methods import STEERING_METHOD
from crow_core.agent.app_source import announce
from crow_core.agent.client_turn import run_own_turn
from crow_core.agent.request_params import check_prompt
from crow_core.app import Crow
from crow_core.content import find_first_text, to_blocks, to_user_message
from crow_core.errors import EndTurn, StoreError
from crow_core.messages.message import Message, get_id
from crow_core.models.model_call import ModelRequest
from crow_core.session.log import new_id
from crow_core.session.session import Session
from crow_core.session_state import StateKey
from msgspec import ValidationError


@dataclass(eq=False)
class JoiningMessage:
    """A message of the user for the running turn."""

    message: Message
    shown: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done once the client was shown the message, which the log has then."""


@dataclass
class Steering:
    """The messages of the user that join the turns of a session."""

    waiting: list[JoiningMessage] = field(default_factory=list[JoiningMessage])
    """Those that have passed the hook `before_prompt`, and that the log does not have."""
    entered: list[JoiningMessage] = field(default_factory=list[JoiningMessage])
    """Those that have entered the log, and that the client has not been shown."""
    tasks: "set[asyncio.Task[None]]" = field(default_factory=set["asyncio.Task[None]"])
    """The turns that began with words for a turn that had ended."""

    def enter(self) -> Sequence[Message]:
        """Move all that wait to `entered`. The caller appends the messages that are returned to the log."""
        messages = [steer.message for steer in self.waiting]
        self.entered += self.waiting
        self.waiting.clear()
        return messages


STEERING = StateKey("steering", Steering)
"""The messages that join the turns of a session."""


def steering(crow: Crow) -> None:
    """Add the method `_session/steering`, which other agents have, too: content blocks (`prompt`) for the running turn.

    They pass the hook `before_prompt`, with the note `steer` in the message, and enter the log before the next model
    call. A turn that would end goes on with them. The answer comes when they are stored: `{"outcome": "injected"}`,
    with the `messageId` that the client was shown. Another answer comes when the turn has ended without them: no turn
    runs, it was cancelled, it failed, or it made all its model calls. A slash command does not join a turn.

    Words that do not join a turn begin one: `{"outcome": "startedNewTurn"}`, with the `messageId` that all clients of
    the session were shown. With `_meta.steering.idleBehavior` `promptRequired`, they do not: `{"outcome":
    "promptRequired", "reason": …}`, and the client sends them as a prompt. After a cancelled or failed turn the outcome
    is `failed` for a client without this option.

    `$/cancel_request` takes back what waits. Messages in the log stay; /undo takes them back with their turn.

    Use it before extensions that read the log in `before_model`, and those that continue a turn in `before_end`.
    """

    @crow.before_model
    async def join(request: ModelRequest, session: Session) -> ModelRequest:
        box = session.state[STEERING]
        if messages := box.enter():
            for message in messages:
                session.log.append(message)
            request = {**request, "messages": [request["messages"][0], *session.view.messages()]}
        await show(box, session)
        return request

    @crow.before_end
    def go_on(session: Session, stop_reason: StopReason) -> Message | None:
        if stop_reason == "refusal" or not (messages := session.state[STEERING].enter()):
            return None
        *others, last = messages
        for message in others:
            session.log.append(message)
        return last  # the loop appends it

    @crow.turn_end
    async def show_rest(session: Session, outcome: StopReason | Exception) -> None:
        """Show what entered the log before a model call that was not made; nothing if it could not be stored."""
        box = session.state[STEERING]
        if isinstance(outcome, StoreError):
            box.entered.clear()
        else:
            await show(box, session, wait=False)

    async def steer(session: Session, params: dict[str, Any]) -> dict[str, Any]:
        """Answer the method `_session/steering`. Raises RpcError."""
        try:
            blocks = convert_leniently(params.get("prompt"), list[ContentBlock])
        except ValidationError as error:
            raise RpcError(INVALID_PARAMS, f"Invalid params: prompt: {error}") from error
        check_prompt(blocks, audio=announce(crow).audio)
        prompts_itself = parse_idle_behavior(params.get("_meta"))
        turn = next(iter(session.turns.tasks), None)
        message, is_command = to_user_message(blocks), find_first_text(to_user_message(blocks)).startswith("/")
        message.setdefault("crow", {})["steer"] = True
        if turn and not is_command and (id := await join_turn(session, turn, message)):
            return {"outcome": "injected", "messageId": id}
        if prompts_itself:
            reason = "slashCommand" if is_command else "refused" if turn and not turn.done() else "noRunningTurn"
            return {"outcome": "promptRequired", "reason": reason}
        if turn and turn.done() and (turn.cancelled() or turn.exception() or turn.result() == "cancelled"):
            return {"outcome": "failed"}
        message = to_user_message(blocks)
        message.setdefault("crow", {})["id"] = id = new_id()
        starting = asyncio.ensure_future(run_own_turn(crow, session, message))
        session.state[STEERING].tasks.add(starting)
        starting.add_done_callback(session.state[STEERING].tasks.discard)
        return {"outcome": "startedNewTurn", "messageId": id}

    crow.methods[STEERING_METHOD] = steer


def parse_idle_behavior(meta: Any) -> bool:
    """Find out whether the client itself sends as a prompt what joins no turn. Raises RpcError for an unknown wish."""
    match meta:
        case {"steering": {"idleBehavior": "promptRequired"}}:
            return True
        case {"steering": {"idleBehavior": wish}} if wish is not None:
            details = f"The only value of _meta.steering.idleBehavior is 'promptRequired', not {str(wish)[:40]!r}."
            raise RpcError(INVALID_PARAMS, "Invalid params", details=details)
        case _:
            return False


async def join_turn(session: Session, turn: "asyncio.Task[StopReason]", message: Message) -> str:
    """Let a message join a turn that runs. Return its id once it is stored; "" if the turn has ended without it.

    If the waiting task is cancelled, the message is taken back, unless it has joined.
    """
    box, joining = session.state[STEERING], JoiningMessage(message)
    try:
        joining.message = await session.hooks.before_prompt.run(message, session)
        if turn.done():
            return ""
        box.waiting.append(joining)
        ends = [joining.shown, turn]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if joining in box.waiting:
                raise
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not joining.shown.done():
            return ""
        await session.log.written()
        return get_id(joining.message)
    except (EndTurn, StoreError):  # a prompt with these words is answered with the reason
        return ""
    finally:
        if joining in box.waiting:
            box.waiting.remove(joining)


async def show(box: Steering, session: Session, *, wait: bool = True) -> None:
    """Show the client the messages that have entered the log; with `wait`, after they are written."""
    while box.entered:
        steer = box.entered[0]
        if wait:
            await session.log.written()
        box.entered.remove(steer)  # and nothing is awaited before it is sent whole, or it could be shown twice
        id = get_id(steer.message)
        for block in to_blocks(steer.message):
            await session.send(UserMessageChunk(content=block, message_id=id))
        steer.shown.set_result(None)
