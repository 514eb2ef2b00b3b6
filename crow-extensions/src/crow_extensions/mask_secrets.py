"""Mask the secrets of the configuration, the models and the MCP servers before they reach the log and the model."""

from collections.abc import Collection

from crow_core.app import Crow
from crow_core.masking import mask
from crow_core.mcp.result import ToolResult
from crow_core.mcp.tool import ToolCall
from crow_core.messages.message import Message
from crow_core.models.chat import ChatModel
from crow_core.session.session import Session


def mask_secrets(crow: Crow, *, known: Collection[str] = ()) -> None:
    """Mask the `known` secrets and those of a session's models and MCP servers in prompts and tool results.

    Use it before extensions that look at results: one that stores a long result whole must store it masked.
    """

    @crow.session_start
    def collect(session: Session) -> None:
        models = (model for model in session.models.values() if isinstance(model, ChatModel))
        session.toolbox.own_secrets = frozenset(known).union(*(model.secrets for model in models))

    @crow.before_prompt
    def mask_prompt(message: Message, session: Session) -> Message:
        return mask(message, session.secrets)

    @crow.after_tool
    def mask_result(result: ToolResult, session: Session, tool_call: ToolCall) -> ToolResult:
        masked = result.mask(session.secrets)
        if masked.content != result.content:
            masked.meta["crow/private"] = [*masked.meta.get("crow/private", ()), "a secret of crow's settings"]
        return masked
