"""The PATH of the user's login shell, for a process that a desktop has started.

A desktop starts an editor, and the editor crow, with the folders of the system alone: neither Homebrew, nor nvm, nor uv
is in it. The login shell is asked once, and its answer kept in a file.
"""

import os
import secrets
import subprocess
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

import crow_system as system
import msgspec
from crow_system.files import make_private_folder

CACHE = "login-path.json"
"""Name of the file, in crow's data folder."""
SYSTEM_FOLDERS = {
    *("/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin"),
    *("/usr/games", "/usr/local/games", "/snap/bin"),
}
"""The value of PATH if no shell has set it."""
PROFILES = (
    *("/etc/paths", "/etc/profile", "/etc/zprofile", "~/.profile", "~/.bash_profile", "~/.bash_login", "~/.bashrc"),
    *("~/.zshenv", "~/.zprofile", "~/.zshrc", "~/.config/fish/config.fish"),
)
"""Files that set PATH: the shell is asked again once one of them has changed."""
TIME_LIMIT = 5.0
"""Seconds that the shell has."""
MAX_AGE = 30 * 86400
"""Seconds for which an answer is kept."""


class ShellAnswer(msgspec.Struct):
    """The answer of the shell."""

    shell: str
    path: str
    """Empty if it did not answer."""
    at: float
    """Seconds since 1970."""
    stamps: dict[str, int]
    """Modification times of PROFILES, in nanoseconds, without the files that do not exist."""


def complete_path(env: MutableMapping[str, str], data: Path) -> None:
    """Give `env` the PATH of the user's login shell, before what it has, if a desktop has started this process.

    It may take TIME_LIMIT seconds, once. `data` is crow's data folder.
    """
    if lacks_login_path(env) and (path := read_login_path(env, data)):
        own = [folder for folder in env.get("PATH", "").split(os.pathsep) if folder not in path.split(os.pathsep)]
        env["PATH"] = os.pathsep.join([path, *filter(None, own)])


def lacks_login_path(env: Mapping[str, str]) -> bool:
    """Test whether no shell has set PATH: none is among the parents, and it has only folders of the system."""
    if system.WINDOWS or "SHLVL" in env:
        return False
    return set(filter(None, env.get("PATH", "").split(os.pathsep))) <= SYSTEM_FOLDERS


def read_login_path(env: Mapping[str, str], data: Path) -> str:
    """Return the PATH of the user's login shell: as it was kept, or as the shell says now. Empty if it is not known."""
    if not (shell := system.find_login_shell(env)):
        return ""
    stamps = read_stamps(env)
    try:
        kept = msgspec.json.decode((data / CACHE).read_bytes(), type=ShellAnswer)
    except (OSError, msgspec.DecodeError):
        kept = None
    if kept and (kept.shell, kept.stamps) == (shell, stamps) and 0 <= time.time() - kept.at < MAX_AGE:
        return kept.path
    answer = ShellAnswer(shell, ask_shell(shell, env), time.time(), stamps)
    with suppress(OSError):  # then the shell is asked again next time
        make_private_folder(data)
        new = data / f"{CACHE}.{os.getpid()}"
        new.write_bytes(msgspec.json.encode(answer))
        system.replace_file(new, data / CACHE)
    return answer.path


def read_stamps(env: Mapping[str, str]) -> dict[str, int]:
    """Return the modification times of PROFILES."""
    stamps: dict[str, int] = {}
    for name in PROFILES:
        with suppress(OSError):
            stamps[name] = os.stat(name.replace("~", env.get("HOME", ""), 1)).st_mtime_ns
    return stamps


def ask_shell(shell: str, env: Mapping[str, str]) -> str:
    """Ask a login shell for its PATH; return "" if it does not answer in time, or with no folder of its own."""
    mark = secrets.token_hex(8)  # profiles print, too
    command = [shell, "-l", "-i", "-c", f"echo {mark}; printenv PATH; echo {mark}"]
    try:
        process = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interactive shell would take the terminal
        )
    except OSError:
        return ""
    with process:
        try:
            said, _ = process.communicate(timeout=TIME_LIMIT)
        except subprocess.TimeoutExpired:
            system.kill_group(process.pid)
            return ""
    _, _, rest = said.decode("utf-8", "surrogateescape").partition(f"{mark}\n")
    path, ended, _ = rest.partition(f"\n{mark}")
    return path if ended and os.path.isabs(path) and "\n" not in path else ""
