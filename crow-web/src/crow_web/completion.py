"""Completion of the agent's `/` commands and of files behind `@`."""

from collections.abc import Sequence

from crow_core.acp.complete_method import Completion
from crow_core.acp.schema import AvailableCommand
from crow_terminal.mentions import MENTION, find_files, list_files, quote_name

MOST = 12
"""Completions that are offered."""


def list_completions(text: str, commands: Sequence[AvailableCommand], folder: str) -> list[Completion]:
    """Return what may follow the text before the cursor. Lists the files of the folder, so call it in a thread."""
    if text.startswith("/") and not any(letter.isspace() for letter in text):
        typed = text[1:].lower()
        fitting = [one for one in commands if typed in one.name.lower()]
        fitting.sort(key=lambda one: (not one.name.lower().startswith(typed), one.name))
        return [
            Completion(f"/{one.name} " if one.input else f"/{one.name}", len(text), f"/{one.name}", one.description)
            for one in fitting[:MOST]
        ]
    if found := MENTION.search(text):
        typed = next((group for group in found.groups() if group is not None), "")
        names = find_files(list_files(folder), typed)[:MOST]
        return [Completion(f"@{quote_name(name)}", len(found[0].lstrip()), f"@{name}") for name in names]
    return []
