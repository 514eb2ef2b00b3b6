"""Find the first value in parsed settings that its type does not allow, and its line in the file."""

import re
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, cast, get_args, get_origin

import msgspec
from crow_core.errors import ConfigError
from msgspec import Struct

UNKNOWN_KEY = "no such setting. Remove it, or correct its name"
FORMER_KEYS = {"max_turns": "max_requests", "extensions.budgets.turns": "requests"}
"""The present names of settings by their former names."""


def to_read_error(path: Path, error: OSError | UnicodeDecodeError) -> ConfigError:
    return ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.")


class Fault(NamedTuple):
    """A value that its type does not allow."""

    keys: list[str]
    """The keys that lead to it. An item of a list counts as the list."""
    sentence: str


def find_fault(data: Any, kind: Any) -> Fault | None:
    """Return the first value in parsed data that does not fit the type, or None if all of it does."""
    try:
        msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        sentence = str(error)
    else:
        return None
    for keys, inner, inner_kind in list_parts(data, kind):
        if inner_kind is None:
            return Fault(keys, UNKNOWN_KEY)
        if fault := find_fault(inner, inner_kind):
            return Fault([*keys, *fault.keys], fault.sentence)
    return Fault([], sentence)


def list_parts(data: Any, kind: Any) -> list[tuple[list[str], Any, Any]]:
    """List what a table or a list holds: its keys, the value and the value's type; None is the type of an unknown key.

    Return nothing for other values.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return list_parts(data, arguments[0])
    if origin in (Union, UnionType):
        return [part for choice in arguments for part in list_parts(data, choice)]
    match data:
        case dict() if len(arguments) == 2:
            return [([key], value, arguments[1]) for key, value in cast(dict[str, Any], data).items()]
        case dict() if isinstance(kind, type) and issubclass(kind, Struct):
            types = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
            parts = [([key], value, types.get(key)) for key, value in cast(dict[str, Any], data).items()]
            return [part for part in parts if part[2] or kind.__struct_config__.forbid_unknown_fields]
        case list() if len(arguments) == 1:
            return [([], value, arguments[0]) for value in cast(list[Any], data)]
        case _:
            return []


def to_config_error(path: Path, text: str, fault: Fault) -> ConfigError:
    """Make the error that names the file, the line and the key of a fault; `text` is the file's content."""
    key = ".".join(fault.keys)
    sentence = f"{fault.sentence[:1].lower()}{fault.sentence[1:]}"
    if fault.sentence == UNKNOWN_KEY and key in FORMER_KEYS:
        sentence = f"this setting is called {FORMER_KEYS[key]} now. Rename it"
    return ConfigError(f"{path}{find_line(text, fault.keys)}{f' {key}' if key else ''}: {sentence}.")


def find_line(text: str, keys: list[str]) -> str:
    """Return `, line N,` of the last of these nested keys in TOML or JSON; "" if none of them is found."""
    return describe_line(blank_comments(text), find_key(text, keys))


def find_line_number(text: str, keys: list[str]) -> int:
    """Return the number of the line of the last of these nested keys in TOML or JSON; 0 if none of them is found."""
    at = find_key(text, keys)
    return blank_comments(text).count("\n", 0, at) + 1 if at >= 0 else 0


def find_key(text: str, keys: list[str]) -> int:
    """Return the index of the last of these nested keys in TOML or JSON without its comments; -1 if none is found."""
    at, text = -1, blank_comments(text)
    for key in keys:
        match = re.compile(rf"""(?m)(?:^|[\[.{{,])\s*["']?({re.escape(key)})["']?\s*[].=:]""").search(text, at + 1)
        at = match.start(1) if match else at
    return at


def describe_line(text: str, at: int) -> str:
    """Return `, line N,` for a character's index; "" for a negative one."""
    return f", line {text.count(chr(10), 0, at) + 1}," if at >= 0 else ""


def blank_comments(text: str) -> str:
    """Empty the comment lines of TOML, so that nothing is found in them."""
    return re.sub(r"(?m)^[ \t]*#.*", "", text)
