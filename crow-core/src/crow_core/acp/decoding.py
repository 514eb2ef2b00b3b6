"""JSON to the structs of `schema` and back: one strict pass, and a lenient one for what the protocol says to tolerate.

The lenient pass follows the marks of the official schema (`x-deserialize-*`): a malformed optional field falls back to
its default, some lists drop their invalid items, null may mean the default. It also keeps variants it does not know,
and takes 1.0 for 1.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar, cast

import msgspec
from msgspec import UNSET, ValidationError, inspect

from crow_core.acp.schema import DEFAULT_ON_ERROR, DEFAULT_ON_NULL, SKIP_INVALID_ITEMS, UNKNOWN_VARIANTS, Unknown

T = TypeVar("T")
Path = tuple[str | int, ...]


def decode(raw: bytes | msgspec.Raw, type: type[T]) -> T:
    """One value of `type` from JSON.

    Raises msgspec.ValidationError, one line that begins with the path (`cwd: expected str, got int`), when it does not
    fit; its base class msgspec.DecodeError when it is not JSON.
    """
    try:
        return decoder(type).decode(raw)
    except ValidationError:
        return lenient(msgspec.json.decode(raw), type)
    except RecursionError:
        raise ValidationError("message: nested too deeply") from None


def encode(value: Any) -> bytes:
    """JSON on one line, unknown variants as they came."""
    return ENCODER.encode(value)


def as_it_came(value: Any) -> Any:
    if isinstance(value, Unknown):
        return value.raw
    raise TypeError(f"{type(value).__name__} is not part of the ACP vocabulary")


ENCODER = msgspec.json.Encoder(enc_hook=as_it_came)


@cache
def decoder(type: type[T]) -> msgspec.json.Decoder[T]:
    return msgspec.json.Decoder(type)


shape_of = cache(inspect.type_info)


def lenient(value: Any, type: type[T]) -> T:
    shape = shape_of(type)
    if value is None and isinstance(shape, inspect.StructType):
        value = {}  # parameters or a result left out: fine where nothing is required
    return build(shape, value, ())


def build(shape: inspect.Type, value: Any, path: Path) -> Any:
    """What `value` is as `shape`; raises ValidationError."""
    match shape:
        case inspect.StructType():
            return build_struct(shape, expect(shape, value, path), path)
        case inspect.UnionType():
            return build_union(shape, value, path)
        case inspect.ListType():
            items: list[Any] = expect(shape, value, path)
            return [build(shape.item_type, item, (*path, index)) for index, item in enumerate(items)]
        case inspect.DictType():
            entries: dict[str, Any] = expect(shape, value, path)
            return {key: build(shape.value_type, entry, (*path, key)) for key, entry in entries.items()}
        case inspect.LiteralType() if value not in shape.values:
            raise mismatch([shape], value, path)
        case inspect.IntType() if isinstance(value, float) and value.is_integer():
            return int(value)
        case inspect.FloatType() if type(value) is int:
            return float(value)
        case _:
            return expect(shape, value, path)


def build_struct(shape: inspect.StructType, value: dict[str, Any], path: Path) -> Any:
    cls = shape.cls
    arguments: dict[str, Any] = {}
    for field in shape.fields:
        name, here = field.name, (*path, field.encode_name)
        item = value.get(field.encode_name, UNSET)
        if item is UNSET or (item is None and name in DEFAULT_ON_NULL.get(cls, ())):
            if field.required:
                raise ValidationError(f"{dotted(here)}: required, but missing")
            continue
        skipping = name in SKIP_INVALID_ITEMS.get(cls, ())
        try:
            arguments[name] = (build_valid_items if skipping else build)(field.type, item, here)
        except ValidationError:
            if name != "meta" and name not in DEFAULT_ON_ERROR.get(cls, ()):
                raise
            if field.required:  # what is required and tolerant is a list
                arguments[name] = []
    try:
        return cls(**arguments)
    except ValueError as unfit:
        raise ValidationError(f"{dotted(path)}: {unfit}") from None


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
    fitting = [option for option in shape.types if kind_of(option) in ("any", kind(value))]
    failure = mismatch(shape.types, value, path)
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
        raise ValidationError(f"{dotted((*path, tag_field))}: required, but {'missing' if tag is UNSET else 'no str'}")
    return UNKNOWN_VARIANTS[variants[0].cls](value)


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


def kind_of(shape: inspect.Type) -> str:
    """What an error calls a type."""
    if isinstance(shape, inspect.LiteralType):
        return "str"
    return KINDS[type(shape)]


def kind(value: object) -> str:
    """What an error calls a value."""
    return KINDS.get(type(value), type(value).__name__)


def expect(shape: inspect.Type, value: Any, path: Path) -> Any:
    if kind_of(shape) not in ("any", kind(value)):
        raise mismatch([shape], value, path)
    return value


def mismatch(shapes: Sequence[inspect.Type], value: Any, path: Path) -> ValidationError:
    names = [
        f"one of {', '.join(map(str, shape.values))}" if isinstance(shape, inspect.LiteralType) else kind_of(shape)
        for shape in shapes
    ]
    named = isinstance(value, str) and any(isinstance(shape, inspect.LiteralType) for shape in shapes)
    got = repr(value)[:40] if named else kind(value)
    return ValidationError(f"{dotted(path)}: expected {' or '.join(dict.fromkeys(names))}, got {got}")


def dotted(path: Path) -> str:
    """`update.content[0].text`, as a reader of the JSON would write it."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".") or "message"
