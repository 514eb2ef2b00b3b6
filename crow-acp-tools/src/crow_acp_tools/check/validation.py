"""Check messages strictly against the protocol's schema, without the tolerance that receivers need.

The schema is made from crow's own structs, which are generated from the official one, with the unstable parts that crow
speaks. They are a little laxer where the schema gives a range or a format (`line` may be negative, `updatedAt` any
text). They are stricter in one place: 1.0 is not an integer.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

import msgspec
from crow_core.acp.decoding import get_shape
from crow_system.shortening import shorten_line
from msgspec import Struct, inspect

from crow_acp_tools.check.versions import CHUNKS, VERSION_1, VERSION_2, ProtocolVersion


def find_envelope_flaw(message: dict[str, Any]) -> str:
    """Return what is wrong with an answer apart from its content; the empty text if nothing is."""
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


def find_call_flaw(message: dict[str, Any], version: ProtocolVersion = VERSION_1) -> str:
    """Return what is wrong with a request or a notification; the empty text if nothing is."""
    method = message["method"]
    if not isinstance(method, str):
        return "`method` is not a text"
    if type(message.get("id")) not in (int, str, type(None)):
        return "the `id` of a request is neither an integer, a string nor null"
    if method.startswith("_") or (version.number > 1 and is_own_update(message.get("params"))):
        return ""
    if (known := version.agent_calls.get(method)) is None:
        described = f"{method} is not a method of ACP v{version.number} that an agent may call"
        return f"{described}; an agent's own methods begin with `_`"
    if version.number > 1 and is_chunk_without_id(message.get("params")):
        return f"{method}: a chunk of a message without a `messageId`"
    return find_flaw(message.get("params", {}), known.params, method)


def is_chunk_without_id(params: Any) -> bool:
    """Tell whether an update is a chunk of a message without the message's id, which version 1 allows."""
    update = get_path(params, "update")
    return get_path(update, "sessionUpdate") in CHUNKS and not isinstance(get_path(update, "messageId"), str)


def is_own_update(params: Any) -> bool:
    """Tell whether an update is of a kind of the agent's own, which version 2 allows."""
    return str_or_empty(get_path(params, "update", "sessionUpdate")).startswith("_")


def find_result_flaw(method: str, result: Any, version: ProtocolVersion = VERSION_1) -> str:
    """Return what is wrong with the result of a method; the empty text if nothing is."""
    known = version.agent_methods.get(method)
    return find_flaw(result, known.result, f"the result of {method}") if known and known.result else ""


def find_flaw(value: Any, struct: type[Struct], name: str) -> str:
    """Return why a value is not of this type; the empty text if it is. null is read as an empty object."""
    try:
        to_struct(value, struct)
    except msgspec.ValidationError as error:
        return f"{name}: {error}"
    except RecursionError:
        return f"{name}: nested too deeply"
    return ""


def to_struct(value: Any, struct: type[Struct]) -> Any:
    """Convert a value to a struct. Raises msgspec.ValidationError."""
    if value is None:
        value = {}
    return msgspec.convert(drop_auth_types(value), struct)


def drop_auth_types(value: Any) -> Any:
    """Remove the `type` of auth methods that are not of the type `terminal`: any other is valid and has no meaning."""
    methods = list_or_empty(get_path(value, "authMethods"))
    if not methods or get_path(value, "protocolVersion") == VERSION_2.number:
        return value
    return {**value, "authMethods": [drop_unknown_type(method) for method in methods]}


def drop_unknown_type(method: Any) -> Any:
    if not isinstance(method, dict) or get_path(method, "type") == "terminal":
        return cast("object", method)
    return {key: value for key, value in cast("dict[str, Any]", method).items() if key != "type"}


def get_path(value: Any, *path: str) -> Any:
    """Return the value at a path in any JSON; None where the path does not exist."""
    for name in path:
        if not isinstance(value, dict):
            return None
        value = cast("dict[str, Any]", value).get(name)
    return value


def str_or_empty(value: Any) -> str:
    """Return a string as it is, and the empty string for anything else."""
    return value if isinstance(value, str) else ""


def list_or_empty(value: Any) -> list[Any]:
    """Return a list as it is, and an empty list for anything else."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def find_unknown_keys(message: dict[str, Any], method: str, version: ProtocolVersion = VERSION_1) -> list[str]:
    """Return the paths of keys in a valid message that the protocol does not define: own keys belong in `_meta`."""
    found = [key for key in message if key not in {"jsonrpc", "id", "method", "params", "result", "error"}]
    with suppress(RecursionError):
        if "method" in message and (known := version.agent_calls.get(method)):
            found += walk_unknown_keys(message.get("params"), get_shape(known.params), "params")
        elif "result" in message and (known := version.agent_methods.get(method)) and known.result:
            found += walk_unknown_keys(message["result"], get_shape(known.result), "result")
    return found


def walk_unknown_keys(value: Any, shape: inspect.Type, path: str) -> Iterator[str]:
    if isinstance(value, list) and isinstance(shape, inspect.ListType):
        for index, item in enumerate(list_or_empty(value)):
            yield from walk_unknown_keys(item, shape.item_type, f"{path}[{index}]")
    elif isinstance(shape, inspect.UnionType):
        for option in shape.types:
            if not isinstance(option, inspect.StructType) or is_variant(value, option):
                yield from walk_unknown_keys(value, option, path)
    elif isinstance(value, dict):
        for key, item in cast("dict[str, Any]", value).items():
            yield from check_key(key, item, shape, f"{path}.{key}")


def is_variant(value: Any, option: inspect.StructType) -> bool:
    return option.tag_field is None or get_path(value, option.tag_field) == option.tag


def check_key(key: str, item: Any, shape: inspect.Type, path: str) -> Iterator[str]:
    if isinstance(shape, inspect.DictType):
        yield from walk_unknown_keys(item, shape.value_type, path)
    elif isinstance(shape, inspect.StructType):
        types = {field.encode_name: field.type for field in shape.fields}
        if key in types:
            yield from walk_unknown_keys(item, types[key], path)
        elif key != shape.tag_field:
            yield path


def to_short_json(value: Any, width: int = 100) -> str:
    """Encode any JSON, cut to `width` characters."""
    try:
        text = msgspec.json.encode(value).decode()
    except RecursionError:
        return "something nested too deeply"
    return shorten_line(text, width)
