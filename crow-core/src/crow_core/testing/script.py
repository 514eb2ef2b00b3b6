"""The answers of a scripted model: replies, failures and raw bytes, and the fragments of a reply."""

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict, TypeVar

T = TypeVar("T")

FRAGMENT_LENGTH = 4
"""Characters in one fragment of text. It is about a token, so that fragments cut words."""


class ScriptedCall(TypedDict):
    """A tool call in a script. A missing `id` is generated; an empty one is sent as it is."""

    name: str
    arguments: dict[str, Any] | str  # text is sent as it is, also if it is not JSON
    id: NotRequired[str]


@dataclass
class Reply:
    """An answer of a model, streamed as reasoning, content, then tool calls."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ScriptedCall] = field(default_factory=list[ScriptedCall])
    finish_reason: str | None = None
    """None means `tool_calls` if there are any, else `stop`."""
    usage: dict[str, Any] | None = None
    """The token counts. None means an estimate of four characters a token; an empty dict is not sent."""
    pace: float = 0.0
    """Seconds between fragments."""
    hang: bool = False
    """True if to wait after the last fragment, without finishing, until cancelled."""
    error: Exception | None = None
    """An error after the last fragment: a `ScriptedModel` raises it, a `ScriptedServer` cuts the connection."""


@dataclass
class Failure:
    """An HTTP error instead of a reply."""

    status: int
    body: Any = ""
    """The body; text is sent as it is, anything else as JSON."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass
class Raw:
    """A response body in bytes, for streams that a correct server would not send."""

    chunks: Sequence[bytes]
    """The parts of the body, which are flushed one by one."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Headers in addition to `content-type: text/event-stream`."""
    abort: bool = False
    """True if to close the connection after the last chunk without ending the response."""
    hang: bool = False
    """True if to wait after the last chunk, without ending the response, until cancelled."""


Script = Callable[[dict[str, Any]], Reply | Failure | Raw | Awaitable[Reply | Failure | Raw]]
"""A function that receives the request's JSON body and returns the answer."""


class ScriptEnded(Exception):
    """A scripted model received more requests than its script has replies."""


def play_in_order(answers: Sequence[T]) -> Callable[[dict[str, Any]], T]:
    """Make a script that returns a list's items in order and raises `ScriptEnded` after the last one."""
    remaining = iter(answers)

    def answer(request: dict[str, Any]) -> T:
        try:
            return next(remaining)
        except StopIteration:
            raise ScriptEnded(f"The script holds {len(answers)} replies and was asked for one more.") from None

    return answer


def to_tool_calls(reply: Reply, turn: int) -> list[dict[str, Any]]:
    """Return a reply's tool calls in the form of an assistant message; `turn` makes generated ids unique."""
    return [
        {
            "id": call.get("id", f"call_{turn}_{index}"),
            "type": "function",
            "function": {"name": call["name"], "arguments": to_text(call["arguments"])},
        }
        for index, call in enumerate(reply.tool_calls)
    ]


def to_deltas(reply: Reply, turn: int) -> Iterator[dict[str, Any]]:
    """Yield a reply in fragments, each the `delta` of one streamed chunk."""
    for piece in split_text(reply.reasoning):
        yield {"reasoning_content": piece}
    for piece in split_text(reply.content):
        yield {"content": piece}
    for index, call in enumerate(to_tool_calls(reply, turn)):
        function = call["function"]
        yield {"tool_calls": [{"index": index, **call, "function": {"name": function["name"], "arguments": ""}}]}
        for piece in split_text(function["arguments"]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def get_finish_reason(reply: Reply) -> str:
    return reply.finish_reason or ("tool_calls" if reply.tool_calls else "stop")


def get_usage(reply: Reply, request: dict[str, Any]) -> dict[str, Any]:
    """Return the token counts of a reply; an empty dict if it reports none."""
    if reply.usage is not None:
        return reply.usage
    prompt = len(to_text([request.get("messages"), request.get("tools")])) // 4
    completion = sum(len(to_text(delta)) for delta in (reply.content, reply.reasoning, to_tool_calls(reply, 0))) // 4
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def split_text(text: str) -> Iterator[str]:
    return (text[start : start + FRAGMENT_LENGTH] for start in range(0, len(text), FRAGMENT_LENGTH))


def to_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
