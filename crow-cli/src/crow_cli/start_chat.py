"""`crow` and `crow chat`: the interactive terminal, with crow or another agent in a process of its own."""

import gc
import logging
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from crow_system.files import make_private_folder
from crow_terminal.agent_connections import AgentAddress, NoAgent, parse_command
from crow_terminal.settings import Left, Settings
from msgspec.structs import replace

if TYPE_CHECKING:
    from crow_cli.worktree_session import OpenTree

CROW = (sys.executable, "-m", "crow_cli", "acp", "--unstable")
"""The command of crow as an agent: a process of its own, so that the screen is there before it."""
PAGE = (sys.executable, "-m", "crow_cli", "web", "--no-open", "--of-terminal")
"""The command that serves the pages of crow's sessions."""
CHOOSE = "?"
"""Stands for the id of a session that the user chooses."""


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
    worktree: str | None = None,
) -> int:
    """Run the interactive terminal and return the exit code.

    `agent` is the command of another agent, `url` the address of one. `resume` is the id of a session to load, for crow
    its beginning, or CHOOSE; `last` loads the last session of the folder. `worktree` is the name of a git worktree in
    which the session works, empty to make one up; None for none.
    """
    try:
        own = folder = str(Path(cwd).expanduser().resolve())
    except FileNotFoundError:
        from crow_cli.process import NO_FOLDER, fail  # not above: it loads Click, and the screen waits for this module

        fail(NO_FOLDER)
    if worktree is not None:
        folder = enter_worktree(folder, worktree, prompt)
    try:
        if url:
            chosen = AgentAddress(url, url=url, token=token)
        elif agent:
            chosen = parse_command(agent)
        else:
            chosen = AgentAddress("crow", (*CROW, *(("-m", model) if model else ())))
            resume, folder = find_session(resume, folder) if resume not in ("", CHOOSE) else (resume, folder)
    except NoAgent as error:
        from crow_cli.process import fail  # not above: it loads Click, and the screen waits for this module

        fail(str(error))
    if os.environ.get("CROW_ACP_VERSION") == "2":
        chosen = replace(chosen, version=2)
    theme = theme or os.environ.get("CROW_THEME", "")
    logging.getLogger().addHandler(logging.NullHandler())  # a line of the log would break the screen
    words = ["crow", *([] if not (url or agent or cwd != ".") else ["chat"])]
    words += [word for option, value in (("--agent", agent), ("--connect", url)) if value for word in (option, value)]
    words += ["--cwd", own] if cwd != "." else []
    settings = Settings(
        chosen,
        folder,
        theme,
        find_history,
        resume.removeprefix(CHOOSE),
        last,
        prompt,
        shlex.join(words),
        resume == CHOOSE,
        () if url or agent else PAGE,
        has_moved=folder != own,
        has_worktrees=not url,
    )
    left, is_ours = Left(folder), worktree is not None or folder != own
    tree = hold_worktree(folder) if is_ours else None
    code = show(settings, left, plain=plain)
    if tree or left.folder != folder:
        (tree or hold_worktree(left.folder)).end(ask=left.by_user)
    if left.worktree is None:
        return code
    return chat(model=model, cwd=cwd, agent=agent, theme=theme, worktree=left.worktree)


def show(settings: Settings, left: Left, *, plain: bool) -> int:
    """Show the terminal until the user leaves, and return the exit code."""
    if plain or not is_interactive() or os.environ.get("TERM", "dumb") in ("dumb", ""):
        from crow_terminal.plain import run_plain

        if settings.choose:
            from crow_cli.process import fail

            fail("-r takes the id of a session here: `crow sessions list` shows them.")
        gc.enable()
        return run_plain(settings, left)
    from crow_terminal.chat import run

    return run(settings, left)


def enter_worktree(folder: str, name: str, prompt: str) -> str:
    """Make or find a worktree of a folder's repository; return the folder of the session in it. Print an error and exit
    if there can be none."""
    from crow_core.errors import ConfigError  # not above: most sessions work in no worktree

    from crow_cli.process import fail
    from crow_cli.worktree_session import begin_session
    from crow_cli.worktrees import NoWorktree

    try:
        return begin_session(folder, name, prompt)
    except (NoWorktree, ConfigError) as error:
        fail(str(error))


def hold_worktree(folder: str) -> "OpenTree":
    """Mark the worktree that a folder is in as open."""
    from crow_cli.worktree_session import OpenTree  # see `enter_worktree`

    return OpenTree(folder)


def find_session(prefix: str, folder: str) -> tuple[str, str]:
    """Return the id of the session whose id begins with `prefix`, and the folder in which it goes on; print an error
    and exit if there is none."""
    from crow_core.errors import StoreError  # not above: the screen waits for this module

    from crow_cli.process import fail
    from crow_cli.storage import find_session_to_continue

    try:
        return find_session_to_continue(os.environ, prefix, folder)
    except StoreError as error:
        fail(str(error))


def find_history() -> str | None:
    """Return the file of earlier prompts; None if its folder cannot be made."""
    from crow_agent.settings.home import Home
    from crow_core.errors import ConfigError  # not above: the screen waits for this module

    try:
        data = Home.find(os.environ).data
        make_private_folder(data)
    except (ConfigError, OSError):
        return None
    return str(data / "prompts.txt")
