"""The sandbox of a session: begins runs, each of one command, on the level that this machine was proven to hold."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from crow_sandbox.applying import AppliedChange
from crow_sandbox.changes import LayerChange
from crow_sandbox.layers import Layer
from crow_sandbox.policy import Level, Policy


@dataclass(frozen=True)
class Standing:
    """What holds on this machine."""

    level: Level
    """The level that commands get: what was wanted, or the highest below it that was proven."""
    says: str
    """A sentence for a person: by which program, or why not."""


class SandboxRun:
    """One command in the sandbox, from its start until its changes are applied or discarded."""

    def __init__(self, policy: Policy, folder: Path, layers: Sequence[Layer]) -> None:
        self.policy = policy
        self.folder = folder
        """Holds the layers, the journal and the earlier files of this run."""
        self.layers = layers

    def wrap(
        self, arguments: Sequence[str], env: Mapping[str, str], cwd: str, folders: Sequence[str]
    ) -> tuple[list[str], dict[str, str]]:
        """Return the arguments and the environment that start a command in the sandbox, in the folder `cwd`.

        `arguments` begins with the absolute path of the program. `folders` are temporary folders of the caller, which
        the command may write.
        """
        raise NotImplementedError

    def read_changes(self) -> Sequence[LayerChange]:
        """List what the command, which has ended, changed."""
        raise NotImplementedError

    def apply(self, changes: Sequence[LayerChange]) -> Sequence[AppliedChange]:
        """Apply changes; what is not among them is discarded with the run."""
        raise NotImplementedError

    def remove(self) -> None:
        """Remove the folder of the run with all that was not applied."""
        raise NotImplementedError


class Sandbox:
    """Begins the runs of one session."""

    def __init__(self, folder: Path) -> None:
        """`folder` holds the runs; it is in crow's data."""

    async def prove(self, level: Level) -> Standing:
        """Find the level that holds, by running a command; the answer is kept for this process."""
        raise NotImplementedError

    async def begin(self, policy: Policy) -> SandboxRun:
        """Begin a run. Raises SandboxError if the policy cannot be applied here."""
        raise NotImplementedError

    async def close(self) -> None:
        """End the session's network, and remove its runs."""
        raise NotImplementedError
