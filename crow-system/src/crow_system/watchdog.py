"""Start a process that kills commands when this process dies without having ended them."""

import os
import subprocess

import crow_system as system


def start_watchdog(*folders: str, grace: float = 0.0) -> subprocess.Popen[bytes]:
    """Start a watchdog, which reads lines from its input until that closes, or until a line `now`.

    `start GROUP:MARK` and `end GROUP:MARK` say which commands run. At the end it kills the process groups that have
    started and not ended (GROUP may be empty), and the processes with their marks in the environment. It also removes
    the `folders`. If its input closes without `now`, this process has died: first it waits `grace` seconds, in which a
    command may end by itself. Raises OSError.
    """
    command, env = system.make_watchdog_command(grace, *folders)
    return subprocess.Popen(
        command,
        env=env,
        cwd=os.path.abspath(os.sep),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        creationflags=system.NEW_GROUP,
    )
