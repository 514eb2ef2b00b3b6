"""Linux and macOS: files, locks, open folders, process groups, signals, pseudo-terminals and the shell."""

import sys

assert sys.platform != "win32"

import fcntl  # noqa: E402
import os  # noqa: E402
import pty  # noqa: E402
import pwd  # noqa: E402
import resource  # noqa: E402
import shlex  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import stat  # noqa: E402
import struct  # noqa: E402
import termios  # noqa: E402
from collections.abc import Callable, Iterator, Mapping, Sequence  # noqa: E402
from contextlib import suppress  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

if TYPE_CHECKING:
    import asyncio

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
KILL = signal.SIGKILL
"""The signal that no process survives."""
HAS_TERMINALS = True
"""True if `open_pseudo_terminal` works."""
STOP_STATUS = 128 + signal.SIGTSTP
"""The exit status of a command that Ctrl-Z has stopped."""
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
LIST_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
PASS_FLAGS = os.O_DIRECTORY | getattr(os, "O_PATH", os.O_RDONLY)
HAS_OPEN_PATHS = sys.platform == "linux" and os.path.isdir("/proc/self/fd")
"""True if an open folder has a path by its descriptor."""


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
    """Open the lock for a whole folder and return its descriptor. Raises OSError."""
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


def set_blocking(descriptor: int, wait: bool) -> None:
    """Make reads and writes of a file wait, or return at once."""
    os.set_blocking(descriptor, wait)


def get_groups() -> set[int]:
    """Return the ids of the processes that lead this process's group and session."""
    return {os.getpgrp(), os.getsid(0)}


def end_group(pid: int) -> None:
    """Ask the processes of a group to end."""
    _signal_group(pid, signal.SIGTERM)


def kill_group(pid: int) -> None:
    _signal_group(pid, signal.SIGKILL)


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS raises the latter for a group of zombies
        os.killpg(pid, number)


def has_group(group: int) -> bool:
    """True if a process group has processes that this user may signal."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def on_signal(loop: "asyncio.AbstractEventLoop", number: int, handle: Callable[[], object]) -> None:
    """Call a function in the event loop when a signal comes. Raises RuntimeError, ValueError in a thread."""
    loop.add_signal_handler(number, handle)


def stop_signal(loop: "asyncio.AbstractEventLoop", number: int) -> None:
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


def find_shell() -> str:
    """Return the path of the shell that runs commands of the model."""
    return shutil.which("bash") or "/bin/sh"


def make_terminal_command(shell: str, command: str, script: str = "") -> list[str]:
    """Return the name of such a shell and the arguments with which it runs a command.

    `script` is the path of a file that the shell reads before, if it is there; "" for none. The command is the last
    argument as it is, so that a client recognises it.
    """
    name = os.path.basename(shell)
    if not script:
        return [name, "-c", command]
    return [name, "-c", 'test ! -r "$1" || . "$1"; eval "set --; $2"', name, script, command]


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


def open_pseudo_terminal(rows: int, columns: int) -> tuple[int, int, str]:
    """Open a pseudo-terminal; return the descriptors of both sides, and the name of the program's. Raises OSError."""
    terminal, program_side = pty.openpty()
    fcntl.ioctl(program_side, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    return terminal, program_side, os.ttyname(program_side)


def reads_lines(terminal: int) -> bool:
    """True if the program in a pseudo-terminal gets its input by the line."""
    with suppress(termios.error):
        return bool(termios.tcgetattr(terminal)[3] & termios.ICANON)
    return False


def limit_memory(size: int) -> None:
    """Limit the memory of this process to so many bytes, and let it dump none. Raises OSError, ValueError."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def get_process_limit() -> int:
    """Return how many processes this user may have; negative for any number."""
    return resource.getrlimit(resource.RLIMIT_NPROC)[0]


class Folder:
    """An open folder. Its files are named from there, so that no link can replace a folder above them meanwhile."""

    def __init__(self, path: str) -> None:
        """Open a folder by its path, which may lead through links. Raises OSError."""
        self.path = path
        self._descriptor = os.open(path, PASS_FLAGS)

    @property
    def start(self) -> str:
        """The path by which a new process starts in this folder; on Linux it is that of the descriptor."""
        return f"/proc/self/fd/{self._descriptor}" if HAS_OPEN_PATHS else self.path

    def open_folder(self, name: str, *, to_list: bool = False) -> "Folder":
        """Open a folder in this one. Raises OSError, also for a link."""
        below = object.__new__(Folder)
        below.path = os.path.join(self.path, name)
        flags = LIST_FLAGS if to_list else PASS_FLAGS | os.O_NOFOLLOW
        below._descriptor = os.open(name, flags, dir_fd=self._descriptor)
        return below

    def open_file(self, name: str) -> int:
        """Open a file for reading, without waiting for one that is a pipe. Raises OSError, also for a link."""
        return os.open(name, READ_FLAGS, dir_fd=self._descriptor)

    def create_file(self, name: str) -> int:
        """Create a file and open it for writing. Raises OSError."""
        return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=self._descriptor)

    def create_folder(self, name: str) -> None:
        """Create a folder. Raises OSError."""
        os.mkdir(name, dir_fd=self._descriptor)

    def read_status(self, name: str) -> os.stat_result:
        """Return the status of a file or a link. Raises OSError."""
        return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)

    def is_writable(self, name: str) -> bool:
        """True if this user may write a file."""
        return os.access(name, os.W_OK, dir_fd=self._descriptor)

    def replace(self, old: str, new: str) -> None:
        """Give a file a new name, in place of another one. Raises OSError."""
        os.rename(old, new, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def remove(self, name: str) -> None:
        """Remove a file. Raises OSError."""
        os.unlink(name, dir_fd=self._descriptor)

    def list_entries(self) -> dict[str, str]:
        """Return the names in the folder with a mark each: `/` for a folder, `@` for a link. Raises OSError."""
        with os.scandir(self._descriptor) as found:
            return {entry.name: "@" if entry.is_symlink() else "/" if entry.is_dir() else "" for entry in found}

    def close(self) -> None:
        os.close(self._descriptor)


def walk(root: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield each folder below a root with the names of its folders, which may be changed, and of its files."""
    for here, folders, files, _ in os.fwalk(root):
        yield here, folders, files
