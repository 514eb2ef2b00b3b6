"""How much the model thinks, where it can be told."""

from crow_core.app import Crow
from crow_core.models.chat import ChatModel, ModelRequest
from crow_core.options import Choice, Option
from crow_core.session import Session

DEFAULT = "default"
"""The endpoint's own choice: nothing is sent."""


def effort(crow: Crow) -> None:
    """Offer the model's levels of thought as a session option (ACP category `thought_level`)."""

    @crow.options
    def option(session: Session) -> Option | None:
        model = session.model
        if not isinstance(model, ChatModel) or not takes_effort(model):
            return None
        choices = [Choice(level, level.capitalize()) for level in (DEFAULT, *model.quirks.efforts)]

        def current() -> str:
            level = session.state.get("effort", DEFAULT)
            return level if level in model.quirks.efforts else DEFAULT

        def choose(level: str) -> None:
            session.state["effort"] = level

        return Option("thought_level", "Thinking", "thought_level", choices, current, choose)

    @crow.before_model
    def ask_for(request: ModelRequest, session: Session) -> ModelRequest | None:
        model, level = session.model, session.state.get("effort", DEFAULT)
        if not isinstance(model, ChatModel) or not takes_effort(model) or level not in model.quirks.efforts:
            return None
        name, _, inner = model.quirks.effort.partition(".")
        return {name: {inner: level} if inner else level, **request}


def takes_effort(model: ChatModel) -> bool:
    """Whether the endpoint has a parameter for it, and has not refused it."""
    return bool(model.quirks.effort) and model.quirks.effort.partition(".")[0] not in model.refused_parameters
