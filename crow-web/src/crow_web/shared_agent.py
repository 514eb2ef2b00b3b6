"""The connection to the agent: opened when a chat needs it, shared by all chats, closed when none is open."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from crow_core.acp.connection import ConnectionClosed, Handler, RpcError
from crow_core.acp.schema import (
    CloseSessionRequest,
    ForkSessionRequest,
    ForkSessionResponse,
    ListSessionsRequest,
    LoadSessionRequest,
    NewSessionResponse,
    ResumeSessionRequest,
    SessionInfo,
    SessionNotification,
    SessionUpdate,
)
from crow_terminal.abilities import Abilities
from crow_terminal.agent_connections import AgentLink, NoAgent
from crow_terminal.chat_client import AgentQuestion, ChatClient
from crow_terminal.open_questions import make_cancellation
from crow_terminal.page_methods import JOIN_METHOD, OPENED_METHOD, TURN_METHOD
from msgspec import UNSET

START_TIMEOUT = 60.0
"""Seconds that an agent may take to answer `initialize`."""
MAX_EARLY = 1_000
"""Updates of sessions that no chat has yet, which are kept for it."""


class SessionListener(Protocol):
    """A chat, as the connection calls it."""

    def receive(self, update: SessionUpdate) -> None: ...

    def ask(self, id: int, request: AgentQuestion) -> None: ...

    def withdraw(self, id: int) -> None: ...

    def follow_turn(self, stop_reason: str, *, runs: bool) -> None:
        """A turn of the terminal has begun, or ended."""
        ...

    def lose(self, sentence: str) -> None:
        """The connection has ended, or the session is to be opened again."""
        ...


class SharedAgent:
    """An agent that is started, or connected to, when the first session is opened."""

    def __init__(
        self, open_link: Callable[[], Awaitable[AgentLink]], *, stays_open: bool = False, shows_apps: bool = False
    ) -> None:
        """`open_link` starts the agent, or connects to it; it raises NoAgent. With `stays_open`, the connection is kept
        when no session is open. `shows_apps` says that the pages show MCP Apps."""
        self._open_link, self._stays_open, self._shows_apps = open_link, stays_open, shows_apps
        self.shared = ""
        """The session of the terminal to which this page belongs; empty for none."""
        self.client: ChatClient | None = None
        self.abilities = Abilities()
        self.listeners: dict[str, SessionListener] = {}
        """The chats whose sessions are open, by the ids of the sessions."""
        self._early: list[tuple[str, SessionUpdate]] = []
        self._early_questions: list[tuple[str, int, AgentQuestion]] = []
        """The same of its questions."""
        self._asked: dict[int, SessionListener] = {}
        self._lock = asyncio.Lock()
        self._holding: asyncio.Task[None] | None = None

    async def connect(self) -> ChatClient:
        """Return the open connection. Raises NoAgent."""
        async with self._lock:
            if self.client is None:
                link = await self._open_link()
                client = ChatClient(link.transport, self._receive, self._ask, self._withdraw, self._make_handlers())
                ready: asyncio.Future[Abilities] = asyncio.get_running_loop().create_future()
                self._holding = asyncio.ensure_future(self._hold(client, link, ready))
                self.abilities = await ready
                self.client = client
                meta = client.initialized.meta
                self.shared = str(meta.get(OPENED_METHOD, "")) if isinstance(meta, dict) else ""
            return self.client

    async def _hold(self, client: ChatClient, link: AgentLink, ready: "asyncio.Future[Abilities]") -> None:
        """Serve the connection until it ends."""
        problem = ""
        async with client.serving():
            try:
                async with asyncio.timeout(START_TIMEOUT):
                    ready.set_result(await client.start(apps=self._shows_apps))
                await client.until_closed()
            except TimeoutError:
                problem = f"The agent did not answer within {START_TIMEOUT:g} seconds."
            except RpcError as error:
                problem = client.describe_error(error)
            except ConnectionClosed:
                pass
            problem = problem or await link.describe_end()
        self._end(client, problem)
        if not ready.done():
            ready.set_exception(NoAgent(problem))

    def _end(self, client: ChatClient, sentence: str) -> None:
        if self.client is client:
            self.client = None
        listeners, self.listeners = self.listeners, {}
        self._early.clear()
        self._early_questions.clear()
        self._asked.clear()
        for listener in {*listeners.values()}:
            listener.lose(sentence)

    async def close(self) -> None:
        """Close the connection, which ends the turns and the process."""
        async with self._lock:
            self.listeners.clear()
            client, holding = self.client, self._holding
            self.client = self._holding = None
            if client:
                await client.connection.close()
            if holding:
                holding.cancel() if client is None else None
                await asyncio.wait([holding])

    # Sessions

    async def new_session(self, listener: SessionListener, cwd: str) -> NewSessionResponse:
        """Open a new session for a chat. Raises NoAgent, RpcError, ConnectionClosed."""
        client = await self.connect()
        opened = await client.new_session(cwd)
        self._register(opened.session_id, listener)
        return opened

    async def open_session(self, listener: SessionListener, id: str, cwd: str, *, is_shown: bool) -> Any:
        """Open a stored session for a chat, with what was said in it unless it `is_shown`. Raises NoAgent, RpcError,
        ConnectionClosed."""
        client = await self.connect()
        self._register(id, listener)
        try:
            if is_shown and self.abilities.resumes:
                return await client.request("session/resume", ResumeSessionRequest(session_id=id, cwd=cwd))
            return await client.request("session/load", LoadSessionRequest(session_id=id, cwd=cwd))
        except BaseException:
            self.listeners.pop(id, None)
            raise

    async def fork_session(self, listener: SessionListener, id: str, cwd: str) -> ForkSessionResponse:
        """Open a copy of a session for a chat. Raises NoAgent, RpcError, ConnectionClosed."""
        client = await self.connect()
        opened = await client.request("session/fork", ForkSessionRequest(session_id=id, cwd=cwd))
        self._register(opened.session_id, listener)
        return opened

    async def close_session(self, id: str) -> None:
        """Close a session, which releases it for others; close the connection after the last one."""
        self.listeners.pop(id, None)
        if client := self.client:
            with suppress(RpcError, ConnectionClosed):
                if client.initialized.agent_capabilities.session_capabilities.close not in (UNSET, None):
                    await client.request("session/close", CloseSessionRequest(session_id=id))
        if not (self.listeners or self._stays_open):
            await self.close()

    async def join(self, id: str, started: int) -> None:
        """Follow what happens in the terminal's session, from the beginning of its last turn on. Raises RpcError,
        ConnectionClosed."""
        if self.client:
            await self.client.request(JOIN_METHOD, {"sessionId": id, "started": started})

    async def until_closed(self) -> None:
        """Wait until the connection has ended."""
        if self._holding:
            await asyncio.wait([self._holding])

    async def list_sessions(self) -> Sequence[SessionInfo]:
        """Return the first stored sessions of the agent. Raises NoAgent, RpcError, ConnectionClosed."""
        client = await self.connect()
        if not self.abilities.lists:
            return []
        return (await client.request("session/list", ListSessionsRequest())).sessions

    def answer(self, id: int, response: Any) -> None:
        """Answer a question of the agent."""
        self._asked.pop(id, None)
        if self.client:
            self.client.answer(id, response)

    def _register(self, id: str, listener: SessionListener) -> None:
        self.listeners[id] = listener
        early, self._early = self._early, []
        for session, update in early:
            self._pass_on(session, update)
        questions, self._early_questions = self._early_questions, []
        for _, number, request in questions:
            self._ask(number, request)

    def _make_handlers(self) -> dict[str, Handler]:
        async def follow_turn(params: dict[str, Any]) -> None:
            if listener := self.listeners.get(str(params["sessionId"])):
                listener.follow_turn(str(params["stopReason"]), runs=bool(params["runs"]))

        async def note_opened(params: dict[str, Any]) -> None:
            before, self.shared = self.shared, str(params[OPENED_METHOD])
            if listener := self.listeners.pop(before, None):
                listener.lose("" if self.shared == before else "The terminal has another session now.")
            if params.get("restarted"):
                others, self.listeners = self.listeners, {}
                for listener in others.values():
                    listener.lose("The terminal has started its agent again.")

        return {TURN_METHOD: follow_turn, OPENED_METHOD: note_opened}

    def _receive(self, notification: SessionNotification) -> None:
        self._pass_on(notification.session_id, notification.update)

    def _pass_on(self, session: str, update: SessionUpdate) -> None:
        if listener := self.listeners.get(session):
            listener.receive(update)
        elif len(self._early) < MAX_EARLY:
            self._early.append((session, update))

    def _ask(self, id: int, request: AgentQuestion) -> None:
        session = request.session_id if isinstance(request.session_id, str) else ""
        if listener := self.listeners.get(session):
            self._asked[id] = listener
            listener.ask(id, request)
        elif session:
            self._early_questions.append((session, id, request))
        elif self.client:  # about no session: nobody can be asked
            self.client.answer(id, make_cancellation(request))

    def _withdraw(self, id: int) -> None:
        if listener := self._asked.pop(id, None):
            listener.withdraw(id)
