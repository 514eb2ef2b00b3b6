"""Linux and macOS: files, locks, process groups, signals and the shell."""

import sys

assert sys.platform != "win32"

import asyncio  # noqa: E402
import fcntl  # noqa: E402
import os  # noqa: E402
import pwd  # noqa: E402
import shlex  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import stat  # noqa: E402
from collections.abc import Callable, Mapping, Sequence  # noqa: E402
from contextlib import suppress  # noqa: E402
from pathlib import Path  # noqa: E402

BINARY = 0
"""The flag of `os.open` against a conversion of line ends."""
NO_LINKS = os.O_NOFOLLOW
"""The flag against a link as the last part of a path."""
NO_WAIT = os.O_NONBLOCK
"""The flag against waiting for the other end of a pipe."""
NO_TERMINAL = os.O_NOCTTY
"""The flag against a new controlling terminal."""
NEW_GROUP = 0
"""The flags of Popen for a process group; `start_new_session` makes one here."""
END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""The signals that tell a process to end; SIGINT is one that asks."""


def lock(descriptor: int, *, wait: bool) -> None:
    """Lock an open file for this descriptor, until it is closed.

    Raises BlockingIOError if another one has locked it and this is not to `wait`, and OSError.
    """
    fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def lock_byte(descriptor: int, at: int) -> bool:
    """Lock a byte of a file for this process; False if another process has locked it."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, at)
    except OSError:
        return False
    return True


def unlock_byte(descriptor: int, at: int) -> None:
    """Unlock a byte that this process has locked."""
    fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, at)


def open_folder_lock(folder: Path) -> int:
    """Open what is locked for a whole folder and return its descriptor. Raises OSError."""
    return os.open(folder, os.O_RDONLY)


def create_locked(file: Path) -> int:
    """Create a file that is locked as soon as it has its name, and return its descriptor. Raises OSError."""
    new = file.with_name(f".{file.name}")
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        lock(descriptor, wait=False)
        new.rename(file)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_start(descriptor: int, size: int) -> bytes:
    """Read the first bytes of a file, wherever the descriptor stands."""
    return os.pread(descriptor, size, 0)


def write_start(descriptor: int, data: bytes) -> None:
    """Write the first bytes of a file, wherever the descriptor stands."""
    os.pwrite(descriptor, data, 0)


def set_mode(descriptor: int, mode: int) -> None:
    """Set the permission bits of an open file."""
    os.fchmod(descriptor, mode)


def get_mode(status: os.stat_result) -> int:
    """Return the permission bits of a file that say something on this system."""
    return stat.S_IMODE(status.st_mode)


def keep_owner(descriptor: int, status: os.stat_result) -> None:
    """Give an open file the owner, the group and the permission bits of another one, as far as this user may."""
    with suppress(PermissionError):  # only root gives files away
        os.fchown(descriptor, status.st_uid, status.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(status.st_mode))


def get_user() -> int:
    """Return the id of the user as `stat` names the owner of a file."""
    return os.getuid()


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in a folder. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def restore_blocking(descriptor: int) -> None:
    """Make reads and writes of a file wait again."""
    os.set_blocking(descriptor, True)


def get_groups() -> set[int]:
    """Return the ids of the processes that lead this process's group and session."""
    return {os.getpgrp(), os.getsid(0)}


def end_group(pid: int) -> None:
    """Ask the processes of a group to end."""
    _signal_group(pid, signal.SIGTERM)


def kill_group(pid: int) -> None:
    """Kill the processes of a group."""
    _signal_group(pid, signal.SIGKILL)


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS raises the latter for a group of zombies
        os.killpg(pid, number)


def on_signal(loop: asyncio.AbstractEventLoop, number: int, handle: Callable[[], object]) -> None:
    """Call a function in the event loop when a signal comes. Raises RuntimeError, ValueError in a thread."""
    loop.add_signal_handler(number, handle)


def stop_signal(loop: asyncio.AbstractEventLoop, number: int) -> None:
    """Let a signal do again what it does by default. Raises RuntimeError, ValueError in a thread."""
    loop.remove_signal_handler(number)


def make_shell_command(command: str) -> list[str]:
    """Return the program and arguments that run a command of the configuration."""
    return ["/bin/sh", "-c", command]


def split_command(text: str) -> list[str]:
    """Split a command line into the program and its arguments. Raises ValueError."""
    return shlex.split(text)


def join_command(words: Sequence[str]) -> str:
    """Join a program and its arguments into a line that the shell runs."""
    return shlex.join(words)


def make_terminal_command(command: str, script: str = "") -> list[str]:
    """Return the program and arguments that run a command of the model in a terminal of the client.

    `script` is the path of a file that the shell reads before, if it is there; "" for none. The command is the last
    argument as it is, so that a client recognises it.
    """
    shell = "bash" if shutil.which("bash") else "sh"
    if not script:
        return [shell, "-c", command]
    return [shell, "-c", 'test ! -r "$1" || . "$1"; eval "set --; $2"', shell, script, command]


def make_user_command(command: str) -> list[str]:
    """Return the program and arguments that run a command as the user would."""
    return [os.environ.get("SHELL") or "/bin/sh", "-c", command]


def find_program(name: str, env: Mapping[str, str]) -> str:
    """Return what starts a program: its name, or on Windows its path, since the system finds no `.cmd` by its name."""
    return name


def find_login_shell(env: Mapping[str, str]) -> str:
    """Return the path of the shell that the user logs in with; "" if there is none."""
    with suppress(KeyError):
        return env.get("SHELL") or pwd.getpwuid(os.getuid()).pw_shell
    return ""


def open_terminal() -> int:
    """Open the controlling terminal of this process for reading and return its descriptor. Raises OSError."""
    return os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
