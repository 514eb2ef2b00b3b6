"""What crow itself holds (its configuration, its environment, what servers are started with) never reaches the log."""

from collections.abc import Collection

from crow_core.app import Crow
from crow_core.masking import find_secrets, mask
from crow_core.mcp.tool import ToolResult
from crow_core.messages import Message, ToolUse
from crow_core.models.chat import ChatModel
from crow_core.session import Session


def secrets(crow: Crow, *, known: Collection[str] = ()) -> None:
    """Mask known secrets, and those that a session's MCP servers and models were given, in what the user says and a
    tool returns.

    To be used before what else looks at results: a file that holds a whole long one is to be masked, too.
    """

    @crow.session_start
    def gather(session: Session) -> None:
        models = (model for model in session.models.values() if isinstance(model, ChatModel))
        of_models = find_secrets(*({"api_key": model.api_key, "headers": dict(model.headers)} for model in models))
        session.state["secrets"] = frozenset([*known, *of_models])

    @crow.before_prompt
    def mask_prompt(message: Message, session: Session) -> Message:
        return mask(message, session_secrets(session))

    @crow.after_tool
    def mask_result(result: ToolResult, session: Session, call: ToolUse) -> ToolResult:
        return without_secrets(result, session)


def without_secrets(result: ToolResult, session: Session) -> ToolResult:
    """A result whose texts hold the mask instead; the digests of what really changed stay."""
    secrets = session_secrets(session)
    return ToolResult(mask(result.content, secrets), result.is_error, mask(result.meta, secrets))


def session_secrets(session: Session) -> Collection[str]:
    """What of a session must be written nowhere."""
    return {*session.toolbox.secrets, *session.state.get("secrets", ())}
