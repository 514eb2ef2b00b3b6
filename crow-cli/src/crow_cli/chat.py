"""`crow` and `crow chat`: the interactive terminal, with crow or another agent in a process of its own."""

import logging
import os
import sys
from pathlib import Path

from crow_core.errors import ConfigError, StoreError
from crow_core.settings.config import Home
from crow_terminal.agents import AgentAddress, NoAgent, parse_command

from crow_cli.process import fail
from crow_cli.storage import find_session_id

CROW = (sys.executable, "-m", "crow_cli", "acp", "--unstable")
"""The command of crow as an agent: a process of its own, so that the screen is there before it."""


def is_interactive() -> bool:
    """Return whether a person sits at standard input and output."""
    return bool(sys.stdin and sys.stdout and sys.stdin.isatty() and sys.stdout.isatty())


def chat(
    *,
    model: str = "",
    cwd: str = ".",
    agent: str = "",
    url: str = "",
    token: str = "",
    resume: str = "",
    last: bool = False,
    theme: str | None = "",
    plain: bool = False,
    prompt: str = "",
) -> int:
    """Run the interactive terminal and return the exit code.

    `agent` is the command of another agent, `url` the address of one. `resume` is the id of a session to load, for crow
    its beginning; `last` loads the last session of the folder.
    """
    try:
        if url:
            chosen = AgentAddress(url, url=url, token=token)
        elif agent:
            chosen = parse_command(agent)
        else:
            chosen = AgentAddress("crow", (*CROW, *(("-m", model) if model else ())))
            resume = resume and find_session_id(os.environ, resume)
    except (NoAgent, StoreError) as error:
        fail(str(error))
    history = find_history()
    theme = theme or os.environ.get("CROW_THEME", "")
    logging.getLogger().addHandler(logging.NullHandler())  # a line of the log would break the screen
    folder = str(Path(cwd).expanduser().resolve())
    if plain or not is_interactive() or os.environ.get("TERM", "dumb") in ("dumb", ""):
        from crow_terminal.plain import run_plain

        return run_plain(chosen, folder, resume=resume, prompt=prompt)
    from crow_terminal.chat import Settings, run

    return run(Settings(chosen, folder, theme, history, resume, last, prompt))


def find_history() -> str | None:
    """Return the file of earlier prompts; None if its folder cannot be made."""
    try:
        data = Home.find(os.environ).data
        data.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (ConfigError, OSError):
        return None
    return str(data / "prompts.txt")
