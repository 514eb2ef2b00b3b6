"""Values of workflows as JSON: arguments, results of steps, errors, and durations."""

import json
import re
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from inspect import Parameter, signature
from typing import Any, cast, get_type_hints

import msgspec

from crow_agent.typed_results import OutputType
from crow_agent.workflows.errors import WorkflowError

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
PART = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")


def to_time(milliseconds: int | None) -> datetime | None:
    """Convert milliseconds since 1970 to a time of this place."""
    return None if milliseconds is None else datetime.fromtimestamp(milliseconds / 1000).astimezone()


def to_seconds(duration: str | float | timedelta) -> float:
    """Convert a duration to seconds: "90s", "2h 30m", "3d", "1w", seconds, or a timedelta. Raises ValueError."""
    if isinstance(duration, timedelta):
        return duration.total_seconds()
    if isinstance(duration, str):
        parts = PART.findall(duration.lower())
        if not parts or PART.sub("", duration.lower()).strip():
            raise ValueError(f"{duration!r} is no duration. Write it as 90s, 30m, 2h, 3d or 1w.")
        return sum(float(number) * UNITS[unit] for number, unit in parts)
    return float(duration)


def to_plain(value: Any) -> Any:
    """Convert a value to JSON values. Raises TypeError."""

    def encode(value: Any) -> Any:
        if hasattr(value, "model_dump"):
            return value.model_dump(mode="json")
        raise TypeError(
            f"{type(value).__name__} cannot be stored as JSON. Give a dataclass, a pydantic model, or JSON."
        )

    return msgspec.to_builtins(value, str_keys=True, enc_hook=encode)


def from_plain(value: Any, hint: Any) -> Any:
    """Convert JSON values to a value of a type; they stay as they are for no type, and for one without a schema."""
    if hint in (Any, None, type(None), Parameter.empty, object) or isinstance(hint, str):
        return value
    try:
        wanted = OutputType[Any](hint)
    except TypeError:
        return value
    return wanted.convert(value)


def get_hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a function as types; empty if they cannot be resolved."""
    try:
        return get_type_hints(function, include_extras=True)
    except (NameError, TypeError):
        return {}


def bind(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Convert arguments to JSON values by name. Raises TypeError for arguments that do not fit."""
    bound = signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return {name: to_plain(value) for name, value in bound.arguments.items()}


def unbind(function: Callable[..., Any], arguments: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Convert stored arguments to those of a call, with their types."""
    hints = get_hints(function)
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for name, parameter in signature(function).parameters.items():
        if name not in arguments:
            continue  # it was added with a default since
        hint = hints.get(name, Any)
        match parameter.kind:
            case Parameter.VAR_POSITIONAL:
                positional += [from_plain(value, hint) for value in arguments[name]]
            case Parameter.VAR_KEYWORD:
                named |= {key: from_plain(value, hint) for key, value in arguments[name].items()}
            case Parameter.KEYWORD_ONLY:
                named[name] = from_plain(arguments[name], hint)
            case _:
                positional.append(from_plain(arguments[name], hint))
    return positional, named


def error_to_plain(error: BaseException) -> dict[str, Any]:
    """Convert an error to JSON values: its class, its text, its arguments and fields as far as they are JSON."""
    kind = type(error)
    fields = {name: value for name, value in vars(error).items() if is_json(value)}
    arguments = [value if is_json(value) else str(value) for value in error.args]
    return {"class": f"{kind.__module__}:{kind.__qualname__}", "text": str(error), "args": arguments, "fields": fields}


def is_json(value: Any) -> bool:
    """Test whether a value is stored as JSON without a change."""
    try:
        return json.loads(json.dumps(value)) == value
    except (TypeError, ValueError, RecursionError):
        return False


def error_from_plain(stored: dict[str, Any]) -> Exception:
    """Convert a stored error back, to its class if its module is loaded; else to WorkflowError."""
    module, _, name = str(stored.get("class", "")).partition(":")
    kind: Any = sys.modules.get(module)
    for part in name.split("."):
        kind = getattr(kind, part, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return WorkflowError(f"{name.rpartition('.')[2]}: {stored.get('text', '')}")
    error: Exception = kind.__new__(kind)
    error.args = tuple(stored.get("args", ()))
    for field, value in stored.get("fields", {}).items():
        setattr(error, field, value)
    return error


def dump_json(value: Any) -> str:
    """Convert a value or an error to the text that is stored."""
    if isinstance(value, BaseException):
        value = {"$error": error_to_plain(value)}
    return msgspec.json.encode(to_plain(value)).decode()


def load_json(text: str) -> Any:
    """Convert a stored text to JSON values, or to an error."""
    match json.loads(text):
        case {"$error": {**stored}}:
            return error_from_plain(cast("dict[str, Any]", stored))
        case value:
            return value
