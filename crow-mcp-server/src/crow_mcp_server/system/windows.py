"""Windows: processes, signals and the shell, as far as Windows has what POSIX means by them."""

import sys

assert sys.platform == "win32"

import errno  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import subprocess  # noqa: E402

HAS_TERMINALS = False
KILL = signal.SIGTERM  # ends a process at once, as every signal does that Python sends
NEW_GROUP = subprocess.CREATE_NEW_PROCESS_GROUP
STOP_STATUS = -1  # no command can be stopped

USE_UTF8 = "try { [Console]::OutputEncoding = [Text.UTF8Encoding]::new($false) } catch { }"
"""PowerShell that prints in UTF-8, in place of the console's code page; without a console it cannot be set."""
KEEP_EXIT_CODE = "if ($?) { exit 0 }; if ($LASTEXITCODE) { exit $LASTEXITCODE }; exit 1"
"""PowerShell that ends with the exit code of the last program; by itself it makes 1 of any failure."""


def keep_owner(descriptor: int, before: os.stat_result) -> None:
    """Do nothing: the folder's access list holds for the files in it."""


def find_shell() -> str:
    return shutil.which("pwsh") or shutil.which("powershell") or "powershell.exe"


def shell_options(command: str) -> list[str]:
    lines = "\n".join((USE_UTF8, command, KEEP_EXIT_CODE))
    return ["-NoLogo", "-NoProfile", "-NonInteractive", "-Command", lines]


def signal_group(group: int, number: int) -> None:
    """Do nothing: `list_members` finds the processes below the first one, and each of them gets the signal."""


def has_group(group: int) -> bool:
    return False


def set_nonblocking(descriptor: int) -> None:
    """Do nothing: a thread reads."""


def open_terminal(rows: int, columns: int) -> tuple[int, int, str]:
    raise OSError(errno.ENOTSUP, "crow opens no terminals on Windows")


def reads_lines(terminal: int) -> bool:
    return False


def limit_memory(size: int) -> None:
    """Do nothing: Windows limits the memory of jobs, not of processes."""


def get_process_limit() -> int:
    return -1
