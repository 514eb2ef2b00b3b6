"""Typed results: the JSON schema that the result of a turn must fit, and the check of a value.

`jsonschema` is imported where it is used: it is slow to load, and few prompts ask for a typed result.
"""

import re
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cached_property, lru_cache
from typing import Any, cast

import msgspec
from crow_system.shortening import shorten_middle

from crow_core.mcp.schemas import DEPTH_LIMIT, SIZE_LIMIT, is_small, resolve_reference
from crow_core.text import decode_json, list_inner

TURN_NOTES: ContextVar[dict[str, Any] | None] = ContextVar("turn_notes", default=None)
"""Notes of extensions in the answer to the running prompt, under `_meta.crow`; the caller of the prompt sets it."""

STOPPED = "stopped"
"""The key in TURN_NOTES that says why a turn was ended without an answer: an object with `by` and `reason`."""

WRAPPER = "result"
"""The property that holds a result whose schema is not that of an object."""
WRAPPERS = frozenset({WRAPPER, "arguments", "parameters", "input"})
"""Properties in which models wrap a result although the schema does not."""
FAULTS_LIMIT = 10
"""Faults of one value that are listed."""
FAULT_LENGTH = 300
"""Characters of one fault."""
FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.S)
"""Matches a fenced block of a Markdown text."""
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
CHOICES = ("anyOf", "oneOf", "allOf", "not", "enum", "const", "if")
"""Keywords that providers refuse at the top of a schema."""


class OutputSchema:
    """A JSON schema for the result of a turn."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self.schema = schema

    @cached_property
    def root(self) -> dict[str, Any]:
        """The schema, without a reference at its top."""
        return inline_root(self.schema)

    @property
    def is_wrapped(self) -> bool:
        """True if models are shown the schema inside of an object, as its property `result`."""
        return self.root.get("type") != "object" or any(key in self.root for key in CHOICES)

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """The schema as models are shown it: that of an object, as providers demand."""
        if not self.is_wrapped:
            return self.root
        shared = {key: self.schema[key] for key in ("$defs", "definitions") if key in self.schema}
        own = {key: value for key, value in self.schema.items() if key not in (*shared, "$schema", "$id")}
        moved = {key: move_references(value) for key, value in shared.items()}
        return {"type": "object", "properties": {WRAPPER: move_references(own)}, "required": [WRAPPER], **moved}

    def accept(self, value: Any) -> Any:
        """Return the result that a model gave. Raises ValueError, with one line for each fault."""
        match value:
            case {"result": inner} if self.is_wrapped and len(cast("dict[str, Any]", value)) == 1:
                value = inner
            case _:
                pass
        readings = iterate_readings(value)
        if not (faults := list_faults(next(readings), self.schema)):
            return value
        for reading in readings:
            if not list_faults(reading, self.schema):
                return reading
        raise ValueError("\n".join(faults))

    def accept_text(self, text: str) -> Any:
        """Return the result in the text of a model: JSON, or the text itself where the schema allows text.

        Raises ValueError.
        """
        try:
            value = find_json(text)
        except ValueError:
            if list_faults(text.strip(), self.schema):
                raise
            return text.strip()
        return self.accept(value)


def iterate_readings(value: Any) -> Iterator[Any]:
    """Yield a value, then what is in it if it is a needless wrapper, or a tool call that was written as text."""
    yield value
    if isinstance(value, dict):
        given = cast("dict[str, Any]", value)
        for key in WRAPPERS & given.keys():
            if given.keys() <= {key, "name", "type"}:
                yield from iterate_readings(given[key])


def check_schema(schema: Any) -> None:
    """Check that a JSON schema can be used. Raises ValueError, with the reason."""
    if not isinstance(schema, dict):
        raise ValueError("it is not a JSON object")
    try:
        text = msgspec.json.encode(cast("dict[str, Any]", schema))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error})") from error
    if len(text) > SIZE_LIMIT:
        raise ValueError(f"it has more than {SIZE_LIMIT:,} bytes")
    if reason := find_schema_fault(text):
        raise ValueError(reason)


@lru_cache(maxsize=64)  # a check takes milliseconds, and a program sends the same schema with every prompt
def find_schema_fault(text: bytes) -> str:
    """Find the reason why a JSON schema, given as JSON text, cannot be used; empty if there is none."""
    schema: dict[str, Any] = msgspec.json.decode(text)
    if not is_small(schema):
        return f"it has more than {DEPTH_LIMIT} levels, or its references make it too large"
    for place in iterate_objects(schema):
        for key in REFERENCES:
            if not isinstance(name := place.get(key), str):
                continue
            if name != "#" and not name.startswith("#/"):
                return f"it refers to {name[:100]!r}; only references such as '#/$defs/Name' can be followed"
            if resolve_reference(name, schema) is None:
                return f"it refers to {name[:100]!r}, which it does not have"
        if place is not schema and isinstance(place.get("$id"), str):
            return "only its top may have an $id"
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import validator_for

    try:
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except SchemaError as error:
        return f"{shorten_middle(error.message, FAULT_LENGTH)} (at {describe_path(error.absolute_path)})"
    return ""


def list_faults(value: Any, schema: dict[str, Any]) -> list[str]:
    """List why a value does not fit a schema that was checked, each fault with its place; empty if it fits."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import ValidationError, best_match  # pyright: ignore[reportUnknownVariableType]
    from jsonschema.validators import validator_for

    faults: list[str] = []
    try:
        for found in validator_for(schema, default=Draft202012Validator)(schema).iter_errors(value):
            error = cast("ValidationError", best_match([found]) or found)  # of several choices the nearest
            faults.append(f"{describe_path(error.absolute_path)}: {shorten_middle(error.message, FAULT_LENGTH)}")
    except RecursionError:
        faults.append("the result: it is nested too deeply")
    more = len(faults) - FAULTS_LIMIT
    return [*faults[:FAULTS_LIMIT], *([f"and {more} more"] if more > 0 else [])]


def describe_path(path: Any) -> str:
    """Convert the path of a value to text, such as `people[0].name`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".") or "the result"


def find_json(text: str) -> Any:
    """Return the JSON value that a text is, holds in a fenced block, or holds between braces. Raises ValueError."""
    candidates = [text, *reversed(FENCE.findall(text))]
    for first, last in ("{}", "[]"):
        if (start := text.find(first)) >= 0 and (end := text.rfind(last)) > start:
            candidates.append(text[start : end + 1])
    for candidate in candidates:
        try:
            return decode_json(candidate.strip())
        except ValueError:
            continue
    raise ValueError("it is not JSON")


def inline_root(schema: dict[str, Any]) -> dict[str, Any]:
    """Replace a reference at the top of a schema by its target."""
    seen: set[str] = set()
    while isinstance(name := schema.get("$ref"), str) and name not in seen:
        seen.add(name)
        target = resolve_reference(name, schema)
        if not isinstance(target, dict):
            break
        schema = {**{key: value for key, value in schema.items() if key != "$ref"}, **target}
    return schema


def move_references(schema: Any) -> Any:
    """Let the references in a schema point to its place in the property `result`; definitions stay at the top."""
    match schema:
        case dict():
            moved = {key: move_references(value) for key, value in cast("dict[str, Any]", schema).items()}
            name = moved.get("$ref")
            if isinstance(name, str) and not name.startswith(("#/$defs/", "#/definitions/")):
                moved["$ref"] = f"#/properties/{WRAPPER}{name[1:]}"
            return moved
        case list():
            return [move_references(value) for value in cast("list[Any]", schema)]
        case _:
            return schema


def iterate_objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield every JSON object in a schema."""
    todo: list[Any] = [schema]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            yield cast("dict[str, Any]", value)
        todo += list_inner(value)


def is_strict(schema: Any) -> bool:
    """True if each object in a schema has exactly its properties, as providers demand for `strict`."""
    return all(
        place.get("additionalProperties") is False
        and set(place.get("required", ())) == set(place.get("properties", ()))
        for place in iterate_objects(schema)
        if place.get("type") == "object"
    )
