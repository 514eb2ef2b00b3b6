"""A session as every export tells it: what was said, what was done and what came of it, in order."""

import difflib
import json
import re
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal

from crow_core.mcp.tool import make_title
from crow_core.messages import Message, ToolUse, parse_arguments, to_parts
from crow_core.store import Record, Summary
from sqlalchemy import Connection, Row, select

from crow_persistence import blobs, reading, requests
from crow_persistence.export.redaction import redact, redacted
from crow_persistence.tables import messages

DIFFED = 2_000_000
"""Characters of a file's two texts from which their difference is not worked out."""

MEDIA = re.compile(r"data:(image/(?:png|jpeg|gif|webp)|audio/(?:wav|mp3|ogg|flac|aac|webm));base64,(.+)")
"""An image or a sound that can be shown without asking anybody for it, and that can do nothing."""


TOLD = (
    *("id", "purpose", "prompt", "version", "model", "endpoint", "crow", "started", "first", "total", "stop_reason"),
    *("error", "usage", "input", "output", "cached", "cost", "currency", "tools", "sampling", "digest"),
)
"""What is of use elsewhere of a call."""


@dataclass
class Use:
    """A tool call and what came of it."""

    name: str
    title: str
    arguments: str
    answer: str = ""
    media: list[str] = field(default_factory=list[str])
    diffs: list[str] = field(default_factory=list[str])
    """Of the files it changed, unified."""
    failed: bool = False
    decision: str = ""
    """Who allowed or denied it."""


@dataclass
class Part:
    """Something that was said, with the tools that were used for it; or a note on what happened beside it."""

    who: Literal["user", "assistant", "note"]
    id: str = ""
    at: int | None = None
    """Milliseconds since 1970, where it is known."""
    title: str = ""
    """Of a note; its text is long if it has one."""
    thought: str = ""
    text: str = ""
    media: list[str] = field(default_factory=list[str])
    """Addresses of images and sounds, those of `data:` too."""
    uses: list[Use] = field(default_factory=list[Use])
    cut: str = ""
    """Why it broke off, if it did."""


@dataclass(frozen=True)
class Story:
    """A session with its calls."""

    summary: Summary
    record: Record
    calls: Sequence[Mapping[str, Any]] = ()
    """Oldest first, each as `told` tells it."""
    times: Mapping[str, int] = field(default_factory=dict[str, int])
    """When an entry was written down, by its id; milliseconds since 1970."""

    @classmethod
    def of(cls, connection: Connection, row: Row[Any]) -> "Story":
        """The story of a row of `sessions`."""
        record, track = reading.recall(connection, row)
        written: dict[int, int] = {}
        for rows in blobs.parts(track.rows):
            times = select(messages.c.id, messages.c.at).where(messages.c.id.in_(rows))
            written |= {found.id: found.at for found in connection.execute(times)}
        ids = (entry.get("crow", {}).get("id", "") for entry in record.log)
        at = {id: written.get(row, 0) for id, row in zip(ids, track.rows, strict=False)}
        calls = [told(call) for call in requests.listing(connection, row.number)]
        return cls(reading.summary(row), record, calls[::-1], at)

    def redacted(self) -> "Story":
        """The same with what looks like a secret masked."""
        record, summary = self.record, self.summary
        return replace(
            self,
            summary=replace(
                summary, title=redact(summary.title), cwd=redact(summary.cwd), roots=redacted(list(summary.roots))
            ),
            record=replace(
                record,
                log=[redacted(entry) for entry in record.log],
                options=redacted(record.options),
                system=redacted(record.system),
                tools=redacted(record.tools),
            ),
            calls=[redacted(dict(call)) for call in self.calls],
        )

    def parts(self) -> Iterator[Part]:
        """What was said and done, in order."""
        answers = {m.get("tool_call_id", ""): m for m in self.record.log if m.get("role") == "tool"}
        notes = [entry.get("crow", {}) for entry in self.record.log]
        decisions = {note.get("call", ""): note for note in notes if note.get("kind") == "decision"}
        for entry in self.record.log:
            id = entry.get("crow", {}).get("id", "")
            match entry.get("role"):
                case "user" | "assistant" as who:
                    said = to_parts(entry.get("content"))
                    uses = [used(c, answers.get(c["id"]), decisions.get(c["id"])) for c in entry.get("tool_calls", [])]
                    yield Part(
                        who,
                        id,
                        self.times.get(id),
                        thought=entry.get("reasoning_content", ""),
                        text=text_of(said),
                        media=media_of(said),
                        uses=uses,
                        cut=str(entry.get("crow", {}).get("cut", "")),
                    )
                case None if title := noted(entry):
                    own = entry.get("crow", {})
                    text = str(own.get("text") or own.get("summary") or "")
                    yield Part("note", id, self.times.get(id), title=title, text=text)
                case _:
                    pass

    def facts(self) -> list[tuple[str, str]]:
        """What is to be known of a session before it is read: names and values."""
        summary, calls = self.summary, self.calls
        models = ", ".join(dict.fromkeys(call["model"] for call in calls))
        input, cached, output = (sum(call[name] or 0 for call in calls) for name in ("input", "cached", "output"))
        costs: dict[str, float] = {}
        for call in calls:
            if call["cost"] is not None:
                costs[call["currency"]] = costs.get(call["currency"], 0.0) + call["cost"]
        facts = [
            ("Session", summary.id),
            ("Folder", summary.cwd),
            ("Time", f"{in_words(summary.created)} to {in_words(summary.updated)}"),
            ("Model", models),
            ("Calls", f"{len(calls)}" if calls else ""),
            ("Tokens", f"{input:,} in ({cached:,} cached), {output:,} out" if calls else ""),
            ("Cost", ", ".join(f"{cost:.4f} {currency}" for currency, cost in costs.items())),
            ("Damage", self.record.damage),
        ]
        return [(name, value) for name, value in facts if value]


def told(call: Row[Any]) -> dict[str, Any]:
    """What is of use elsewhere of a row of `requests.listing`."""
    values = {name: getattr(call, name) for name in TOLD}
    return values | {name: reading.lenient(values[name] or "", {}) for name in ("usage", "sampling")}


def noted(marker: Message) -> str:
    """A marker as a line; "" for one that is shown elsewhere."""
    match marker.get("crow"):
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
            return f"Summed up, from about {before:,} to {after:,} tokens"
        case {"kind": "shrink", "before": int(before), "after": int(after)}:
            return f"Old tool outputs shortened, from about {before:,} to {after:,} tokens"
        case {"kind": "child", "session": str(session)}:
            return f"A sub-agent begins: session {session}"
        case {"kind": "parent", "session": str(session)}:
            return f"A sub-agent of session {session}"
        case {"kind": "pin"}:
            return "Pinned a message"
        case _:
            return ""


def used(call: ToolUse, answer: Message | None, decision: Mapping[str, Any] | None) -> Use:
    """A tool call with its answer, if it got one."""
    name, arguments = call["function"]["name"], parse_arguments(call)
    shown = call["function"]["arguments"] if arguments is None else json.dumps(arguments, indent=2, ensure_ascii=False)
    use = Use(name, make_title(name, arguments or {}), shown)
    if answer is not None:
        said, notes = to_parts(answer.get("content")), answer.get("crow", {})
        use.answer, use.media, use.failed = text_of(said), media_of(said), bool(notes.get("failed"))
        use.diffs = [diff for change in notes.get("changes", []) if (diff := diff_of(change))]
    if decision is not None:
        use.decision = f"{decision.get('is', '')}, by {decision.get('by', '')}"
    return use


def diff_of(change: Mapping[str, Any]) -> str:
    """What was changed in a file, unified."""
    path, old, new = str(change.get("path")), change.get("old"), change.get("new")
    if len(old or "") + len(new or "") > DIFFED:
        return f"--- {path}\n+++ {path}\n(too large to compare)"
    before, after = ("/dev/null" if text is None else path for text in (old, new))
    lines = difflib.unified_diff((old or "").splitlines(), (new or "").splitlines(), before, after, lineterm="")
    return "\n".join(lines)


def text_of(said: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(str(part.get("text", "")) for part in said if part.get("type") == "text")


def media_of(said: Sequence[Mapping[str, Any]]) -> list[str]:
    return [url for part in said if (url := address_of(part))]


def address_of(part: Mapping[str, Any]) -> str:
    """The address of an image or a sound; "" for another part of a message."""
    match part:
        case {"type": "image_url", "image_url": {"url": str(url)}}:
            return url
        case {"type": "input_audio", "input_audio": {"data": data, "format": format}}:
            return f"data:audio/{format};base64,{data}"
        case _:
            return ""


def in_words(at: int) -> str:
    """A time as a person reads it."""
    return f"{datetime.fromtimestamp(at / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"


def embedded(url: str) -> tuple[str, bytes] | None:
    """The media type and the bytes of an image or a sound that is in its address."""
    try:
        return (found[1], b64decode(found[2], validate=True)) if (found := MEDIA.fullmatch(url)) else None
    except ValueError:
        return None


def caption(url: str) -> str:
    """An image or a sound in words."""
    kind = "audio" if url.startswith("data:audio/") else "image"
    if found := embedded(url):
        return f"{kind}: {found[0]}, {len(found[1]):,} bytes"
    return kind if url.startswith("data:") else f"{kind}: {url}"
