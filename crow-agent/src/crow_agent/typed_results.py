"""Typed results: a type as a JSON schema, and a JSON value as a value of that type."""

from collections.abc import Mapping
from contextlib import suppress
from inspect import isfunction
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")

INSTRUCTION = """\
When you are done, answer with JSON alone, without any other text. It must fit this JSON schema:

{schema}"""
"""Is appended to a prompt of an agent that does not take the schema itself."""

CORRECTION = "Your answer does not fit:\n{fault}\n\nGive it again, so that it fits."
"""The prompt after an answer that does not fit."""


class OutputType(Generic[T]):
    """A type that answers must fit: pydantic, dataclass, TypedDict, msgspec, a type of `typing`, or a JSON schema.

    A JSON schema is given as a dict; answers stay JSON values then.
    """

    def __init__(self, wanted: type[T] | Mapping[str, Any]) -> None:
        """Raises TypeError for a type that has no JSON schema, ValueError for a JSON schema that cannot be used."""
        self.wanted: Any = wanted
        self._adapter: TypeAdapter[T] | None = None
        """Pydantic's adapter for the type, if msgspec does not know it."""
        from crow_core.session.output import OutputSchema, check_schema  # only typed results need it

        self._accepts = OutputSchema
        if isinstance(wanted, Mapping):
            try:
                check_schema({**wanted})
            except ValueError as error:
                raise ValueError(f"The JSON schema of the output cannot be used: {error}.") from error
            self.schema: dict[str, Any] = msgspec.json.decode(msgspec.json.encode({**wanted}))  # tuples become lists
        else:
            self.schema = self._make_schema()

    @property
    def name(self) -> str:
        """A name for people."""
        if isinstance(self.wanted, Mapping):
            return str(self.schema.get("title") or "the JSON schema")
        return self.wanted.__name__ if isinstance(self.wanted, type) else str(self.wanted)

    def _make_schema(self) -> dict[str, Any]:
        """Convert the type to a JSON schema. Raises TypeError."""
        if isinstance(self.wanted, str) or isfunction(self.wanted):
            raise self._make_error("it is no type")
        if not (hasattr(self.wanted, "__pydantic_validator__") or has_pydantic_notes(self.wanted)):
            try:
                return msgspec.json.schema(self.wanted)
            except (TypeError, RuntimeError, ValueError):
                pass
        from pydantic import TypeAdapter  # imported here: only a person who hands in a pydantic type needs it
        from pydantic.errors import PydanticUserError

        try:
            self._adapter = TypeAdapter(self.wanted)
            return self._adapter.json_schema()
        except AttributeError as error:  # a value of a class
            raise self._make_error("it is no type") from error
        except (PydanticUserError, TypeError, NameError) as error:
            raise self._make_error(str(error).partition("\n")[0].rstrip(".")) from error

    def _make_error(self, reason: str) -> TypeError:
        return TypeError(
            f"{self.wanted!r} cannot be the type of an output: {reason}. Give a pydantic model, a dataclass, a "
            "TypedDict, a msgspec Struct, a type made of these, or a JSON schema."
        )

    def convert(self, value: Any) -> T:
        """Convert a JSON value. Raises ValueError, with one line for each fault."""
        if isinstance(self.wanted, Mapping):
            return self._accepts(self.schema).accept(value)
        if self._adapter is None:
            return msgspec.convert(value, self.wanted, str_keys=True)  # its ValidationError is a ValueError
        try:
            return self._adapter.validate_json(msgspec.json.encode(value))
        except ValueError as error:
            raise ValueError(describe_faults(error)) from error

    def parse(self, text: str) -> T:
        """Convert the JSON in a text. Raises ValueError, which says what does not fit."""
        return self.convert(self._accepts(self.schema).accept_text(text))


def has_pydantic_notes(hint: Any, seen: frozenset[Any] = frozenset()) -> bool:
    """Test whether a type, or one inside it, is `Annotated` with what only pydantic reads, such as its `Field`."""
    if get_origin(hint) is Annotated:
        notes = (type(note).__module__.partition(".")[0] for note in hint.__metadata__)
        if not {"pydantic", "pydantic_core", "annotated_types"}.isdisjoint(notes):
            return True
    inner = [*get_args(hint)]
    if isinstance(hint, type) and hint not in seen and hasattr(hint, "__annotations__"):
        seen |= {hint}
        with suppress(NameError, TypeError):
            inner += get_type_hints(hint, include_extras=True).values()
    return any(has_pydantic_notes(each, seen) for each in inner)


def describe_faults(error: ValueError) -> str:
    """Convert an error of pydantic to one line for each fault."""
    from crow_core.session.output import describe_path

    if not hasattr(error, "errors"):
        return str(error)
    faults = cast("ValidationError", error).errors(include_url=False)
    return "\n".join(f"{describe_path(fault['loc'])}: {fault['msg']}" for fault in faults)
