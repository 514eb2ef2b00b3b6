"""Convert JSON to the structs of ACP and back, in one strict pass and, if that fails, one lenient pass.

The lenient pass follows the marks of the official schema (`x-deserialize-*`): a malformed optional field gets its
default, some lists drop their invalid items, null may stand for the default. It also keeps variants that it does not
know, and accepts 1.0 as 1.
"""

import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Literal, TypeVar, cast

import msgspec
from msgspec import UNSET, ValidationError, inspect

from crow_core.acp.schema import Unknown

T = TypeVar("T")
Path = tuple[str | int, ...]


def decode(raw: bytes | msgspec.Raw, target: type[T]) -> T:
    """Decode JSON as a value of the type `target`.

    Raises msgspec.ValidationError if it does not fit, with one line that begins with the path (`cwd: expected str,
    got int`); its base class msgspec.DecodeError if it is not JSON.
    """
    try:
        return get_decoder(target).decode(raw)
    except ValidationError:
        return convert_leniently(msgspec.json.decode(raw), target)
    except RecursionError:
        raise ValidationError("message: nested too deeply") from None


def to_raw(value: Any) -> Any:
    """Return the raw value of an unknown variant; the encoder calls this for objects that msgspec does not know."""
    if isinstance(value, Unknown):
        return value.raw
    raise TypeError(f"{type(value).__name__} is not part of the ACP vocabulary")


encode = msgspec.json.Encoder(enc_hook=to_raw).encode
"""Encodes a value as JSON on one line, unknown variants as they were received."""


@cache
def get_decoder(target: type[T]) -> msgspec.json.Decoder[T]:
    return msgspec.json.Decoder(target)


get_shape = cache(inspect.type_info)


def convert_leniently(value: Any, target: type[T]) -> T:
    """Convert decoded JSON to the type `target`, by the lenient rules if it must. Raises msgspec.ValidationError."""
    with suppress(ValidationError):
        return msgspec.convert(value, target)
    shape = get_shape(target)
    if value is None and isinstance(shape, inspect.StructType):
        value = {}  # params or a result may be left out if no field is required
    return build(shape, value, ())


def build(shape: inspect.Type, value: Any, path: Path) -> Any:
    """Convert decoded JSON to a type; `path` is its place for errors. Raises ValidationError."""
    match shape:
        case inspect.StructType():
            return build_struct(shape, check_kind(shape, value, path), path)
        case inspect.UnionType():
            return build_union(shape, value, path)
        case inspect.ListType():
            items: list[Any] = check_kind(shape, value, path)
            return [build(shape.item_type, item, (*path, index)) for index, item in enumerate(items)]
        case inspect.DictType():
            entries: dict[str, Any] = check_kind(shape, value, path)
            return {key: build(shape.value_type, entry, (*path, key)) for key, entry in entries.items()}
        case inspect.LiteralType() if value not in shape.values:
            raise make_mismatch_error([shape], value, path)
        case inspect.IntType() if isinstance(value, float) and value.is_integer():
            return int(value)
        case inspect.FloatType() if type(value) is int:
            return float(value)
        case _:
            return check_kind(shape, value, path)


def build_struct(shape: inspect.StructType, value: dict[str, Any], path: Path) -> Any:
    cls = shape.cls
    arguments: dict[str, Any] = {}
    for field in shape.fields:
        name, here = field.name, (*path, field.encode_name)
        item = value.get(field.encode_name, UNSET)
        if item is UNSET or (item is None and name in find_marks(cls, "DEFAULT_ON_NULL")):
            if field.required:
                raise ValidationError(f"{format_path(here)}: required, but missing")
            continue
        skipping = name in find_marks(cls, "SKIP_INVALID_ITEMS")
        try:
            arguments[name] = (build_valid_items if skipping else build)(field.type, item, here)
        except ValidationError:
            if name != "meta" and name not in find_marks(cls, "DEFAULT_ON_ERROR"):
                raise
            if field.required:  # all required fields that fall back to a default are lists
                arguments[name] = []
    try:
        return cls(**arguments)
    except ValueError as error:
        raise ValidationError(f"{format_path(path)}: {error}") from None


def build_valid_items(shape: inspect.Type, value: Any, path: Path) -> Any:
    if not isinstance(value, list):
        return build(shape, value, path)
    items: list[Any] = []
    for item in cast("list[Any]", value):
        with suppress(ValidationError):
            items += build(shape, [item], path)
    return items


def build_union(shape: inspect.UnionType, value: Any, path: Path) -> Any:
    structs = [option for option in shape.types if isinstance(option, inspect.StructType)]
    if len(structs) > 1 and isinstance(value, dict):
        return build_variant(structs, cast("dict[str, Any]", value), path)
    fitting = [option for option in shape.types if get_shape_kind(option) in ("any", get_kind(value))]
    failure = make_mismatch_error(shape.types, value, path)
    for option in fitting or shape.types:
        try:
            return build(option, value, path)
        except ValidationError as error:
            failure = error if option in fitting else failure
    raise failure


def build_variant(variants: list[inspect.StructType], value: dict[str, Any], path: Path) -> Any:
    tag_field = str(variants[0].tag_field)
    tag = value.get(tag_field, UNSET)
    for variant in variants:
        if variant.tag == tag:
            return build_struct(variant, value, path)
    if not isinstance(tag, str):
        problem = "missing" if tag is UNSET else "no str"
        raise ValidationError(f"{format_path((*path, tag_field))}: required, but {problem}")
    unknown: type[Unknown] = sys.modules[variants[0].cls.__module__].UNKNOWN_VARIANTS[variants[0].cls]
    return unknown(value)


def find_marks(
    cls: type[Any], table: Literal["DEFAULT_ON_ERROR", "DEFAULT_ON_NULL", "SKIP_INVALID_ITEMS"]
) -> tuple[str, ...]:
    """Find the fields of a struct that a table of its module names; () for a struct that is not part of a schema."""
    return getattr(sys.modules[cls.__module__], table, {}).get(cls, ())


KINDS: dict[type[Any], str] = {
    inspect.StructType: "object",
    inspect.DictType: "object",
    inspect.ListType: "array",
    inspect.StrType: "str",
    inspect.BoolType: "bool",
    inspect.IntType: "int",
    inspect.FloatType: "float",
    inspect.NoneType: "null",
    inspect.AnyType: "any",
    dict: "object",
    list: "array",
    type(None): "null",
}


def get_shape_kind(shape: inspect.Type) -> str:
    """Return the name of a type's JSON kind, as errors show it."""
    if isinstance(shape, inspect.LiteralType):
        return "str"
    return KINDS[type(shape)]


def get_kind(value: object) -> str:
    """Return the name of a value's JSON kind, as errors show it."""
    return KINDS.get(type(value), type(value).__name__)


def check_kind(shape: inspect.Type, value: Any, path: Path) -> Any:
    """Return the value if its JSON kind is that of the type. Raises ValidationError."""
    if get_shape_kind(shape) not in ("any", get_kind(value)):
        raise make_mismatch_error([shape], value, path)
    return value


def make_mismatch_error(shapes: Sequence[inspect.Type], value: Any, path: Path) -> ValidationError:
    """Return an error that says which types were expected and what the value is."""
    names: list[str] = []
    for shape in shapes:
        is_literal = isinstance(shape, inspect.LiteralType)
        names.append(f"one of {', '.join(map(str, shape.values))}" if is_literal else get_shape_kind(shape))
    shows_value = isinstance(value, str) and any(isinstance(shape, inspect.LiteralType) for shape in shapes)
    got = repr(value)[:40] if shows_value else get_kind(value)
    return ValidationError(f"{format_path(path)}: expected {' or '.join(dict.fromkeys(names))}, got {got}")


def format_path(path: Path) -> str:
    """Format a path as `update.content[0].text`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".") or "message"
