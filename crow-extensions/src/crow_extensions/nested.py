"""The client of an agent that works for a tool call: a sub-agent of the session, or another program."""

from typing import Any, Literal, TypeVar

from crow_core.acp.client import answer_permission
from crow_core.acp.connection import RpcError
from crow_core.acp.decoding import convert_leniently
from crow_core.acp.schema import (
    INTERNAL_ERROR,
    AgentMessageChunk,
    BlockContent,
    ClientSessionCapabilities,
    CreateElicitationRequest,
    NoticeCapabilities,
    NoticeUpdate,
    RequestPermissionRequest,
    RequestPermissionResponse,
    SessionNotification,
    SessionUpdate,
    TextBlock,
    ToolCall,
    ToolCallContent,
    ToolCallUpdate,
)
from crow_core.errors import ElicitationError, EndTurn
from crow_core.masking import drop_partial_secret, mask
from crow_core.session.session import Session
from crow_core.text import to_line
from msgspec import Struct, to_builtins
from msgspec.structs import replace

S = TypeVar("S", bound=Struct)

TEXT_LIMIT = 4_000
"""Characters of the end of the agent's text that the client is shown, and that stand in for a missing report."""
UPDATE_INTERVAL = 400
"""Characters of new text after which the client is sent an update."""


GOES_ON = "It goes on in the background."
NOTICES_LIMIT = 20
"""Notices of one task that are shown."""
NOTICE_LIMIT = 1_000
"""Characters of a notice that are shown."""


class NestedClient:
    """The client of an agent that works for a tool call: it passes on to the session's client what that may see.

    The ids of the agent's tool calls begin with the id of the call. Requests are sent in the name of the session, and
    permissions are asked for one at a time. The secrets of the session are masked in all that the client shows.
    """

    def __init__(self, parent: Session, tool_call_id: str, name: str = "") -> None:
        self.parent, self.tool_call_id, self.name = parent, tool_call_id, name
        self.shown_in = tool_call_id
        """The id of the tool call that shows its text; "" for none."""
        self.open_calls: dict[str, None] = {}
        """The ids of the agent's tool calls that the client was shown and that have not ended, for the client."""
        self.notices = 0
        """The number of its notices."""
        notices = ClientSessionCapabilities(notices=NoticeCapabilities())  # `Session.notice` of the parent shows them
        self.capabilities = replace(parent.client.capabilities, session=notices)
        self._text = ""
        """The end of the agent's text, longer than it is shown: where it is cut, there may be a part of a secret."""
        self.unseen = 0
        """Characters of it that the client was not sent."""

    @property
    def text(self) -> str:
        """The end of the agent's text."""
        secrets = self.parent.secrets
        return str(mask(drop_partial_secret(self._text, secrets), secrets))[-TEXT_LIMIT:]

    def mask(self, shown: S) -> S:
        """Mask the secrets of the session in what its client will show."""
        secrets = self.parent.secrets
        return convert_leniently(mask(to_builtins(shown), secrets), type(shown)) if secrets else shown

    async def request(self, method: str, params: Any) -> Any:
        if isinstance(params, RequestPermissionRequest):
            return await self.ask_permission(params)
        if isinstance(params, CreateElicitationRequest):
            params = self.mask(params)
        return await self.parent.client.request(method, self.to_parent_request(params))

    async def ask_permission(self, question: RequestPermissionRequest) -> RequestPermissionResponse:
        """Ask the user in the name of the session. Raises RpcError if its client does not ask."""
        about = replace(question.tool_call, tool_call_id=self.to_parent_id(question.tool_call.tool_call_id))
        options = [replace(option, name=mask(option.name, self.parent.secrets)) for option in question.options]
        try:
            choice = await self.parent.user.ask_permission(self.mask(about), options)
        except EndTurn:
            return answer_permission()
        except ElicitationError as error:
            raise RpcError(INTERNAL_ERROR, str(error)) from error
        if choice.fault:
            raise RpcError(INTERNAL_ERROR, choice.fault)
        return answer_permission(choice.option_id, reason=choice.reason, command=choice.command)

    async def notify(self, method: str, params: Any) -> None:
        match params:
            case SessionNotification(update=NoticeUpdate(title=title, severity="info" | "warning" | "error" as kind)):
                await self.show_notice(title, kind)
            case SessionNotification(update=update):
                if (shown := self.to_parent_update(update)) is not None:
                    await self.parent.send(shown)
            case _:
                await self.parent.client.notify(method, self.to_parent_request(params))

    async def hide(self) -> None:
        """Show no tool calls and no text from now on; those that are open end for the client."""
        self.shown_in = ""
        calls, self.open_calls = self.open_calls, {}
        content: list[ToolCallContent] = [BlockContent(content=TextBlock(text=GOES_ON))]
        unknown: dict[str, dict[str, Any]] = {"exitStatus": {}}  # of a terminal
        for id in calls:
            update = ToolCallUpdate(tool_call_id=id, status="completed", content=content, raw_output=unknown)
            await self.parent.send(update)

    async def show_notice(self, title: str, severity: Literal["info", "warning", "error"]) -> None:
        """Show a notice, but not more than NOTICES_LIMIT."""
        self.notices += 1
        if self.notices > NOTICES_LIMIT:
            return
        begin = f"{self.name}: " if self.name else ""
        await self.parent.notice(f"{begin}{to_line(mask(title, self.parent.secrets))[:NOTICE_LIMIT]}", severity)
        if self.notices == NOTICES_LIMIT:
            await self.parent.notice(f"{begin}further notices of this task are not shown.", "info")

    def to_parent_request(self, params: Any) -> Any:
        """Convert the params of the agent's request to those of the session's."""
        if isinstance(id := getattr(params, "tool_call_id", None), str):
            params = replace(params, tool_call_id=self.to_parent_id(id))
        return replace(params, session_id=self.parent.id) if hasattr(params, "session_id") else params

    def to_parent_update(self, update: SessionUpdate) -> SessionUpdate | None:
        """Convert an update of the agent to one of the session; None for what the client is not shown."""
        match update:
            case ToolCall() | ToolCallUpdate():
                if not self.shown_in:
                    return None
                id = self.to_parent_id(update.tool_call_id)
                self.open_calls[id] = None
                if update.status in ("completed", "failed"):
                    del self.open_calls[id]
                return self.mask(replace(update, tool_call_id=id))
            case AgentMessageChunk(content=TextBlock(text=text)):
                self._text = (self._text + text)[-2 * TEXT_LIMIT :]
                self.unseen += len(text)
                if self.unseen < UPDATE_INTERVAL or not self.shown_in:
                    return None
                self.unseen = 0
                content = BlockContent(content=TextBlock(text=self.text))
                return ToolCallUpdate(tool_call_id=self.shown_in, content=[content])
            case _:
                return None

    def to_parent_id(self, id: str) -> str:
        """Convert the id of a tool call of the agent."""
        return f"{self.tool_call_id}/{id}"
