"""The result of a prompt."""

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from crow_core.acp.record import TurnRecord
from crow_core.acp.schema import ToolCall, Usage
from msgspec import UNSET
from msgspec.structs import replace

T = TypeVar("T")


@dataclass
class Result(Generic[T]):
    """The result of a prompt."""

    session_id: str
    text: str = ""
    """The agent's last message."""
    stop_reason: str = ""
    """`end_turn`, `max_tokens`, `max_turn_requests`, `refusal` or `cancelled` (ACP); empty if the turn failed."""
    usage: Usage | None = None
    """The tokens of the turn; None if the agent does not tell."""
    cost: float | None = None
    """The cost of the turn, in the currency of the model's prices; None if the agent does not tell."""
    tool_calls: list[ToolCall] = field(default_factory=list[ToolCall])
    """The tool calls, as they ended. `name` is "" where an agent tells none; it always tells a `title`."""
    denied: list[ToolCall] = field(default_factory=list[ToolCall])
    """Those among them that were denied a permission."""
    error: Exception | None = None
    """The error of an item of `Agent.map`, or why a turn that ended early has no answer; else None."""
    value: Any = UNSET
    """The answer in the type that was asked for; UNSET if there is none."""
    stopped_by: str = ""
    """The part of crow that ended the turn without an answer; empty if none did. `error` has the reason in words.

    `repeated_calls` for equal tool calls with equal results, `budget` for `[extensions.budgets]`, `hook` for a command
    of `[[hooks.before_prompt]]` that refused the prompt, `unknown_command` for a slash command that does not exist.
    """

    @property
    def output(self) -> T:
        """The answer in the type that was asked for; the text if none was. Raises `error`."""
        if self.error is not None:
            raise self.error
        return self.text if self.value is UNSET else self.value  # pyright: ignore[reportReturnType]

    def __str__(self) -> str:
        return self.text if self.text or self.value is UNSET else repr(self.value)

    def _repr_markdown_(self) -> str:
        return self.to_markdown()

    def to_markdown(self) -> str:
        """Return the answer, and below it what it took, as a notebook shows it."""
        facts = [f"{len(self.tool_calls)} tool calls" if self.tool_calls else ""]
        facts += [f"{len(self.denied)} denied" if self.denied else ""]
        facts += [f"{self.usage.total_tokens:,} tokens" if self.usage else ""]
        facts += [f"{self.cost:.4f}" if self.cost else "", "" if self.stop_reason == "end_turn" else self.stop_reason]
        answer = f"```\n{self.value!r}\n```" if self.value is not UNSET else self.text
        answer = f"**{self.error}**" if self.error else answer
        return f"{answer}\n\n<small>{' · '.join(filter(None, [*facts, self.session_id]))}</small>"


def to_result(record: TurnRecord, session_id: str, *, cost_before: float | None) -> Result[Any]:
    """Make the result of a turn from the received updates."""
    calls = {id: call if call.name else replace(call, name="") for id, call in record.calls.items()}
    return Result(
        session_id,
        record.text,
        cost=None if record.cost is None else record.cost - (cost_before or 0),
        tool_calls=list(calls.values()),
        denied=[call for id, call in calls.items() if id in record.denied],
    )
