"""The effects of an event on the terminal, its agent and its session. `State` returns them, `Chat` carries them out."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from msgspec import Struct

from crow_terminal.blocks import Block, CommandOutput


class Show(Struct, frozen=True):
    """Print a finished block."""

    block: Block
    whole: bool = False


class Send(Struct, frozen=True):
    """Send a prompt."""

    text: str
    outputs: tuple[CommandOutput, ...] = ()
    """The commands that the user ran before, which the agent has not seen."""


class Steer(Struct, frozen=True):
    """Send words for the running turn. `end_steer` tells the answer."""

    text: str
    outputs: tuple[CommandOutput, ...] = ()
    """The commands that the user ran before, which the agent has not seen."""


class Withdraw(Struct, frozen=True):
    """Take back the words that wait for the running turn. Each is answered by `end_steer`."""


class Cancel(Struct, frozen=True):
    """Cancel the running turn."""


class CallBackground(Struct, frozen=True):
    """Ask the agent what runs in the background, or send what runs there, stop it, or tell it something."""

    action: str
    name: str = ""
    text: str = ""


class Respond(Struct, frozen=True):
    """Answer a request of the agent."""

    id: int
    response: Any


class LogIn(Struct, frozen=True):
    """Run the agent's log-in in the terminal, then open the session again."""

    args: Sequence[str]
    """The arguments to add to the agent's command."""
    env: Mapping[str, str]


class Wait(Struct, frozen=True):
    """Call `State.wake` after so many seconds."""

    seconds: float


class Leave(Struct, frozen=True):
    """End the terminal."""

    worktree: str | None = None
    """The name of the worktree in which to go on; see `Left`."""


class Ring(Struct, frozen=True):
    """Tell the user, who may look elsewhere, that something is done or asked."""

    sentence: str


class Edit(Struct, frozen=True):
    """Replace the text of the editor."""

    text: str
    keep: bool = False
    """True if what is in the editor stays, below the text."""


class SetOption(Struct, frozen=True):
    """Set a config option of the session, or its mode if `id` is empty."""

    id: str
    value: str | bool


class Open(Struct, frozen=True):
    """Open another session: a new one, or a stored one."""

    session: str = ""
    again: bool = False
    """True if to open the current one once more, with what was said in it."""


class ListSessions(Struct, frozen=True):
    """Ask the agent for its sessions, to choose one."""


class Run(Struct, frozen=True):
    """Run a command of the user."""

    command: str
    shared: bool
    """True if the next prompt tells the agent."""


class StopCommand(Struct, frozen=True):
    """Kill the user's running command."""


class ListTurns(Struct, frozen=True):
    """Ask the agent for the turns that it can take back. `offer_turns` has the answer, `undo_turn` for the last one."""

    last: bool = False


class TakeBack(Struct, frozen=True):
    """Ask the agent to take back the last turns; with `confirmed`, do it, and `keep` files that cannot be restored."""

    turns: int
    confirmed: bool = False
    keep: bool = False


class Copy(Struct, frozen=True):
    """Copy a text to the clipboard."""

    text: str


class ExportSession(Struct, frozen=True):
    """Write the transcript to a file."""

    path: str


class OpenPage(Struct, frozen=True):
    """Show the session in a browser."""


class SetTheme(Struct, frozen=True):
    """Use another theme from now on."""

    name: str


class Fold(Struct, frozen=True):
    """Leave out, or print, thoughts; fold, or print whole, the output of tools."""

    thoughts: bool | None = None
    output: bool | None = None


Effect: TypeAlias = (
    Show | Send | Steer | Withdraw | Cancel | CallBackground | Respond | Wait | Leave | Ring | Edit | SetOption | Open
    | ListSessions | Run | StopCommand | ListTurns | TakeBack | Copy | ExportSession | OpenPage | SetTheme | Fold
    | LogIn
)  # fmt: skip
