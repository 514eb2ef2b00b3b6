"""The outcome of `crow run`: one JSON document in every case, and the exit code."""

import re
import shlex
from dataclasses import replace
from time import monotonic
from typing import Any, Literal

import click
import msgspec
from crow_core.acp.schema import StopReason
from crow_core.app import Crow
from crow_core.content import to_announcement
from crow_core.errors import ModelError
from crow_core.masking import mask
from crow_core.mcp.result import ToolResult
from crow_core.mcp.tool import ToolCall
from crow_core.models.model_call import ModelCall
from crow_core.models.token_usage import count_tokens, find_price
from crow_core.session.session import Session
from crow_core.session.user import NOBODY_THERE
from crow_core.text import escape_controls
from crow_permissions.judgement import find_permissions, judge
from crow_permissions.rules import parse_rule
from crow_permissions.subjects import find_subject

from crow_cli.console import shorten

SCHEMA_VERSION = 1
"""The version of the JSON document. New keys do not change it; keys that are removed or mean something else do."""

DONE, FAILED, USAGE, NOT_PERMITTED, LIMIT, TRANSIENT, INTERRUPTED = 0, 1, 2, 3, 4, 75, 130
"""The exit codes of `crow run`."""

MAX_TITLE = 200
"""Columns of the title of a denied tool call."""


class DeniedCall(msgspec.Struct):
    """A tool call that was denied."""

    id: str
    tool: str
    title: str
    """The command, the path, or the address and more; what a client shows."""
    reason: str
    flag: str
    """The option of `crow run` that would have allowed it; "" if none would, or if nobody was asked."""


class TokenUsage(msgspec.Struct):
    """The tokens of a prompt, those of sub-agents too."""

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    total_tokens: int = 0


class ContextUse(msgspec.Struct):
    """The tokens in the context window after the last model call, and the size of the window."""

    used: int
    size: int


class Outcome(msgspec.Struct, kw_only=True):
    """The end of a prompt, as the JSON document has it. `output` is set with --output-schema only."""

    type: Literal["result"] = "result"
    schema_version: int = SCHEMA_VERSION
    exit_code: int = DONE
    session_id: str | None = None
    """`crow run -r` continues it; null if none was opened, or if it is not stored."""
    model: str | None = None
    stop_reason: str | None = None
    """As in ACP: `end_turn`, `max_tokens`, `max_turn_requests`, `refusal` or `cancelled`; null if the turn failed."""
    stopped_by: str | None = None
    """The part of crow that ended the turn without an answer, such as `repeated_calls`; null if none did."""
    text: str = ""
    """All messages of the agent."""
    output: Any = msgspec.UNSET
    error: str | None = None
    """The reason of an exit code that is not 0, as a sentence."""
    denied: list[DeniedCall] = []
    usage: TokenUsage = msgspec.field(default_factory=TokenUsage)
    context: ContextUse | None = None
    cost: float | None = None
    """In the currency of the model's prices; null if they are not known."""
    currency: str | None = None
    seconds: float = 0.0

    def print(self) -> None:
        """Print it as one line of JSON."""
        click.echo(escape_controls(msgspec.json.encode(self).decode()))


class TurnWatch:
    """Records the tokens and the cost of a turn, the calls denied in it, and the error that ends it."""

    def __init__(self) -> None:
        self.outcome = Outcome()
        self.failure: Exception | None = None
        self._started = monotonic()

    def __call__(self, crow: Crow) -> None:
        """Register its functions, as an extension."""
        crow.model_call(self.count)
        crow.after_tool(self.note_denial)
        crow.turn_end(self.note_failure)

    def count(self, session: Session, model_call: ModelCall) -> None:
        if not model_call.ended:
            return
        outcome, usage, counted = self.outcome, self.outcome.usage, count_tokens(model_call)
        if model_call.purpose == "turn" and not session.parent:
            outcome.model = model_call.model.name
        usage.requests += 1
        if not model_call.first_delta and not model_call.usage:
            return
        usage.input_tokens += counted["prompt"]
        usage.output_tokens += counted["completion"]
        usage.cached_tokens += counted["cached"]
        usage.total_tokens = usage.input_tokens + usage.output_tokens
        if paid := find_price(model_call):
            outcome.cost, outcome.currency = (outcome.cost or 0) + paid[0], paid[1]

    def note_denial(self, result: ToolResult, session: Session, tool_call: ToolCall) -> None:
        if reason := result.meta.get("crow/denied"):
            title = shorten(to_announcement(tool_call, session.cwd).title, MAX_TITLE)
            flag = find_flag(session, tool_call) if reason == NOBODY_THERE else ""
            denied = DeniedCall(tool_call.id, tool_call.name, title, reason, flag)
            self.outcome.denied.append(msgspec.convert(mask(msgspec.to_builtins(denied), session.secrets), DeniedCall))

    def note_failure(self, session: Session, outcome: StopReason | Exception) -> None:
        if not session.parent and isinstance(outcome, Exception):
            self.failure = outcome

    def conclude(self, *, limit: str) -> Outcome:
        """Complete the outcome with the exit code and its explanation; `limit` is the limit that the turn has reached,
        "" if none."""
        outcome = self.outcome
        outcome.seconds = round(monotonic() - self._started, 3)
        unanswered = [call for call in outcome.denied if NOBODY_THERE in call.reason]
        is_transient = isinstance(self.failure, ModelError) and self.failure.retry
        if limit or outcome.stop_reason == "max_turn_requests":
            outcome.exit_code, outcome.error = LIMIT, limit or outcome.error or SENTENCES["max_turn_requests"]
        elif outcome.stop_reason == "cancelled":
            outcome.exit_code, outcome.error = INTERRUPTED, SENTENCES["cancelled"]
        elif outcome.error or outcome.stop_reason != "end_turn":
            outcome.exit_code = TRANSIENT if is_transient else outcome.exit_code or FAILED
            outcome.error = outcome.error or SENTENCES.get(str(outcome.stop_reason), str(outcome.stop_reason))
        elif unanswered:
            outcome.exit_code, outcome.error = NOT_PERMITTED, describe_unanswered(unanswered)
        return outcome


SENTENCES = {
    "max_tokens": "The model's answer was cut at its length limit.",
    "max_turn_requests": "Stopped: the prompt took as many model requests as allowed (--max-requests).",
    "refusal": "The model refused.",
    "cancelled": "Cancelled.",
}
"""Sentences about turns that did not end normally, by the stop reason."""


def describe_unanswered(calls: list[DeniedCall]) -> str:
    """Say which tool calls were denied because nobody could be asked, and how to allow them."""
    flags = list(dict.fromkeys(call.flag for call in calls if call.flag))
    what = "A tool call" if len(calls) == 1 else f"{len(calls)} tool calls"
    named = ", ".join(dict.fromkeys(f"{call.tool} {call.title}" for call in calls[:3]))
    more = ", …" if len(calls) > 3 else ""
    how = f" To allow this, add: {' '.join(flags)}" if flags else ""
    return f"{what} needed a permission, and nobody was there to give it: {named}{more}.{how}"


def find_flag(session: Session, tool_call: ToolCall) -> str:
    """Find the narrowest option of `crow run` with which a tool call would not be asked about; "" if there is none."""
    permissions = find_permissions(session)
    if permissions is None:
        return ""
    subject = find_subject(session, tool_call)
    pattern = "" if subject.startswith("{") else ":" + re.sub(r"([*?[])", r"[\1]", subject)
    try:
        rule = parse_rule(f"{tool_call.name}{pattern}")
    except ValueError:
        return ""
    rules = replace(permissions.rules, allow=[*permissions.rules.allow, rule])
    options = {
        f"--allow {shlex.quote(str(rule))}": replace(permissions, rules=rules),
        "--mode accept-edits": replace(permissions, mode="accept-edits"),
        "--mode yolo": replace(permissions, mode="yolo"),
    }
    return next((flag for flag, each in options.items() if judge(session, each, tool_call).verdict == "allow"), "")
