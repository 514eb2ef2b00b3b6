"""Report the tokens, the cost and the cache use of model calls: to the client after each reply, and through /usage."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from crow_core.acp.schema import Cost, UsageUpdate
from crow_core.app import Crow
from crow_core.messages.message import Message, marker_kind
from crow_core.messages.passes import SELECTING_MARKERS
from crow_core.models.chat_model import encode_json, get_window
from crow_core.models.model_call import ModelCall, ModelRequest
from crow_core.models.token_usage import (
    ASSUMED_WINDOW,
    SESSION_TOTALS,
    TURN_TOTALS,
    TokenTotals,
    count_tokens,
    find_price,
)
from crow_core.session.session import Command, Session
from crow_core.session_state import StateKey
from msgspec import UNSET


@dataclass
class LastRequest:
    """The last request of a session, compared with the one before: servers reuse what is equal at the start."""

    messages: list[dict[str, Any]]
    tools: Any
    equal: int = 0
    """The number of messages, from the first on, that are those of the request before; -1 if its tools are others."""
    total: int = 0
    """The number of messages of the request before; 0 if there was none."""
    counted: dict[str, int] = field(default_factory=dict[str, int])
    """The tokens of the request, as `count_tokens` returns them."""
    estimated: bool = True
    """True if they are estimated, because the server did not count."""

    def measure(self) -> str:
        """Draw the meter for /usage: the share of the request that it began with like the one before, and the share
        that the server says it had in its cache. Empty for the first request."""
        if not self.total:
            return ""
        whole = len(encode_json({"tools": self.tools, "messages": self.messages}))
        same = (
            len(encode_json({"tools": self.tools, "messages": self.messages[: self.equal]})) if self.equal >= 0 else 0
        )
        lines = [
            f"`{draw_bar(same / whole)}` {same / whole:.0%} of the last request is the beginning of the one before it."
        ]
        if not self.estimated and (prompt := self.counted["prompt"]):
            share, of = self.counted["cached"] / prompt, f"{self.counted['cached']:,} of {prompt:,} tokens"
            lines.append(f"`{draw_bar(share)}` {share:.0%} came from the server's cache: {of}.")
        else:
            lines.append("The server does not report how much it had in its cache.")
        return "\n\n".join(lines)

    def describe(self) -> str:
        """Make a sentence for /usage; empty for the first request."""
        if not self.total:
            return ""
        if self.equal >= self.total - 1:  # the last message may grow: two user messages in a row are joined
            return "The last request began like the one before it: the server could reuse all it had read."
        where = f"message {self.equal + 1} of {self.total}" if self.equal >= 0 else "its tools"
        return f"The last request departed from the one before it at {where}."


def draw_bar(share: float) -> str:
    """Draw a share as a bar of ten characters, full only for all of it."""
    filled = min(int(share * 10 + 0.5), 10 if share >= 1 else 9)
    return "█" * filled + "░" * (10 - filled)


def compare_requests(request: ModelRequest, before: LastRequest | None) -> LastRequest:
    last = LastRequest(request["messages"], request.get("tools"))
    if before:
        pairs = enumerate(zip(before.messages, last.messages, strict=False))
        shorter = min(len(before.messages), len(last.messages))
        equal = next((n for n, (old, new) in pairs if old != new), shorter)
        last.equal, last.total = equal if before.tools == last.tools else -1, len(before.messages)
    return last


LAST_REQUEST = StateKey[LastRequest | None]("last_request", lambda: None)


def usage(crow: Crow) -> None:
    """Report the tokens of each model call. A store supplies the totals of a session that is loaded.

    Adds the command /usage and the method `_crow/usage`.
    """

    @crow.message
    def forget_request(session: Session, entry: Message) -> None:
        if marker_kind(entry) in SELECTING_MARKERS:  # it changes what is sent, so there is nothing to compare
            session.state[LAST_REQUEST] = None

    @crow.model_call
    def count_aside(session: Session, model_call: ModelCall) -> None:
        if model_call.ended and not model_call.error and model_call.purpose != "turn":
            add_usage(session, model_call, count_tokens(model_call))

    @crow.after_model
    async def report(session: Session, model_call: ModelCall) -> None:
        last = session.state[LAST_REQUEST] = compare_requests(model_call.request, session.state[LAST_REQUEST])
        counted = count_tokens(model_call)
        totals = add_usage(session, model_call, counted)
        last.counted, last.estimated = counted, not model_call.usage
        totals.used, totals.estimated = counted["prompt"] + counted["completion"], not model_call.usage
        cost = Cost(amount=totals.cost, currency=totals.currency) if totals.currency else UNSET
        await session.update(UsageUpdate(used=totals.used, size=get_window(session.model) or ASSUMED_WINDOW, cost=cost))

    crow.methods["_crow/usage"] = report_usage

    @crow.commands
    def command(session: Session) -> list[Command]:
        return [Command("usage", "Tokens, cost and cache use so far", show_usage)]


def add_usage(session: Session, model_call: ModelCall, counted: Mapping[str, int]) -> TokenTotals:
    """Add a model call to the totals of the session, its parent and the turn; return those of the session."""
    totals = session.state[SESSION_TOTALS]
    above = session.parent and session.parent.state[SESSION_TOTALS]
    for each in filter(None, (totals, above, TURN_TOTALS.get())):
        each.calls += 1
        each.prompt += counted["prompt"]
        each.completion += counted["completion"]
        each.cached += counted["cached"]
        each.thought += counted["thought"]
    if paid := find_price(model_call):
        for each in filter(None, (totals, above)):
            each.cost += paid[0]
            each.currency = paid[1]
    return totals


def report_usage(session: Session, params: dict[str, Any]) -> dict[str, Any]:
    """Answer the method `_crow/usage` with the totals of a session."""
    totals = session.state[SESSION_TOTALS]
    answer: dict[str, Any] = {
        "calls": totals.calls,
        "inputTokens": totals.prompt,
        "outputTokens": totals.completion,
        "cachedReadTokens": totals.cached,
        "thoughtTokens": totals.thought,
        "used": totals.used,
        "size": get_window(session.model),
    }
    return {**answer, "cost": {"amount": totals.cost, "currency": totals.currency}} if totals.currency else answer


async def show_usage(session: Session, words: str) -> str:
    """Answer the command /usage."""
    totals = session.state[SESSION_TOTALS]
    if not totals.calls:
        return "The model has not been asked in this session."
    last = session.state[LAST_REQUEST]
    size = get_window(session.model) or ASSUMED_WINDOW
    about = "about " if totals.estimated else ""
    share = f", {totals.cached / totals.prompt:.0%}" if totals.prompt else ""
    lines = [
        f"Context: {about}{totals.used:,} of {size:,} tokens{'' if get_window(session.model) else ' (assumed)'}.",
        f"{totals.calls} model calls: {totals.prompt:,} tokens in ({totals.cached:,} from the server's cache{share}), "
        f"{totals.completion:,} out.",
        last.describe() if last else "",
        last.measure() if last else "",
        f"Cost: {totals.cost:.4f} {totals.currency}." if totals.currency else "",
    ]
    return "\n\n".join(line for line in lines if line)
