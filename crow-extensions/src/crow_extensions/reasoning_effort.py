"""A session option for the reasoning effort of the model."""

from crow_core.app import Crow
from crow_core.models.chat_model import ChatModel
from crow_core.models.model_call import ModelRequest
from crow_core.session.options import Choice, Option
from crow_core.session.session import Session
from crow_core.session_state import StateKey

DEFAULT = "default"
"""The choice that sends nothing: the endpoint decides."""
LEVEL = StateKey("reasoning_effort", lambda: DEFAULT)


def reasoning_effort(crow: Crow) -> None:
    """Add a session option (ACP category `thought_level`) for models whose endpoint has a parameter for it."""

    @crow.options
    def option(session: Session) -> Option | None:
        model = session.model
        if not isinstance(model, ChatModel) or not takes_effort(model):
            return None
        choices = [Choice(level, level.capitalize()) for level in (DEFAULT, *model.quirks.efforts)]

        def current() -> str:
            level = get_level(session)
            return level if level in model.quirks.efforts else DEFAULT

        def choose(level: str) -> None:
            session.state[LEVEL] = level

        return Option("thought_level", "Thinking", "thought_level", choices, current, choose)

    @crow.before_model
    def set_effort(request: ModelRequest, session: Session) -> ModelRequest | None:
        model, level = session.model, get_level(session)
        if not isinstance(model, ChatModel) or not takes_effort(model) or level not in model.quirks.efforts:
            return None
        name, _, inner = model.quirks.effort.partition(".")
        return {name: {inner: level} if inner else level, **request}


def get_level(session: Session) -> str:
    """Return the chosen level; that of its parent for a sub-agent."""
    return get_level(session.parent) if session.parent else session.state[LEVEL]


def takes_effort(model: ChatModel) -> bool:
    """True if the endpoint has a parameter for the effort, and has not refused it."""
    return bool(model.quirks.effort) and model.quirks.effort.partition(".")[0] not in model.refused_parameters
