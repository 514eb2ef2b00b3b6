"""Options: the settings of a session that its user can change at any time (ACP, session config options)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from crow_core.acp.schema import (
    BooleanConfigOption,
    SelectConfigOption,
    SelectEntry,
    SessionConfigOption,
)


@dataclass(frozen=True)
class Choice:
    """One value an option can have."""

    value: str
    name: str
    description: str = ""
    fleeting: bool = False
    """It does not come back with a stored session: it has to be chosen anew."""


SWITCH = (Choice("on", "On"), Choice("off", "Off"))
"""The choices of an option that is a boolean; clients that know booleans are shown one."""


@dataclass(frozen=True)
class Option:
    """A setting of a session that its user can change at any time (ACP, session config options)."""

    id: str
    name: str
    category: str
    """"mode", "model", "model_config", "thought_level", or one's own that begins with `_`; empty for none."""
    choices: Sequence[Choice]
    get: "Callable[[], str]"
    set: "Callable[[str], None]"
    description: str = ""


def to_config_option(option: Option, *, booleans: bool) -> SessionConfigOption:
    """An option as ACP has it, with its current value."""
    what: dict[str, Any] = {
        "id": option.id,
        "name": option.name,
        "category": option.category or UNSET,
        "description": option.description or UNSET,
    }
    if booleans and option.choices is SWITCH:
        return BooleanConfigOption(**what, current_value=option.get() == "on")
    entries = [SelectEntry(value=c.value, name=c.name, description=c.description or UNSET) for c in option.choices]
    return SelectConfigOption(**what, current_value=option.get(), options=entries)
