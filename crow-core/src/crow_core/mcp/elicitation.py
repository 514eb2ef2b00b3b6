"""Forms and pages for the user (ACP, elicitation): which may be asked for, and which answers fit."""

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import date, datetime
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from crow_core.acp.schema import (
    BooleanPropertySchema,
    ClientCapabilities,
    ElicitationPropertySchema,
    ElicitationSchema,
    IntegerPropertySchema,
    MultiSelectPropertySchema,
    NumberPropertySchema,
    StringPropertySchema,
)
from crow_core.errors import ElicitationError
from crow_core.models.endpoint import is_local

SECRET_NAME = re.compile(
    r"\b((api|access|secret|private)[ _-]?(key|token)s?|pass(word|wd|phrase|code)|pin|credentials?)\b"
    r"|(\b|_)(token|secret|key)$",
    re.IGNORECASE,
)
"""Matches names of fields that ask for a secret, which no form may do: it would be sent and stored as plain text."""


@dataclass(frozen=True)
class FormAnswer:
    """The user's answer to a form or a page."""

    action: Literal["accept", "decline", "cancel"]
    """Filled in, or on the way to the page; refused; closed without an answer."""
    content: dict[str, Any] = field(default_factory=dict[str, Any])
    """The checked values of a form, by field."""
    id: str = ""
    """The id of a page, for `User.complete`."""


def can_ask(capabilities: ClientCapabilities, mode: Literal["form", "url"]) -> bool:
    """True if the client supports forms, or pages."""
    can = capabilities.elicitation
    return bool(can and (can.form if mode == "form" else can.url))


def check_form(message: str, form: ElicitationSchema) -> None:
    """Raise ElicitationError for a form that asks for a secret."""
    for name, schema in form.properties.items():
        if not isinstance(schema, StringPropertySchema) or list_allowed_values(schema) is not None:
            continue
        words = [name, schema.title, schema.description, message.rstrip(" ?.:!") if len(form.properties) == 1 else ""]
        if any(isinstance(text, str) and SECRET_NAME.search(text) for text in words):
            raise ElicitationError("A form must not ask for secrets. Name the variable or file that should hold it")


def check_page(url: str) -> None:
    """Raise ElicitationError for a URL that no user should be sent to: neither https nor on this machine."""
    try:
        scheme = urlsplit(url).scheme
    except ValueError:
        scheme = ""
    if scheme != "https" and not (scheme == "http" and is_local(url)):
        raise ElicitationError(f"{url!r} is no https address")


def check_values(content: dict[str, Any], form: ElicitationSchema) -> dict[str, Any]:
    """Return the values of a form's own fields. Raises ElicitationError for values that its schema does not allow."""
    for name in form.required or ():
        if name not in content:
            raise ElicitationError(f"the answer lacks {name!r}")
    values = {name: value for name, value in content.items() if name in form.properties}
    for name, value in values.items():
        if not fits(value, form.properties[name]):
            raise ElicitationError(f"the answer has an unfit {name!r}")
    return values


def fits(value: Any, schema: ElicitationPropertySchema) -> bool:
    """True if the schema of a field allows a value."""
    match schema:
        case BooleanPropertySchema():
            return isinstance(value, bool)
        case IntegerPropertySchema():
            return type(value) is int and is_within(value, schema.minimum, schema.maximum)
        case NumberPropertySchema():
            return type(value) in (int, float) and is_within(value, schema.minimum, schema.maximum)
        case StringPropertySchema():
            return (
                isinstance(value, str)
                and is_within(len(value), schema.min_length, schema.max_length)
                and (list_allowed_values(schema) is None or value in (list_allowed_values(schema) or ()))
                and (not schema.pattern or re.search(schema.pattern, value) is not None)
                and (not schema.format or is_formatted(value, schema.format))
            )
        case MultiSelectPropertySchema(items=items):
            choices = [option.const for option in items.any_of] if items.any_of else items.enum or []
            chosen = cast(list[Any], value) if isinstance(value, list) else [None]
            return is_within(len(chosen), schema.min_items, schema.max_items) and all(one in choices for one in chosen)
        case _:
            return False


def list_allowed_values(schema: StringPropertySchema) -> Collection[str] | None:
    """List the values that a field allows; None if it allows any text."""
    if schema.one_of:
        return [option.const for option in schema.one_of]
    return schema.enum or None


def is_within(value: float, least: Any, most: Any) -> bool:
    """True if a number is between two bounds; a bound that is not a number is ignored."""
    above = not isinstance(least, int | float) or value >= least
    return above and (not isinstance(most, int | float) or value <= most)


def is_formatted(text: str, format: str) -> bool:
    """True if a text has a format of the protocol; an unknown format fits every text."""
    try:
        match format:
            case "email":
                return re.fullmatch(r"[^@\s]+@[^@\s]+", text) is not None
            case "uri":
                return bool(urlsplit(text).scheme)
            case "date":
                return bool(date.fromisoformat(text))
            case "date-time":
                return bool(datetime.fromisoformat(text))
            case _:
                return True
    except ValueError:
        return False
