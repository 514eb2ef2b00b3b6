"""A record of a turn, gathered by a client from the updates that an agent sends."""

from dataclasses import dataclass, field

from msgspec import UNSET
from msgspec.structs import asdict, replace

from crow_core.acp.schema import (
    AgentMessageChunk,
    SessionUpdate,
    TextBlock,
    ToolCall,
    ToolCallUpdate,
    UsageUpdate,
)


@dataclass
class TurnRecord:
    """The updates by an agent in the running turn of a session."""

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
    currency: str = ""
    """The currency of the cost."""

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
                if id not in self.calls:
                    self.message_id = None
                known = self.calls.get(id) or ToolCall(tool_call_id=id, title=id)
                fields = {key: value for key, value in changed.items() if hasattr(known, key) and value is not None}
                self.calls[id] = replace(known, **fields)
                match update.meta:
                    case {"crow": {"denied": _}}:
                        self.denied.add(id)
                    case _:
                        pass
            case UsageUpdate(cost=cost) if cost:
                self.cost, self.currency = cost.amount, cost.currency
            case _:
                pass

    @property
    def text(self) -> str:
        """The last message."""
        return "".join(self.messages[-1]) if self.messages else ""
