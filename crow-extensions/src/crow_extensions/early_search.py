"""The question to a server about its model that the opening of a session begins, for all who need the answer."""

import asyncio
from dataclasses import dataclass, field

from crow_core.session.session import Session
from crow_core.session_state import StateKey

ANSWER_LIMIT = 1.0
"""Seconds that the first prompt waits for a server on a private network, so that the profile fits the model."""


@dataclass
class EarlySearch:
    """The search that the opening of a session has begun."""

    task: asyncio.Task[None] | None = None
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the first prompt has come."""


EARLY = StateKey[EarlySearch]("context_window_early")


async def wait_for_server(session: Session) -> None:
    """Wait until the server has told about the model, if it is asked since the session has opened; at most a second."""
    if (early := session.state.get(EARLY)) and early.task:
        await asyncio.wait([early.task], timeout=ANSWER_LIMIT)
