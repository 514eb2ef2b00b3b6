"""The place of a call in a durable workflow, as agents and sessions see it; `crow_agent.workflows` sets it."""

from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

from crow_agent.agent_client import ProgramClient
from crow_agent.result import Result


class DurableSession(Protocol):
    """A session as a workflow knows it."""

    id: str

    @property
    def takes_keys(self) -> bool:
        """True if an interrupted turn can go on."""
        ...

    @property
    def is_lost(self) -> bool:
        """True if its agent was closed."""
        ...

    async def close(self) -> None:
        """Close the session."""
        ...


S = TypeVar("S", bound=DurableSession)
S_co = TypeVar("S_co", bound=DurableSession, covariant=True)


class DurableAgent(Protocol[S_co]):
    """An agent as a workflow knows it."""

    async def open(self) -> ProgramClient:
        """Start or connect the agent, if that is not done."""
        ...

    async def session(self, id: str = "", *, cwd: str = "") -> S_co:
        """Open a new session, or the stored one with this id."""
        ...

    async def make_session(self, id: str, cwd: str = "", origin: Mapping[str, Any] | None = None) -> S_co:
        """Make a session, or open the stored one with this id."""
        ...


class DurablePlace(Protocol):
    """A task of a running workflow, whose calls are numbered in the order of the program."""

    async def open_session(self, agent: DurableAgent[S], cwd: str) -> S:
        """Open the session of this place: a new one, or the one that was opened here before the program ended."""
        ...

    async def prompt(
        self, session: DurableSession, ask: Callable[[str], Awaitable[Result[Any]]], output: Any
    ) -> Result[Any]:
        """Run a prompt as a step. `ask` sends it with a key; the key is empty for an agent that takes none."""
        ...

    def branch(self) -> AbstractContextManager[None]:
        """Number a part of the program that runs at the same time as others; its calls are those in the block."""
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
