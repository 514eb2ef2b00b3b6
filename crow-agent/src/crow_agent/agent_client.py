"""The ACP client of a program."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar, cast

from crow_core import __version__
from crow_core.acp.agent_process import START_TIMEOUT
from crow_core.acp.client import OPTION_NAMES, AcpClient, answer_permission
from crow_core.acp.connection import ConnectionClosed, Handler, RpcError
from crow_core.acp.schema import (
    AUTH_REQUIRED,
    METHOD_NOT_FOUND,
    NOT_FOUND,
    ClientCapabilities,
    ClientSessionCapabilities,
    CompleteElicitationNotification,
    CreateElicitationRequest,
    CreateElicitationResponse,
    ElicitationCapabilities,
    ElicitationFormCapabilities,
    FileSystemCapabilities,
    NoticeCapabilities,
    NoticeUpdate,
    RequestPermissionRequest,
    RequestPermissionResponse,
    SelectedOutcome,
    SessionNotification,
    SessionUpdate,
    ToolCall,
    ToolCallFields,
)
from crow_core.hooks import call_function
from msgspec import UNSET
from msgspec.structs import asdict

from crow_agent.connections import AgentConnection
from crow_agent.errors import AgentClosed, AgentError, PromptFailed, SessionNotFound

if TYPE_CHECKING:
    from crow_agent.local_workspace import LocalWorkspace

T = TypeVar("T")

logger = logging.getLogger("crow_agent")
"""Gets the warnings of agents, such as that an MCP server does not start."""

Verdict: TypeAlias = bool | str
"""Return True to allow a tool call, False to reject it, or the id of an option of the question. Any other text rejects
the call and tells the model why."""
Permissions: TypeAlias = Literal["deny", "allow"] | Callable[[RequestPermissionRequest], Verdict | Awaitable[Verdict]]
Form: TypeAlias = Mapping[str, Any] | None
"""The values of a form; None to decline."""
Elicit: TypeAlias = Callable[[CreateElicitationRequest], Form | Awaitable[Form]]


class TurnReceiver(Protocol):
    """A session, as the client sees it."""

    id: str
    cwd: str
    allowed: list[ToolCallFields]
    """The tool calls of the running turn that were allowed."""

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

    def __init__(self, connected: AgentConnection, permissions: Permissions, elicit: Elicit | None) -> None:
        self.sessions: dict[str, TurnReceiver] = {}
        """The open sessions, by id."""
        self.workspace: LocalWorkspace | None = None
        """The files and terminals that the agent may use; None if it is offered none."""
        handlers: dict[str, Handler] = {
            "session/update": self.on_update,
            "session/request_permission": self.on_permission,
            "elicitation/create": self.on_elicitation,
            "elicitation/complete": self.on_complete,
        }
        if connected.workspace is not None:
            self.workspace = self.make_workspace(connected.workspace)
            handlers |= self.workspace.list_handlers(may_change=permissions != "deny")
        super().__init__(connected.transport, handlers)
        self.connected = connected
        self._warned: set[str] = set()
        """The warnings of the agent that were logged."""
        self.closed = False
        """True once the program has closed the agent."""
        self._permissions: Permissions = permissions
        self._elicit = elicit

    @property
    def takes_keys(self) -> bool:
        """True if the agent is crow in this process, which takes ids for sessions and keys for prompts."""
        match self.initialized.agent_capabilities.meta:
            case {"crow": {"keys": True}}:
                return True
            case _:
                return False

    def make_workspace(self, env: Mapping[str, str]) -> "LocalWorkspace":
        """Make what answers requests for files and terminals; `env` is for the commands."""
        from crow_agent.local_workspace import LocalWorkspace  # only other agents need it

        return LocalWorkspace(self.sessions.get, self.ask_program, env)

    async def start(self, version: int) -> None:
        """Agree on the protocol version, at most this one, and exchange capabilities."""
        forms = ElicitationCapabilities(form=ElicitationFormCapabilities()) if self._elicit else UNSET
        session = ClientSessionCapabilities(notices=NoticeCapabilities())
        works = self.workspace is not None
        may_change = works and self._permissions != "deny"  # else every write and every command would be refused
        files = FileSystemCapabilities(read_text_file=works, write_text_file=may_change)
        capabilities = ClientCapabilities(
            fs=files, terminal=may_change, session=session, elicitation=forms, meta=OPTION_NAMES
        )
        request = self.initialize(f"crow-agent {__version__}", capabilities, version=version)
        await self._wait("initialize", request, START_TIMEOUT)

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
                sentence = self.describe_login(error)
                raise PromptFailed(f"{self.connected.name}: {sentence}", code=error.code) from error
            raise to_agent_error(error) from error
        except ConnectionClosed as error:
            if self.closed:
                raise AgentClosed("This agent was closed.") from error
            raise await self.connected.describe_end() from error

    async def on_update(self, notification: SessionNotification) -> None:
        match notification.update:
            case NoticeUpdate(title=title, severity="warning" | "error") if title not in self._warned:
                self._warned.add(title)  # once: a thousand sessions may say the same
                logger.warning("%s", title)
            case _:
                pass
        if session := self.sessions.get(notification.session_id):
            session.receive(notification.update)

    async def ask_program(self, question: RequestPermissionRequest) -> str:
        """Ask whether a write or a command of an agent may be done; return why not, or "" if it may.

        A denied one is shown as a failed tool call.
        """
        about, session = question.tool_call, self.sessions.get(question.session_id)
        answer = await self.on_permission(question)
        if isinstance(answer.outcome, SelectedOutcome) and answer.outcome.option_id == "allow":
            if session is not None:
                session.allowed.remove(about)
            return ""
        if session is not None:
            fields = {name: value for name, value in asdict(about).items() if value is not UNSET}
            session.receive(ToolCall(**fields, status="failed"))
        match answer.meta:
            case {"crow": {"reason": str(reason)}}:
                return reason
            case _:
                return "the program does not allow it."

    async def on_permission(self, question: RequestPermissionRequest) -> RequestPermissionResponse:
        session = self.sessions.get(question.session_id)
        try:
            answer: Any = self._permissions == "allow"
            if callable(self._permissions):
                answer = await call_function(self._permissions, question)
        except Exception as error:  # of the program's function: `prompt` raises it
            if session is not None:
                await session.fail(error)
            return answer_permission()
        offered = {option.option_id: option.kind for option in question.options}
        reason = ""
        if not isinstance(answer, str) or answer not in offered:
            reason = answer.strip() if isinstance(answer, str) else ""
            kinds = ("allow_once", "allow_always") if answer is True else ("reject_once", "reject_always")
            answer = next((id for kind in kinds for id, known in offered.items() if known == kind), None)
        if session is not None and str(offered.get(answer or "")).startswith("allow"):
            session.allowed.append(question.tool_call)
        elif session is not None:
            session.deny(question.tool_call.tool_call_id)
        return answer_permission(answer, reason=reason if answer is not None else "")

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
