"""The client's side of the protocol, for an editor, a terminal or a program that uses an agent."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from msgspec import UNSET, ValidationError

from crow_core.acp.connection import Connection, Handler, RpcError
from crow_core.acp.decoding import convert_leniently
from crow_core.acp.schema import (
    AGENT_METHODS,
    CLIENT_METHODS,
    INTERNAL_ERROR,
    INVALID_REQUEST,
    PROTOCOL_VERSION,
    AuthMethod,
    CancelledOutcome,
    CancelNotification,
    ClientCapabilities,
    ContentBlock,
    Implementation,
    InitializeRequest,
    InitializeResponse,
    McpServer,
    Method,
    NewSessionRequest,
    NewSessionResponse,
    PromptRequest,
    PromptResponse,
    RequestPermissionResponse,
    SelectedOutcome,
    SetSessionConfigOptionRequest,
    SetSessionConfigOptionResponse,
    SetSessionModeRequest,
    TextBlock,
)
from crow_core.acp.shared_methods import get_own_meta, has_background
from crow_core.acp.transports import Transport

if TYPE_CHECKING:
    from crow_core.acp.connection_v2 import ConnectionV2

OPTION_NAMES: dict[str, Any] = {"crow": {"optionNames": True}}
"""`_meta` of the capabilities of a client that shows the name of each option of a permission question."""


def answer_permission(
    option_id: str | None = None, *, reason: str = "", command: str = ""
) -> RequestPermissionResponse:
    """Make the answer that chooses an option, with what crow also takes (`agentCapabilities._meta.crow`).

    Without an option, the question is cancelled.
    """
    own = {name: text for name, text in (("reason", reason), ("command", command)) if text}
    return RequestPermissionResponse(
        outcome=SelectedOutcome(option_id=option_id) if option_id is not None else CancelledOutcome(),
        meta={"crow": own} if own else UNSET,
    )


class AcpClient:
    """A connection to an ACP agent. `handlers` answer its requests and notifications, such as `session/update`.

    The methods raise RpcError if the agent answers with an error, ConnectionClosed if it has closed the connection.
    """

    initialized: InitializeResponse
    """The agent's answer to `initialize`."""

    def __init__(self, transport: Transport, handlers: Mapping[str, Handler]) -> None:
        self.connection: Connection | ConnectionV2 = Connection(transport, CLIENT_METHODS, AGENT_METHODS, handlers)
        self._handlers = handlers
        self._serving: asyncio.Task[None] | None = None
        self._auth_methods: Sequence[AuthMethod] = ()

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None]:
        """Serve the connection inside the block and close it at the end."""
        self._serving = asyncio.ensure_future(self.connection.serve())
        try:
            yield
        finally:
            await self.connection.close()
            await self.until_closed()

    async def until_closed(self) -> None:
        """Wait until the connection has ended."""
        if self._serving:
            await asyncio.wait([self._serving])

    async def initialize(
        self, name: str, capabilities: ClientCapabilities, *, version: int = PROTOCOL_VERSION
    ) -> InitializeResponse:
        """Agree on the protocol version and exchange capabilities.

        With `version` 2, speak version 2, a draft, if the agent does; its messages are converted to version 1. Raises
        RpcError also for an agent of another version.
        """
        if version == 2:
            return await self._initialize_version_2(name, capabilities)
        response: InitializeResponse = await self.connection.request(
            "initialize",
            InitializeRequest(
                protocol_version=PROTOCOL_VERSION,
                client_info=Implementation(name=name, version="0"),
                client_capabilities=capabilities,
            ),
        )
        return self._take_initialized(response)

    async def _initialize_version_2(self, name: str, capabilities: ClientCapabilities) -> InitializeResponse:
        """Offer version 2, with what an agent of version 1 has to know, too."""
        from crow_core.acp import schema_v2  # imported here because few clients ask for it
        from crow_core.acp.connection_v2 import ConnectionV2
        from crow_core.acp.to_v1 import to_initialized

        connection = self.connection
        assert isinstance(connection, Connection)
        info = Implementation(name=name, version="0")
        terminal = schema_v2.TerminalAuthCapabilities() if capabilities.auth.terminal else UNSET
        can = schema_v2.ClientCapabilities(
            elicitation=capabilities.elicitation,
            auth=schema_v2.ClientAuthCapabilities(terminal=terminal) if terminal else UNSET,
            meta=capabilities.meta,
        )
        wanted = {"protocolVersion": 2, "info": info, "capabilities": can}
        connection.speak(CLIENT_METHODS, {**AGENT_METHODS, "initialize": Method(dict, None)}, self._handlers)
        old = {"clientInfo": info, "clientCapabilities": capabilities}
        answer: dict[str, Any] = await connection.request("initialize", {**wanted, **old})
        try:
            if answer.get("protocolVersion") != 2 or "agentCapabilities" in answer:
                connection.speak(CLIENT_METHODS, AGENT_METHODS, self._handlers)
                # Agents of version 1 that repeat the number they were sent are told apart by their capabilities.
                known = {"protocolVersion": PROTOCOL_VERSION} if answer.get("protocolVersion") == 2 else {}
                return self._take_initialized(convert_leniently({**answer, **known}, InitializeResponse))
            response = to_initialized(convert_leniently(answer, schema_v2.InitializeResponse))
        except (ValidationError, AttributeError) as error:
            raise RpcError(INTERNAL_ERROR, "Unreadable answer to initialize", details=str(error)) from error
        self.connection = second = ConnectionV2(connection, self._handlers)
        if not has_background(get_own_meta(response.agent_capabilities)):
            second.answer_background()
        if self._serving:
            self._serving.add_done_callback(lambda _: second.end())
        self.initialized, self._auth_methods = response, response.auth_methods
        return response

    def _take_initialized(self, response: InitializeResponse) -> InitializeResponse:
        if response.protocol_version != PROTOCOL_VERSION:
            sentence = f"It speaks version {response.protocol_version} of ACP, not {PROTOCOL_VERSION}."
            raise RpcError(INVALID_REQUEST, sentence)
        self.initialized, self._auth_methods = response, response.auth_methods
        return response

    def describe_login(self, error: RpcError) -> str:
        """Make the sentences for an agent that wants a log-in first."""
        offered = "; ".join(f"{one.id}: {one.description or one.name}" for one in self._auth_methods)
        return (
            f"It wants a log-in first ({error.message.rstrip('.')}). Log in with its own command, then try again."
            f"{f' Its methods: {offered}.' if offered else ''}"
        )

    async def new_session(
        self, cwd: str, servers: Sequence[McpServer] = (), roots: Sequence[str] = ()
    ) -> NewSessionResponse:
        """Open a session in a folder; the agent connects to the MCP servers and may use the additional roots."""
        request = NewSessionRequest(cwd=cwd, mcp_servers=list(servers), additional_directories=list(roots))
        return await self.connection.request("session/new", request)

    async def prompt(
        self, session_id: str, prompt: str | Sequence[ContentBlock], meta: Mapping[str, Any] | None = None
    ) -> PromptResponse:
        """Send a prompt, with `meta` as its `_meta`, and wait for the end of its turn."""
        blocks: list[ContentBlock] = [TextBlock(text=prompt)] if isinstance(prompt, str) else list(prompt)
        params = PromptRequest(session_id=session_id, prompt=blocks, meta=dict(meta) if meta else UNSET)
        return await self.connection.request("session/prompt", params)

    async def cancel(self, session_id: str) -> None:
        """Cancel the current turn; its prompt is answered with the stop reason `cancelled`."""
        await self.connection.notify("session/cancel", CancelNotification(session_id=session_id))

    async def set_mode(self, session_id: str, mode_id: str) -> None:
        await self.connection.request("session/set_mode", SetSessionModeRequest(session_id=session_id, mode_id=mode_id))

    async def set_option(self, session_id: str, option_id: str, value: str) -> SetSessionConfigOptionResponse:
        """Set a config option; the response has all options with their values."""
        request = SetSessionConfigOptionRequest(session_id=session_id, config_id=option_id, value=value)
        return await self.connection.request("session/set_config_option", request)

    async def request(self, method: str, params: Any) -> Any:
        """Send any other request and return its result."""
        return await self.connection.request(method, params)
