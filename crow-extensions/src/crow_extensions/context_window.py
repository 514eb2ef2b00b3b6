"""Ask servers about their models, beside the first requests: the context window, the size, and what they can report."""

import asyncio
from dataclasses import dataclass

from crow_core.app import Crow
from crow_core.models.chat_model import ChatModel
from crow_core.models.endpoint import is_on_private_network
from crow_core.models.model_call import ModelCall, ModelRequest
from crow_core.models.window import ask_server
from crow_core.session.session import Session

TRIES_LIMIT = 3
"""Times that a server is asked: some know the window only once the model is loaded."""
OPENING_LIMIT = 1.0
"""Seconds that the start of a session waits for a server on a private network, so that the profile fits the model."""


@dataclass
class WindowSearch:
    """The state of the search for one model's window."""

    task: asyncio.Task[None]
    tries: int = 1
    found: bool = False


def context_window(crow: Crow) -> None:
    """Set the window of each model to what its server reports, but never to more than is configured.

    Servers on private networks are asked when a session opens: the size of the model chooses its profile.
    """
    searches: dict[int, WindowSearch] = {}

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

    @crow.mcp_servers
    async def begin(session: Session) -> None:
        model = session.model
        if isinstance(model, ChatModel) and is_on_private_network(model.display_url):
            search(model)
            await asyncio.wait([searches[id(model)].task], timeout=OPENING_LIMIT)

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
        if not crow.sessions:
            for one in searches.values():
                one.task.cancel()
            await asyncio.gather(*(one.task for one in searches.values()), return_exceptions=True)
