"""What a scripted model says: replies, failures and raw bytes, and how a reply falls into fragments."""

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict, TypeVar

T = TypeVar("T")

PIECE = 4
"""Characters in one fragment of text: about a token, so that consumers meet words cut in the middle."""


class ScriptedCall(TypedDict):
    """A call as a script writes it; `id` is made up where absent, and an empty one is sent empty."""

    name: str
    arguments: dict[str, Any] | str  # text goes out as it is, broken JSON included
    id: NotRequired[str]


@dataclass
class Reply:
    """One answer of the model, streamed as reasoning, content, then tool calls."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ScriptedCall] = field(default_factory=list[ScriptedCall])
    finish_reason: str | None = None
    """None means "tool_calls" where there are some, else "stop"."""
    usage: dict[str, Any] | None = None
    """None means an estimate of four characters a token; an empty dict means that none is reported."""
    pace: float = 0.0
    """Seconds between fragments."""
    hang: bool = False
    """After the last fragment wait, without finishing, until cancelled."""
    error: Exception | None = None
    """What breaks after the last fragment: raised by a `ScriptedModel`, a cut connection at a `ScriptedServer`."""


@dataclass
class Failure:
    """An HTTP error instead of a reply."""

    status: int
    body: Any = ""
    """Text is sent as it is, anything else as JSON."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass
class Raw:
    """A response body given byte for byte, for streams that no well-behaved server would send."""

    chunks: Sequence[bytes]
    """Flushed one by one."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Joined to `content-type: text/event-stream`."""
    abort: bool = False
    """Close the connection after the last chunk without ending the response."""
    hang: bool = False
    """After the last chunk wait, without ending the response, until cancelled."""


Script = Callable[[dict[str, Any]], Reply | Failure | Raw | Awaitable[Reply | Failure | Raw]]
"""Receives the request's JSON body, returns the answer."""


class ScriptEnded(Exception):
    """A scripted model was asked more often than its script foresaw."""


def in_order(answers: Sequence[T]) -> Callable[[dict[str, Any]], T]:
    """A script that plays a list, and raises `ScriptEnded` once it has been played."""
    remaining = iter(answers)

    def answer(request: dict[str, Any]) -> T:
        try:
            return next(remaining)
        except StopIteration:
            raise ScriptEnded(f"The script holds {len(answers)} replies and was asked for one more.") from None

    return answer


def calls(reply: Reply, turn: int) -> list[dict[str, Any]]:
    """The reply's tool calls as an assistant message holds them; `turn` makes the made-up ids unique."""
    return [
        {
            "id": call.get("id", f"call_{turn}_{index}"),
            "type": "function",
            "function": {"name": call["name"], "arguments": _text(call["arguments"])},
        }
        for index, call in enumerate(reply.tool_calls)
    ]


def deltas(reply: Reply, turn: int) -> Iterator[dict[str, Any]]:
    """The reply in fragments, each the `delta` of one streamed chunk."""
    for piece in _pieces(reply.reasoning):
        yield {"reasoning_content": piece}
    for piece in _pieces(reply.content):
        yield {"content": piece}
    for index, call in enumerate(calls(reply, turn)):
        function = call["function"]
        yield {"tool_calls": [{"index": index, **call, "function": {"name": function["name"], "arguments": ""}}]}
        for piece in _pieces(function["arguments"]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def finish_reason(reply: Reply) -> str:
    return reply.finish_reason or ("tool_calls" if reply.tool_calls else "stop")


def usage(reply: Reply, request: dict[str, Any]) -> dict[str, Any]:
    """What the reply reports as its tokens; empty where it reports none."""
    if reply.usage is not None:
        return reply.usage
    prompt = len(_text([request.get("messages"), request.get("tools")])) // 4
    completion = sum(len(_text(delta)) for delta in (reply.content, reply.reasoning, calls(reply, 0))) // 4
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _pieces(text: str) -> Iterator[str]:
    return (text[start : start + PIECE] for start in range(0, len(text), PIECE))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
