"""The ACP client: it passes updates and questions on, and sends what the user wants."""

import asyncio
from collections.abc import Callable, Mapping
from itertools import count
from types import MappingProxyType
from typing import Any, TypeAlias

from crow_core import __version__
from crow_core.acp.client import OPTION_NAMES, AcpClient
from crow_core.acp.complete_method import can_complete
from crow_core.acp.connection import Handler, RpcError
from crow_core.acp.schema import (
    AUTH_REQUIRED,
    PROTOCOL_VERSION,
    AuthCapabilities,
    AuthMethod,
    BooleanConfigOptionCapabilities,
    ClientCapabilities,
    ClientSessionCapabilities,
    CompactionCapabilities,
    CompleteElicitationNotification,
    CreateElicitationRequest,
    CreateElicitationResponse,
    ElicitationCapabilities,
    ElicitationFormCapabilities,
    ElicitationUrlCapabilities,
    InitializeResponse,
    NoticeCapabilities,
    RequestPermissionRequest,
    RequestPermissionResponse,
    SessionConfigOptionsCapabilities,
    SessionNotification,
)
from crow_core.acp.shared_methods import can_rewind, can_steer, get_own_meta, has_background
from crow_core.acp.transports import Transport
from msgspec import UNSET

from crow_terminal.abilities import Abilities

AgentQuestion: TypeAlias = RequestPermissionRequest | CreateElicitationRequest


class ChatClient(AcpClient):
    """A client that passes what the agent sends to functions."""

    def __init__(
        self,
        transport: Transport,
        receive: Callable[[SessionNotification], None],
        ask: Callable[[int, AgentQuestion], None],
        withdraw: Callable[[int], None],
        more: Mapping[str, Handler] = MappingProxyType({}),
    ) -> None:
        """`ask` is called with a number and a question, which `answer` answers; `withdraw` if nobody waits any more.
        `more` are handlers of other methods."""
        super().__init__(
            transport,
            {
                "session/update": self._on_update,
                "session/request_permission": self._on_question,
                "elicitation/create": self._on_question,
                "elicitation/complete": self._on_complete,
                **more,
            },
        )
        self._receive, self._ask, self._withdraw = receive, ask, withdraw
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._ids = count(1)

    async def start(self, version: int = PROTOCOL_VERSION, *, apps: bool = False, logs_in: bool = False) -> Abilities:
        """Agree on the protocol version, at most this one, and exchange capabilities; `apps` says that MCP Apps are
        shown, `logs_in` that the agent's log-in can run in this terminal."""
        session = ClientSessionCapabilities(
            notices=NoticeCapabilities(),
            compaction=CompactionCapabilities(),
            config_options=SessionConfigOptionsCapabilities(boolean=BooleanConfigOptionCapabilities()),
        )
        meta = {"crow": {**OPTION_NAMES["crow"], **({"apps": True} if apps else {})}}
        forms = ElicitationCapabilities(form=ElicitationFormCapabilities(), url=ElicitationUrlCapabilities())
        capabilities = ClientCapabilities(session=session, elicitation=forms, meta=meta)
        capabilities.auth = AuthCapabilities(terminal=logs_in)
        name = f"crow-terminal {__version__}"
        return find_abilities(await self.initialize(name, capabilities, version=version))

    def answer(self, id: int, response: Any) -> None:
        """Answer a question."""
        future = self._answers.get(id)
        if future and not future.done():
            future.set_result(response)

    def describe_error(self, error: RpcError) -> str:
        """Make a sentence of an error of the agent."""
        if error.code == AUTH_REQUIRED and not error.details:
            return self.describe_login(error)
        sentence = error.details or error.message
        return sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."

    def find_login(self, error: RpcError) -> AuthMethod | None:
        """Return the log-in in a terminal that the agent offers for an error; None if it offers none."""
        methods = self.initialized.auth_methods if error.code == AUTH_REQUIRED else []
        return next((one for one in methods if one.type == "terminal"), None)

    async def _on_update(self, notification: SessionNotification) -> None:
        self._receive(notification)

    async def _on_question(self, request: AgentQuestion) -> RequestPermissionResponse | CreateElicitationResponse:
        id = next(self._ids)
        self._answers[id] = future = asyncio.get_running_loop().create_future()
        self._ask(id, request)
        try:
            return await future
        finally:
            del self._answers[id]
            if future.cancelled():
                self._withdraw(id)

    async def _on_complete(self, notification: CompleteElicitationNotification) -> None:
        """Ignore that a page was visited: the user says so."""


def find_abilities(initialized: InitializeResponse) -> Abilities:
    """Find out what an agent can do."""
    can = initialized.agent_capabilities
    info = initialized.agent_info
    own = get_own_meta(can)
    return Abilities(
        name=(info.title or info.name) if info else "",
        lists=can.session_capabilities.list not in (UNSET, None),
        loads=can.load_session,
        undoes=can_rewind(initialized.meta),
        images=can.prompt_capabilities.image,
        resumes=can.session_capabilities.resume not in (UNSET, None),
        answers=tuple(map(str, own.get("permissionAnswers", ()))),
        steers=can_steer(initialized.meta),
        backgrounds=has_background(own),
        lists_background=initialized.protocol_version == 2 or has_background(own),
        completes=can_complete(own),
    )
