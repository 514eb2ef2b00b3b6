"""Show a summary to the user before it counts; the user may edit it or discard it."""

from collections.abc import Sequence
from typing import Any

from crow_core.acp.schema import ElicitationSchema, StringPropertySchema
from crow_core.content import find_first_text
from crow_core.errors import ElicitationError
from crow_core.mcp.elicitation import can_ask
from crow_core.messages.message import Message
from crow_core.session.session import Session
from crow_system.shortening import shorten_line

from crow_compact.summary import CannotCompact

MAX_LISTED = 8
"""Kept messages that are listed; the others are counted."""
LINE_LENGTH = 70
"""Characters of each listed message."""


async def ask_for_summary(session: Session, summary: str, kept: Sequence[Message], *, must_ask: bool) -> str:
    """Ask the user about a summary of older messages, and return it as the user left it.

    `kept` are the messages that stay word for word. Without forms, the client is asked only with `must_ask`: it shows
    the summary and takes a yes or no. Raises CannotCompact.
    """
    listed, edited = describe_kept(kept), summary
    if can_ask(session.client.capabilities, "form"):
        text = StringPropertySchema(title="Summary", default=summary)
        form = ElicitationSchema(properties={"summary": text}, required=["summary"])
        try:
            answer = await session.user.elicit(f"Replace the older messages by this summary? {listed}", form=form)
        except ElicitationError as error:
            raise CannotCompact(f"The summary could not be shown: {error}.") from error
        accepted, edited = answer.action == "accept", str(answer.content.get("summary", "")).strip()
    elif must_ask:
        await session.notice(f"The summary: {summary}")
        accepted = await session.user.confirm(f"Replace the older messages by it? {listed}")
    else:
        return summary
    if not accepted:
        raise CannotCompact("You discarded the summary.")
    if not edited:
        raise CannotCompact("The summary was edited to nothing.")
    return edited


def describe_kept(kept: Sequence[Message]) -> str:
    """Describe the messages that stay word for word, a line each."""
    lines = [f"- {describe_message(message)}" for message in kept[:MAX_LISTED]]
    if len(kept) > MAX_LISTED:
        lines.append(f"- and {len(kept) - MAX_LISTED} more")
    return "\n".join(["These stay word for word:", *lines])


def describe_message(message: Message) -> str:
    """Describe a message in one line: its role, and the beginning of its text or the tools that it calls."""
    calls: list[Any] = [*message.get("tool_calls", ())]
    text = " ".join(find_first_text(message).split()) or ", ".join(call["function"]["name"] for call in calls)
    role = {"user": "you", "tool": "a result"}.get(str(message.get("role")), "the model")
    return f"{role}: {shorten_line(text, LINE_LENGTH)}"
