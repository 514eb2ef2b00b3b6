"""A log's entry as a row, and a row as an entry again: the same, whatever was in it.

What is large in an entry, and the same in many, is kept apart: its place in the body holds `"blob:<SHA-256>"`.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec
from crow_core.messages import Message

LARGE = 1_000
"""Characters from which a string is kept apart."""
BLOB = "blob:"
RENDERED = ("template", "variables", "text")
"""Of a `render` marker: what the tables `prompts` and `renders` hold."""


class Damaged(Exception):
    """A row cannot be read as it was written; `rest` is what can be, if anything."""

    def __init__(self, rest: Message | None = None) -> None:
        super().__init__()
        self.rest = rest


@dataclass(frozen=True)
class Row:
    """An entry as it is stored."""

    kind: str
    """A message's role, or a marker's kind."""
    body: str
    blobs: dict[str, bytes]
    """What the body names, by hash."""


def pack(entry: Message) -> Row:
    """An entry as a row."""
    blobs: dict[str, bytes] = {}

    def apart(text: str) -> str:
        if len(text) < LARGE and not text.startswith(BLOB):
            return text
        data = text.encode("utf-8", "surrogatepass")
        hash = hashlib.sha256(data).hexdigest()
        blobs[hash] = data
        return BLOB + hash

    kind, notes = kind_of(entry), entry.get("crow", {})
    if kind == "tools" and "schemas" in notes:
        notes = {**notes, "schemas": encode(notes["schemas"])}
    if kind == "render":
        notes = {name: value for name, value in notes.items() if name not in RENDERED}
    return Row(kind[:16], encode(swapped({**entry, "crow": notes} if notes else entry, apart)), blobs)


def unpack(kind: str, body: str, blobs: Mapping[str, bytes]) -> Message:
    """The entry that became this row; of a `render` marker, what `renders` does not hold. Raises Damaged."""
    missing: list[str] = []

    def back(text: str) -> str:
        if not text.startswith(BLOB):
            return text
        if (data := blobs.get(text.removeprefix(BLOB))) is None:
            missing.append(text)
            return text
        return data.decode("utf-8", "surrogatepass")

    try:
        entry: Any = decode(body)
        msgspec.convert(entry, Message)  # whether it has the shape of one
        whole = swapped(entry, back) if f'"{BLOB}' in body else entry
        if kind == "tools" and not missing and "schemas" in whole.get("crow", {}):
            whole["crow"]["schemas"] = decode(whole["crow"]["schemas"])
    except (ValueError, TypeError, RecursionError) as error:  # no JSON, or JSON that is no entry
        raise Damaged from error
    if missing:
        raise Damaged(without(entry, missing))
    return whole


def names(body: str) -> set[str]:
    """The hashes of all blobs a body may name, and perhaps more; none of one that was damaged to something else."""
    if not isinstance(body, str):  # pyright: ignore[reportUnnecessaryIsInstance] - SQLite takes anything
        return set()
    return {part[:64] for part in body.split(f'"{BLOB}')[1:]}


def kind_of(entry: Message) -> str:
    return str(entry.get("role") or entry.get("crow", {}).get("kind", ""))


def swapped(entry: Any, swap: Callable[[str], str]) -> Any:
    """An entry with the strings replaced that may be kept apart: those of our notes, and of content that is no text."""
    entry = dict(entry)
    if "crow" in entry:
        entry["crow"] = mapped(entry["crow"], swap)
    if isinstance(entry.get("content"), list):
        entry["content"] = [part if is_text(part) else mapped(part, swap) for part in entry["content"]]
    return entry


def without(entry: Any, missing: Collection[str]) -> Message:
    """An entry of which something is lost that was kept apart: parts that held it say so, of our notes the id stays."""

    def names_lost(value: Any) -> bool:
        found: list[str] = []
        mapped(value, lambda text: found.append(text) or text)
        return not set(missing).isdisjoint(found)

    if isinstance(entry.get("content"), list):
        lost = {"type": "text", "text": "[lost: what was attached here is not in the database any more]"}
        entry["content"] = [part if is_text(part) or not names_lost(part) else lost for part in entry["content"]]
    if names_lost(entry.get("crow")):
        entry["crow"] = {name: entry["crow"][name] for name in ("id", "kind", "failed") if name in entry["crow"]}
    return entry


def is_text(part: dict[str, Any]) -> bool:
    return part.get("type") == "text"


def mapped(value: Any, swap: Callable[[str], str]) -> Any:
    """A JSON value with each of its strings (not the keys) replaced by what a function makes of it."""
    match value:
        case str():
            return swap(value)
        case dict():
            return {key: mapped(inner, swap) for key, inner in cast(dict[str, Any], value).items()}
        case list() | tuple():
            return [mapped(inner, swap) for inner in cast(list[Any], value)]
        case _:
            return value


def encode(value: Any) -> str:
    """JSON; also of text with halves of surrogate pairs, as models and file names have them."""
    try:
        return msgspec.json.encode(value, enc_hook=str).decode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"), default=str)


def decode(text: str) -> Any:
    """What `encode` was given. Raises ValueError."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:  # a ValueError, too
        return json.loads(text)


def plain(text: str) -> str:
    """Text as every database takes it, for columns that are no JSON."""
    return text.encode("utf-8", "replace").decode().replace("\0", " ")
