"""Convert log entries to rows of `messages` and back, without loss.

Large strings in an entry are stored as blobs; the body then holds `"blob:<SHA-256>"` in their place.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec
from crow_core.messages.message import Message, SentMessage

MIN_BLOB_LENGTH = 1_000
"""Length, in characters, from which a string is stored as a blob."""
BLOB_PREFIX = "blob:"
RENDER_KEYS = ("template", "variables", "text")
"""Keys of a `render` marker that are stored in the tables `prompts` and `renders` instead of the body."""


class DamagedEntry(Exception):
    """A stored entry cannot be read as it was written; `rest` is the readable part, if any."""

    def __init__(self, rest: Message | None = None) -> None:
        super().__init__()
        self.rest = rest


@dataclass(frozen=True)
class EntryRow:
    """A log entry as it is stored."""

    kind: str
    """A message's role, or a marker's kind."""
    body: str
    blobs: dict[str, bytes]
    """The blobs that the body refers to, by hash."""


class StoredEntry(SentMessage, total=False):
    """An entry as the database has it: its notes may be of another version, or of an extension of somebody else."""

    crow: dict[str, Any]


def pack(entry: Message) -> EntryRow:
    blobs: dict[str, bytes] = {}

    def to_blob(text: str) -> str:
        if len(text) < MIN_BLOB_LENGTH and not text.startswith(BLOB_PREFIX):
            return text
        data = text.encode("utf-8", "surrogatepass")
        hash = hashlib.sha256(data).hexdigest()
        blobs[hash] = data
        return BLOB_PREFIX + hash

    kind, notes = entry_kind(entry), entry.get("crow", {})
    if kind == "tools" and "schemas" in notes:
        notes = {**notes, "schemas": encode(notes["schemas"])}
    if kind == "render":
        notes = {name: value for name, value in notes.items() if name not in RENDER_KEYS}
    return EntryRow(kind[:16], encode(replace_strings({**entry, "crow": notes} if notes else entry, to_blob)), blobs)


def unpack(kind: str, body: str, blobs: Mapping[str, bytes]) -> Message:
    """Convert a row to its entry; a `render` marker lacks the keys that `renders` holds. Raises DamagedEntry."""
    missing: list[str] = []

    def from_blob(text: str) -> str:
        if not text.startswith(BLOB_PREFIX):
            return text
        if (data := blobs.get(text.removeprefix(BLOB_PREFIX))) is None:
            missing.append(text)
            return text
        return data.decode("utf-8", "surrogatepass")

    try:
        entry: Any = decode(body)
        msgspec.convert(entry, StoredEntry)  # raises ValidationError if it is not an entry
        whole = replace_strings(entry, from_blob) if f'"{BLOB_PREFIX}' in body else entry
        if kind == "tools" and not missing and "schemas" in whole.get("crow", {}):
            whole["crow"]["schemas"] = decode(whole["crow"]["schemas"])
    except (ValueError, TypeError, RecursionError) as error:  # not JSON, or JSON that is not an entry
        raise DamagedEntry from error
    if missing:
        raise DamagedEntry(drop_missing(entry, missing))
    return whole


def find_blobs(body: str) -> set[str]:
    """Return the hashes of all blobs that a body may refer to; text in it that looks like a reference is included."""
    if not isinstance(body, str):  # pyright: ignore[reportUnnecessaryIsInstance] - SQLite columns take any type
        return set()
    return {part[:64] for part in body.split(f'"{BLOB_PREFIX}')[1:]}


def entry_kind(entry: Message) -> str:
    """Return a message's role, or a marker's kind."""
    return str(entry.get("role") or entry.get("crow", {}).get("kind", ""))


def replace_strings(entry: Any, replace: Callable[[str], str]) -> Any:
    """Return an entry with `replace` applied to the strings that may become blobs: those under `crow` and in content
    parts other than text."""
    entry = dict(entry)
    if "crow" in entry:
        entry["crow"] = map_strings(entry["crow"], replace)
    if isinstance(entry.get("content"), list):
        entry["content"] = [part if is_text_part(part) else map_strings(part, replace) for part in entry["content"]]
    return entry


def drop_missing(entry: Any, missing: Collection[str]) -> Message:
    """Return an entry without its missing blobs: a notice replaces each content part that used one, and only the id,
    kind and failure mark stay under `crow`."""

    def mentions_missing(value: Any) -> bool:
        found: list[str] = []
        map_strings(value, lambda text: found.append(text) or text)
        return not set(missing).isdisjoint(found)

    if isinstance(entry.get("content"), list):
        lost = {"type": "text", "text": "[lost: what was attached here is not in the database any more]"}
        entry["content"] = [
            part if is_text_part(part) or not mentions_missing(part) else lost for part in entry["content"]
        ]
    if mentions_missing(entry.get("crow")):
        entry["crow"] = {name: entry["crow"][name] for name in ("id", "kind", "failed") if name in entry["crow"]}
    return entry


def is_text_part(part: dict[str, Any]) -> bool:
    return part.get("type") == "text"


def map_strings(value: Any, replace: Callable[[str], str]) -> Any:
    """Return a JSON value with `replace` applied to each of its strings, except keys."""
    match value:
        case str():
            return replace(value)
        case dict():
            return {key: map_strings(inner, replace) for key, inner in cast(dict[str, Any], value).items()}
        case list() | tuple():
            return [map_strings(inner, replace) for inner in cast(list[Any], value)]
        case _:
            return value


def encode(value: Any) -> str:
    """Encode a value as JSON. Text may hold unpaired surrogates, as in output of models and in file names."""
    try:
        return msgspec.json.encode(value, enc_hook=str).decode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"), default=str)


def decode(text: str) -> Any:
    """Decode JSON from `encode`. Raises ValueError."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:  # is a ValueError, as is json's error
        return json.loads(text)


def clean_text(text: str) -> str:
    """Return text that every database accepts, for columns that are not JSON: unpaired surrogates become question
    marks, and NUL characters spaces."""
    return text.encode("utf-8", "replace").decode().replace("\0", " ")
