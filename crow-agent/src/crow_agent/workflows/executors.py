"""The processes that share a file of workflows: each has an id, and a lock that the system releases at its end."""

import os
from itertools import count
from zlib import crc32

import crow_system as system

from crow_agent.workflows.errors import WorkflowError


class ExecutorLocks:
    """The locks of executors: bytes of a file next to the database."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def claim(self, wanted: str = "") -> str:
        """Lock an executor and return its id: the wanted one, else the first that is free of local, local-2, …

        Raises WorkflowError if the wanted one runs in another process.
        """
        if wanted:
            if not self.lock(wanted):
                raise WorkflowError(
                    f"Another process runs these workflows as executor {wanted!r}. Stop it, or give this process "
                    "another executor."
                )
            return wanted
        names = (f"local-{number}" if number > 1 else "local" for number in count(1))
        return next(name for name in names if self.lock(name))

    def lock(self, executor: str) -> bool:
        """Lock an executor; False if another process has it."""
        return system.lock_byte(self._descriptor, crc32(executor.encode()))

    def release(self, executor: str) -> None:
        """Release an executor that this process has locked."""
        system.unlock_byte(self._descriptor, crc32(executor.encode()))

    def close(self) -> None:
        """Release all that this process has locked."""
        os.close(self._descriptor)
