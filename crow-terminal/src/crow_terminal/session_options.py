"""The settings of a session that the agent offers: its modes and its config options."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from crow_core.acp.schema import SelectConfigOption, SelectEntry, SessionConfigOption, SessionModeState

from crow_terminal.dialogs import Row
from crow_terminal.effects import SetOption
from crow_terminal.printable_text import escape_line

UNASKED = re.compile(r"yolo|bypass|full.?access|unrestricted|dangerous|auto.?approve|don.?t.?ask", re.I)
"""The names of modes in which tools run without a question."""


@dataclass
class OfferedOptions:
    """The settings that a session has now."""

    modes: SessionModeState | None = None
    config: Sequence[SessionConfigOption] = field(default_factory=list[SessionConfigOption])
    former_model: str = ""
    """The model that the user changed for another one; empty for none."""

    def set_mode(self, mode: str) -> None:
        """Set the current mode, if the session has modes."""
        if self.modes:
            self.modes = SessionModeState(current_mode_id=mode, available_modes=self.modes.available_modes)

    def take(self, config: Sequence[SessionConfigOption]) -> None:
        """Take the options that the agent has answered after the user changed one."""
        before = self.find("model")
        self.config = config
        after = self.find("model")
        if before and after and before.current_value != after.current_value:
            self.former_model = before.current_value

    def find(self, category: str) -> SelectConfigOption | None:
        """Return the option of a category, such as `model`."""
        found = (one for one in self.config if isinstance(one, SelectConfigOption) and one.category == category)
        return next(found, None)

    def get_mode(self) -> str:
        """Return the name of the session's mode; empty if it has none."""
        if self.modes:
            mode = next((one for one in self.modes.available_modes if one.id == self.modes.current_mode_id), None)
            return escape_line(mode.name if mode else self.modes.current_mode_id)
        return self.get_choice("mode")

    def get_choice(self, category: str) -> str:
        """Return the name of the chosen value of an option; empty if there is no such option."""
        if not (option := self.find(category)):
            return ""
        entry = next((one for one in list_entries(option) if one.value == option.current_value), None)
        return escape_line(entry.name if entry else option.current_value)

    def choose_former_model(self) -> list[SetOption]:
        """Choose the model that the user had before; nothing if there is none."""
        option = self.find("model")
        values = [one.value for one in list_entries(option)] if option else []
        return [SetOption(option.id, self.former_model)] if option and self.former_model in values else []

    def next_mode(self) -> list[SetOption]:
        """Choose the mode after the current one, but none that asks nothing: the user names such a mode."""
        option = self.find("mode")
        if self.modes and self.modes.available_modes:
            id, current = "", self.modes.current_mode_id
            names = {mode.id: mode.name for mode in self.modes.available_modes}
        elif option:
            id, current = option.id, option.current_value
            names = {str(one.value): one.name for one in list_entries(option)}
        else:
            return []
        values = [*names]
        at = values.index(current) if current in values else -1
        later = [*values[at + 1 :], *values[: at + 1]]
        found = [value for value in later if not UNASKED.search(f"{value} {names[value]}")]
        return [SetOption(id, found[0])] if found and found[0] != current else []


def find_changes(wanted: OfferedOptions, offered: OfferedOptions) -> list[SetOption]:
    """Return what gives a new session the model, thinking and mode of another one, as far as it offers them."""
    changes: list[SetOption] = []
    for category in ("model", "thought_level", "mode"):  # what a model offers follows from it
        before, now = wanted.find(category), offered.find(category)
        if before and now and before.current_value != now.current_value:
            values = [one.value for one in list_entries(now)]
            changes += [SetOption(now.id, before.current_value)] if before.current_value in values else []
    if wanted.modes and offered.modes and (mode := wanted.modes.current_mode_id) != offered.modes.current_mode_id:
        changes += [SetOption("", mode)] if mode in [one.id for one in offered.modes.available_modes] else []
    return changes


def list_entries(option: SelectConfigOption) -> list[SelectEntry]:
    """Return the choices of an option, also those in groups."""
    return [
        entry for one in option.options for entry in ([one] if isinstance(one.value, str) else list(one.options or []))
    ]


def make_option_rows(option: SelectConfigOption) -> list[Row]:
    """Return the rows of a list from which the user chooses the value of an option."""
    return [
        Row(one.name, one.description or "", one.value, current=one.value == option.current_value)
        for one in list_entries(option)
    ]
