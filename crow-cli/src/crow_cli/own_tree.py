"""Refuse crow's commands below crow itself that change something: a model must not approve its own calls.

CLASSES has a class for each command. A command without one is refused there, as is one that changes something.

A process counts as below crow in two cases. It, or a process above it, has one of the marks that crow gives to its
commands and servers; or a process above it is one in which crow works. If nothing tells who has started it, because it
has no terminal and has left its parents, it changes no settings as long as crow works on this machine.

This is not a sandbox. It does not find a process that has cleared its environment, left its parents and made itself a
terminal. Nor does it find a process of another service, such as cron or an SSH server. A command that the user allows
can write crow's files as the user can.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import click
from crow_agent.settings.home import Home
from crow_permissions.running import find_sign_of_crow, find_unknown_origin

from crow_cli.process import fail

READS = ""
"""It prints, or writes a file that its arguments name."""
WORKS = "works"
"""It runs a model by the user's settings: refused with an option that loosens these."""
SETTINGS = "this changes what crow may do"
STORED = "this changes what crow has stored"
FILES = "this changes files"
PROGRAMS = "this runs programs without a question"

CLASSES = {
    "acp": WORKS,
    "acp check": PROGRAMS,
    "acp record": PROGRAMS,
    "acp replay": PROGRAMS,
    "acp setup": SETTINGS,
    "audit list": READS,
    "audit repair": STORED,
    "audit verify": READS,
    "batch": WORKS,
    "calls list": READS,
    "calls show": READS,
    "chat": WORKS,
    "completion": READS,
    "config get": READS,
    "config set": SETTINGS,
    "config show": READS,
    "db backup": READS,
    "db check": READS,
    "db info": READS,
    "db path": READS,
    "db prune": STORED,
    "db repair": STORED,
    "db restore": STORED,
    "demo": WORKS,
    "doctor": WORKS,
    "eval diff": READS,
    "eval import": STORED,
    "eval list": READS,
    "eval run": PROGRAMS,
    "eval show": READS,
    "import": STORED,
    "lessons": WORKS,
    "mcp add": SETTINGS,
    "mcp list": READS,
    "mcp login": SETTINGS,
    "mcp logout": SETTINGS,
    "mcp remove": SETTINGS,
    "mcp search": READS,
    "mcp test": READS,
    "memory edit": STORED,
    "memory forget": STORED,
    "memory list": READS,
    "perms explain": READS,
    "perms list": READS,
    "perms revoke": SETTINGS,
    "perms test": READS,
    "prompts diff": READS,
    "prompts history": READS,
    "prompts improve": PROGRAMS,
    "prompts list": READS,
    "prompts pin": SETTINGS,
    "prompts promote": SETTINGS,
    "prompts show": READS,
    "prompts stats": READS,
    "prompts unpin": SETTINGS,
    "reask": WORKS,
    "run": WORKS,
    "sandbox check": READS,
    "sandbox run": FILES,
    "serve": WORKS,
    "sessions delete": STORED,
    "sessions export": READS,
    "sessions fork": STORED,
    "sessions list": READS,
    "sessions search": READS,
    "sessions share": READS,
    "sessions show": READS,
    "sessions to-task": PROGRAMS,
    "setup": SETTINGS,
    "skills list": READS,
    "skills new": SETTINGS,
    "skills validate": READS,
    "status": READS,
    "trust add": SETTINGS,
    "trust list": READS,
    "trust revoke": SETTINGS,
    "undo": FILES,
    "web": STORED,
    "worker": PROGRAMS,
    "workflows approve": SETTINGS,
    "workflows cancel": SETTINGS,
    "workflows fork": SETTINGS,
    "workflows list": READS,
    "workflows resume": SETTINGS,
    "workflows show": READS,
    "worktrees": FILES,
}
"""The class of each command that does something by itself."""

LOOSENING = ("yolo", "allow", "mcp_config", "roots", "agent", "save", "origins", "allow_remote", "until", "apply")
"""Parameters of the class WORKS that loosen the settings."""
LOOSE_MODES = ("accept-edits", "yolo")


def guard(command: click.Command, told: Callable[[str], AbstractContextManager[None]], path: str = "") -> None:
    """Make a command and those below it refuse where crow has started them, by their class.

    `told` makes a context in which a failure is told in an output format.
    """
    if (callback := command.callback) and acts(command, path):

        @wraps(callback)
        def run_guarded(*arguments: Any, **options: Any) -> Any:
            if not click.get_current_context().invoked_subcommand:
                with told(str(options.get("output_format", "text"))):
                    refuse_command(path, options)
            return callback(*arguments, **options)

        command.callback = run_guarded
    if isinstance(command, click.Group):
        for name, each in command.commands.items():
            guard(each, told, f"{path} {name}".strip())


def acts(command: click.Command, path: str) -> bool:
    """Return True if a command does something by itself, unlike a group that only holds others."""
    return not isinstance(command, click.Group) or (path != "" and command.invoke_without_command)


def list_commands(command: click.Command, path: str = "") -> Iterator[str]:
    """Yield the words of each command that does something by itself."""
    if acts(command, path):
        yield path
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            if each := command.get_command(context, name):
                yield from list_commands(each, f"{path} {name}".strip())


def refuse_command(path: str, options: Mapping[str, Any]) -> None:
    """Print a sentence and exit with code 2 if crow has started this process, and the command is not for it."""
    does = CLASSES.get(path, SETTINGS)
    if does == READS:
        return
    if does != WORKS:
        refuse_below_crow(does)
    elif any(options.get(name) for name in LOOSENING) or options.get("mode") in LOOSE_MODES:
        refuse_below_crow("this loosens what crow may do")


def refuse_below_crow(does: str = SETTINGS) -> None:
    """Print a sentence and exit with code 2 if crow has started this process, directly or not."""
    data = Home.find(os.environ).data
    if reason := find_sign_of_crow(data):
        fail(f"{does}, so it does not run where crow has started it: {reason}. Run it in a terminal of your own.")
    if does == SETTINGS and (reason := find_unknown_origin(data)):
        fail(
            f"{does}, and nothing shows that crow has not started it: {reason}. Run it in a terminal, or by a service "
            "that has started before that process."
        )
