"""Linux and macOS: process groups, signals, pseudo-terminals, the shell, and folders that are open."""

import sys

assert sys.platform != "win32"

import fcntl  # noqa: E402
import os  # noqa: E402
import pty  # noqa: E402
import resource  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import stat  # noqa: E402
import struct  # noqa: E402
import termios  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from contextlib import suppress  # noqa: E402

HAS_TERMINALS = True
"""Whether `open_terminal` works."""
KILL = signal.SIGKILL
"""The signal that no process survives."""
NEW_GROUP = 0
"""The flags of Popen for a process group; `start_new_session` makes one here."""
STOP_STATUS = 128 + signal.SIGTSTP
"""The exit status of a command that Ctrl-Z has stopped."""
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
LIST_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
PASS_FLAGS = os.O_DIRECTORY | getattr(os, "O_PATH", os.O_RDONLY)
HAS_OPEN_PATHS = sys.platform == "linux" and os.path.isdir("/proc/self/fd")
"""Whether an open folder has a path by its descriptor."""


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
        """Whether this user may write a file."""
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
        """Close the folder."""
        os.close(self._descriptor)


def walk(root: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield each folder below a root with the names of its folders, which may be changed, and of its files."""
    for here, folders, files, _ in os.fwalk(root):
        yield here, folders, files


def keep_owner(descriptor: int, before: os.stat_result) -> None:
    """Give an open file the owner, the group and the permission bits of another one, as far as this user may."""
    with suppress(PermissionError):  # only root may change the owner, and only a member may set the group
        os.fchown(descriptor, before.st_uid, before.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(before.st_mode))


def find_shell() -> str:
    """Return the path of the shell that runs commands."""
    return shutil.which("bash") or "/bin/sh"


def shell_options(command: str) -> list[str]:
    """Return the arguments with which that shell runs a command."""
    return ["-c", command]


def signal_group(group: int, number: int) -> None:
    """Send a signal to a process group if it kills, else to its leader only."""
    with suppress(ProcessLookupError, PermissionError):  # macOS: PermissionError when only zombies are left
        if number == KILL and group > 0:  # reaches processes that start meanwhile, too
            os.killpg(group, number)
        elif group > 0:  # the leader first, so that a shell does not report the end of its children
            os.kill(group, number)


def has_group(group: int) -> bool:
    """Whether a process group has processes that this user may signal."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def set_nonblocking(descriptor: int) -> None:
    """Make reads of a descriptor return at once."""
    os.set_blocking(descriptor, False)


def open_terminal(rows: int, columns: int) -> tuple[int, int, str]:
    """Open a pseudo-terminal; return the descriptors of both sides, and the name of the program's. Raises OSError."""
    terminal, program_side = pty.openpty()
    fcntl.ioctl(program_side, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    return terminal, program_side, os.ttyname(program_side)


def reads_lines(terminal: int) -> bool:
    """Whether the program in a pseudo-terminal gets its input by the line."""
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
