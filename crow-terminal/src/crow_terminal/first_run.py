"""The card that a person sees the first time, once for each home."""

import os
from collections.abc import Callable
from contextlib import suppress

from crow_terminal.session_options import OfferedOptions

CARD = """\
- Type what you want done; `@` adds a file, `/` lists commands, `!ls` runs a command
- Esc stops the work; Ctrl-C twice leaves, and `crow -c` continues
- `/undo` takes back the last turn and its changes of files
- {mode}; Shift-Tab changes that
- `/model` chooses another model"""

MODES = {
    "ask": "crow asks before it edits or runs something",
    "accept-edits": "crow edits here, and asks before it runs something",
    "plan": "crow changes nothing, and only plans",
    "yolo": "crow edits and runs without asking",
}


def is_first_run(find_history: Callable[[], str | None]) -> bool:
    """Return whether this home has no file of earlier prompts."""
    with suppress(OSError, ValueError):
        if file := find_history():
            return not os.path.exists(file)
    return False


def end_first_run(find_history: Callable[[], str | None]) -> bool:
    """Make the file of earlier prompts, so that the next run is not the first. Return whether there is one now."""
    with suppress(OSError, ValueError):
        if file := find_history():
            os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))
            return True
    return False


def make_card(options: OfferedOptions) -> str:
    """Make the five lines, as Markdown."""
    option = options.find("mode")
    mode = options.modes.current_mode_id if options.modes else option.current_value if option else "ask"
    return CARD.format(mode=MODES.get(mode, MODES["ask"]))
