"""Questions to the clients of a session: the first answer holds, and the others need not answer any more."""

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

from msgspec import Struct

from crow_core.acp.connection import ConnectionClosed
from crow_core.acp.schema import ClientCapabilities, CreateElicitationRequest
from crow_core.mcp.elicitation import can_ask
from crow_core.session.session import Session
from crow_core.session_state import StateKey

TO_ONE = ("fs/", "terminal/")
"""The beginnings of the methods that one client answers, the one that has been there for longest."""


class AskedClient(Protocol):
    """A client that can be asked (`AcpAgent`)."""

    @property
    def capabilities(self) -> ClientCapabilities: ...
    async def ask(self, method: str, params: Struct) -> Any:
        """Send this client a request. Raises RpcError, ConnectionClosed."""
        ...


class SharedQuestion:
    """A question that several clients are asked."""

    def __init__(self, method: str, params: Struct) -> None:
        self._method, self._params = method, params
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.asking: dict[AskedClient, asyncio.Task[Any]] = {}

    def ask(self, client: AskedClient) -> None:
        """Ask one more client, if it can be asked."""
        if isinstance(self._params, CreateElicitationRequest):
            mode = "url" if self._params.mode == "url" else "form"
            if not can_ask(client.capabilities, mode):
                return
        self.asking[client] = task = asyncio.ensure_future(client.ask(self._method, self._params))
        task.add_done_callback(partial(self._take, client))

    def _take(self, client: AskedClient, task: "asyncio.Task[Any]") -> None:
        """Take the answer of a client. An error counts when nobody else can answer."""
        self.asking.pop(client, None)
        error = ConnectionClosed("the client has left") if task.cancelled() else task.exception()
        if self.answer.done():
            return
        if error is None:
            self.answer.set_result(task.result())
        elif not self.asking:
            self.answer.set_exception(error)

    async def withdraw(self) -> None:
        """Withdraw the question from all who have not answered."""
        if asking := [*self.asking.values()]:
            for task in asking:
                task.cancel()
            await asyncio.wait(asking)


async def ask_clients(session: Session, clients: Iterable[AskedClient], method: str, params: Struct) -> Any:
    """Ask clients, and those who join meanwhile; return the first answer. Raises RpcError, ConnectionClosed."""
    questions = session.state[QUESTIONS]
    questions.append(question := SharedQuestion(method, params))
    try:
        for client in clients:
            question.ask(client)
        return await question.answer
    finally:
        questions.remove(question)
        await question.withdraw()


QUESTIONS = StateKey("questions", list[SharedQuestion])
"""The open questions of a session."""
