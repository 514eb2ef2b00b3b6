"""What is read from another agent's history: sessions with messages, and what could not be read."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

from crow_core.messages import Message, ToolUse, decode_json


@dataclass
class ForeignSession:
    """A session of another agent."""

    agent: str
    """The agent's name, as `crow import` knows it."""
    id: str
    """The id that the agent gave it."""
    source: Path
    """The file or folder that it was read from."""
    cwd: str = ""
    """The folder that it worked in, which may not exist here; empty if it is not known."""
    title: str = ""
    model: str = ""
    entries: list[tuple[int, Message]] = field(default_factory=list[tuple[int, Message]])
    """The messages, each with its time in milliseconds since 1970; 0 if it is not known."""
    left_out: Counter[str] = field(default_factory=Counter[str])
    """What has no place in a message, by a name for it, with its number."""

    @property
    def own_id(self) -> str:
        """The id of the session here: always the same for the same session."""
        return sha256(f"{self.agent}\0{self.id}".encode("utf-8", "surrogatepass")).hexdigest()[:32]

    def add(self, at: int, message: Message) -> None:
        """Add a message."""
        self.entries.append((at, message))

    def add_text(self, at: int, role: str, text: str) -> None:
        """Add a message of the user or the assistant, unless it is empty."""
        if text.strip():
            self.add(at, cast(Message, {"role": role, "content": text}))

    def add_result(self, at: int, id: str, content: Any, *, failed: bool = False) -> None:
        """Add the result of a tool call."""
        notes: dict[str, Any] = {"crow": {"failed": True}} if failed else {}
        self.add(at, cast(Message, {"role": "tool", "tool_call_id": id, "content": to_text(content), **notes}))

    def settle(self) -> None:
        """Drop results of calls that are not there, and count them."""
        known: set[str] = set()
        kept: list[tuple[int, Message]] = []
        for at, message in self.entries:
            if message.get("role") == "tool" and message.get("tool_call_id") not in known:
                self.left_out["results without a call"] += 1
                continue
            known |= {use["id"] for use in message.get("tool_calls", [])}
            kept.append((at, message))
        self.entries = kept


def make_use(id: Any, name: Any, arguments: Any) -> ToolUse:
    """Make a tool call; its arguments are JSON values, or a text as the model wrote it."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return {"id": str(id), "type": "function", "function": {"name": str(name), "arguments": text}}


def make_reply(text: str = "", reasoning: str = "", uses: Sequence[ToolUse] = ()) -> Message:
    """Make a message of the assistant."""
    reply: Message = {"role": "assistant", "content": text or None}
    if reasoning:
        reply["reasoning_content"] = reasoning
    if uses:
        reply["tool_calls"] = [*uses]
    return reply


def to_text(content: Any) -> str:
    """Convert the content of a message or of a result to text: a text, or a list of parts."""
    match content:
        case str():
            return content
        case None:
            return ""
        case list():
            parts = [to_text(part) for part in cast("list[Any]", content)]
            return "\n\n".join(filter(None, parts))
        case {"text": str(text)}:
            return text
        case {"type": str(kind)}:
            return f"[{kind}]"
        case _:
            return json.dumps(content, ensure_ascii=False)


def to_time(value: Any) -> int:
    """Convert a time to milliseconds since 1970: ISO 8601, or a number of seconds or milliseconds; 0 for others."""
    if isinstance(value, str):
        try:
            return int(datetime.fromisoformat(value).timestamp() * 1000)
        except (ValueError, OverflowError):
            return 0
    if isinstance(value, (int, float)) and 0 < value < 1e14:
        return int(value if value > 1e11 else value * 1000)
    return 0


def list_files(path: Path, pattern: str) -> list[Path]:
    """Return the file, or the files below a folder whose names match."""
    return [path] if path.is_file() else sorted(file for file in path.rglob(pattern) if file.is_file())


def read_lines(file: Path, left_out: Counter[str]) -> Iterator[Mapping[str, Any]]:
    """Read the JSON objects of a file, a line each. Broken lines are counted. Raises OSError."""
    with file.open("rb") as opened:
        for line in opened:
            try:
                value = decode_json(line) if line.strip() else None
            except ValueError:  # also a last line that was not written whole
                left_out["broken lines"] += 1
                continue
            if isinstance(value, dict):
                yield cast("dict[str, Any]", value)
            elif value is not None:
                left_out["broken lines"] += 1


def read_object(file: Path, left_out: Counter[str]) -> Mapping[str, Any]:
    """Read a file with a JSON object; empty, and counted, if it is broken. Raises OSError."""
    try:
        value = decode_json(file.read_bytes())
    except ValueError:
        value = None
    if not isinstance(value, dict):
        left_out["broken files"] += 1
        return {}
    return cast("dict[str, Any]", value)


def get_dict(value: Any, name: str) -> dict[str, Any]:
    """Return the object at a key of an object; empty if there is none."""
    found = value.get(name) if isinstance(value, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def get_list(value: Any, name: str) -> list[Any]:
    """Return the list at a key of an object; empty if there is none."""
    found = value.get(name) if isinstance(value, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return cast("list[Any]", found) if isinstance(found, list) else []
