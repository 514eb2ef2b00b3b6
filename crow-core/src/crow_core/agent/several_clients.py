"""A session with several clients: what happens is told to all, and the first answer to a question holds.

Imported when a client opens a session that another one has open.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import UNSET, Struct
from msgspec.structs import replace

from crow_core.acp.connection import Connection, ConnectionClosed
from crow_core.acp.schema import (
    AgentMessageChunk,
    AgentThoughtChunk,
    ClientCapabilities,
    ClientSessionCapabilities,
    NoticeUpdate,
    SessionNotification,
    SessionUpdate,
    TextBlock,
    ToolCall,
    ToolCallUpdate,
)
from crow_core.agent.announcement import Outcome, make_begin, make_end, to_chunks
from crow_core.agent.client_questions import QUESTIONS, TO_ONE, AskedClient, ask_clients
from crow_core.content import to_announcement, to_early_announcement
from crow_core.messages.message import Message, find_unanswered, get_id
from crow_core.session.session import Session
from crow_core.session.user import shows_option_names
from crow_core.session_state import StateKey

PATIENCE = 5.0
"""Seconds for which a client that reads nothing makes the others wait; then its connection is closed."""


class SessionClient(AskedClient, Protocol):
    """A client of the session, over its own connection (`AcpAgent`)."""

    connection: Connection

    async def notify(self, method: str, params: Struct) -> None: ...
    async def show(self, session: Session, updates: Iterable[SessionUpdate]) -> None: ...
    def make_replay(self, session: Session, log: Sequence[Message], start: str) -> Iterator[SessionUpdate]: ...


@dataclass(eq=False)
class PromptOrder:
    """Lets the prompts of all clients enter a session's conversation one after the other."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the turn of a prompt runs."""
    waiting: "set[asyncio.Task[Any]]" = field(default_factory=set["asyncio.Task[Any]"])
    """The tasks whose prompts have not entered the conversation."""

    @asynccontextmanager
    async def wait(self) -> AsyncGenerator[None]:
        """Count this task as one that waits."""
        task = asyncio.current_task()
        assert task is not None
        self.waiting.add(task)
        try:
            yield
        finally:
            self.waiting.discard(task)

    def cancel_waiting(self) -> None:
        for task in self.waiting:
            task.cancel()


ORDER = StateKey("prompt order", PromptOrder)


class SharedSession:
    """The clients of one session, in the place of its one client."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.order = session.state[ORDER]
        self.clients: list[Any] = [session.client]
        """The clients, in the order in which they came."""
        self._late: dict[SessionClient, deque[tuple[str, Any]]] = {}
        """The messages for clients that are still being shown what has happened."""
        self._begun: Message | None = None
        """The prompt of the turn that a client has begun."""
        self._holder: Message | None = None
        """The prompt that holds `order.lock`, if it came by version 1."""
        session.client = session.user.client = self

    # What the session needs of its client

    @property
    def capabilities(self) -> ClientCapabilities:
        """The abilities of the first client, without those that decide what is shown, unless all have them."""
        found: list[ClientCapabilities] = [client.capabilities for client in [*self.clients, *self._late]]
        if not found:  # the session is being closed
            return ClientCapabilities()
        shown = [one.session or ClientSessionCapabilities() for one in found]
        common = ClientSessionCapabilities(
            config_options=shown[0].config_options if all(one.config_options for one in shown) else UNSET,
            compaction=shown[0].compaction if all(one.compaction for one in shown) else UNSET,
            notices=shown[0].notices if all(one.notices for one in shown) else UNSET,
        )
        meta = found[0].meta if all(map(shows_option_names, found)) else UNSET
        return replace(found[0], session=common, meta=meta)

    async def notify(self, method: str, params: Any) -> None:
        """Tell all clients. One that reads nothing for PATIENCE seconds while others do is disconnected."""
        await self._tell(method, [params])

    async def request(self, method: str, params: Struct) -> Any:
        """Ask all clients; the first answer holds. Requests about files and terminals go to the first client."""
        if not self.clients:
            raise ConnectionClosed("all clients have left")
        if method.startswith(TO_ONE):
            return await self.clients[0].ask(method, params)
        return await ask_clients(self.session, self.clients, method, params)

    async def _tell(self, method: str, told: Sequence[Any], *, besides: SessionClient | None = None) -> None:
        """Send notifications, given by their params. A client that joins meanwhile gets all of them, or none."""
        for client, waiting in self._late.items():
            if client is not besides:
                waiting.extend((method, copy_chunk(params)) for params in told)
        telling = {
            asyncio.ensure_future(notify_all(client, method, [*map(copy_chunk, told)])): client
            for client in self.clients
            if client is not besides
        }
        left = {*telling}
        while left:
            done, left = await asyncio.wait(left, timeout=PATIENCE if len(left) > 1 or len(telling) > 1 else None)
            for task in done:
                task.result()
            if left and len(left) < len(telling):
                for task in left:
                    await telling[task].connection.close()

    # Clients come and go

    async def join(self, client: SessionClient, start: str | None) -> None:
        """Let a client join: show it the conversation from a message on, "" for all, None for nothing. Then it gets
        every update, and is asked the open questions. Raises RpcError if there is no such message."""
        self._late[client] = deque()  # the session stays open until it is there
        try:
            await self._settle()
            log = [*self.session.log]
            updates = [] if start is None else [*self._replay(client, log, start), *self._make_open()]
            # Nothing is awaited between this and the state of the session that is shown.
            self._late[client] = waiting = deque[tuple[str, Any]]()
            await client.show(self.session, updates)
            while waiting:
                await client.notify(*waiting.popleft())
        finally:
            del self._late[client]
        self.clients.append(client)
        for question in self.session.state[QUESTIONS]:
            question.ask(client)

    def leave(self, client: SessionClient) -> bool:
        """Forget a client. Return True if others are there."""
        if client in self.clients:
            self.clients.remove(client)
        for question in self.session.state[QUESTIONS]:
            if task := question.asking.get(client):
                task.cancel()
        return bool(self.clients or self._late)

    async def _settle(self) -> None:
        """Wait until the clients were told all that has happened: no fragment of a reply waits for the log, and no turn
        is about to begin."""
        log, turns = self.session.log, self.session.turns
        while True:
            await log.written()
            await asyncio.sleep(0)
            if log.is_written and (turns.lock.locked() or not turns.tasks):
                return

    def _replay(self, client: SessionClient, log: Sequence[Message], start: str) -> Iterator[SessionUpdate]:
        """Make the updates for the log; tool calls that run are shown as running."""
        toolbox = self.session.toolbox
        runs = bool(self.session.turns.tasks)
        open_calls = {use["id"]: use for use in find_unanswered(log)} if runs else {}
        for update in client.make_replay(self.session, log, start):
            match update:
                case ToolCall(tool_call_id=id) if id in open_calls:
                    yield to_announcement(toolbox.parse(open_calls[id]), self.session.cwd)
                case ToolCallUpdate(tool_call_id=id) if id in open_calls:
                    status = "in_progress" if toolbox.is_running(id) else "pending"
                    yield ToolCallUpdate(tool_call_id=id, status=status)
                case _:
                    yield update

    def _make_open(self) -> Iterator[SessionUpdate]:
        """Make the updates for what the log of the running turn has not: its prompt, and the reply so far."""
        turns, stream = self.session.turns, self.session.stream
        prompt = self._begun or (turns.message if turns.tasks else None)
        if prompt and (turns.message is not prompt or not turns.requests):
            yield from to_chunks(prompt)
        call = stream.arriving
        if call is None or not turns.tasks or any(get_id(entry) == call.id for entry in self.session.log):
            return
        reply = call.arriving.build()
        if text := reply.get("reasoning_content"):
            yield AgentThoughtChunk(content=TextBlock(text=text), message_id=call.id)
        if text := reply.get("content"):
            yield AgentMessageChunk(content=TextBlock(text=str(text)), message_id=call.id)
        for use in reply.get("tool_calls", ()):
            if use["id"] in stream.announced:
                yield to_early_announcement(self.session.toolbox.parse(use))

    # The turns that clients begin

    async def begin_turn(self, client: SessionClient, message: Message, *, in_order: bool) -> None:
        """Tell the other clients that a prompt of this one begins a turn, with `in_order` after those of others."""
        async with self.order.wait():
            if in_order:
                await self.order.lock.acquire()
                self._holder = message
            await self.tell_begun(client, message)

    async def tell_begun(self, client: SessionClient | None, message: Message) -> None:
        """Tell the other clients that a prompt of this one begins a turn, or with None all that nobody's does."""
        updates = make_begin(message)
        self._begun = message
        await self._tell_updates(updates, besides=client)

    def end_order(self, message: Message) -> None:
        """Let the next prompt begin, if it waits for the turn of this one."""
        if self._holder is message:
            self._holder = None
            self.order.lock.release()

    async def end_turn(self, client: SessionClient | None, outcome: Outcome | BaseException) -> None:
        """Tell the clients, but for the one whose turn it was, how it has ended."""
        self._begun, updates = None, list[SessionUpdate]()
        if isinstance(outcome, BaseException) and self.session.takes_notices:
            updates.append(NoticeUpdate(severity="error", title=str(outcome)))
        updates.append(make_end("error" if isinstance(outcome, BaseException) else outcome))
        await self._tell_updates(updates, besides=client)

    async def _tell_updates(self, updates: Sequence[SessionUpdate], *, besides: SessionClient | None) -> None:
        told = [SessionNotification(session_id=self.session.id, update=update) for update in updates]
        await self._tell("session/update", told, besides=besides)


async def notify_all(client: SessionClient, method: str, told: Sequence[Any]) -> None:
    with suppress(ConnectionClosed):  # it is leaving
        for params in told:
            await client.notify(method, params)


def copy_chunk(params: Any) -> Any:
    """Copy a part of a thought, which `AcpAgentV2.notify` changes; return anything else as it is."""
    if isinstance(params, SessionNotification) and isinstance(params.update, AgentThoughtChunk):
        return SessionNotification(session_id=params.session_id, update=replace(params.update))
    return params
