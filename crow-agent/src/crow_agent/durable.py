"""The place of a call in a durable workflow, as agents and sessions see it; `crow_agent.workflows` sets it."""

from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from crow_agent.agent import Agent
    from crow_agent.result import Result
    from crow_agent.session import AgentSession


class DurablePlace(Protocol):
    """A task of a running workflow, whose calls are numbered in the order of the program."""

    async def open_session(self, agent: "Agent", cwd: str) -> "AgentSession":
        """Open the session of this place: a new one, or the one that was opened here before the program ended."""
        ...

    async def prompt(
        self, session: "AgentSession", ask: "Callable[[str], Awaitable[Result[Any]]]", output: Any
    ) -> "Result[Any]":
        """Run a prompt as a step. `ask` sends it with a key; the key is empty for an agent that takes none."""
        ...

    def branch(self) -> AbstractContextManager[None]:
        """Number a part of the program that runs beside others; its calls are those in the block."""
        ...


PLACE: "ContextVar[DurablePlace | None]" = ContextVar("PLACE", default=None)
"""The place of the running code; None outside of a workflow, in its steps, and in an agent."""


@contextmanager
def outside_workflows() -> Generator[None]:
    """Run a block, and the tasks that it starts, as outside of any workflow."""
    token = PLACE.set(None)
    try:
        yield
    finally:
        PLACE.reset(token)
