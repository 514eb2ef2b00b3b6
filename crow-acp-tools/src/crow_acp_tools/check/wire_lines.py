"""The lines of a conversation with an agent, its requests with their answers, and its flaws."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from crow_acp_tools.check.validation import get_path, to_short_json

MAX_LINE_BYTES = 64 * 1024
"""Bytes of a line that are kept for the report."""
Message = dict[str, Any]


@dataclass(eq=False)
class WireLine:
    """One line that the client or the agent wrote, without its newline."""

    at: float
    """Seconds since the agent was started."""
    sender: Literal["client", "agent"]
    raw: bytes
    """Its first MAX_LINE_BYTES bytes."""
    message: Message | None = None
    """None if the line is not a JSON-RPC message."""


@dataclass(frozen=True)
class Flaw:
    """Something that is wrong in any conversation."""

    id: str
    """The id of the requirement that it breaks."""
    why: str
    line: WireLine | None


@dataclass(eq=False)
class CheckRequest:
    """A request of this client, with its answer."""

    method: str
    params: Message
    sent: WireLine
    answer: WireLine | None = None
    """The answer, if it came in time."""
    late_answer: WireLine | None = None
    """The answer, if it came after the timeout."""
    no_answer_reason: str = ""
    """The reason why there is no answer, or none in time."""
    is_lost: bool = False
    """True if there is no answer because the agent had ended, or was stopped for writing too much."""
    interrupted: WireLine | None = None
    """The line with which this client interrupted the turn."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def answer_message(self) -> Message:
        """The answer; empty if there is none."""
        return (self.answer and self.answer.message) or {}

    @property
    def error(self) -> Message | None:
        """The error of an answer that came in time."""
        error = self.answer_message.get("error")
        return cast("Message", error) if isinstance(error, dict) else None

    @property
    def result(self) -> Any:
        return self.answer_message.get("result")

    def member(self, name: str) -> Any:
        """Return a member of the result; None if it has no such member."""
        return get_path(self.result, name)


def is_update(line: WireLine, session: str) -> bool:
    """Tell whether a line is an update of this session."""
    updates = line.sender == "agent" and get_path(line.message, "method") == "session/update"
    return updates and get_path(line.message, "params", "sessionId") == session


def update_kind(line: WireLine) -> str:
    """Return the kind of the update in a line; "" for any other line."""
    return str(get_path(line.message, "params", "update", "sessionUpdate") or "")


def get_stop_reason(line: WireLine) -> Any:
    """Return the stop reason of an update that ends a turn of version 2; None for another line."""
    update = get_path(line.message, "params", "update")
    ends = update_kind(line) == "state_update" and get_path(update, "state") == "idle"
    return get_path(update, "stopReason") if ends else None


def describe_error(error: Message) -> str:
    """Format an error of an answer for a person."""
    return f"{to_short_json(error.get('code'))} {to_short_json(error.get('message'))}"
