"""The answers to calls of the tool `terminal`, as texts for the model."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import crow_system as system

from crow_mcp_server.terminal.processes import PipedCommand, name_signal
from crow_mcp_server.workspace import CommandOutcome

if TYPE_CHECKING:
    from crow_mcp_server.terminal.interactive_shell import Shell

MAX_OUTPUT_CHARACTERS = 30_000  # of one answer
MAX_NAMES = 20  # in the note on what a restart has ended
NEEDS_TERMINAL = re.compile(
    r"not (?:to |from )?an? (?:input )?(?:tty\b|terminal)|failed tty get|inappropriate ioctl for device|/dev/tty"
    r"|opening terminal|tty present|terminal is required|requires an? (?:interactive )?(?:tty|terminal)|open a new TTY",
    re.IGNORECASE,
)
"""Complaints of programs that have no terminal."""
MAX_COMPLAINT_CHARACTERS = 2_000  # at the end of the output, where a complaint is looked for


@dataclass(frozen=True)
class TerminalAnswer:
    """The answer to a tool call."""

    text: str
    folder: str = ""
    """The folder in which the next command starts; "" if no command has ended."""
    host_terminal: str = ""
    """The host's id of the terminal in which the command ran."""
    failure: Mapping[str, int | str] = field(default_factory=dict[str, int | str])
    """`exitCode` or `signal` of a command that ended with another exit code than 0; empty otherwise."""
    ended: str = ""
    """Id of the tool call whose `launch` started the command or session that has ended; "" if there is none."""
    opened_by: str = ""
    """Id of the tool call whose `launch` opened the session that this is about; "" if there is none."""


async def report_session(name: str, shell: "PipedCommand | Shell") -> str:
    """Return the text for the model about a session: its new output and its state."""
    if shell.exit_code is not None:
        await shell.settle()
    parts = [shell.capture.take_text(MAX_OUTPUT_CHARACTERS)]
    if not isinstance(shell, PipedCommand):
        shell.note_report()
    if not isinstance(shell, PipedCommand) and shell.screen.is_active:
        parts.append(f"[screen]\n{shell.screen.get_text()}")
    if shell.is_running:
        parts.append(format_running(name))
    elif shell.exit_code is not None:
        await shell.kill()  # the processes that it left
        parts.append("" if shell.timed_out else format_end(shell.exit_code))
    elif not isinstance(shell, PipedCommand):
        parts.append("" if shell.timed_out else format_status(shell.status))
    parts.append(format_timeout(shell.timeout) if shell.timed_out and not shell.is_running else "")
    return join_parts(*parts)


def describe_need(output: str) -> str:
    """Return advice if a command that has failed or hangs complains that it has no terminal, else ""."""
    needs = NEEDS_TERMINAL.search(output[-MAX_COMPLAINT_CHARACTERS:])
    return "[this program needs a terminal: run it with a session]" if needs else ""


def format_loss(variables: Sequence[str], sessions: Sequence[str]) -> str:
    """Return the note on what an earlier server knew and this one does not; "" for nothing."""
    parts = [
        f"{what}: {', '.join(names[:MAX_NAMES])}{f' and {more} more' if (more := len(names) - MAX_NAMES) > 0 else ''}"
        for what, names in (("variables are no longer set or unset", variables), ("sessions have ended", sessions))
        if names
    ]
    return f"[the server was restarted since the last command; {'; '.join(parts)}]" if parts else ""


def format_outcome(outcome: CommandOutcome, timeout: float, *notes: str) -> str:
    """Return the text for the model about a command that has ended: the output, what was unusual, further notes."""
    need = describe_need(outcome["output"]) if outcome["exit_code"] != 0 else ""
    pids = " ".join(map(str, outcome.get("background", ())))
    left = f"[still running in the background: {pids}; their further output is lost unless redirected]" if pids else ""
    if outcome.get("timed_out"):
        end = format_timeout(timeout)
    elif outcome["signal"]:
        end = f"[killed by {outcome['signal']}]"
    elif outcome["exit_code"] is None:
        end = "[ended, but its exit code is not known]"
    else:
        end = format_status(outcome["exit_code"])
    return join_parts(outcome["output"], left, end, need, *notes)


def find_failure(outcome: CommandOutcome) -> dict[str, int | str]:
    """Return the `exitCode` or the `signal` of a command that failed; an empty dict if it succeeded."""
    if outcome["signal"]:
        return {"signal": outcome["signal"]}
    if outcome.get("timed_out"):
        return {"signal": "SIGKILL"}
    return {"exitCode": outcome["exit_code"]} if outcome["exit_code"] else {}


def find_shell_failure(shell: "Shell") -> dict[str, int | str]:
    """Return the `exitCode` of the command that ended last in a session; an empty dict if it succeeded, or runs."""
    status = shell.status if shell.exit_code is None else shell.exit_code
    return {} if shell.is_running or not status or is_stopped(status) else {"exitCode": status}


def join_parts(output: str, *notes: str) -> str:
    """Return the output as it is, and below it the notes that are not empty, one a line."""
    end = "" if output.endswith("\n") or not output else "\n"
    below = "\n".join(note for note in notes if note)
    if not output.strip():  # some models' servers refuse a text without a visible character
        below = below or ("[nothing but white space]" if output else "[no output]")
    return f"{output}{end}{below}" if below else output


def format_status(status: int) -> str:
    """Return the note on an exit status; "" for 0."""
    if is_stopped(status):
        return "[stopped: fg or bg lets it go on]"
    return f"[exit code {status}]" if status else ""


def format_end(exit_code: int) -> str:
    """Return the note on a terminal whose shell has ended."""
    if exit_code < 0:
        return f"[the shell has ended, killed by {name_signal(-exit_code)}]"
    return f"[the shell has ended, exit code {exit_code}]"


def is_stopped(status: int) -> bool:
    """Tell whether an exit status is that of a command that Ctrl-Z stopped."""
    return status == system.STOP_STATUS


def format_timeout(timeout: float) -> str:
    """Return the note on a command that was killed after a timeout."""
    return (
        f"[timed out after {timeout:g} s and was killed; the output so far is above. Give a longer timeout, "
        "or start it in a session and look again later]"
    )


def format_running(name: str) -> str:
    """Return the note on a session whose command still runs."""
    return (
        f'[still running in session "{name}": name it to look again, with input or keys to answer; keys "kill" ends it]'
    )
