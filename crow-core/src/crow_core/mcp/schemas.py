"""JSON schemas of strangers: whether they are fit to be shown to a model, and to be checked against."""

import re
from collections.abc import Iterable
from typing import Any, cast
from urllib.parse import unquote

import msgspec

LIMIT = 64_000
"""Bytes of a schema, as JSON."""
NODES_LIMIT = 50_000
"""Values in it when what it refers to is written out."""
DEPTH_LIMIT = 64
"""How deep they may be nested."""
ENDLESS = re.compile(rb'"(pattern|\$(?!(ref|defs|schema|comment)"))')
"""Keywords by which a check may take for ever: expressions, and references that are found only while one checks."""


def is_fit(schema: Any) -> bool:
    """Whether a schema is not too large, also when what it refers to is written out."""
    try:
        return len(msgspec.json.encode(schema)) <= LIMIT and written_out(schema, schema, NODES_LIMIT, (), 0) > 0
    except RecursionError:
        return False


def is_tame(schema: Any) -> bool:
    """Whether a check against a schema comes to its end."""
    return is_fit(schema) and ENDLESS.search(msgspec.json.encode(schema)) is None


def written_out(value: Any, root: Any, left: int, inside: tuple[str, ...], depth: int) -> int:
    """How many of `left` values are left when a schema is written out; 0 or less where they do not suffice."""
    if depth > DEPTH_LIMIT:
        return 0
    items: Iterable[Any] = ()
    match value:
        case {"$ref": str(name)} if name not in inside:  # what refers to itself is written out once
            items, inside = (*cast("dict[str, Any]", value).values(), target_of(name, root)), (*inside, name)
        case dict():
            items = cast("dict[str, Any]", value).values()
        case list():
            items = cast("list[Any]", value)
        case _:
            pass
    left -= 1
    for item in items:
        if left <= 0:
            break
        left = written_out(item, root, left, inside, depth + 1)
    return left


def target_of(name: str, root: Any) -> Any:
    """What a reference within a schema leads to; None for one that leads nowhere, or elsewhere."""
    if not name.startswith("#"):
        return None
    place = root
    for step in name[1:].split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        match place:
            case dict():
                place = cast("dict[str, Any]", place).get(key)
            case list() if key.isdecimal() and int(key) < len(cast("list[Any]", place)):
                place = cast("list[Any]", place)[int(key)]
            case _:
                return None
    return place
