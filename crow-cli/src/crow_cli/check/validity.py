"""Whether a message is what the protocol's schema says, without the tolerance that receivers owe to each other.

The measure are the structs that crow's own wire uses, which are generated from the official schema; of its unstable
parts they hold those that crow speaks. They are a little laxer than the schema where it gives a range or a format
(`line` may be negative, `updatedAt` any text), and a little stricter in one place: 1.0 is no integer.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

import msgspec
from crow_core.acp.decoding import get_shape
from crow_core.acp.schema import AGENT_METHODS, CLIENT_METHODS, PROTOCOL_METHODS
from msgspec import Struct, inspect

CALLS = {**CLIENT_METHODS, **PROTOCOL_METHODS}
"""What an agent may call."""


def envelope_flaw(message: dict[str, Any]) -> str:
    """What is wrong with an answer before its content is looked at; nothing is an empty text."""
    if "id" not in message:
        return "an answer without `id`"
    if type(message["id"]) not in (int, str, type(None)):
        return "the `id` of an answer is neither an integer, a string nor null"
    if ("result" in message) == ("error" in message):
        return "an answer has either `result` or `error`" + (", not both" if "result" in message else "")
    if "error" not in message:
        return ""
    match message["error"]:
        case {"code": int(code), "message": str()} if not isinstance(code, bool):
            return ""
        case _:
            return "an `error` has an integer `code` and a text `message`"


def call_flaw(message: dict[str, Any]) -> str:
    """What is wrong with a request or a notification."""
    method = message["method"]
    if not isinstance(method, str):
        return "`method` is no text"
    if type(message.get("id")) not in (int, str, type(None)):
        return "the `id` of a request is neither an integer, a string nor null"
    if method.startswith("_"):
        return ""
    if (known := CALLS.get(method)) is None:
        return f"{method} is no method of ACP v1 that an agent may call; one's own begin with `_`"
    return flaw(message.get("params", {}), known.params, method)


def result_flaw(method: str, result: Any) -> str:
    """What is wrong with the result of a method."""
    known = AGENT_METHODS.get(method)
    return flaw(result, known.result, f"the result of {method}") if known and known.result else ""


def flaw(value: Any, type: type[Struct], what: str) -> str:
    """Why a value is not of this type; null stands for an object that requires nothing."""
    try:
        read(value, type)
    except msgspec.ValidationError as error:
        return f"{what}: {error}"
    except RecursionError:
        return f"{what}: nested too deeply"
    return ""


def read(value: Any, type: type[Struct]) -> Any:
    """The struct. Raises msgspec.ValidationError."""
    if value is None:
        value = {}
    return msgspec.convert(without_other_auth(value), type)


def without_other_auth(value: Any) -> Any:
    """Every `type` of an auth method is valid; only that of a terminal means more than its id and name."""
    if not (methods := listed(at(value, "authMethods"))):
        return value
    return {**value, "authMethods": [without_other_type(method) for method in methods]}


def without_other_type(method: Any) -> Any:
    if not isinstance(method, dict) or at(method, "type") == "terminal":
        return cast("object", method)
    return {key: value for key, value in cast("dict[str, Any]", method).items() if key != "type"}


def at(value: Any, *path: str) -> Any:
    """What stands at a path in any JSON; None where there is no such place."""
    for name in path:
        if not isinstance(value, dict):
            return None
        value = cast("dict[str, Any]", value).get(name)
    return value


def listed(value: Any) -> list[Any]:
    """A list as it is; anything else is an empty one."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def strangers(message: dict[str, Any], method: str) -> list[str]:
    """The paths of the keys that the protocol's objects in a valid message do not have; one's own go into `_meta`."""
    found = [key for key in message if key not in {"jsonrpc", "id", "method", "params", "result", "error"}]
    with suppress(RecursionError):
        if "method" in message and (known := CALLS.get(method)):
            found += unknown_keys(message.get("params"), get_shape(known.params), "params")
        elif "result" in message and (known := AGENT_METHODS.get(method)) and known.result:
            found += unknown_keys(message["result"], get_shape(known.result), "result")
    return found


def unknown_keys(value: Any, shape: inspect.Type, path: str) -> Iterator[str]:
    if isinstance(value, list) and isinstance(shape, inspect.ListType):
        for index, item in enumerate(listed(value)):
            yield from unknown_keys(item, shape.item_type, f"{path}[{index}]")
    elif isinstance(shape, inspect.UnionType):
        for option in shape.types:
            if not isinstance(option, inspect.StructType) or is_variant(value, option):
                yield from unknown_keys(value, option, path)
    elif isinstance(value, dict):
        for key, item in cast("dict[str, Any]", value).items():
            yield from unknown_key(key, item, shape, f"{path}.{key}")


def is_variant(value: Any, option: inspect.StructType) -> bool:
    return option.tag_field is None or at(value, option.tag_field) == option.tag


def unknown_key(key: str, item: Any, shape: inspect.Type, path: str) -> Iterator[str]:
    if isinstance(shape, inspect.DictType):
        yield from unknown_keys(item, shape.value_type, path)
    elif isinstance(shape, inspect.StructType):
        types = {field.encode_name: field.type for field in shape.fields}
        if key in types:
            yield from unknown_keys(item, types[key], path)
        elif key != shape.tag_field:
            yield path


def brief(value: Any, width: int = 100) -> str:
    """Any JSON in a few words."""
    try:
        text = msgspec.json.encode(value).decode()
    except RecursionError:
        return "something nested too deeply"
    return text if len(text) <= width else f"{text[: width - 2]} …"
