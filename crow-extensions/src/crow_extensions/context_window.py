"""Ask servers about their models, at the same time as the first requests: the context window, the size, and what they
can report."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from crow_core.app import Crow
from crow_core.models.chat_model import ChatModel
from crow_core.models.endpoint import is_on_private_network
from crow_core.models.model_call import ModelCall, ModelRequest
from crow_core.models.window import ask_server
from crow_core.session.session import Session

from crow_extensions.early_search import EARLY, EarlySearch, wait_for_server

TRIES_LIMIT = 3
"""Times that a server is asked: some know the window only once the model is loaded."""
OPENING_DELAY = 0.1
"""Seconds after the answer to `session/new` until the server is asked: the import of the HTTP client would delay it."""


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

    async def ask(model: ChatModel) -> None:
        model.facts = await ask_server(model)
        if found := model.facts.window:
            model.window = min(found, model.window or found)
            searches[id(model)].found = True

    def is_wanted(model: ChatModel) -> bool:
        before = searches.get(id(model))
        return before is None or (before.task.done() and not before.found and before.tries < TRIES_LIMIT)

    def search(model: ChatModel) -> None:
        if is_wanted(model):
            tries = searches[id(model)].tries if id(model) in searches else 0
            searches[id(model)] = WindowSearch(asyncio.ensure_future(ask(model)), tries + 1)

    async def ask_early(session: Session, model: ChatModel) -> None:
        await session.turns.id_known.wait()
        with suppress(TimeoutError):
            await asyncio.wait_for(session.state[EARLY].wanted.wait(), OPENING_DELAY)
        search(model)
        await asyncio.wait([searches[id(model)].task])

    @crow.session_start
    def begin(session: Session) -> None:
        model = session.model
        if isinstance(model, ChatModel) and is_on_private_network(model.display_url) and is_wanted(model):
            session.state[EARLY] = early = EarlySearch()
            early.task = asyncio.ensure_future(ask_early(session, model))

    @crow.tools
    async def wait(schemas: list[dict[str, Any]], session: Session) -> None:
        if early := session.state.get(EARLY):
            early.wanted.set()
            await wait_for_server(session)

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
        if (early := session.state.get(EARLY)) and early.task:
            early.task.cancel()
            await asyncio.wait([early.task])
        if not crow.sessions:
            for one in searches.values():
                one.task.cancel()
            await asyncio.gather(*(one.task for one in searches.values()), return_exceptions=True)
