"""Convert the arguments that a model gives to those that a tool's schema describes.

Models use the argument names of the tools they were trained with, and write numbers, lists and objects as text. A tool
of crow says in its `_meta`, under `crow/arguments`, which values it accepts in addition to its schema:

- `synonyms`: {name: [other names]}, also of the properties of nested objects. Case and separators do not matter:
  `file_path` covers `filePath` and `File-Path`. A value under a name that ends in `_ms` is divided by 1000.
- `values`: {value of an enum: [other values]}.
- `ignored`: {name: [values]}: arguments that are left out if they have one of these values; any value if the list is
  empty.
- `ranges`: {name: {"first": [names], "last": [names], "count": [names]}}: arguments that together give a pair of lines.
- `implied`: {name: [{other name: value}, …]}: the value of an argument that is missing, by which others are given. The
  first of these tables with a name that is given decides, if it gives one value.
- `joined`: [names]: arguments whose list of words becomes a shell command.

An argument under its own name always wins: another value under a synonym is an error.

crow_core converts the arguments before a call is judged, crow_mcp_server those of other hosts. Converting them twice
changes nothing.
"""

import ast
import json
import re
import shlex
import warnings
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, cast

DEPTH_LIMIT = 16
"""Levels of nested values that are converted."""
CAMEL_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
NUMBER = re.compile(r"[+-]?\d{1,15}(\.\d{1,15})?")
LINE_RANGE = re.compile(r"[\[(]?\s*([+-]?\d{1,15})\s*(?:,|:|;|\.\.|to|-|–|\s)\s*([+-]?\d{1,15})\s*[\])]?")
NO_VALUE = ("", "null", "none", "undefined")
"""Texts, in lower case, that stand for a missing value where the schema allows no text."""
SHELL = re.compile(r"(.*/)?(ba|da|z|k|a)?sh")
SHELL_FLAG = re.compile(r"-[eilux]*c")
"""The option of a shell that is followed by a command."""


def fit_arguments(
    arguments: Mapping[str, Any], schema: Mapping[str, Any], table: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Convert arguments to the names and types of a tool's JSON schema.

    `table` is the tool's `crow/arguments`; without it, only types are converted. Converting twice changes nothing more.
    Raises ValueError, with a sentence for the model, for two different values of one argument, and for an unknown name
    if the schema allows none.
    """
    return _fit_object(arguments, schema, schema.get("$defs") or {}, table, 0)


@lru_cache(1024)
def to_key(name: str) -> str:
    """Convert a name to its form in `synonyms`: `filePath` and `file-path` become `file_path`, and `-i` becomes `i`."""
    return re.sub(r"[\W_]+", "_", CAMEL_HUMP.sub("_", name)).strip("_").lower()


def find_types(schema: Any, definitions: Mapping[str, Any]) -> set[str]:
    """List the JSON types that the schema of a property allows; {"any"} where it does not say."""
    match schema:
        case {"type": str(kind)}:
            return {kind}
        case {"type": [*kinds]}:
            return set(map(str, kinds))
        case {"anyOf": [*choices]} | {"oneOf": [*choices]}:
            return {kind for choice in choices for kind in find_types(choice, definitions)}
        case {"$ref": str(name)} if (target := definitions.get(name.removeprefix("#/$defs/"))) is not None:
            return find_types(target, {})  # one step only: a schema may refer to itself
        case _:
            return {"any"}


def _fit_object(
    given: Mapping[str, Any],
    schema: Mapping[str, Any],
    definitions: Mapping[str, Any],
    table: Mapping[str, Any] | None,
    depth: int,
) -> dict[str, Any]:
    properties: dict[str, Any] = schema.get("properties") or {}
    required, named = schema.get("required"), dict(given)
    if table is not None:
        named, others = _rename(given, properties, table)
        named |= _make_ranges(others, named, properties, table)
        if others and schema.get("additionalProperties") is False:
            unknown = ", ".join(repr(name[:100]) for name in others)
            raise ValueError(f"There is no argument {unknown}. The arguments are: {', '.join(properties)}.")
        named |= others
        for name in table.get("joined", ()):
            if name in named:
                named[name] = _to_command(named[name])
    fitted: dict[str, Any] = {}
    for name, value in named.items():
        fit = _fit_value(value, properties[name], definitions, table, depth) if name in properties else value
        kinds = find_types(properties.get(name), definitions)
        if fit is not None or kinds & {"null", "any"} or (isinstance(required, list) and name in required):
            fitted[name] = fit
    return fitted | _imply(fitted, properties, table or {})


def _rename(
    given: Mapping[str, Any], properties: Mapping[str, Any], table: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments by the names of the schema, and those that have none and are not ignored."""
    synonyms: dict[str, list[str]] = table.get("synonyms", {})
    names = {to_key(other): name for name in properties for other in synonyms.get(name, ())}
    names |= {to_key(name): name for name in properties}
    ignored: dict[str, list[Any]] = table.get("ignored", {})
    named, sources, others = dict[str, Any](), dict[str, str](), dict[str, Any]()
    for source, value in given.items():
        key = to_key(source)
        harmless = ignored.get(key)
        name = source if source in properties else names.get(key)
        if name != source and harmless and _to_plain(value) in harmless:
            continue
        if name is None:
            if harmless != [] and value is not None and value not in ("", [], {}):
                others[source] = value
            continue
        if name != source and key.endswith("_ms"):
            value = _to_seconds(value)
        if named.get(name) is None:
            named[name], sources[name] = value, source
        elif value is not None and value != named[name]:
            raise ValueError(f"{sources[name]} and {source} are the same argument with two values: give only {name}.")
    return named, others


def _to_plain(value: Any) -> Any:
    """Convert the text of a boolean or a number to its value."""
    return _parse_text(value, {"boolean", "integer"}) if isinstance(value, str) else value


def _to_seconds(value: Any) -> Any:
    number = _parse_text(value, {"number"}) if isinstance(value, str) else value
    return number / 1000 if isinstance(number, int | float) and not isinstance(number, bool) else value


def _make_ranges(
    others: dict[str, Any], named: Mapping[str, Any], properties: Mapping[str, Any], table: Mapping[str, Any]
) -> dict[str, list[int]]:
    """Remove the arguments that give ranges from `others`, and return the ranges. Raises ValueError."""
    made: dict[str, list[int]] = {}
    ranges: dict[str, dict[str, list[str]]] = table.get("ranges", {})
    for name in properties.keys() & ranges.keys():
        parts, found = ranges[name], dict[str, int]()
        for part, keys in parts.items():
            for source in [source for source in others if to_key(source) in keys]:
                number = _to_plain(others.pop(source))
                if type(number) is not int or found.get(part, number) != number or named.get(name) is not None:
                    raise ValueError(f"{source} does not give a range of lines. Give {name} as [first, last].")
                found[part] = number
        if found:
            first = found.get("first", 1) or 1
            # A count from line 10 on may be meant from 0 or from 1: one line more covers both.
            extra = 0 if first < 0 or "first" not in found else 1
            last = first + found.get("count", 0) - 1 + extra
            last = -1 if "count" not in found or (first < 0 <= last) else last
            made[name] = [first, found.get("last", last)]
    return made


def _imply(arguments: Mapping[str, Any], properties: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, str]:
    """Return the arguments that are missing and follow from those that are given."""
    implied: dict[str, str] = {}
    given = {name for name, value in arguments.items() if value not in (None, "")}
    for name, tiers in cast(dict[str, list[dict[str, str]]], table.get("implied", {})).items():
        values = next((found for tier in tiers if (found := {tier[key] for key in given & tier.keys()})), set[str]())
        if name in properties and name not in given and len(values) == 1:
            implied[name] = values.pop()
    return implied


def _to_command(value: Any) -> Any:
    """Convert a list of words, also as JSON text, to a shell command; return anything else as it is."""
    words = parse_container(value) if isinstance(value, str) and value.lstrip().startswith('["') else value
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in cast(list[Any], words)):
        return value
    match cast(list[str], words):
        case [shell, flag, command] if SHELL.fullmatch(shell) and SHELL_FLAG.fullmatch(flag):
            return _to_command(command)
        case [command]:
            return _to_command(command)
        case several:
            return shlex.join(several)


def _fit_value(
    value: Any, schema: Any, definitions: Mapping[str, Any], table: Mapping[str, Any] | None, depth: int
) -> Any:
    """Convert a value to a type that its schema allows; return it as it is if that cannot be done."""
    kinds = find_types(schema, definitions)
    if depth > DEPTH_LIMIT or "any" in kinds:
        return value
    target = _resolve(schema, definitions)
    if isinstance(value, str) and "string" not in kinds:
        items = _resolve(target.get("items"), definitions)
        value = _parse_text(value, kinds, pair="array" in kinds and items.get("type") == "integer")
    elif type(value) is int and kinds == {"string"}:
        value = str(value)
    if isinstance(value, str) and table is not None and isinstance(target.get("enum"), list):
        return _fit_choice(value, target["enum"], table.get("values", {}))
    if isinstance(value, dict) and "array" in kinds and "object" not in kinds:
        value = [cast(dict[str, Any], value)]
    if isinstance(value, dict) and isinstance(target.get("properties"), dict):
        return _fit_object(cast(dict[str, Any], value), target, definitions, table, depth + 1)
    if isinstance(value, list) and isinstance(items := target.get("items"), dict):
        return [_fit_value(item, items, definitions, table, depth + 1) for item in cast(list[Any], value)]
    return cast(Any, value)


def _resolve(schema: Any, definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema, or the target of its reference."""
    match schema:
        case {"$ref": str(name)}:
            target = definitions.get(name.removeprefix("#/$defs/"))
            return cast(dict[str, Any], target) if isinstance(target, dict) else {}
        case dict():
            return cast(dict[str, Any], schema)
        case _:
            return {}


def _fit_choice(value: str, choices: list[Any], values: Mapping[str, list[str]]) -> Any:
    """Return the value of an enum that a text means, None for no text, or the text."""
    if value in choices:
        return value
    keys = {to_key(other): choice for choice in choices for other in values.get(str(choice), ())}
    keys |= {to_key(str(choice)): choice for choice in choices}
    return keys.get(to_key(value), None if value.strip().lower() in NO_VALUE else value)


def _parse_text(text: str, kinds: set[str], *, pair: bool = False) -> Any:
    """Parse a text as one of these types, or with `pair` as two numbers; return the text if it is none of them."""
    plain = text.strip()
    if plain.lower() in NO_VALUE:
        return None
    if "boolean" in kinds and plain.lower() in ("true", "false"):
        return plain.lower() == "true"
    if kinds & {"integer", "number"} and NUMBER.fullmatch(plain):
        number = float(plain)
        if number.is_integer() and ("." not in plain or "number" not in kinds):
            return int(number)
        return number if "number" in kinds else text
    if pair and len(plain) < 50 and (match := LINE_RANGE.fullmatch(plain)):
        return [int(match[1]), int(match[2])]
    if kinds & {"object", "array"} and plain[0] in "[{(":
        container = parse_container(plain)
        wanted = {"object": dict, "array": list}
        return container if type(container) in {wanted[kind] for kind in kinds & wanted.keys()} else text
    return text


def parse_container(text: str) -> Any:
    """Parse JSON, or what Python prints of a list or dict; None if the text is neither."""
    try:
        try:
            value = json.loads(text)
        except ValueError:
            with warnings.catch_warnings(action="ignore"):
                value = ast.literal_eval(text)
        plain = json.dumps(value, ensure_ascii=False, allow_nan=False)
        plain.encode()  # raises for half a surrogate pair
        return json.loads(plain)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
