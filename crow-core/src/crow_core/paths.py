"""Paths as rules, addresses and people write them. Pure: each function works for both kinds of systems anywhere."""

import ntpath
import re
from urllib.parse import unquote

import crow_system as system

DRIVE_IN_URI = re.compile(r"/([A-Za-z])[:|](?=/|$)")
"""The beginning of the path of a `file:` URI that names a drive."""
LONG_PREFIX = re.compile(r"//[?.]/(UNC/)?", re.IGNORECASE)
"""The beginning of a Windows path that is not limited to 260 characters."""


def is_below(path: str, folder: str, *, windows: bool = system.WINDOWS, ignore_case: bool = False) -> bool:
    """True if an absolute path without links is a folder or leads into it."""
    path, folder = to_subject(path, windows=windows), to_subject(folder, windows=windows)
    if windows or ignore_case:
        path, folder = path.casefold(), folder.casefold()
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def to_relative(path: str, folder: str, *, windows: bool = system.WINDOWS, ignore_case: bool = False) -> str:
    """Spell an absolute path as rules do: relative to a folder if it leads into it, else absolute."""
    full, base = to_subject(path, windows=windows), to_subject(folder, windows=windows).rstrip("/")
    return (
        (full[len(base) + 1 :] or ".")
        if is_below(full, base or "/", windows=windows, ignore_case=ignore_case)
        else full
    )


def to_subject(path: str, *, windows: bool = system.WINDOWS) -> str:
    """Spell an absolute path as rules do: with slashes.

    On Windows, also without dots and spaces at the end of a name, and a stream after a colon. The
    system ignores them, and no second spelling may escape a rule.
    """
    if not windows:
        return path
    path = path.replace("\\", "/")
    path = LONG_PREFIX.sub(lambda found: "//" if found[1] else "", path, count=1)
    drive, rest = ntpath.splitdrive(path)
    names = [name.partition(":")[0].rstrip(". ") or name for name in rest.split("/")]
    return (drive[:1].upper() + drive[1:] if drive[1:2] == ":" else drive) + "/".join(names)


def from_uri(host: str, path: str, *, windows: bool = system.WINDOWS) -> str:
    """Convert the host and the path of a `file:` URI to a path of the system."""
    path = unquote(path)
    if not windows:
        return path
    if host and host.lower() != "localhost":
        return f"//{host}{path}"
    return DRIVE_IN_URI.sub(r"\1:", path, count=1)
