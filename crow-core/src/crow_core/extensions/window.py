"""How much fits, as the server tells it: asked while the model thinks, and again once it is loaded."""

import asyncio
from dataclasses import dataclass

from crow_core.app import Crow
from crow_core.models.chat import ChatModel, ModelCall, Request
from crow_core.models.window import find_window
from crow_core.session import Session

TRIES = 3
"""How often a server that does not tell is asked: some know only once the model is loaded."""


@dataclass
class Search:
    """What was asked of one model's server."""

    task: asyncio.Task[None]
    tries: int = 1
    found: bool = False


def window(crow: Crow) -> None:
    """Learn each model's real context window; it is never more than the user has configured."""
    searches: dict[int, Search] = {}

    async def ask(model: ChatModel) -> None:
        if found := await find_window(model):
            model.window = min(found, model.window or found)
            searches[id(model)].found = True

    def look(model: ChatModel) -> None:
        before = searches.get(id(model))
        if before is None:
            searches[id(model)] = Search(asyncio.ensure_future(ask(model)))
        elif before.task.done() and not before.found and before.tries < TRIES:
            searches[id(model)] = Search(asyncio.ensure_future(ask(model)), before.tries + 1)

    @crow.before_model
    def before(request: Request, session: Session) -> None:
        if isinstance(session.model, ChatModel):
            look(session.model)

    @crow.after_model
    def after(session: Session, model_call: ModelCall) -> None:
        if isinstance(session.model, ChatModel):
            look(session.model)

    @crow.session_end
    async def stop(session: Session) -> None:
        if not crow.sessions:
            for search in searches.values():
                search.task.cancel()
            await asyncio.gather(*(search.task for search in searches.values()), return_exceptions=True)
