"""The ACP client of a program."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, cast

from crow_core import __version__
from crow_core.acp.client import AcpClient, describe_login
from crow_core.acp.connection import ConnectionClosed, RpcError
from crow_core.acp.schema import (
    AUTH_REQUIRED,
    METHOD_NOT_FOUND,
    NOT_FOUND,
    CancelledOutcome,
    ClientCapabilities,
    ClientSessionCapabilities,
    CompleteElicitationNotification,
    CreateElicitationRequest,
    CreateElicitationResponse,
    ElicitationCapabilities,
    ElicitationFormCapabilities,
    InitializeResponse,
    NoticeCapabilities,
    RequestPermissionRequest,
    RequestPermissionResponse,
    SelectedOutcome,
    SessionNotification,
    SessionUpdate,
)
from crow_core.agent_process import START_TIMEOUT
from crow_core.hooks import call_function
from msgspec import UNSET

from crow_agent.connections import AgentConnection
from crow_agent.errors import AgentClosed, AgentError, PromptFailed, SessionNotFound

T = TypeVar("T")
Verdict: TypeAlias = bool | str
"""True to allow a tool call, False to reject it, or the id of one of the options that the question offers."""
Permissions: TypeAlias = Literal["deny", "allow"] | Callable[[RequestPermissionRequest], Verdict | Awaitable[Verdict]]
Form: TypeAlias = Mapping[str, Any] | None
"""The values of a form; None to decline."""
Elicit: TypeAlias = Callable[[CreateElicitationRequest], Form | Awaitable[Form]]


class TurnReceiver(Protocol):
    """A session, as the client sees it."""

    def receive(self, update: SessionUpdate) -> None:
        """Take in an update of the agent."""
        ...

    def deny(self, tool_call_id: str) -> None:
        """Note that a tool call was denied."""
        ...

    async def fail(self, fault: Exception) -> None:
        """End the turn because one of the program's functions failed."""
        ...


class ProgramClient(AcpClient):
    """The ACP client of a program: it passes updates to sessions, and questions to the program's functions."""

    initialized: InitializeResponse
    """The agent's answer to `initialize`."""

    def __init__(self, connected: AgentConnection, permissions: Permissions, elicit: Elicit | None) -> None:
        super().__init__(
            connected.transport,
            {
                "session/update": self.on_update,
                "session/request_permission": self.on_permission,
                "elicitation/create": self.on_elicitation,
                "elicitation/complete": self.on_complete,
            },
        )
        self.sessions: dict[str, TurnReceiver] = {}
        """The open sessions, by id."""
        self.connected = connected
        self.closed = False
        """True once the program has closed the agent."""
        self._permissions: Permissions = permissions
        self._elicit = elicit

    async def start(self) -> None:
        """Agree on the protocol version and exchange capabilities."""
        forms = ElicitationCapabilities(form=ElicitationFormCapabilities()) if self._elicit else UNSET
        session = ClientSessionCapabilities(notices=NoticeCapabilities())
        capabilities = ClientCapabilities(session=session, elicitation=forms)
        request = self.initialize(f"crow-agent {__version__}", capabilities)
        self.initialized = await self._wait("initialize", request, START_TIMEOUT)

    async def ask(self, method: str, params: Any, *, timeout: float | None = None) -> Any:
        """Send a request and return its result. `timeout` is in seconds. Raises AgentError."""
        return await self._wait(method, self.request(method, params), timeout)

    async def _wait(self, method: str, answer: Awaitable[T], timeout: float | None) -> T:
        """Wait for the answer to a request. Raises AgentError."""
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                return await answer
        except TimeoutError:
            if not limit.expired():
                raise
            raise self.connected.describe_silence(method, timeout or 0) from None
        except RpcError as error:
            if error.code == AUTH_REQUIRED:
                sentence = describe_login(error, self.initialized.auth_methods)
                raise PromptFailed(f"{self.connected.name}: {sentence}", code=error.code) from error
            raise to_agent_error(error) from error
        except ConnectionClosed as error:
            if self.closed:
                raise AgentClosed("This agent was closed.") from error
            raise await self.connected.describe_end() from error

    async def on_update(self, notification: SessionNotification) -> None:
        if session := self.sessions.get(notification.session_id):
            session.receive(notification.update)

    async def on_permission(self, question: RequestPermissionRequest) -> RequestPermissionResponse:
        session = self.sessions.get(question.session_id)
        try:
            answer: Any = self._permissions == "allow"
            if callable(self._permissions):
                answer = await call_function(self._permissions, question)
        except Exception as error:  # of the program's function: `prompt` raises it
            if session is not None:
                await session.fail(error)
            return RequestPermissionResponse(outcome=CancelledOutcome())
        offered = {option.option_id: option.kind for option in question.options}
        if not isinstance(answer, str) or answer not in offered:
            kinds = ("allow_once", "allow_always") if answer is True else ("reject_once", "reject_always")
            answer = next((id for kind in kinds for id, known in offered.items() if known == kind), None)
        if session is not None and not str(offered.get(answer or "")).startswith("allow"):
            session.deny(question.tool_call.tool_call_id)
        if answer is None:
            return RequestPermissionResponse(outcome=CancelledOutcome())
        return RequestPermissionResponse(outcome=SelectedOutcome(option_id=answer))

    async def on_elicitation(self, request: CreateElicitationRequest) -> CreateElicitationResponse:
        if self._elicit is None or request.mode != "form":
            return CreateElicitationResponse(action="cancel")
        try:
            answer: Any = await call_function(self._elicit, request)
        except Exception as error:  # of the program's function: `prompt` raises it
            if session := self.sessions.get(str(request.session_id)):
                await session.fail(error)
            return CreateElicitationResponse(action="cancel")
        if answer is None:
            return CreateElicitationResponse(action="decline")
        return CreateElicitationResponse(action="accept", content=dict(answer))

    async def on_complete(self, notification: CompleteElicitationNotification) -> None:
        """Ignore that a page was visited: no pages are offered."""


def to_agent_error(error: RpcError) -> AgentError:
    """Convert an error answer of an agent."""
    received: Any = error.data
    data = cast("dict[str, Any]", received) if isinstance(received, dict) else {}
    details = data.get("details") or data.get("message")
    sentence = str(details or error.message)
    if error.code == NOT_FOUND and "sessionId" in data:
        return SessionNotFound(str(data["sessionId"]))
    if error.code == METHOD_NOT_FOUND:
        sentence = f"The agent cannot do that: {sentence}"
    return PromptFailed(sentence, code=error.code, data=None if received is UNSET else received)
