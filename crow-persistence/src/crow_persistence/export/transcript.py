"""A session as all exports show it: messages, tool calls and their results, in order."""

import difflib
import json
import re
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal, cast

from crow_core.mcp.tool import make_title
from crow_core.messages.message import Message, RawToolCall, list_edits, parse_arguments, to_parts
from crow_core.messages.worktree import find_recorded
from crow_core.redaction import redact_data, redact_text
from crow_core.session.store import Record, Summary
from sqlalchemy import Connection, Row, select

from crow_persistence import blobs, loader, requests
from crow_persistence.tables import messages

MAX_DIFF_LENGTH = 2_000_000
"""Length of both texts of a changed file, in characters, above which no diff is made."""

MEDIA_URL = re.compile(r"data:(image/(?:png|jpeg|gif|webp)|audio/(?:wav|mp3|ogg|flac|aac|webm));base64,(.+)")
"""A URL that contains an image or a sound of a safe type, and can be shown without loading anything."""


EXPORTED_COLUMNS = (
    *("id", "purpose", "prompt", "version", "model", "endpoint", "crow", "started", "first", "total", "stop_reason"),
    *("error", "usage", "input", "output", "cached", "cost", "currency", "tools", "sampling", "digest"),
)
"""Columns of a model call that are exported."""


@dataclass
class TranscriptToolCall:
    """A tool call and its result."""

    name: str
    title: str
    arguments: str
    answer: str = ""
    media: list[str] = field(default_factory=list[str])
    diffs: list[str] = field(default_factory=list[str])
    """Unified diffs of the files it changed."""
    failed: bool = False
    decision: str = ""
    """The permission decision, and who made it."""


@dataclass
class TranscriptPart:
    """A message with its tool calls, or a note about a marker."""

    who: Literal["user", "assistant", "note"]
    id: str = ""
    at: int | None = None
    """Milliseconds since 1970; None if unknown."""
    title: str = ""
    """Line of a note; a longer note has a text, too."""
    thought: str = ""
    text: str = ""
    media: list[str] = field(default_factory=list[str])
    """URLs of images and sounds, including `data:` URLs."""
    tool_calls: list[TranscriptToolCall] = field(default_factory=list[TranscriptToolCall])
    cut: str = ""
    """Reason why the message was cut off; "" if it is complete."""


@dataclass(frozen=True)
class Transcript:
    """A session with its model calls."""

    summary: Summary
    record: Record
    model_calls: Sequence[Mapping[str, Any]] = ()
    """The model calls, oldest first, from `model_call_to_dict`."""
    times: Mapping[str, int] = field(default_factory=dict[str, int])
    """Times at which entries were stored, by entry id; milliseconds since 1970."""

    @classmethod
    def load(cls, connection: Connection, row: Row[Any]) -> "Transcript":
        record, progress = loader.load_with_progress(connection, row)
        written: dict[int, int] = {}
        for rows in blobs.split_batches(progress.rows):
            times = select(messages.c.id, messages.c.at).where(messages.c.id.in_(rows))
            written |= {found.id: found.at for found in connection.execute(times)}
        ids = (entry.get("crow", {}).get("id", "") for entry in record.log)
        at = {id: written.get(row, 0) for id, row in zip(ids, progress.rows, strict=False)}
        calls = [model_call_to_dict(model_call) for model_call in requests.list_model_calls(connection, row.number)]
        return cls(loader.to_summary(row), record, calls[::-1], at)

    def redact(self) -> "Transcript":
        """Return a copy with likely secrets masked."""
        record, summary = self.record, self.summary
        return replace(
            self,
            summary=replace(
                summary,
                title=redact_text(summary.title),
                cwd=redact_text(summary.cwd),
                roots=redact_data(list(summary.roots)),
            ),
            record=replace(
                record,
                log=[redact_data(entry) for entry in record.log],
                options=redact_data(record.options),
                system=redact_data(record.system),
                tools=redact_data(record.tools),
            ),
            model_calls=[redact_data(dict(model_call)) for model_call in self.model_calls],
        )

    def parts(self) -> Iterator[TranscriptPart]:
        """Yield the messages and notes, in order."""
        answers = {m.get("tool_call_id", ""): m for m in self.record.log if m.get("role") == "tool"}
        notes = [entry.get("crow", {}) for entry in self.record.log]
        decisions = {note.get("call", ""): note for note in notes if note.get("kind") == "decision"}
        uses = [use for entry in self.record.log for use in entry.get("tool_calls", [])]
        names = {use["id"]: use["function"]["name"] for use in uses}
        for entry in self.record.log:
            id = entry.get("crow", {}).get("id", "")
            match entry.get("role"):
                case "user" | "assistant" as who:
                    said = to_parts(entry.get("content"))
                    tool_calls = [
                        make_tool_call(tool_call, answers.get(tool_call["id"]), decisions.get(tool_call["id"]))
                        for tool_call in entry.get("tool_calls", [])
                    ]
                    yield TranscriptPart(
                        who,
                        id,
                        self.times.get(id),
                        thought=entry.get("reasoning_content", ""),
                        text=join_text(said),
                        media=find_media(said),
                        tool_calls=tool_calls,
                        cut=str(entry.get("crow", {}).get("cut", "")),
                    )
                case None if (own := entry.get("crow", {})).get("kind") == "inner" and "use" in own and "answer" in own:
                    use, answer = cast("RawToolCall", own["use"]), cast("Message", own["answer"])
                    call = make_tool_call(use, answer, decisions.get(use["id"]))
                    outer = names.get(own.get("call", ""), "another call")
                    title = f"Called inside {outer}: {call.title}"
                    yield TranscriptPart("note", id, self.times.get(id), title=title, tool_calls=[call])
                case None if title := describe_marker(entry):
                    own = entry.get("crow", {})
                    text = str(own.get("text") or own.get("summary") or "")
                    yield TranscriptPart("note", id, self.times.get(id), title=title, text=text)
                case _:
                    pass

    def facts(self) -> list[tuple[str, str]]:
        """Return what to know about a session before reading it, as names and values."""
        summary, calls = self.summary, self.model_calls
        models = ", ".join(dict.fromkeys(model_call["model"] for model_call in calls))
        input, cached, output = (
            sum(model_call[name] or 0 for model_call in calls) for name in ("input", "cached", "output")
        )
        costs: dict[str, float] = {}
        for model_call in calls:
            if model_call["cost"] is not None:
                costs[model_call["currency"]] = costs.get(model_call["currency"], 0.0) + model_call["cost"]
        facts = [
            ("Session", summary.id),
            ("Folder", summary.cwd),
            ("Time", f"{format_time(summary.created)} to {format_time(summary.updated)}"),
            ("Model", models),
            ("Model calls", f"{len(calls)}" if calls else ""),
            ("Tokens", f"{input:,} in ({cached:,} cached), {output:,} out" if calls else ""),
            ("Cost", ", ".join(f"{cost:.4f} {currency}" for currency, cost in costs.items())),
            ("Damage", self.record.damage),
        ]
        return [(name, value) for name, value in facts if value]


def model_call_to_dict(row: Row[Any]) -> dict[str, Any]:
    """Convert a row from `requests.list_model_calls` to the values that are exported."""
    values = {name: getattr(row, name) for name in EXPORTED_COLUMNS}
    return values | {name: loader.decode_or(values[name] or "", {}) for name in ("usage", "sampling")}


def describe_marker(marker: Message) -> str:
    """Return a line about a marker; "" for one that is shown elsewhere."""
    notes = cast("Mapping[str, Any]", marker.get("crow", {}))  # also the notes of extensions
    match notes:
        case {"kind": "render", "prompt": str(prompt), "purpose": str(purpose)}:
            return "System prompt" if purpose == "system" else f"Prompt {prompt}, for: {purpose}"
        case {"kind": "tools", "schemas": [*schemas]}:
            names: list[str] = [str(schema.get("function", {}).get("name")) for schema in schemas]
            return f"Tools: {', '.join(names) or 'none'}"
        case {"kind": "option", "option": str(option), "value": str(value)}:
            return f"{option} is now {value}"
        case {"kind": "rewind"}:
            return "Rewound"
        case {"kind": "compaction", "before": int(before), "after": int(after)}:
            return f"Compacted from about {before:,} to {after:,} tokens"
        case {"kind": "shrink", "before": int(before), "after": int(after)}:
            return f"Old tool outputs shortened from about {before:,} to {after:,} tokens"
        case {"kind": "child", "session": str(session)}:
            return f"Started a sub-agent: session {session}"
        case {"kind": "parent", "session": str(session)}:
            return f"A sub-agent of session {session}"
        case {"kind": "goal", "state": str(state), "why": str(why)} if why:
            return f"Goal {state}: {why}"
        case {"kind": "pin"}:
            return "Pinned a message"
        case {"kind": "imported", "agent": str(agent)}:
            return f"Imported from {agent}"
        case {"kind": "reask", "origin": str(origin)}:
            return f"Asks session {origin} again"
        case {"kind": "worktree"} if tree := find_recorded([marker]):
            return tree.describe()
        case _:
            return ""


def make_tool_call(
    tool_call: RawToolCall, answer: Message | None, decision: Mapping[str, Any] | None
) -> TranscriptToolCall:
    """Join a tool call with its result and its permission decision, if any."""
    name, arguments = tool_call["function"]["name"], parse_arguments(tool_call)
    text = (
        tool_call["function"]["arguments"] if arguments is None else json.dumps(arguments, indent=2, ensure_ascii=False)
    )
    made = TranscriptToolCall(name, make_title(name, arguments or {}), text)
    if answer is not None:
        said, notes = to_parts(answer.get("content")), answer.get("crow", {})
        made.answer, made.media, made.failed = join_text(said), find_media(said), bool(notes.get("failed"))
        made.diffs = [diff for change in list_edits(answer) if (diff := make_diff(change))]
    if decision is not None:
        made.decision = f"{decision.get('is', '')}, by {decision.get('by', '')}"
    return made


def make_diff(change: Mapping[str, Any]) -> str:
    """Return the unified diff of a changed file."""
    path, old, new = str(change.get("path")), change.get("old"), change.get("new")
    if len(old or "") + len(new or "") > MAX_DIFF_LENGTH:
        return f"--- {path}\n+++ {path}\n(too large to compare)"
    before, after = ("/dev/null" if text is None else path for text in (old, new))
    lines = difflib.unified_diff((old or "").splitlines(), (new or "").splitlines(), before, after, lineterm="")
    return "\n".join(lines)


def join_text(parts: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(str(part.get("text", "")) for part in parts if part.get("type") == "text")


def find_media(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the URLs of images and sounds in content parts."""
    return [url for part in parts if (url := find_url(part))]


def find_url(part: Mapping[str, Any]) -> str:
    """Return the URL of an image or a sound; "" for another content part."""
    match part:
        case {"type": "image_url", "image_url": {"url": str(url)}}:
            return url
        case {"type": "input_audio", "input_audio": {"data": data, "format": format}}:
            return f"data:audio/{format};base64,{data}"
        case _:
            return ""


def format_time(at: int) -> str:
    """Format milliseconds since 1970 for a reader."""
    return f"{datetime.fromtimestamp(at / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"


def decode_media(url: str) -> tuple[str, bytes] | None:
    """Return the media type and bytes of an image or a sound contained in its URL; None for other URLs."""
    try:
        return (found[1], b64decode(found[2], validate=True)) if (found := MEDIA_URL.fullmatch(url)) else None
    except ValueError:
        return None


def describe_media(url: str) -> str:
    """Return a description of an image or a sound."""
    kind = "audio" if url.startswith("data:audio/") else "image"
    if found := decode_media(url):
        return f"{kind}: {found[0]}, {len(found[1]):,} bytes"
    return kind if url.startswith("data:") else f"{kind}: {url}"
