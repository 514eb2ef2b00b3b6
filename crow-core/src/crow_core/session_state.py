"""Values that extensions keep for a session, each under a key that knows its type."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class StateKey(Generic[T]):
    """The key of a value of type T in `Session.state`. Two keys are never equal, even if they have the same name."""

    name: str
    """The name that an error shows."""
    make_default: Callable[[], T] | None = None
    """Makes the value that a session has at first; without it, reading a value that was not set raises KeyError."""


class SessionState(dict[StateKey[Any], Any]):
    """The values of a session, by their keys. A key has a value once it was set, or its default was read."""

    if TYPE_CHECKING:  # the type of a value is known by its key

        def __getitem__(self, key: StateKey[T], /) -> T: ...
        def __setitem__(self, key: StateKey[T], value: T, /) -> None: ...

    def __missing__(self, key: StateKey[T]) -> T:
        """Set and return the default of a key. Raises KeyError if it has none."""
        if key.make_default is None:
            raise KeyError(key.name)
        value = self[key] = key.make_default()
        return value

    def pop(self, key: StateKey[T]) -> T:  # pyright: ignore[reportIncompatibleMethodOverride] - each key has a default
        """Remove the value of a key, and return it or its default. Raises KeyError."""
        value = self[key]
        del self[key]
        return value
