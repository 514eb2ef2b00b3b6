"""The commands and sub-agents of a session that run in the background, and the sub-agents that have ended."""

from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import Struct, convert

Ask = Callable[[str, str, str], Awaitable[dict[str, Any]]]
"""Sends an action, with the name of work and a text, to the agent; see `_crow/background`."""


class BackgroundWork(Struct, rename="camel"):
    """A command or a sub-agent of a session, as it was when `AgentSession.background` was called."""

    name: str
    kind: str
    """`command` or `agent`."""
    title: str
    state: str
    """`running` or `ended`."""
    end: str = ""
    """The way in which it has ended, such as "exit code 1"."""
    last_line: str = ""
    """The last line of its output, or of what the sub-agent said."""
    session_id: str = ""
    """The id of a sub-agent's own session, which `Agent.session` opens; empty for a command."""
    _ask: Ask | None = None

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name}: {self.title} ({self.end or self.state})>"

    async def stop(self) -> None:
        """End it with all its processes. Raises AgentError."""
        await self._do("stop", "")

    async def tell(self, words: str) -> None:
        """Give words to a sub-agent: it reads them at its next step, or goes on with them. Raises AgentError."""
        await self._do("tell", words)

    async def _do(self, action: str, text: str) -> None:
        assert self._ask
        await self._ask(action, self.name, text)


def to_work(answer: dict[str, Any], ask: Ask) -> list[BackgroundWork]:
    """Convert the answer of the agent."""
    works = convert(answer["work"], list[BackgroundWork])
    for work in works:
        work._ask = ask  # pyright: ignore[reportPrivateUsage]
    return works
