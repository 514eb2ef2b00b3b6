"""Steering: the user's words join the running turn before its next model call, without cancelling it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from crow_core.acp.connection import RpcError
from crow_core.acp.decoding import convert_leniently
from crow_core.acp.schema import INVALID_PARAMS, ContentBlock, StopReason, UserMessageChunk
from crow_core.agent.app_source import announce
from crow_core.agent.request_params import check_prompt
from crow_core.app import Crow
from crow_core.content import find_first_text, to_blocks, to_user_message
from crow_core.errors import EndTurn, StoreError
from crow_core.messages.message import Message, get_id
from crow_core.models.model_call import ModelRequest
from crow_core.session.session import Session
from crow_core.session_state import StateKey
from msgspec import ValidationError


@dataclass(eq=False)
class JoiningMessage:
    """A message of the user for the running turn."""

    message: Message
    taken: "asyncio.Future[bool]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """True once the client was shown the message, which the log has then; False once the client has withdrawn it."""


@dataclass
class Steering:
    """The messages of the user that join the turns of a session."""

    arriving: list[JoiningMessage] = field(default_factory=list[JoiningMessage])
    """Those that pass the hook `before_prompt`."""
    waiting: list[JoiningMessage] = field(default_factory=list[JoiningMessage])
    """Those that have passed it, and that the log does not have."""
    entered: list[JoiningMessage] = field(default_factory=list[JoiningMessage])
    """Those that have entered the log, and that the client has not been shown."""

    def enter(self) -> Sequence[Message]:
        """Move all that wait to `entered`. The caller appends the messages that are returned to the log."""
        messages = [steer.message for steer in self.waiting]
        self.entered += self.waiting
        self.waiting.clear()
        return messages

    def withdraw(self) -> int:
        """Let go of all that have not entered, and return how many they were."""
        withdrawn, self.arriving, self.waiting = [*self.arriving, *self.waiting], [], []
        for steer in withdrawn:
            steer.taken.set_result(False)
        return len(withdrawn)


STEERING = StateKey("steering", Steering)
"""The messages that join the turns of a session."""


def steering(crow: Crow) -> None:
    """Add the method `_crow/steer`, with the parameter `prompt`: content blocks for the running turn.

    They pass the hook `before_prompt`, with the note `steer` in the message, and enter the log before the next model
    call. A turn that would end goes on with them. The answer, `{"taken": bool}`, comes when they are stored, or when
    the turn has ended without them: no turn runs, it was cancelled, it failed, or it has made all its model calls. A
    slash command is not taken. A client keeps what was not taken, or not answered, and sends it as a prompt.

    With `withdraw` in place of `prompt`, `true` takes back what waits: `{"withdrawn": 2}` says how many requests this
    answers, each with `{"taken": false}`. What has entered the log stays; /undo takes it back with its turn.

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
        """Answer the method `_crow/steer`. Raises RpcError."""
        if params.get("withdraw") is True:
            return {"withdrawn": session.state[STEERING].withdraw()}
        try:
            blocks = convert_leniently(params.get("prompt"), list[ContentBlock])
        except ValidationError as error:
            raise RpcError(INVALID_PARAMS, f"Invalid params: prompt: {error}") from error
        check_prompt(blocks, audio=announce(crow).audio)
        message = to_user_message(blocks)
        message.setdefault("crow", {})["steer"] = True
        if not (turns := session.turns.tasks) or find_first_text(message).startswith("/"):
            return {"taken": False}
        turn, box, waiting = turns[0], session.state[STEERING], JoiningMessage(message)
        box.arriving.append(waiting)
        try:
            waiting.message = await session.hooks.before_prompt.run(message, session)
            if turn.done() or waiting not in box.arriving:
                return {"taken": False}
            box.arriving.remove(waiting)
            box.waiting.append(waiting)
            await asyncio.wait([waiting.taken, turn], return_when=asyncio.FIRST_COMPLETED)
            taken = waiting.taken.done() and waiting.taken.result()
            if taken:
                await session.log.written()
            return {"taken": taken}
        except (EndTurn, StoreError):  # a prompt with these words is answered with the reason
            return {"taken": False}
        finally:
            for place in (box.arriving, box.waiting):
                if waiting in place:
                    place.remove(waiting)

    crow.methods["_crow/steer"] = steer


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
        steer.taken.set_result(True)
