"""Chat-completions messages: the entries of the log, and how a reply is completed.

The log is append-only. Its entries are messages, in the form that is sent to the model, and markers, which have only
the key `crow`. `settle` completes a reply. `passes.view` derives from the log the messages of the next request.
"""

import hashlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Literal, TypedDict, Unpack, cast

from crow_core.messages.notes import EditNotes, Notes
from crow_core.text import decode_json

INTERRUPTED = "Interrupted before it finished; it may have had effects. Check before you repeat it."
"""The answer to a tool call whose result never arrived."""
NOT_RUN = "This was not run, and had no effects: the turn ended before the call began."
"""The answer to a tool call that had not begun when its turn was cancelled, or failed."""


class Function(TypedDict):
    name: str
    """The name that the model wrote, which may not be a tool's; see `tool_names`."""
    arguments: str
    """JSON text, exactly as the model wrote it."""


class RawToolCall(TypedDict):
    """A tool call of an assistant message."""

    id: str
    type: Literal["function"]
    function: Function


class SentMessage(TypedDict, total=False):
    """A chat-completions message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: "str | list[dict[str, Any]] | None"
    reasoning_content: str
    tool_calls: list[RawToolCall]
    tool_call_id: str


class Message(SentMessage, total=False):
    """An entry of the log: a chat-completions message or, with only the key `crow`, a marker."""

    crow: Notes
    """Notes of our own, which are never sent."""


class Delta(TypedDict, total=False):
    """A fragment of a streamed reply, with the same keys for every provider."""

    content: str
    reasoning_content: str
    tool_calls: list[dict[str, Any]]
    finish_reason: str
    usage: dict[str, Any]
    cached: int
    """Prompt tokens that the server had in its cache, if it says so outside of `usage`."""
    thought_ends: bool
    """True if all content before this delta was reasoning: the server sent only the closing tag."""
    sent: dict[str, Any]
    """The body of the request that is about to be sent; not part of the reply."""
    printed: str
    """The whole text of a reply in which the server sent tool calls as text; they are in `tool_calls`."""
    progress: dict[str, Any]
    """The server's count of the prompt's tokens: `total`, `cache`, `processed`, and the `time_ms` so far."""
    notice: str
    """A sentence for the user, such as that the request is sent again; not part of the reply."""


def parse_arguments(call: RawToolCall) -> dict[str, Any] | None:
    """Parse the arguments of a tool call; None if their text is not a JSON object, or empty."""
    text = call["function"]["arguments"]
    if not text:
        return None
    try:
        parsed = decode_json(text)
    except ValueError:  # not JSON, or with half a surrogate pair
        return None
    return cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else None


def settle(reply: Message, *, used: set[str], whole: bool = True) -> Message:
    """Complete a reply: give each tool call an id that is not in `used`, and drop the calls of a reply that was cut.

    `used` holds the ids of the session's tool calls so far; those of the reply are added. Providers reuse ids in later
    turns, but ids must be unique in a session (ACP, tool calls).
    """
    notes = reply.get("crow", {})
    calls = drop_echoes(reply.pop("tool_calls", []), notes.pop("indexes", []))
    if calls and not whole:
        # Half a call cannot run, and a call that does not run must not appear in the log.
        notes["dropped_calls"] = [call["function"]["name"] for call in calls]
        calls = []
    for call in calls:
        call["function"]["arguments"] = call["function"]["arguments"] or "{}"
        call["id"] = make_unique(call["id"] or "call", used)
        used.add(call["id"])
    if calls:
        reply["tool_calls"] = calls
    if notes:
        reply["crow"] = notes
    else:
        reply.pop("crow", None)
    return reply


def drop_echoes(calls: Sequence[RawToolCall], indexes: Sequence[Any]) -> list[RawToolCall]:
    """Drop the calls that are empty, or only repeat one: its name behind its arguments, or all of it with its index."""
    kept: list[RawToolCall] = []
    seen: set[tuple[str, ...]] = set()
    for call, index in zip_longest(calls, indexes):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        key = (call["id"], str(index), name, arguments)
        is_repeated = kept and not arguments.strip() and name == kept[-1]["function"]["name"]
        is_echo = (is_repeated and call["id"] in ("", kept[-1]["id"])) or (call["id"] and key in seen)
        if (name or arguments) and not is_echo:
            kept.append(call)
        seen.add(key)
    return kept


def make_unique(name: str, used: set[str]) -> str:
    """Return `name`, or `name_2`, `name_3` … if it is in `used`."""
    candidate, n = name, 1
    while candidate in used:
        n += 1
        candidate = f"{name}_{n}"
    return candidate


def answer_tool_call(raw_call: RawToolCall, content: "str | list[dict[str, Any]]", **notes: Unpack[Notes]) -> Message:
    """Make the tool message that answers a tool call."""
    message: Message = {"role": "tool", "tool_call_id": raw_call["id"], "content": content}
    if notes:
        message["crow"] = notes
    return message


def to_digest(part: dict[str, Any]) -> str:
    """Return a digest of an image; "" for another part of a message."""
    match part:
        case {"type": "image_url", "image_url": {"url": str(url)}}:
            return hashlib.sha256(url.encode()).hexdigest()
        case _:
            return ""


def get_id(entry: Message) -> str:
    """Return the id of an entry; "" if it has none."""
    return str(entry.get("crow", {}).get("id", ""))


def marker_kind(entry: Message) -> str:
    """Return the kind of a marker; empty for a message."""
    return "" if "role" in entry else str(entry.get("crow", {}).get("kind", ""))


def list_edits(entry: Message) -> list[EditNotes]:
    """List the edits of files that an entry records: the answer to a tool call, or a marker of kind `changes`. Other
    markers may have `changes` of another kind."""
    records = entry.get("role") == "tool" or marker_kind(entry) == "changes"
    return entry.get("crow", {}).get("changes", []) if records else []


def find_prompts(log: Sequence[Message]) -> list[int]:
    """Find the indexes of the user's messages; messages that crow added in the user's place are `hidden`."""
    return [
        at for at, entry in enumerate(log) if entry.get("role") == "user" and not entry.get("crow", {}).get("hidden")
    ]


def find_turns(log: Sequence[Message]) -> list[int]:
    """Find the indexes of the user's messages that began a turn."""
    return [at for at in find_prompts(log) if not joins_turn(log[at])]


def joins_turn(message: Message) -> bool:
    """Return whether the user said this while a turn ran, which went on with it."""
    return bool(message.get("crow", {}).get("steer"))


def find_unanswered(log: Sequence[Message]) -> list[RawToolCall]:
    """Find the tool calls of the last reply that have no answer yet."""
    answered: set[str] = set()
    for message in reversed(log):
        match message.get("role"):
            case "tool":
                answered.add(message.get("tool_call_id", ""))
            case "assistant":
                return [call for call in message.get("tool_calls", []) if call["id"] not in answered]
            case _:
                pass
    return []


def find_markers_of_call(log: Sequence[Message], id: str) -> list[Notes]:
    """Find the notes of the markers about a tool call of the last reply."""
    found: list[Notes] = []
    for entry in reversed(log):
        if entry.get("role") == "assistant":
            break
        if marker_kind(entry) and entry.get("crow", {}).get("call") == id:
            found.append(entry.get("crow", {}))
    return found


def is_reply(message: Message) -> bool:
    """True if it is a reply with content or tool calls, not only reasoning."""
    return message.get("role") == "assistant" and (bool(message.get("tool_calls")) or not is_blank(message))


def is_blank(message: Message) -> bool:
    """True if the content of a message is empty or white space."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return not content.strip()
    return all(part.get("type") == "text" and not part["text"].strip() for part in content)


def join_content(first: "str | list[dict[str, Any]] | None", second: "str | list[dict[str, Any]] | None") -> Any:
    if isinstance(first, str) and isinstance(second, str):
        return "\n\n".join(filter(None, (first, second)))
    return [*to_parts(first), *to_parts(second)]


def to_parts(content: "str | list[dict[str, Any]] | None") -> list[dict[str, Any]]:
    """Convert the content of a message to a list of parts."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content or [])
