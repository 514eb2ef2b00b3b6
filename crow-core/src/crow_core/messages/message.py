"""Chat-completions messages: the entries of the log, how a reply is completed, and how the log becomes a request.

The log is append-only. Its entries are messages, in the form that is sent to the model, and markers, which have only
the key `crow`. `settle` completes a reply, and `view` derives from the log the messages of the next request.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, zip_longest
from typing import Any, Literal, TypedDict, cast

import msgspec
from crow_system.shortening import leave_out

INTERRUPTED = "Interrupted before it finished; it may have had effects. Check before you repeat it."
"""The answer to a tool call whose result never arrived."""
NOT_RUN = "This was not run, and had no effects: the turn ended before the call began."
"""The answer to a tool call that had not begun when its turn was cancelled, or failed."""
SUMMARY_TEMPLATE = (
    "[What stands above was kept word for word. The conversation went on and became too long to be sent whole; this is "
    "your own summary of it.]\n\n{}\n\n[The summary ends here. Go on from there.]"
)
"""The user message that stands for a compacted part of the conversation."""
PROXY_TOOL = "call_tool"
"""The name of the tool that calls another tool; its arguments are {name, arguments}."""

LEGAL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""Matches a tool's name that every provider accepts."""

MAX_DEPTH = 100
"""The most levels of JSON that are read. Deeper JSON exhausts the stack of one of the encoders that it passes."""
TOO_DEEP = f"it has more than {MAX_DEPTH} levels"

JSON = msgspec.json.Decoder()


class Function(TypedDict):
    name: str
    """The name that the model wrote, which may not be a tool's; see `name_tool_uses`."""
    arguments: str
    """JSON text, exactly as the model wrote it."""


class ToolUse(TypedDict):
    """A tool call of an assistant message."""

    id: str
    type: Literal["function"]
    function: Function


class Message(TypedDict, total=False):
    """An entry of the log: a chat-completions message or, with only the key `crow`, a marker.

    `crow` holds notes of our own; it is never sent. The note `called` of a reply has the tool's name for each call that
    names its tool in another way, by the call's id.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: "str | list[dict[str, Any]] | None"
    reasoning_content: str
    tool_calls: list[ToolUse]
    tool_call_id: str
    crow: dict[str, Any]


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
    """Whether all content before this delta was reasoning: the server sent only the closing tag."""
    sent: dict[str, Any]
    """The body of the request that is about to be sent; not part of the reply."""
    notice: str
    """A sentence for the user, such as that the request is sent again; not part of the reply."""


def parse_arguments(call: ToolUse) -> dict[str, Any] | None:
    """Parse the arguments of a tool call; None if their text is not a JSON object, or empty."""
    text = call["function"]["arguments"]
    if not text:
        return None
    try:
        parsed = decode_json(text)
    except ValueError:  # not JSON, or with half a surrogate pair
        return None
    return cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else None


def decode_json(text: str | bytes) -> Any:
    """Decode JSON. Raises ValueError, also for JSON of more than MAX_DEPTH levels."""
    try:
        value: Any = JSON.decode(text)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    brackets = text.count(b"{") + text.count(b"[") if isinstance(text, bytes) else text.count("{") + text.count("[")
    if brackets > MAX_DEPTH and is_deep(value):
        raise ValueError(TOO_DEEP)
    return value


def is_deep(value: Any) -> bool:
    """Whether a JSON value has more than MAX_DEPTH levels."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for outer in level for inner in list_inner(outer)]
    return bool(level)


def list_inner(value: Any) -> Iterable[Any]:
    """Return the values inside a JSON object or array; none for any other value."""
    match value:
        case dict():
            return cast("dict[str, Any]", value).values()
        case list():
            return cast("list[Any]", value)
        case _:
            return ()


def unwrap_proxy_call(call: ToolUse) -> ToolUse:
    """Convert a call of `call_tool` to the call that it asks for; return any other call unchanged."""
    if call["function"]["name"] != PROXY_TOOL:
        return call
    given = parse_arguments(call) or {}
    name, arguments = given.get("name"), given.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict | str):
        return call
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return {**call, "function": {"name": name, "arguments": text}}


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


def drop_echoes(calls: Sequence[ToolUse], indexes: Sequence[Any]) -> list[ToolUse]:
    """Drop the calls that are empty, or only repeat one: its name behind its arguments, or all of it with its index."""
    kept: list[ToolUse] = []
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


def to_legal_name(name: str) -> str:
    """Replace the characters of a tool's name that a provider may refuse."""
    return re.sub(r"[^a-zA-Z0-9_-]", "_", name)


def make_legal_name(name: str) -> str:
    """Return a name that every provider accepts: `name` itself if it is one, else one that no other name has."""
    if LEGAL_NAME.fullmatch(name):
        return name
    digest = hashlib.sha256(name.encode(errors="replace")).hexdigest()[:8]
    return f"{to_legal_name(name[:50])}_{digest}"


def name_tool_uses(reply: Message) -> list[ToolUse]:
    """Return the tool calls of a reply under the names of the tools that they call."""
    called: dict[str, str] = reply.get("crow", {}).get("called", {})
    return [rename(call, called.get(call["id"], call["function"]["name"])) for call in reply.get("tool_calls", [])]


def rename(call: ToolUse, name: str) -> ToolUse:
    """Return a tool call under another name."""
    return call if call["function"]["name"] == name else {**call, "function": {**call["function"], "name": name}}


def answer_tool_call(call: ToolUse, content: "str | list[dict[str, Any]]", **notes: Any) -> Message:
    """Make the tool message that answers a tool call."""
    message: Message = {"role": "tool", "tool_call_id": call["id"], "content": content}
    if notes:
        message["crow"] = notes
    return message


Pass = Callable[[list[Message]], list[Message]]


def view(log: Iterable[Message]) -> list[Message]:
    """Derive the messages of a valid chat-completions request, without the system prompt, from the log."""
    return apply_passes(PASSES, log)


def apply_passes(passes: Iterable[Pass], messages: Iterable[Message]) -> list[Message]:
    """Apply these passes, one after the other."""
    found = list(messages)
    for step in passes:
        found = step(found)
    return found


def select_entries(log: Iterable[Message]) -> list[Message]:
    """Apply the selecting markers of a log: rewind, images, shrink and compaction."""
    return apply_passes(SELECTING_PASSES, log)


def drop_rewound(log: Iterable[Message]) -> list[Message]:
    """Drop the entries between each `rewind` marker and the entry that it names. If that entry was dropped itself by an
    earlier marker, restore it with the entries before it."""
    kept: list[Message] = []
    dropped: list[list[Message]] = []
    for entry in log:
        if marker_kind(entry) == "rewind":
            to = entry.get("crow", {}).get("to")
            before = next((path for path in (kept, *reversed(dropped)) if find_entry(path, to)), None)
            dropped.append(kept)
            kept = [] if to == "" else (before or kept)[: find_entry(before or kept, to) or len(kept)]
        kept.append(entry)
    return kept


def find_entry(log: Sequence[Message], id: Any) -> int:
    """Return the number of entries up to the last one with this id; 0 if there is none."""
    return next((n for n in range(len(log), 0, -1) if log[n - 1].get("crow", {}).get("id") == id), 0)


def find_shell(log: Iterable[Message]) -> dict[str, Any]:
    """Find the state in which the last command of a session left its shell; empty if there was none.

    It has the keys that `crow/shell` has in the result of a tool call.
    """
    for entry in reversed(drop_rewound(log)):
        if shell := entry.get("crow", {}).get("shell"):
            return shell
    return {}


def leave_out_images(messages: list[Message]) -> list[Message]:
    """Replace the images that an `images` marker names, in the messages before it; the log keeps them."""
    for at in [at for at, message in enumerate(messages) if marker_kind(message) == "images"]:
        refused = frozenset(messages[at].get("crow", {}).get("refused", ()))
        messages = [*(replace_refused(message, refused) for message in messages[:at]), *messages[at:]]
    return messages


def replace_refused(message: Message, refused: Collection[str]) -> Message:
    """Replace the images with these digests in a message by a note."""
    content = message.get("content")
    if not isinstance(content, list) or all(to_digest(part) not in refused for part in content):
        return message
    note = {"type": "text", "text": "[an image that was left out: the endpoint refused it]"}
    return {**message, "content": [note if to_digest(part) in refused else part for part in content]}


def to_digest(part: dict[str, Any]) -> str:
    """Return a digest of an image; "" for another part of a message."""
    match part:
        case {"type": "image_url", "image_url": {"url": str(url)}}:
            return hashlib.sha256(url.encode()).hexdigest()
        case _:
            return ""


def shrink_tool_results(messages: list[Message]) -> list[Message]:
    """Shorten the tool results before the entry that the last `shrink` marker names; the log keeps all of them."""
    for notes, end in find_markers(messages, "shrink", "upto"):
        return [*shorten_answers(messages[:end], notes), *messages[end:]]
    return messages


def shorten_answers(messages: Sequence[Message], notes: dict[str, Any]) -> list[Message]:
    """Shorten the tool results among messages as the notes of a `shrink` marker say."""
    limit, tool, pinned = int(notes.get("limit", 0)), str(notes.get("tool", "")), notes.get("pinned", ())
    return [m if m.get("role") != "tool" or has_id(m, pinned) else shorten_answer(m, limit, tool) for m in messages]


def has_id(message: Message, ids: Sequence[str]) -> bool:
    return message.get("crow", {}).get("id") in ids


def shorten_answer(answer: Message, limit: int, tool: str) -> Message:
    """Shorten a tool result to `limit` characters, with a line that says which tool reads all of it."""
    said = to_parts(answer.get("content"))
    whole = "\n\n".join(part["text"] if part.get("type") == "text" else "[image]" for part in said)
    hint = f"{tool} gives the whole of {answer.get('tool_call_id')!r}"
    short = leave_out(whole, limit // 2 * 2, hint, tail=limit // 2)
    if len(short) < len(whole):
        return {**answer, "content": short}
    if any(part.get("type") != "text" for part in said):
        return {
            **answer,
            "content": f"{whole}\n\n[images left out; {tool} shows those of {answer.get('tool_call_id')!r}]",
        }
    return answer


def apply_compaction(messages: list[Message]) -> list[Message]:
    """Apply the last `compaction` marker.

    It leaves the user's first message, pinned messages, a summary, and the entries from the one that it names on.
    """
    first = next((at for at, message in enumerate(messages) if message.get("role") == "user"), len(messages))
    for notes, start in find_markers(messages, "compaction", "from"):
        if start <= first:
            continue
        kept = [m for m in messages[first + 1 : start] if "role" in m and has_id(m, notes.get("pinned", ()))]
        return [messages[first], *kept, to_summary(notes), *messages[start:]]
    return messages


def to_summary(notes: dict[str, Any]) -> Message:
    """Convert the notes of a `compaction` marker to the message that stands for what it drops."""
    text = SUMMARY_TEMPLATE.format(notes.get("summary", ""))
    return {"role": "user", "content": text, "crow": {"hidden": True}}


def find_markers(messages: list[Message], kind: str, key: str) -> Iterator[tuple[dict[str, Any], int]]:
    """Find the markers of a kind, the last first: their notes, and the index of the entry that they name under `key`.

    "" names the marker itself. A marker whose entry does not exist is left out.
    """
    markers = [at for at, message in enumerate(messages) if marker_kind(message) == kind]
    places: dict[str, int] = {m.get("crow", {}).get("id", ""): at for at, m in enumerate(messages)} if markers else {}
    return locate_markers(messages, markers, places, key)


def locate_markers(
    messages: Sequence[Message], markers: Sequence[int], places: Mapping[str, int], key: str
) -> Iterator[tuple[dict[str, Any], int]]:
    """Like `find_markers`, with the indexes of the markers, and of all messages by their ids."""
    for at in reversed(markers):
        notes = messages[at].get("crow", {})
        place = places.get(str(notes[key])) if notes.get(key) else at
        if place is not None and place <= at:
            yield notes, place


def marker_kind(entry: Message) -> str:
    """Return the kind of a marker; empty for a message."""
    return "" if "role" in entry else str(entry.get("crow", {}).get("kind", ""))


def list_edits(entry: Message) -> list[dict[str, Any]]:
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


def find_unanswered(log: Sequence[Message]) -> list[ToolUse]:
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


def find_markers_of_call(log: Sequence[Message], id: str) -> list[dict[str, Any]]:
    """Find the notes of the markers about a tool call of the last reply."""
    found: list[dict[str, Any]] = []
    for entry in reversed(log):
        if entry.get("role") == "assistant":
            break
        if marker_kind(entry) and entry.get("crow", {}).get("call") == id:
            found.append(entry.get("crow", {}))
    return found


def drop_markers(messages: list[Message]) -> list[Message]:
    """Drop the entries that are not messages."""
    return [message for message in messages if "role" in message]


def drop_thoughts(messages: list[Message]) -> list[Message]:
    """Drop replies that hold only reasoning: most servers refuse a reply without content."""
    kept: list[Message] = []
    for message in messages:
        if message.get("role") != "assistant" or is_reply(message):
            kept.append(message)
    return kept


def is_reply(message: Message) -> bool:
    """Whether it is a reply with content or tool calls, not only reasoning."""
    return message.get("role") == "assistant" and (bool(message.get("tool_calls")) or not is_blank(message))


def is_blank(message: Message) -> bool:
    """Whether the content of a message is empty or white space."""
    return all(part.get("type") == "text" and not part["text"].strip() for part in to_parts(message.get("content")))


def make_names_legal(messages: list[Message]) -> list[Message]:
    """Replace the names of tool calls by the names of their tools; servers refuse a name with other characters."""
    kept: list[Message] = []
    for message in messages:
        calls = [rename(call, make_legal_name(call["function"]["name"])) for call in name_tool_uses(message)]
        kept.append({**message, "tool_calls": calls} if calls else message)
    return kept


def repair_arguments(messages: list[Message]) -> list[Message]:
    """Replace arguments that are not a JSON object by an object that shows their text, as servers refuse them."""
    return [repair_message(m) if m.get("tool_calls") else m for m in messages]


def repair_message(message: Message) -> Message:
    calls = message.get("tool_calls", [])
    if all(parse_arguments(call) is not None for call in calls):
        return message
    return {**message, "tool_calls": [repair_tool_call(call) for call in calls]}


def repair_tool_call(call: ToolUse) -> ToolUse:
    if parse_arguments(call) is not None:
        return call
    raw = call["function"]["arguments"]
    text = json.dumps({"invalid_json": raw}, ensure_ascii=False, separators=(",", ":")) if raw else "{}"
    return {**call, "function": {**call["function"], "arguments": text}}


def complete_answers(messages: list[Message]) -> list[Message]:
    """Give each tool call exactly one answer, right behind the reply and in its order; drop all other answers."""
    kept: list[Message] = []
    answers: dict[str, Message] = {}
    for message in reversed(messages):
        # Walking backwards, the answers that follow a call are known when its message is reached.
        if message.get("role") == "tool":
            answers[message.get("tool_call_id", "")] = message
            continue
        calls = message.get("tool_calls") or []
        kept += reversed([answers.pop(call["id"], None) or answer_tool_call(call, INTERRUPTED) for call in calls])
        kept.append(message)
        if message.get("role") == "assistant":
            answers.clear()
    return kept[::-1]


def move_images(messages: list[Message]) -> list[Message]:
    """Move images from tool messages to a user message behind them: most servers refuse them in a tool message."""
    runs = groupby(messages, lambda message: message.get("role") == "tool")
    return [message for are_answers, run in runs for message in (move_images_behind(run) if are_answers else run)]


def move_images_behind(answers: Iterable[Message]) -> list[Message]:
    """Make tool messages of text only, and a user message with their images, numbered in both places."""
    kept: list[Message] = []
    images: list[dict[str, Any]] = []
    for message in answers:
        texts: list[str] = []
        for part in to_parts(message.get("content")):
            if part.get("type") == "text":
                texts.append(part["text"])
                continue
            label = f"[image {len(images) // 2 + 1} of these tool results]"
            texts.append(label)
            images += [{"type": "text", "text": label}, part]
        kept.append({**message, "content": "\n\n".join(texts)})
    return [*kept, {"role": "user", "content": images}] if images else kept


def join_user_messages(messages: list[Message]) -> list[Message]:
    """Join user messages that follow each other, as after a cancelled turn: many chat templates refuse them."""
    kept: list[Message] = []
    for message in messages:
        if kept and message.get("role") == "user" and kept[-1].get("role") == "user":
            kept[-1] = {"role": "user", "content": join_content(kept[-1].get("content"), message.get("content"))}
        else:
            kept.append(message)
    return kept


def join_content(first: "str | list[dict[str, Any]] | None", second: "str | list[dict[str, Any]] | None") -> Any:
    if isinstance(first, str) and isinstance(second, str):
        return "\n\n".join(filter(None, (first, second)))
    return [*to_parts(first), *to_parts(second)]


def to_parts(content: "str | list[dict[str, Any]] | None") -> list[dict[str, Any]]:
    """Convert the content of a message to a list of parts."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content or [])


def drop_notes(messages: list[Message]) -> list[Message]:
    """Drop the notes, and order the keys, so that equal messages have equal bytes."""
    return [to_sent_message(message) for message in messages]


def to_sent_message(message: Message) -> Message:
    kept: Message = {"role": message.get("role", "user")}
    if (id := message.get("tool_call_id")) is not None:
        kept["tool_call_id"] = id
    if thought := message.get("reasoning_content"):
        kept["reasoning_content"] = thought  # sent only to endpoints that want it: see quirks
    kept["content"] = message.get("content") or ""
    if calls := message.get("tool_calls"):
        kept["tool_calls"] = calls
    return kept


SELECTING_PASSES: tuple[Pass, ...] = (drop_rewound, leave_out_images, shrink_tool_results, apply_compaction)
SELECTING_MARKERS = frozenset({"rewind", "images", "shrink", "compaction"})
"""The kinds of markers that these passes apply."""
SHAPING_PASSES: tuple[Pass, ...] = (
    drop_markers,
    drop_thoughts,
    make_names_legal,
    repair_arguments,
    complete_answers,
    move_images,
    join_user_messages,
    drop_notes,
)
PASSES = (*SELECTING_PASSES, *SHAPING_PASSES)
"""All passes, in order; each is a pure function."""
