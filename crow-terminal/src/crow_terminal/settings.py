"""The settings that the terminal is started with, and how its session is continued."""

from collections.abc import Callable, Sequence

from crow_core.acp.schema import SessionInfo
from msgspec import Struct

from crow_terminal.abilities import Abilities
from crow_terminal.agent_connections import AgentAddress

SHORT_ID = 8
"""Letters of a session's id that `crow -r` is content with."""


class Settings(Struct, frozen=True):
    """The settings that the terminal is started with."""

    agent: AgentAddress
    cwd: str
    theme: str = "dark"
    history: Callable[[], str | None] | None = None
    """Finds the file of earlier prompts; None for none."""
    resume: str = ""
    """The id of the session to load; empty for a new one."""
    last: bool = False
    """True if the terminal loads the last session of the folder, if there is one."""
    prompt: str = ""
    """A prompt to begin with."""
    command: str = ""
    """The command that opens this terminal; it takes `-c` and `-r ID`. Empty for none."""
    choose: bool = False
    """True if the user chooses one of the stored sessions first."""
    page: Sequence[str] = ()
    """The command that serves the pages of sessions, as `PageServer` starts it; empty for none."""
    has_moved: bool = False
    """True if the session is not in the folder in which `command` opens one."""
    has_worktrees: bool = False
    """True if the caller makes a git worktree when the user leaves for one, by `Left.worktree`."""


class Left(Struct):
    """The state in which the terminal was left."""

    folder: str
    """The folder of the last session."""
    worktree: str | None = None
    """The name of the worktree in which the user goes on, empty to make one up; None to end."""
    by_user: bool = True
    """False if a signal ended it."""


def describe_continuation(settings: Settings, session: str, can: Abilities, width: int) -> list[str]:
    """Make the lines that say how to continue a session, in one row if it has room; none if that is not possible."""
    command = settings.command
    if not (command and can.loads):
        return []
    named = f"{command} -r {session[:SHORT_ID] if settings.agent.name == 'crow' else session}"
    if not can.lists or settings.has_moved:
        return [f"Continue with {named}"]
    line = f"Continue with {command} -c, or {named}"
    return [line] if len(line) <= width else [f"Continue with {command} -c,", f"or {named}"]


def find_last(stored: Sequence[SessionInfo], folder: str) -> str:
    """Return the id of the last session of a folder, else of another work tree of its repository; "" if there is none.
    `stored` are the sessions of the repository, the latest first."""
    return next((one.session_id for one in stored if one.cwd == folder), stored[0].session_id if stored else "")
