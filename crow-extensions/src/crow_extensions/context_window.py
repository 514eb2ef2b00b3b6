"""Ask servers about their models, beside the first requests: the context window, the size, and what they can report."""

import asyncio
from dataclasses import dataclass
from typing import Any

from crow_core.app import Crow
from crow_core.models.chat_model import ChatModel
from crow_core.models.endpoint import is_on_private_network
from crow_core.models.model_call import ModelCall, ModelRequest
from crow_core.models.window import ask_server
from crow_core.session.session import Session

TRIES_LIMIT = 3
"""Times that a server is asked: some know the window only once the model is loaded."""
ANSWER_LIMIT = 1.0
"""Seconds that the first prompt waits for a server on a private network, so that the profile fits the model."""


@dataclass
class WindowSearch:
    """The state of the search for one model's window."""

    task: asyncio.Task[None]
    tries: int = 1
    found: bool = False


def context_window(crow: Crow) -> None:
    """Set the window of each model to what its server reports, but never to more than is configured.

    Servers on private networks are asked when a session has opened, and the first prompt waits for the answer: the size
    of the model chooses its profile.
    """
    searches: dict[int, WindowSearch] = {}
    openings: dict[str, asyncio.Task[None]] = {}

    async def ask(model: ChatModel) -> None:
        model.facts = await ask_server(model)
        if found := model.facts.window:
            model.window = min(found, model.window or found)
            searches[id(model)].found = True

    def search(model: ChatModel) -> None:
        before = searches.get(id(model))
        if before is None:
            searches[id(model)] = WindowSearch(asyncio.ensure_future(ask(model)))
        elif before.task.done() and not before.found and before.tries < TRIES_LIMIT:
            searches[id(model)] = WindowSearch(asyncio.ensure_future(ask(model)), before.tries + 1)

    async def ask_early(session: Session, model: ChatModel) -> None:
        await session.turns.id_known.wait()  # the import of the HTTP client would delay the answer to `session/new`
        search(model)
        await asyncio.wait([searches[id(model)].task])

    @crow.session_start
    def begin(session: Session) -> None:
        if isinstance(model := session.model, ChatModel) and is_on_private_network(model.display_url):
            openings[session.id] = asyncio.ensure_future(ask_early(session, model))

    @crow.tools
    async def wait(schemas: list[dict[str, Any]], session: Session) -> None:
        if opening := openings.get(session.id):
            await asyncio.wait([opening], timeout=ANSWER_LIMIT)

    @crow.before_model
    def before(request: ModelRequest, session: Session) -> None:
        if isinstance(session.model, ChatModel):
            search(session.model)

    @crow.after_model
    def after(session: Session, model_call: ModelCall) -> None:
        if isinstance(session.model, ChatModel):
            search(session.model)

    @crow.session_end
    async def stop(session: Session) -> None:
        if opening := openings.pop(session.id, None):
            opening.cancel()
            await asyncio.wait([opening])
        if not crow.sessions:
            for one in searches.values():
                one.task.cancel()
            await asyncio.gather(*(one.task for one in searches.values()), return_exceptions=True)
