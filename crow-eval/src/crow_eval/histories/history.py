"""The content of another agent's history: sessions with messages, and unreadable parts."""

import json
import re
import sqlite3
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

from crow_core.content import to_content
from crow_core.mcp.result import ToolResult
from crow_core.messages.message import Message, RawToolCall
from crow_core.text import decode_json

LEFT = "messages of branches that were left"
IMAGE_TYPE = re.compile(r"image/[a-z0-9.+-]+")


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
    """Content without a place in a message, by a name for it, with its number."""

    @property
    def own_id(self) -> str:
        """The id of the session here: always the same for the same session."""
        return sha256(f"{self.agent}\0{self.id}".encode("utf-8", "surrogatepass")).hexdigest()[:32]

    def make_entry_ids(self) -> list[str]:
        """Make the ids of the entries: each is a digest of its message and of all before it, so that equal ids mean
        equal beginnings."""
        ids: list[str] = []
        before = self.own_id
        for _, message in self.entries:
            said = json.dumps(message, sort_keys=True)
            before = sha256(f"{before}\0{said}".encode()).hexdigest()[:32]
            ids.append(before)
        return ids

    def add(self, at: int, message: Message) -> None:
        self.entries.append((at, message))

    def add_text(self, at: int, role: str, text: str) -> None:
        """Add a message of the user or the assistant, unless it is empty."""
        if text.strip():
            self.add(at, cast(Message, {"role": role, "content": text}))

    def add_prompt(self, at: int, content: Any) -> None:
        """Add what the user said, words and images, unless it is empty."""
        said = ToolResult(to_blocks(content))
        if any(block["type"] == "image" for block in said.content):
            self.add(at, {"role": "user", "content": to_content(said)})
        elif said.content:
            self.add_text(at, "user", "\n\n".join(block["text"] for block in said.content))

    def add_result(self, at: int, id: str, content: Any, *, failed: bool = False) -> None:
        """Add the result of a tool call: text and images."""
        blocks, notes = to_blocks(content), dict[str, Any]()
        if failed:
            notes["failed"] = True
        if any(block["type"] == "image" for block in blocks):
            notes["shown"] = {"blocks": blocks}
        text = to_content(ToolResult(blocks)) if notes.get("shown") else "\n\n".join(each["text"] for each in blocks)
        message = {"role": "tool", "tool_call_id": id, "content": text}
        self.add(at, cast(Message, {**message, "crow": notes} if notes else message))

    def drop_turns(self, turns: Any) -> None:
        """Drop the last turns, which the user has left."""
        prompts = [at for at, (_, message) in enumerate(self.entries) if message.get("role") == "user"]
        if isinstance(turns, int) and turns > 0 and prompts:
            end = prompts[-min(turns, len(prompts))]
            self.left_out[LEFT] += len(self.entries) - end
            del self.entries[end:]

    def settle(self) -> None:
        """Give each tool call an id of its own, and put its first result right behind its reply. Other results are
        dropped and counted. Calls without a result stay: it may follow with a later import."""
        groups: list[list[tuple[int, Message]]] = []
        waiting: dict[str, list[tuple[int, str]]] = {}
        used, repeated = set[str](), Counter[str]()
        for at, message in self.entries:
            id = message.get("tool_call_id", "")
            if message.get("role") != "tool":
                uses = message.get("tool_calls", [])
                waiting |= {use["id"]: [] for use in uses}
                for use in uses:
                    own = make_own_id(use["id"], used, repeated)
                    waiting[use["id"]].append((len(groups), own))
                    use["id"] = own
                groups.append([(at, message)])
            elif waiting.get(id):
                group, message["tool_call_id"] = waiting[id].pop(0)
                groups[group].append((at, message))
            else:
                self.left_out["further results of a call" if id in waiting else "results without a call"] += 1
        self.entries = [entry for group in groups for entry in group]


@dataclass
class ReplyParts:
    """The parts of a reply that a history has as records which follow each other."""

    session: ForeignSession
    at: int = 0
    """The time of the first part; 0 if it is not known."""
    texts: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    uses: list[RawToolCall] = field(default_factory=list[RawToolCall])
    results: list[tuple[int, str, Any, bool]] = field(default_factory=list[tuple[int, str, Any, bool]])
    """The results of its calls: the time, the call's id, the content, and True if it failed."""

    def add_call(self, at: int, use: RawToolCall) -> None:
        self.at = self.at or at
        self.uses.append(use)

    def add_text(self, at: int, text: str) -> None:
        """Add text. It begins another reply if calls were before it."""
        if self.uses:
            self.flush()
        self.at = self.at or at
        self.texts.append(text)

    def add_reasoning(self, at: int, text: str) -> None:
        """Add reasoning. It begins another reply if text or calls were before it."""
        if self.texts or self.uses:
            self.flush()
        self.at = self.at or at
        self.reasoning.append(text)

    def flush(self) -> None:
        """Add the reply and the results of its calls to the session, and begin another one."""
        text, reasoning = "".join(self.texts), "".join(self.reasoning)
        if text or reasoning or self.uses:
            self.session.add(self.at, make_reply(text, reasoning, self.uses))
        for at, id, content, failed in self.results:
            self.session.add_result(at, id, content, failed=failed)
        self.at, self.texts, self.reasoning, self.uses, self.results = 0, [], [], [], []


def make_own_id(id: str, used: set[str], repeated: Counter[str]) -> str:
    """Return the id of a tool call, or one with a number behind it if another call has it."""
    own = id
    while own in used:
        repeated[id] += 1
        own = f"{id}-{repeated[id] + 1}"
    used.add(own)
    return own


def make_use(id: Any, name: Any, arguments: Any) -> RawToolCall:
    """Make a tool call; its arguments are JSON values, or a text as the model wrote it."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False, default=str)
    return {"id": str(id), "type": "function", "function": {"name": str(name), "arguments": text}}


def make_reply(text: str = "", reasoning: str = "", uses: Sequence[RawToolCall] = ()) -> Message:
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
            return json.dumps(content, ensure_ascii=False, default=str)


def to_blocks(content: Any) -> list[dict[str, Any]]:
    """Convert the content of a message or of a result to blocks of MCP: text and images."""
    if isinstance(content, list):
        return [block for part in cast("list[Any]", content) for block in to_blocks(part)]
    if image := find_image(content):
        return [image]
    return [{"type": "text", "text": text}] if (text := to_text(content)) else []


def find_image(part: Any) -> dict[str, Any] | None:
    """Convert a part that holds an image, as one of the agents writes it, to a block of MCP. None for any other part,
    also for an image that is somewhere else."""
    match part:
        case {"type": "image", "source": {"media_type": str(kind), "data": str(data)}}:  # of the Messages API
            pass
        case {"type": "image", "mimeType": str(kind), "data": str(data)}:  # of pi
            pass
        case {"type": "input_image", "image_url": str(url)} | {"type": "file", "url": str(url)}:  # Codex; opencode
            kind, _, data = url.removeprefix("data:").partition(";base64,")
        case _:
            return None
    if not IMAGE_TYPE.fullmatch(kind):
        return None
    try:
        b64decode(data, validate=True)
    except ValueError:
        return None
    return {"type": "image", "mimeType": kind, "data": data} if data else None


def to_line(value: Any) -> str:
    """Return a text of a history; empty if it is of another type."""
    return value if isinstance(value, str) else ""


def to_time(value: Any) -> int:
    """Convert a time to milliseconds since 1970: ISO 8601, or a number of seconds or milliseconds; 0 for others."""
    if isinstance(value, str):
        try:
            return max(0, int(datetime.fromisoformat(value).timestamp() * 1000))
        except (ValueError, OverflowError, OSError):
            return 0
    if isinstance(value, (int, float)) and 0 < value < 1e14:
        return int(value if value > 1e11 else value * 1000)
    return 0


def read_files(path: Path, pattern: str, read: Callable[[Path], Iterable[ForeignSession]]) -> Iterator[ForeignSession]:
    """Read the sessions of a file, or of the files below a folder whose names match. Raises OSError."""
    for file in [path] if path.is_file() else sorted(file for file in path.rglob(pattern) if file.is_file()):
        yield from read(file)


def find_path(
    lines: Sequence[Mapping[str, Any]], last: int, get_id: Callable[[int], Any], get_parent: Callable[[int], Any]
) -> set[int]:
    """Find the lines of a tree that lead to one of them, by their numbers. A line whose parent is not there follows the
    line before it, which a broken line may have cost."""
    known = {id: number for number in range(len(lines)) if isinstance(id := get_id(number), str)}
    path = set[int]()
    at: int | None = last
    while at is not None and at >= 0 and at not in path:
        path.add(at)
        parent = get_parent(at)
        at = None if parent is None else known.get(parent, at - 1) if isinstance(parent, str) else at - 1
    return path


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


@contextmanager
def open_database(file: Path, program: str) -> Generator[sqlite3.Connection]:
    """Open the database of a program, for reading. Raises OSError, also for one with other tables or columns.

    Rows have names, and text that is not UTF-8 has replacement characters.
    """
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as database:
            database.row_factory = sqlite3.Row
            database.text_factory = partial(bytes.decode, errors="replace")
            yield database
    except (sqlite3.Error, IndexError) as error:  # no database, or other columns
        raise OSError(f"{file} cannot be read as a database of {program}: {error}") from error


def get_dict(value: Any, name: str) -> dict[str, Any]:
    """Return the object at a key of an object; empty if there is none."""
    found = value.get(name) if isinstance(value, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def get_list(value: Any, name: str) -> list[Any]:
    """Return the list at a key of an object; empty if there is none."""
    found = value.get(name) if isinstance(value, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return cast("list[Any]", found) if isinstance(found, list) else []
