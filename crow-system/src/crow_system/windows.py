"""Windows: files, locks, processes, signals and the shell, as far as Windows has what POSIX means by them."""

import sys

assert sys.platform == "win32"

import errno  # noqa: E402
import msvcrt  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import stat  # noqa: E402
import subprocess  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Mapping, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

if TYPE_CHECKING:
    import asyncio

BINARY = os.O_BINARY
NO_LINKS = 0
NO_WAIT = 0
NO_TERMINAL = 0
NEW_GROUP = subprocess.CREATE_NEW_PROCESS_GROUP
END_SIGNALS = (signal.SIGTERM, signal.SIGBREAK)
KILL = signal.SIGTERM  # ends a process at once, as every signal does that Python sends
HAS_TERMINALS = False
STOP_STATUS = -1  # no command can be stopped

LOCKED_BYTE = 1 << 40
"""The byte that stands for the whole file: nobody reads or writes there, and a locked byte could not be read."""
LOCK_INTERVAL = 0.02
"""Seconds between two attempts to lock."""

USE_UTF8 = "try { [Console]::OutputEncoding = [Text.UTF8Encoding]::new($false) } catch { }"
"""PowerShell that prints in UTF-8, in place of the console's code page; without a console it cannot be set."""
KEEP_EXIT_CODE = "if ($?) { exit 0 }; if ($LASTEXITCODE) { exit $LASTEXITCODE }; exit 1"
"""PowerShell that ends with the exit code of the last program; by itself it makes 1 of any failure."""


def lock(descriptor: int, *, wait: bool) -> None:
    while not lock_byte(descriptor, LOCKED_BYTE):
        if not wait:
            raise BlockingIOError("another process has locked the file")
        time.sleep(LOCK_INTERVAL)


def lock_byte(descriptor: int, at: int) -> bool:
    try:
        _lock_at(descriptor, at, msvcrt.LK_NBLCK)
    except OSError:
        return False
    return True


def unlock_byte(descriptor: int, at: int) -> None:
    _lock_at(descriptor, at, msvcrt.LK_UNLCK)


def _lock_at(descriptor: int, at: int, mode: int) -> None:
    """Call the system's function, which works where the descriptor stands."""
    before = os.lseek(descriptor, 0, os.SEEK_CUR)
    os.lseek(descriptor, at, os.SEEK_SET)
    try:
        msvcrt.locking(descriptor, mode, 1)
    finally:
        os.lseek(descriptor, before, os.SEEK_SET)


def open_folder_lock(folder: Path) -> int:
    return os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | BINARY, 0o600)  # a folder cannot be opened


def create_locked(file: Path) -> int:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | BINARY, 0o600)  # an open file cannot be renamed
    try:
        lock(descriptor, wait=False)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_start(descriptor: int, size: int) -> bytes:
    os.lseek(descriptor, 0, os.SEEK_SET)
    return os.read(descriptor, size)


def write_start(descriptor: int, data: bytes) -> None:
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.write(descriptor, data)


def set_mode(descriptor: int, mode: int) -> None:
    """Do nothing: the folder's access list holds for the files in it, and a profile belongs to its user alone."""


def get_mode(status: os.stat_result) -> int:
    return stat.S_IMODE(status.st_mode) & 0o700  # the bits for others are made up


def keep_owner(descriptor: int, status: os.stat_result) -> None:
    """Do nothing, as `set_mode`."""


def get_user() -> int:
    return 0  # as `stat` says for every file


def sync_folder(folder: Path) -> None:
    """Do nothing: a folder cannot be opened, and its names are written with the file."""


def set_blocking(descriptor: int, wait: bool) -> None:
    """Do nothing: the event loop polls no pipes."""


def get_groups() -> set[int]:
    return set()


def end_group(pid: int) -> None:
    """Ask the processes of a group to end: those that run in a console can be asked."""
    try:
        os.kill(pid, signal.CTRL_BREAK_EVENT)
    except OSError:  # it has no console, or has ended
        kill_group(pid)


def kill_group(pid: int) -> None:
    """Kill a process and all that are below it."""
    from crow_system.trees import find_descendants, kill_all  # loads psutil

    kill_all(find_descendants(pid, with_roots=True))


def has_group(group: int) -> bool:
    return False


def on_signal(loop: "asyncio.AbstractEventLoop", number: int, handle: Callable[[], object]) -> None:
    def forward(_number: int, _frame: object) -> None:
        loop.call_soon_threadsafe(handle)

    signal.signal(number, forward)


def stop_signal(loop: "asyncio.AbstractEventLoop", number: int) -> None:
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def make_shell_command(command: str) -> list[str]:
    return make_terminal_command("powershell.exe", command)


def split_command(text: str) -> list[str]:
    import ctypes

    if not text.strip():
        return []
    shell, kernel = ctypes.WinDLL("shell32"), ctypes.WinDLL("kernel32")
    shell.CommandLineToArgvW.argtypes = (ctypes.c_wchar_p, ctypes.POINTER(ctypes.c_int))
    shell.CommandLineToArgvW.restype = ctypes.POINTER(ctypes.c_wchar_p)
    kernel.LocalFree.argtypes = (ctypes.c_void_p,)
    count = ctypes.c_int()
    words = shell.CommandLineToArgvW(text, ctypes.byref(count))
    if not words:
        raise ValueError("it cannot be split into words")
    try:
        return [words[at] or "" for at in range(count.value)]
    finally:
        kernel.LocalFree(words)


def join_command(words: Sequence[str]) -> str:
    return "& " + " ".join("'" + word.replace("'", "''") + "'" for word in words)


def find_shell() -> str:
    return shutil.which("pwsh") or shutil.which("powershell") or "powershell.exe"


def make_terminal_command(shell: str, command: str, script: str = "") -> list[str]:
    lines = "\n".join((USE_UTF8, command, KEEP_EXIT_CODE))
    return [os.path.basename(shell), "-NoLogo", "-NoProfile", "-NonInteractive", "-Command", lines]


def make_user_command(command: str) -> list[str]:
    return ["powershell.exe", "-NoLogo", "-Command", "\n".join((USE_UTF8, command, KEEP_EXIT_CODE))]


def find_program(name: str, env: Mapping[str, str]) -> str:
    path = next((value for key, value in env.items() if key.upper() == "PATH"), None)
    return shutil.which(name, path=path) or name  # the system itself finds no .cmd, such as npx


def find_login_shell(env: Mapping[str, str]) -> str:
    """Return "": the registry's PATH is that of every process."""
    return ""


def open_terminal() -> int:
    return os.open("CONIN$", os.O_RDONLY | BINARY)


def open_pseudo_terminal(rows: int, columns: int) -> tuple[int, int, str]:
    raise OSError(errno.ENOTSUP, "crow opens no terminals on Windows")


def reads_lines(terminal: int) -> bool:
    return False


def limit_memory(size: int) -> None:
    """Do nothing: Windows limits the memory of jobs, not of processes."""


def get_process_limit() -> int:
    return -1
