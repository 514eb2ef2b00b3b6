"""The variables of a command: no pager, no questions, no colours, and an editor that works in a terminal."""

import os
import shutil
from collections.abc import Mapping

COMMAND_ENVIRONMENT = {
    "CDPATH": "",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "MANPAGER": "cat",
    "SYSTEMD_PAGER": "cat",
    "AWS_PAGER": "",
    "GIT_TERMINAL_PROMPT": "0",
    "GCM_INTERACTIVE": "never",
    "SSH_ASKPASS_REQUIRE": "never",
    "DEBIAN_FRONTEND": "noninteractive",
    "PIP_NO_INPUT": "1",
    "PYTHONUNBUFFERED": "1",
    "TERM": "dumb",
    "NO_COLOR": "1",
}
"""Variables of every command: `cd` takes its argument alone, programs wait for no person and print no colours."""
EDITOR_VARIABLES = ("EDITOR", "VISUAL", "GIT_EDITOR", "GIT_SEQUENCE_EDITOR")
TERMINAL_EDITORS = ("vi", "vim", "nvim", "nano", "micro", "emacs", "hx", "kak", "joe", "mg", "ne", "ed")
"""Editors that work in a terminal. Others open a window, which the model does not see."""
TERMINAL_ENVIRONMENT = {"TERM": "xterm-256color", "VIRTUAL_ENV_DISABLE_PROMPT": "1"}
"""Further variables of a command in a terminal, where escape sequences are interpreted."""


def change_environment(environment: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return an environment with the variables of `changes`, and without those that are None there."""
    changed = {**environment, **changes}
    return {name: value for name, value in changed.items() if value is not None}


def find_editor(environment: Mapping[str, str]) -> str:
    """Return the command of the user's editor, or of another one if that does not work in a terminal; "" for none."""
    for name in ("VISUAL", "EDITOR"):
        words = environment.get(name, "").split()
        if words and os.path.basename(words[0]) in TERMINAL_EDITORS and shutil.which(words[0]):
            return environment[name]
    return next((editor for editor in TERMINAL_EDITORS if shutil.which(editor)), "")
