"""Typed results: a type as a JSON schema, and an answer as a value of that type."""

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")

FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.S)
"""Matches a fenced block of a Markdown text."""

INSTRUCTION = """\
When you are done, answer with JSON alone, without any other text. It must fit this JSON schema:

{schema}"""
"""Is appended to a prompt whose answer must fit a type."""

CORRECTION = "Your answer does not fit: {fault}\n\nAnswer again, with JSON alone that fits the schema."
"""The prompt after an answer that does not fit."""


class OutputType(Generic[T]):
    """A type that answers must fit: pydantic, dataclass, TypedDict, msgspec, a type of `typing`, or a JSON schema.

    A JSON schema, given as a dict, is checked with `jsonschema`; answers stay JSON values then.
    """

    def __init__(self, wanted: type[T] | Mapping[str, Any]) -> None:
        self.wanted: Any = wanted
        self._json_schema = dict(wanted) if isinstance(wanted, Mapping) else None

    @property
    def name(self) -> str:
        """A name for people."""
        if self._json_schema is not None:
            return str(self._json_schema.get("title") or "the JSON schema")
        return getattr(self.wanted, "__name__", None) or str(self.wanted)

    @cached_property
    def schema(self) -> dict[str, Any]:
        """The type as a JSON schema. Raises TypeError for a type that has none."""
        if self._json_schema is not None:
            return self._json_schema
        if self._adapter is not None:
            return self._adapter.json_schema()
        return msgspec.json.schema(self.wanted)

    @cached_property
    def _adapter(self) -> Any:
        """Pydantic's adapter for the type, if it is pydantic's or msgspec does not know it; else None."""
        if not hasattr(self.wanted, "__pydantic_validator__"):
            try:
                msgspec.json.schema(self.wanted)
                return None
            except (TypeError, RuntimeError):
                pass
        from pydantic import TypeAdapter  # imported here: only a person who hands in a pydantic type needs it

        return TypeAdapter(self.wanted)

    def convert(self, value: Any) -> T:
        """Convert a JSON value. Raises ValueError, which says what does not fit."""
        if self._json_schema is not None:
            from jsonschema import ValidationError
            from jsonschema.validators import validator_for

            schema = self.schema
            try:
                validator_for(schema)(schema).validate(value)
            except ValidationError as error:
                raise ValueError(f"{error.message} (at {error.json_path})") from error
            return value
        if self._adapter is not None:
            return self._adapter.validate_python(value)  # pydantic's ValidationError is a ValueError
        return msgspec.convert(value, self.wanted)  # so is msgspec's

    def parse(self, text: str) -> T:
        """Convert the JSON in a text. Raises ValueError, which says what does not fit."""
        return self.convert(find_json(text))


def find_json(text: str) -> Any:
    """Return the JSON value that a text is, holds in a fenced block, or begins with at a brace. Raises ValueError."""
    candidates = [text, *reversed(FENCE.findall(text))]
    if (start := text.find("{")) >= 0 and (end := text.rfind("}")) > start:
        candidates.append(text[start : end + 1])
    for candidate in candidates:
        try:
            return msgspec.json.decode(candidate.strip())
        except msgspec.DecodeError:
            continue
    raise ValueError("it is not JSON")
