"""An editor that writes down what it is shown, and the shortest way from it to an agent."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from crow_core.acp.client import AcpClient
from crow_core.acp.schema import (
    AgentMessageChunk,
    AgentThoughtChunk,
    CancelledOutcome,
    ClientCapabilities,
    CompleteElicitationNotification,
    CreateElicitationRequest,
    CreateElicitationResponse,
    RequestPermissionRequest,
    RequestPermissionResponse,
    SelectedOutcome,
    SessionNotification,
    SessionUpdate,
    TextBlock,
    ToolCall,
    ToolCallUpdate,
)
from crow_core.acp.transports import Transport, memory_pair
from crow_core.agent import Agent
from crow_core.app import Crow

T = TypeVar("T")


class Editor(AcpClient):
    """An ACP client that records every update and answers permission questions as told."""

    def __init__(self, transport: Transport, *, permit: str | None = "allow_once") -> None:
        super().__init__(
            transport,
            {
                "session/update": self.on_update,
                "session/request_permission": self.on_permission,
                "elicitation/create": self.on_elicitation,
                "elicitation/complete": self.on_complete,
            },
        )
        self.permit = permit
        """The kind of option to choose when asked; None leaves the question open until it is cancelled."""
        self.updates: list[SessionUpdate] = []
        self.questions: list[RequestPermissionRequest] = []
        self.cancelled_questions = 0
        self.answer: CreateElicitationResponse | None = None
        """What is answered to a form or a page; None leaves it open until it is cancelled."""
        self.forms: list[CreateElicitationRequest] = []
        """The pages, too."""
        self.completed: list[str] = []
        """The pages whose business is done, by their ids."""
        self._news = asyncio.Condition()

    async def on_update(self, notification: SessionNotification) -> None:
        self.updates.append(notification.update)
        async with self._news:
            self._news.notify_all()

    async def on_permission(self, question: RequestPermissionRequest) -> RequestPermissionResponse:
        self.questions.append(question)
        async with self._news:
            self._news.notify_all()
        if self.permit is None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled_questions += 1
                return RequestPermissionResponse(outcome=CancelledOutcome())
        chosen = next(option for option in question.options if option.kind == self.permit)
        return RequestPermissionResponse(outcome=SelectedOutcome(option_id=chosen.option_id))

    async def on_elicitation(self, form: CreateElicitationRequest) -> CreateElicitationResponse:
        self.forms.append(form)
        async with self._news:
            self._news.notify_all()
        if self.answer is not None:
            return self.answer
        try:
            return await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.cancelled_questions += 1
            raise

    async def on_complete(self, notification: CompleteElicitationNotification) -> None:
        self.completed.append(notification.elicitation_id)
        async with self._news:
            self._news.notify_all()

    async def until(self, true: "Callable[[Editor], Any]") -> None:
        """Wait until something has been shown or asked."""
        async with self._news:
            await self._news.wait_for(lambda: true(self))

    def of(self, kind: type[T]) -> list[T]:
        """The updates of one kind."""
        return [update for update in self.updates if isinstance(update, kind)]

    @property
    def text(self) -> str:
        """What the agent said, without its thoughts."""
        return "".join(u.content.text for u in self.of(AgentMessageChunk) if isinstance(u.content, TextBlock))

    @property
    def thoughts(self) -> str:
        """What the agent thought aloud, and the notices."""
        return "".join(u.content.text for u in self.of(AgentThoughtChunk) if isinstance(u.content, TextBlock))

    def calls(self) -> dict[str, list[str]]:
        """The states each tool call went through, in order, by its id."""
        states: dict[str, list[str]] = {}
        for update in self.updates:
            if isinstance(update, ToolCall | ToolCallUpdate) and update.status:
                states.setdefault(update.tool_call_id, []).append(update.status)
        return states


@asynccontextmanager
async def connect(
    crow: Crow, *, permit: str | None = "allow_once", capabilities: ClientCapabilities | None = None
) -> AsyncGenerator[Editor]:
    """An editor in conversation with an agent of this app, in memory and past `initialize`."""
    ours, theirs = memory_pair()
    agent = asyncio.ensure_future(Agent(theirs, crow).serve())
    editor = Editor(ours, permit=permit)
    try:
        async with editor.serving():
            await editor.initialize("editor", capabilities or ClientCapabilities())
            yield editor
    finally:
        await asyncio.wait([agent])
        await crow.shut_down()
