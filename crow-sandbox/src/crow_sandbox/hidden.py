"""Credentials, sockets and variables with secrets that a command in the sandbox does not get; see hidden.toml."""

import os
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from glob import glob, has_magic
from pathlib import Path

import msgspec

from crow_sandbox.layers import is_in

UNIX_SOCKETS = "/proc/net/unix"
"""Lists the sockets of this machine that have a name."""
TEXT_LIMIT = 1 << 20
"""The size of a file of settings, in bytes, above which it is hidden as a whole."""


class Exposed(msgspec.Struct, frozen=True):
    """Hidden things that a command may reach if the user names them."""

    variables: tuple[str, ...]
    sockets: tuple[str, ...]
    shown: tuple[str, ...]
    kept: tuple[str, ...]


class HiddenTable(msgspec.Struct, frozen=True):
    """The content of hidden.toml, which says what each field is."""

    paths: tuple[str, ...]
    texts: tuple[str, ...]
    secret: str
    variables: str
    values: str
    needed: tuple[str, ...]
    caches: tuple[str, ...]
    absent: Mapping[str, str]
    exposed: Mapping[str, Exposed]


@dataclass(frozen=True)
class Surroundings:
    """The folders around the roots of a command, as far as they exist. All are without links."""

    hidden: tuple[str, ...]
    listening: tuple[str, ...]
    """The sockets on which programs listen."""
    texts: Mapping[str, bytes]
    """For each file of settings with a secret: what the command sees instead."""
    sockets: tuple[str, ...]
    """The sockets that the command may reach."""
    needed: tuple[str, ...]
    caches: tuple[str, ...]
    homes: tuple[str, ...]


@cache
def read_table() -> HiddenTable:
    text = Path(__file__).with_name("hidden.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), HiddenTable)


def find_surroundings(
    env: Mapping[str, str], hidden: Iterable[str], exposed: Iterable[str], roots: Sequence[str]
) -> Surroundings:
    """Look up what of hidden.toml and of the paths in `hidden` this machine has."""
    table, home = read_table(), os.path.expanduser("~")
    homes = sorted({home, os.path.expanduser(f"~{read_user()}"), env.get("HOME") or home})
    named = [table.exposed[name] for name in exposed if name in table.exposed]
    shown = set(find_paths((path for each in named for path in each.shown), homes))
    kept = (path for each in named for path in each.kept)
    private = {*find_paths((*table.paths, *kept), homes), *find_paths(hidden, homes)} - shown
    targets = set(find_targets(private, homes))
    private |= {path for path in targets if not any(is_in(path, root) or is_in(root, path) for root in roots)}
    private = {path for path in private if os.access(path, os.R_OK)}
    sockets = set(find_paths((path for each in named for path in list_sockets(each, env)), homes))
    return Surroundings(
        hidden=tuple(sorted(private - sockets)),
        listening=tuple(sorted(set(list_named_sockets()) - sockets)),
        texts=dict(read_texts(table, homes)),
        sockets=tuple(sorted(sockets)),
        needed=tuple(sorted(find_paths(table.needed, homes))),
        homes=tuple(sorted({os.path.realpath(path) for path in homes if os.path.isdir(path)} - {"/"})),
        caches=tuple(sorted(path for path in find_paths(table.caches, homes) if os.path.isdir(path))),
    )


def read_user() -> str:
    """Return the name of this user in the system's list; "" if it has none."""
    if sys.platform == "win32":
        return ""
    import pwd  # not on Windows

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return ""


def find_paths(patterns: Iterable[str], homes: Iterable[str]) -> Iterator[str]:
    """Yield the existing paths that patterns with `~` match, without links."""
    for pattern in patterns:
        for path in {pattern.replace("~", home, 1) for home in homes} if pattern.startswith("~/") else {pattern}:
            for each in glob(path, include_hidden=True) if has_magic(pattern) else [path]:
                if os.path.exists(each):
                    yield os.path.realpath(each)


def find_targets(folders: Iterable[str], homes: Iterable[str]) -> Iterator[str]:
    """Yield what links in hidden folders lead to, if that is in a home: the real files are often kept elsewhere."""
    inside = tuple(os.path.join(os.path.realpath(home), "") for home in homes)
    for folder in folders:
        if folder.startswith(inside) and os.path.isdir(folder):
            with suppress(OSError), os.scandir(folder) as entries:
                targets = [os.path.realpath(entry.path) for entry in entries if entry.is_symlink()]
                yield from (path for path in targets if path.startswith(inside) and os.path.exists(path))


def list_sockets(exposed: Exposed, env: Mapping[str, str]) -> Iterator[str]:
    """Yield the paths of sockets that are exposed."""
    for name in exposed.variables:
        path = env.get(name, "").removeprefix("unix://")
        if os.path.isabs(path):
            yield path
    user = 0 if sys.platform == "win32" else os.getuid()
    yield from (path.format(uid=user) for path in exposed.sockets)


def list_named_sockets() -> Iterator[str]:
    """Yield the paths of the sockets on which programs of this machine listen."""
    try:
        with open(UNIX_SOCKETS, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.readlines()
    except OSError:
        return
    for line in lines[1:]:
        path = line.rstrip("\n").split(maxsplit=7)[7:]
        if path and path[0].startswith("/") and os.access(path[0], os.W_OK):
            yield os.path.realpath(path[0])


def read_texts(table: HiddenTable, homes: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Yield each file of settings that has a line with a secret, with its other lines."""
    for path in find_paths(table.texts, homes):
        try:
            status = os.stat(path)
            text = remove_secrets(path, status.st_mtime_ns, status.st_size, table.secret)
        except OSError:
            continue
        if text is not None:
            yield path, text


@cache
def remove_secrets(path: str, changed: int, size: int, secret: str) -> bytes | None:
    """Return the lines of a file without those with a secret; None if there is none. Raises OSError."""
    if size > TEXT_LIMIT:
        return b""
    lines = Path(path).read_text(encoding="utf-8", errors="surrogateescape").splitlines(keepends=True)
    kept = [line for line in lines if not re.search(secret, line)]
    return None if len(kept) == len(lines) else "".join(kept).encode(errors="surrogateescape")


def redirect_caches(env: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return variables that lead programs to a folder where a cache of the user is not there."""
    home = env.get("HOME") or os.path.expanduser("~")
    absent = {name: path.replace("~", home, 1) for path, name in read_table().absent.items() if name not in env}
    return {name: os.path.join(folder, name.lower()) for name, path in absent.items() if not os.path.isdir(path)}


def remove_variables(env: Mapping[str, str], exposed: Iterable[str]) -> dict[str, str]:
    """Return an environment without the variables that hold secrets, or lead to a socket or a credential."""
    table = read_table()
    names, values = re.compile(table.variables), re.compile(table.values)
    kept = {name for each in exposed if each in table.exposed for name in table.exposed[each].variables}
    kept |= {name[1:] for name in exposed if name.startswith("$")}
    return {
        name: value
        for name, value in env.items()
        if name in kept or not (names.search(name.upper()) or values.search(value))
    }
