"""Options: the settings of a session that its user can change at any time (ACP, session config options)."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from crow_core.acp.schema import (
    BooleanConfigOption,
    ClientCapabilities,
    SelectConfigOption,
    SelectEntry,
    SessionConfigOption,
    SessionMode,
    SessionModeState,
)
from crow_core.session.log import SessionLog


@dataclass(frozen=True)
class Choice:
    """One value that an option can have."""

    value: str
    name: str
    description: str = ""
    fleeting: bool = False
    """True if a stored session forgets it, so that it has to be chosen anew."""


ON_OFF = (Choice("on", "On"), Choice("off", "Off"))
"""The choices of a switch."""


@dataclass(frozen=True)
class Option:
    """A setting of a session."""

    id: str
    name: str
    category: str
    """"mode", "model", "model_config", "thought_level", or one's own that begins with `_`; empty for none."""
    choices: Sequence[Choice]
    get: Callable[[], str]
    set: Callable[[str], None]
    description: str = ""
    is_switch: bool = False
    """True if the choices are ON_OFF; a client that supports boolean options is shown one."""


class SessionOptions:
    """The options of one session. Choosing one may change the list, so they are collected after each choice."""

    def __init__(self, collect: Callable[[], Awaitable[list[Option]]], log: SessionLog) -> None:
        self._collect = collect
        self._log = log
        self._options: list[Option] = []
        self.remarks: list[str] = []
        """Sentences for the user about the mode of a stored session: it was not restored, or is not the default."""

    def __iter__(self) -> Iterator[Option]:
        return iter(self._options)

    async def collect(self) -> None:
        """Ask the extensions for the options there are now."""
        self._options = await self._collect()

    def find(self, id: str) -> Option | None:
        return next((option for option in self if option.id == id), None)

    def find_mode(self) -> Option | None:
        """Find the option that ACP's session modes stand for."""
        return next((option for option in self if option.category == "mode"), None)

    async def choose(self, option: Option, value: str) -> None:
        """Set an option to one of its choices, and append a marker if that is a change."""
        if option.get() != value:
            option.set(value)
            self._log.append({"crow": {"kind": "option", "option": option.id, "value": value}})
        await self.collect()

    async def restore(self, id: str, value: str) -> None:
        """Set an option to the value of a stored session, if that is still a choice."""
        option = self.find(id)
        choices = {choice.value: choice for choice in option.choices} if option else {}
        if option is None or value not in choices or option.get() == value:
            return
        stored, default = choices[value], choices.get(option.get())
        if stored.fleeting:
            what = f"{option.name.lower()} {stored.name}"
            now = default.name if default else option.get()
            self.remarks.append(
                f"This session was in {what}, which is not restored. It is in {option.name.lower()} {now} now."
            )
            return
        if option.category == "mode":
            self.remarks.append(f"This session is still in {option.name.lower()} {stored.name}.")
        option.set(value)
        await self.collect()

    def to_config_options(self, capabilities: ClientCapabilities) -> list[SessionConfigOption]:
        """Convert all options, with their values, to ACP's config options, as far as the client supports them."""
        wanted = capabilities.session
        booleans = bool(wanted and wanted.config_options and wanted.config_options.boolean)
        return [to_config_option(option, booleans=booleans) for option in self]

    def to_modes(self) -> SessionModeState | None:
        """Convert the option of category `mode` to ACP's older session modes, which some clients read instead."""
        option = self.find_mode()
        if option is None:
            return None
        modes = [SessionMode(id=c.value, name=c.name, description=c.description or UNSET) for c in option.choices]
        return SessionModeState(current_mode_id=option.get(), available_modes=modes)


def to_config_option(option: Option, *, booleans: bool) -> SessionConfigOption:
    """Convert an option, with its value, to ACP's; `booleans` says whether the client supports boolean options."""
    common: dict[str, Any] = {
        "id": option.id,
        "name": option.name,
        "category": option.category or UNSET,
        "description": option.description or UNSET,
    }
    if booleans and option.is_switch:
        return BooleanConfigOption(**common, current_value=option.get() == "on")
    entries = [SelectEntry(value=c.value, name=c.name, description=c.description or UNSET) for c in option.choices]
    return SelectConfigOption(**common, current_value=option.get(), options=entries)
