"""The policy of a sandbox: what a command may read, change and reach."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["review", "workspace", "read-only", "off"]
"""`review`: the roots are a copy-on-write view, and what the command changed is applied or discarded afterwards.
`workspace`: the command changes the roots directly. `read-only`: it changes nothing. `off`: nothing is limited."""


class SandboxError(Exception):
    """A command cannot run in a sandbox, or its changes cannot be applied; the text is a sentence for a person."""


@dataclass(frozen=True)
class Policy:
    """The rights of a command. All paths are absolute and without links."""

    level: Level
    roots: tuple[str, ...]
    """The folders that the command may change, by the level."""
    writable: tuple[str, ...] = ()
    """Folders that the command writes directly at every level but `off`: crow's own temporary folders."""
    hidden: tuple[str, ...] = ()
    """Files and folders that the command cannot read, in addition to those of hidden.toml; they need not exist."""
    exposed: tuple[str, ...] = ()
    """Hidden things of hidden.toml that the command may reach, by name: `ssh-agent`, `gpg-agent`, `docker`; and
    variables of the environment that look like secrets, as `$NAME`."""
    hosts: tuple[str, ...] | None = ()
    """Patterns of the hosts that the command may reach, such as `pypi.org` and `*.example.com`; None if the network is
    not limited."""
    private: tuple[str, ...] = ()
    """Files in the roots that the command sees as empty ones, which it cannot change."""
    addresses: tuple[str, ...] = ()
    """Patterns of addresses that are not public, to which the names of `hosts` may lead; others have no effect."""
    denied: tuple[str, ...] = ()
    """Shell patterns of hosts, or of HOST:PORT, that the command never reaches, whatever `hosts` allows."""
