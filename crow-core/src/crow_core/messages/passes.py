"""The passes that derive the messages of a request from the log: some select entries, others shape them.

`view` applies all of them. `View` (view.py) does the same for a log that grows, and reads each entry once.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from crow_system.shortening import leave_out

from crow_core.messages.message import (
    INTERRUPTED,
    Message,
    RawToolCall,
    answer_tool_call,
    is_reply,
    join_content,
    marker_kind,
    parse_arguments,
    to_digest,
    to_parts,
)
from crow_core.messages.notes import Notes
from crow_core.messages.tool_names import make_legal_name, name_raw_calls, rename

SUMMARY_TEMPLATE = (
    "[What stands above was kept word for word. The conversation went on and became too long to be sent whole; this is "
    "your own summary of it.]\n\n{}\n\n[The summary ends here. Go on from there.]"
)
"""The user message that stands for a compacted part of the conversation."""
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


def shrink_tool_results(messages: list[Message]) -> list[Message]:
    """Shorten the tool results before the entry that the last `shrink` marker names; the log keeps all of them."""
    for notes, end in find_markers(messages, "shrink", "upto"):
        return [*shorten_answers(messages[:end], notes), *messages[end:]]
    return messages


def shorten_answers(messages: Sequence[Message], notes: Notes) -> list[Message]:
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


def to_summary(notes: Notes) -> Message:
    """Convert the notes of a `compaction` marker to the message that stands for what it drops."""
    text = SUMMARY_TEMPLATE.format(notes.get("summary", ""))
    return {"role": "user", "content": text, "crow": {"hidden": True}}


def find_markers(messages: list[Message], kind: str, key: str) -> Iterator[tuple[Notes, int]]:
    """Find the markers of a kind, the last first: their notes, and the index of the entry that they name under `key`.

    "" names the marker itself. A marker whose entry does not exist is left out.
    """
    markers = [at for at, message in enumerate(messages) if marker_kind(message) == kind]
    places: dict[str, int] = {m.get("crow", {}).get("id", ""): at for at, m in enumerate(messages)} if markers else {}
    return locate_markers(messages, markers, places, key)


def locate_markers(
    messages: Sequence[Message], markers: Sequence[int], places: Mapping[str, int], key: str
) -> Iterator[tuple[Notes, int]]:
    """Like `find_markers`, with the indexes of the markers, and of all messages by their ids."""
    for at in reversed(markers):
        notes = messages[at].get("crow", {})
        place = places.get(named) if (named := str(notes.get(key) or "")) else at
        if place is not None and place <= at:
            yield notes, place


def drop_unsent(messages: list[Message]) -> list[Message]:
    """Drop markers, and replies with only reasoning, which most servers refuse."""
    return [m for m in messages if "role" in m and (m["role"] != "assistant" or is_reply(m))]


def repair_calls(messages: list[Message]) -> list[Message]:
    """Give each tool call the name of its tool, and arguments that are a JSON object; servers refuse any others."""
    return [
        {**message, "tool_calls": [repair_tool_call(call) for call in name_raw_calls(message)]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def repair_tool_call(call: RawToolCall) -> RawToolCall:
    call = rename(call, make_legal_name(call["function"]["name"]))
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
        for call in reversed(message.get("tool_calls") or ()):
            kept.append(answers.pop(call["id"], None) or answer_tool_call(call, INTERRUPTED))
        kept.append(message)
        if message.get("role") == "assistant":
            answers.clear()
    return kept[::-1]


def restore_printed_calls(messages: list[Message]) -> list[Message]:
    """Send tool calls that the model wrote as text as it wrote them, and their results in a message of the user.

    Small models go on in the form that they read. Templates without tools refuse the role `tool`.
    """
    kept: list[Message] = []
    printed: set[str] = set()
    for message in messages:
        if (text := message.get("crow", {}).get("printed")) and message.get("role") == "assistant":
            printed |= {call["id"] for call in message.get("tool_calls", ())}
            restored: Message = {"role": "assistant", "content": text}
            if thought := message.get("reasoning_content"):
                restored["reasoning_content"] = thought
            kept.append(restored)
        elif message.get("tool_call_id") in printed:
            opened, closed = ({"type": "text", "text": f"<{mark}tool_response>"} for mark in ("", "/"))
            parts = [opened, *to_parts(message.get("content")), closed]
            only_text = all(part.get("type") == "text" for part in parts)
            content = "\n".join(part["text"] for part in parts) if only_text else parts
            kept.append({"role": "user", "content": content})
        else:
            kept.append(message)
    return kept


def move_images(messages: list[Message]) -> list[Message]:
    """Move images from tool messages to a user message behind them: most servers refuse them in a tool message."""
    kept: list[Message] = []
    images: list[dict[str, Any]] = []
    for message in messages:
        is_answer = message.get("role") == "tool"
        if images and not is_answer:
            kept.append({"role": "user", "content": images})
            images = []
        kept.append({**message, "content": take_images(message, images)} if is_answer else message)
    return [*kept, {"role": "user", "content": images}] if images else kept


def take_images(answer: Message, images: list[dict[str, Any]]) -> str:
    """Return the text of a tool message; append its images to `images`, numbered in both places."""
    texts: list[str] = []
    for part in to_parts(answer.get("content")):
        if part.get("type") == "text":
            texts.append(part["text"])
            continue
        label = f"[image {len(images) // 2 + 1} of these tool results]"
        texts.append(label)
        images += [{"type": "text", "text": label}, part]
    return "\n\n".join(texts)


def join_user_messages(messages: list[Message]) -> list[Message]:
    """Join user messages that follow each other, as after a cancelled turn: many chat templates refuse them."""
    kept: list[Message] = []
    for message in messages:
        if kept and message.get("role") == "user" and kept[-1].get("role") == "user":
            kept[-1] = {"role": "user", "content": join_content(kept[-1].get("content"), message.get("content"))}
        else:
            kept.append(message)
    return kept


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
    drop_unsent,
    repair_calls,
    complete_answers,
    restore_printed_calls,
    move_images,
    join_user_messages,
    drop_notes,
)
PASSES = (*SELECTING_PASSES, *SHAPING_PASSES)
"""All passes, in order; each is a pure function."""
