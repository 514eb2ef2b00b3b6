"""The writes of a session for the next commit."""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from crow_core.messages.message import Message, marker_kind
from crow_core.models.model_call import ModelCall
from crow_core.session.session import Session


def is_stored(log: Sequence[Message]) -> bool:
    """True if a session with this log is stored: it has a message, or is new and its id was chosen."""
    return any("role" in entry or marker_kind(entry) == "opened" for entry in log)


@dataclass(eq=False)
class SessionWrite:
    """The writes of a session: the new entries of its log, and this."""

    session: Session
    parts: list[Message] = field(default_factory=list[Message])
    """The text of a streaming reply that has arrived since the last commit, as `write_draft` received it."""
    model_calls: list[ModelCall] = field(default_factory=list[ModelCall])
    """Model calls that were sent, or have ended, as they were then."""
    lost_calls: dict[str, str] = field(default_factory=dict[str, str])
    """The reasons for which model calls were not stored and never will be, by their ids."""
    is_copy: bool = False
    """True if the session was stored in another file before, which is gone."""
    secrets: Collection[str] = ()
    """Strings that are masked in all of it."""
    entries: int = 0
    """Number of the log's entries when the commit began. Later ones may have a draft that is still to be written."""
    times: Sequence[int] = ()
    """The times of the new entries, in milliseconds since 1970; none if they are new now."""
    done: "asyncio.Future[None] | None" = None
    """Ends with the commit, for those who wait for it."""

    def take_over(self, failed: "SessionWrite") -> None:
        """Also write the model calls and parts of an earlier write, which failed. Its entries are still to be written
        anyway."""
        self.model_calls[:0] = failed.model_calls
        self.parts[:0] = failed.parts

    def drop_model_calls(self, lost: Collection[str]) -> None:
        """Drop the model calls with these ids, and leave of each other one only its latest state."""
        latest = {model_call.id: model_call for model_call in self.model_calls}
        self.model_calls = [model_call for id, model_call in latest.items() if id not in lost]
