"""Let a model on this machine process the beginning of the prompt while the person still types."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from crow_core.app import Crow
from crow_core.errors import ModelError, PromptError
from crow_core.messages.message import Message
from crow_core.models.chat_model import ChatModel
from crow_core.models.endpoint import is_local
from crow_core.models.model_call import ModelCall
from crow_core.models.window import ask_server
from crow_core.session.session import Session
from crow_core.session_state import StateKey

from crow_extensions.early_search import wait_for_server

PURPOSE = "warm-up"
"""The purpose of the model call in the list of calls."""


@dataclass
class WarmUp:
    """The request of one session that only fills the server's cache."""

    task: "asyncio.Task[None] | None" = None
    is_sent: bool = False


WARM_UP = StateKey("warm_up", WarmUp)


def warm_up(crow: Crow) -> None:
    """Send the system prompt and the tools when a session opens, with a limit of one token, to a loaded model.

    The server then has them in its cache when the first prompt comes. Only servers on this machine that say that they
    have the model in memory are asked: it costs nothing there. The request is listed with the model calls. The first
    prompt waits for its end, since the server processes the same text for both.
    """

    @crow.session_start
    def begin(session: Session) -> None:
        model = session.model
        if isinstance(model, ChatModel) and is_local(model.display_url) and not session.parent:
            state = session.state[WARM_UP]
            state.task = asyncio.ensure_future(fill_cache(crow, session, model, state))

    @crow.before_prompt
    async def wait(message: Message, session: Session) -> None:
        state = session.state[WARM_UP]
        if state.task is None:
            return
        if not state.is_sent:
            state.task.cancel()
        try:
            await asyncio.wait([state.task])
        finally:  # also where the turn is cancelled meanwhile
            state.task.cancel()
            state.task = None

    @crow.session_end
    async def stop(session: Session) -> None:
        if task := session.state[WARM_UP].task:
            task.cancel()
            await asyncio.wait([task])


async def fill_cache(crow: Crow, session: Session, model: ChatModel, state: WarmUp) -> None:
    """Send what the next request begins with. A failure is left to that request."""
    await session.turns.id_known.wait()
    await wait_for_server(session)
    if not model.facts.is_loaded:  # a busy server may not have answered yet
        model.facts = await ask_server(model)
    if not model.facts.is_loaded:
        return
    with suppress(ModelError, PromptError):
        async with session.turns.lock:
            await crow.update_tools(session)
            request = await session.draft_request()
        request["messages"] = [*request["messages"], {"role": "user", "content": "."}]
        model_call = ModelCall(model, {"max_tokens": 1, **request}, PURPOSE)

        async def report(delta: Any) -> None:
            state.is_sent = True
            await session.stream.report(delta, model_call)

        try:
            await model_call.run(report)
        finally:
            session.log.record(model_call)
