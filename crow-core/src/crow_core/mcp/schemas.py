"""Limits for JSON schemas that MCP servers send: for showing them to a model, and for checking values with them."""

import re
from collections.abc import Iterable
from typing import Any, cast
from urllib.parse import unquote

import msgspec

SIZE_LIMIT = 64_000
"""Bytes of a schema, as JSON."""
NODES_LIMIT = 50_000
"""Values in a schema after each reference is replaced by its target."""
DEPTH_LIMIT = 64
"""Levels of nesting in a schema."""
ENDLESS = re.compile(rb'"(pattern|\$(?!(ref|defs|schema|comment)"))')
"""Keywords that can make a check endless: regular expressions, and references that are resolved during the check."""


def is_small(schema: Any) -> bool:
    """True if a schema keeps to the limits, also after each reference is replaced by its target."""
    try:
        return len(msgspec.json.encode(schema)) <= SIZE_LIMIT and count_left(schema, schema, NODES_LIMIT, (), 0) > 0
    except RecursionError:
        return False


def is_checkable(schema: Any) -> bool:
    """True if checking a value against a schema is certain to end."""
    return is_small(schema) and ENDLESS.search(msgspec.json.encode(schema)) is None


def count_left(value: Any, root: Any, left: int, inside: tuple[str, ...], depth: int) -> int:
    """Subtract the number of values in a schema from `left`, counting the targets of references. Return 0 or less if it
    has more, or is nested too deeply. `inside` holds the references that are being followed, `depth` the nesting."""
    if depth > DEPTH_LIMIT:
        return 0
    items: Iterable[Any] = ()
    match value:
        case {"$ref": str(name)} if name not in inside:  # a reference to itself is followed once
            items, inside = (*cast("dict[str, Any]", value).values(), resolve_reference(name, root)), (*inside, name)
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
        left = count_left(item, root, left, inside, depth + 1)
    return left


def resolve_reference(name: str, root: Any) -> Any:
    """Return the target of a reference in the schema `root`, or None if the schema has no such place."""
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
