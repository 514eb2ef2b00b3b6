"""The result of a prompt, gathered from the updates that an agent sends while the turn runs."""

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from crow_core.acp.schema import (
    AgentMessageChunk,
    SessionUpdate,
    TextBlock,
    ToolCall,
    ToolCallUpdate,
    Usage,
    UsageUpdate,
)
from msgspec import UNSET
from msgspec.structs import asdict, replace

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
    """The tool calls, as they ended."""
    denied: list[ToolCall] = field(default_factory=list[ToolCall])
    """Those among them that were denied a permission."""
    error: Exception | None = None
    """The error of an item of `Agent.map`, or why a turn that ended early has no value; else None."""
    value: Any = UNSET
    """The answer in the type that was asked for; UNSET if there is none."""

    @property
    def output(self) -> T:
        """The answer in the type that was asked for; the text if none was. Raises `error`."""
        if self.error is not None:
            raise self.error
        return self.text if self.value is UNSET else self.value  # pyright: ignore[reportReturnType]

    def __str__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        """Show the answer in a notebook, and below it what it took."""
        facts = [f"{len(self.tool_calls)} tool calls" if self.tool_calls else ""]
        facts += [f"{len(self.denied)} denied" if self.denied else ""]
        facts += [f"{self.usage.total_tokens:,} tokens" if self.usage else ""]
        facts += [f"{self.cost:.4f}" if self.cost else "", "" if self.stop_reason == "end_turn" else self.stop_reason]
        answer = f"**{self.error}**" if self.error else self.text
        return f"{answer}\n\n<small>{' · '.join(filter(None, [*facts, self.session_id]))}</small>"


@dataclass
class TurnRecord:
    """What an agent has sent for the running turn of a session."""

    messages: list[list[str]] = field(default_factory=list[list[str]])
    """The pieces of each message of the agent."""
    message_id: object = None
    """The id of the last message; None where a new message begins."""
    calls: dict[str, ToolCall] = field(default_factory=dict[str, ToolCall])
    """The tool calls by id."""
    denied: set[str] = field(default_factory=set[str])
    """The ids of those that were denied a permission."""
    cost: float | None = None
    """The cost of the session so far."""

    def add(self, update: SessionUpdate) -> None:
        """Take in an update."""
        match update:
            case AgentMessageChunk(content=TextBlock(text=text), message_id=id):
                if not self.messages or id != self.message_id:
                    self.messages.append([])
                self.message_id = id
                self.messages[-1].append(text)
            case ToolCall(tool_call_id=id):
                self.calls[id] = update
                self.message_id = None
            case ToolCallUpdate(tool_call_id=id):
                changed = {key: value for key, value in asdict(update).items() if value is not UNSET}
                known = self.calls.get(id) or ToolCall(tool_call_id=id, title=id)
                fields = {key: value for key, value in changed.items() if hasattr(known, key) and value is not None}
                self.calls[id] = replace(known, **fields)
                match update.meta:
                    case {"crow": {"denied": _}}:
                        self.denied.add(id)
                    case _:
                        pass
            case UsageUpdate(cost=cost) if cost:
                self.cost = cost.amount
            case _:
                pass

    @property
    def text(self) -> str:
        """The last message."""
        return "".join(self.messages[-1]) if self.messages else ""

    def to_result(self, session_id: str, *, cost_before: float | None) -> Result[Any]:
        """Make the result of the turn."""
        return Result(
            session_id,
            self.text,
            cost=None if self.cost is None else self.cost - (cost_before or 0),
            tool_calls=list(self.calls.values()),
            denied=[call for id, call in self.calls.items() if id in self.denied],
        )
