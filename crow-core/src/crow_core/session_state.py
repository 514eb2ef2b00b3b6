"""Values that extensions keep for a session, each under a key that knows its type."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class StateKey(Generic[T]):
    """The key of a value of type T in `Session.state`. Two keys are never equal, even if they have the same name."""

    name: str
    """The name that an error shows."""
    make_default: Callable[[], T] | None = None
    """Makes the value that a session has at first; without it, reading a value that was not set raises KeyError."""


@dataclass
class SessionState:
    """The values of a session, by their keys."""

    _values: dict[StateKey[Any], Any] = field(default_factory=dict[StateKey[Any], Any])

    def __getitem__(self, key: StateKey[T]) -> T:
        """Return the value of a key; one that was not set gets its default. Raises KeyError."""
        if key not in self._values:
            if key.make_default is None:
                raise KeyError(key.name)
            self._values[key] = key.make_default()
        return self._values[key]

    def __setitem__(self, key: StateKey[T], value: T) -> None:
        self._values[key] = value

    def __contains__(self, key: StateKey[Any]) -> bool:
        """True if the key has a value: it was set, or its default was read."""
        return key in self._values

    def pop(self, key: StateKey[T]) -> T:
        """Remove the value of a key, and return it or its default. Raises KeyError."""
        value = self[key]
        del self._values[key]
        return value

    def update(self, other: "SessionState") -> None:
        """Set the values of another state."""
        self._values |= other._values
