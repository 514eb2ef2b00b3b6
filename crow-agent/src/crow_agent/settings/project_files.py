"""The files of a folder that crow would use or run, read without following a link out of the folder.

`take_snapshot` reads the settings, prompts, skills and commands of a folder, and the files in it that the settings
name, such as the script of an MCP server. Its fingerprint changes with each of them.
"""

import hashlib
import json
import os
import re
import shlex
import stat
import time
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import crow_system as system
from crow_system.files import UnusableFile, open_file

from crow_agent.settings.home import PLUGIN_FOLDERS

SETTINGS = (".mcp.json", ".crow/config.toml")
FOLDERS = (
    *PLUGIN_FOLDERS,
    *(".crow/prompts", ".crow/skills", ".agents/skills", ".claude/skills"),
    *(".crow/commands", ".claude/commands"),
)
"""Folders of a project whose files are used, at any depth. A file that runs may read any other in its folder."""

MAX_BYTES = 100_000_000
"""Bytes that the files of a snapshot may have together."""
MAX_FILES = 100_000
MAX_SECONDS = 30.0
MAX_NAMED_BYTES = 16_000_000
"""Bytes of a file that settings name. A larger one is data: its size and time stand for its content."""
MAX_KEPT_FILE, MAX_KEPT = 64_000, 1_000_000
"""Bytes of one file, and of all files of a snapshot, that are kept to show later what changed."""
MAX_WORDS, MAX_BASES = 2_000, 20
"""Words of the settings that are looked up as files, and folders that they may be relative to."""
RECENT = 2_000_000_000
"""Nanoseconds within which a file may change again without a new time of change."""

VARIABLE = re.compile(r"\$\{[^}:]*(?:env:)?[^}:]*(?::-([^}]*))?\}|\$\w+")
WORD_ENDS = re.compile(r"[\s;&|()<>\"'`,=:]+")
MODULE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
SUFFIXES = (".js", ".mjs", ".cjs", ".ts")
"""Suffixes that a program may add to the name of a script."""
ENTRY_FILES = ("__init__.py", "__main__.py", "package.json", *(f"index{suffix}" for suffix in SUFFIXES))
"""Files that a program reads first in a folder that it is given."""
PROGRAM_FILES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("node", "npm", "npx", "pnpm", "pnpx", "yarn", "bun", "bunx"), ("package.json", ".npmrc")),
    **dict.fromkeys(("python", "python3"), ("__main__.py",)),
    **dict.fromkeys(("uv", "uvx", "poetry", "pdm", "hatch", "rye"), ("pyproject.toml", "uv.toml")),
    **dict.fromkeys(("make", "gmake"), ("GNUmakefile", "makefile", "Makefile")),
    "just": ("justfile", "Justfile", ".justfile"),
    "deno": ("deno.json", "deno.jsonc", "package.json"),
    "cargo": ("Cargo.toml", "build.rs", "src/main.rs"),
    "go": ("go.mod", "main.go"),
    "ruby": ("Gemfile",),
    "bundle": ("Gemfile",),
    "docker": ("compose.yaml", "compose.yml", "docker-compose.yaml", "docker-compose.yml", "Dockerfile"),
}
"""Files that a program reads in its working folder to find out what to run, by the name of the program."""
MANIFEST_KEYS = {
    "package.json": ("main", "module", "bin", "exports", "scripts"),
    "pyproject.toml": ("project.scripts", "project.entry-points"),
}
"""Tables of a manifest whose texts may name a script; a dot separates nested keys."""
DATABASE = b"SQLite format 3\0"


class UnusableFolder(Exception):
    """The settings of a folder cannot be read as a whole. The text is a sentence."""


@dataclass(frozen=True)
class ProjectFile:
    """A file of a snapshot."""

    kind: Literal["file", "link", "special", "large", "database"]
    """`link` is a symbolic link, `special` neither a file nor a folder. No content of `large` and `database` counts."""
    size: int
    digest: str
    content: bytes | None = None
    """None where it is not kept: for size, or because no one will see it."""


@dataclass
class Snapshot:
    """The files of a folder at one time."""

    folder: Path
    """Its real path."""
    files: dict[str, ProjectFile] = field(default_factory=dict[str, ProjectFile])
    """By path, relative to the folder, links resolved."""
    left_out: list[str] = field(default_factory=list[str])
    """Sentences about paths that crow does not use: links out of the folder, pipes, devices."""
    uncovered: list[str] = field(default_factory=list[str])
    """Sentences about files that may change while the fingerprint stays the same."""
    named: list[str] = field(default_factory=list[str])
    """The paths of the files that the settings name."""
    real: dict[str, str] = field(default_factory=dict[str, str])
    """The paths in `files` of those in SETTINGS, links resolved."""

    @property
    def fingerprint(self) -> str:
        """A hash of all names and contents."""
        digest = hashlib.sha256()
        for path, file in sorted(self.files.items()):
            digest.update(b"%s\0%s\0%s\0" % (os.fsencode(path), file.kind.encode(), file.digest.encode()))
        return digest.hexdigest()


Digests = dict[tuple[int, int, int, int, int], str]
"""The digests of files that have been read, by device, inode, size, and times of change."""


def list_settings(folder: Path, wanted: Sequence[str] = (*SETTINGS, *FOLDERS)) -> list[str]:
    """List those of a folder's settings that exist, without following links or reading a file."""
    found: dict[str, None] = {}
    for name in wanted:
        parts = name.split("/")
        above = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
        if link := next((part for part in above if os.path.islink(folder / part)), None):
            found[link] = None
        elif (name in SETTINGS and os.path.lexists(folder / name)) or has_entries(folder / name):
            found[name] = None
    return list(found)


def has_entries(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(entries)
    except OSError:
        return False


def take_snapshot(folder: Path, digests: Digests | None = None, *, keep: bool = False) -> Snapshot:
    """Read the files of a folder that crow would use or run. `keep` keeps small contents.

    A file whose size and times are those in `digests` is not read again. Raises OSError and UnusableFolder.
    """
    root = os.path.realpath(folder)
    os.stat(root)  # raises OSError for a folder that is gone
    return Reader(root, {} if digests is None else digests, keep).read()


class Reader:
    """Reads the files of one snapshot."""

    def __init__(self, root: str, digests: Digests, keep: bool) -> None:
        self.root, self.digests, self.keep = root, digests, keep
        self.prefix = root.rstrip(os.sep) + os.sep
        self.snapshot = Snapshot(Path(root))
        self.visited: set[str] = set()
        self.size = self.kept = 0
        self.ends = time.monotonic() + MAX_SECONDS

    def read(self) -> Snapshot:
        for name in (*SETTINGS, *FOLDERS):
            self.snapshot.real[name] = self.to_relative(os.path.realpath(os.path.join(self.root, name)))
            self.add(os.path.join(self.root, name))
        own = set(self.snapshot.files)
        texts = [text for name in SETTINGS for text in self.list_texts(os.path.join(self.root, name))]
        self.add_named(texts, [self.root])
        for path in [each for each in own if re.fullmatch(r".*/plugins/[^/]+/mcp\.json", each)]:
            file = os.path.join(self.root, path)
            self.add_named(self.list_texts(file), [os.path.dirname(file)])
        self.snapshot.named = sorted(path for path in self.snapshot.files if path not in own)
        self.snapshot.left_out = list(dict.fromkeys(self.snapshot.left_out))
        return self.snapshot

    def add(self, path: str, *, named: bool = False) -> None:
        """Add a file, or all files below a folder. Record each link in the path; stop at one that leads out."""
        for prefix in self.list_prefixes(path):
            if os.path.islink(prefix) and not self.add_link(prefix, named=named):
                return
        real = os.path.realpath(path)
        if not self.has(real):
            return
        try:
            status = os.stat(real)
        except (FileNotFoundError, NotADirectoryError):
            return
        if stat.S_ISDIR(status.st_mode):
            self.add_tree(real)
        else:
            self.add_file(real, status, named=named)

    def list_prefixes(self, path: str) -> Iterator[str]:
        """Yield the paths between the root and a path, the path included."""
        at = self.root
        for part in os.path.relpath(os.path.normpath(path), self.root).split(os.sep):
            at = os.path.join(at, part)
            yield at

    def add_link(self, path: str, *, named: bool = False) -> bool:
        """Record a link. Return False if it must not be followed, and say why."""
        target, real, where = os.readlink(path), os.path.realpath(path), self.to_relative(path)
        inside = self.has(real)
        meant = f"{target}\0{self.to_relative(real) if inside else ''}"
        content = os.fsencode(f"-> {target}\n") if self.keep else None
        self.snapshot.files[where] = ProjectFile("link", len(target), hash_bytes(os.fsencode(meant)), content)
        reason = ""
        if not inside:
            reason = "is a link that leads out of the folder"
        elif not os.path.exists(real):
            reason = "is a link to nothing"
        elif os.path.commonpath([real, os.path.dirname(path)]) == real:
            reason = "is a link to a folder that holds it"
        if reason and named:  # a program that the user allows may follow it
            self.snapshot.uncovered.append(f"{where} {reason}")
        elif reason:
            self.snapshot.left_out.append(f"{where} {reason}")
        return not reason

    def add_tree(self, top: str) -> None:
        """Add all files below a folder, which is a real path."""
        folders = [top]
        while folders:
            folder = folders.pop()
            if folder in self.visited:
                continue
            self.visited.add(folder)
            with os.scandir(folder) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    if entry.is_symlink():
                        if self.add_link(entry.path):
                            real = os.path.realpath(entry.path)
                            status = os.stat(real)
                            if stat.S_ISDIR(status.st_mode):
                                folders.append(real)
                            else:
                                self.add_file(real, status)
                    elif entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        self.add_file(entry.path, entry.stat(follow_symlinks=False))

    def add_file(self, path: str, status: os.stat_result, *, named: bool = False) -> None:
        """Add a file that is not a link."""
        where = self.to_relative(path)
        if where in self.snapshot.files:
            return
        if not stat.S_ISREG(status.st_mode):
            self.snapshot.files[where] = ProjectFile("special", 0, str(stat.S_IFMT(status.st_mode)))
            self.snapshot.left_out.append(f"{where} is not a file")
            return
        if named and status.st_size > MAX_NAMED_BYTES:
            digest = f"{status.st_size} {status.st_mtime_ns}"
            self.snapshot.files[where] = ProjectFile("large", status.st_size, digest)
            self.snapshot.uncovered.append(f"{where} is too large to read: only its size and time are watched")
            return
        self.size += status.st_size
        if self.size > MAX_BYTES:
            raise UnusableFolder(f"its settings have more than {MAX_BYTES // 1_000_000} MB (at {where})")
        if len(self.snapshot.files) >= MAX_FILES:
            raise UnusableFolder(f"its settings have more than {MAX_FILES:,} files (at {where})")
        if time.monotonic() > self.ends:
            raise UnusableFolder(f"its settings could not be read within {MAX_SECONDS:g} s (at {where})")
        self.snapshot.files[where] = self.read_file(path, status, named=named)
        if self.snapshot.files[where].kind == "database":
            self.snapshot.uncovered.append(f"{where} is a database, which may change")

    def read_file(self, path: str, status: os.stat_result, *, named: bool) -> ProjectFile:
        key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        known = self.digests.get(key)
        if known and not self.keep and not named:
            return ProjectFile("file", status.st_size, known)
        read_at = time.time_ns()
        with open(os.open(path, os.O_RDONLY | system.NO_WAIT | system.NO_LINKS), "rb") as file:
            content = file.read(status.st_size + 1)
        if len(content) != status.st_size:
            raise UnusableFolder(f"{self.to_relative(path)} changes while it is read")
        if named and content.startswith(DATABASE):
            return ProjectFile("database", 0, "")
        digest = hash_bytes(content)
        if system.HAS_CHANGE_TIMES and read_at - max(status.st_ctime_ns, status.st_mtime_ns) > RECENT:
            self.digests[key] = digest
        is_short = len(content) <= MAX_KEPT_FILE and self.kept + len(content) <= MAX_KEPT
        is_kept = self.keep and (is_short or self.to_relative(path) in self.snapshot.real.values())
        self.kept += len(content) if is_kept else 0
        return ProjectFile("file", len(content), digest, content if is_kept else None)

    def add_named(self, texts: Iterable[str], bases: list[str]) -> None:
        """Add the files in the folder that texts of the settings name, relative to one of the folders `bases`."""
        words = list(dict.fromkeys(word for text in texts for word in split_words(text)))
        if len(words) > MAX_WORDS:
            self.snapshot.uncovered.append(f"the settings have {len(words):,} words: {MAX_WORDS:,} are looked up")
        words = words[:MAX_WORDS]
        folders = [path for word in words if self.has(path := os.path.realpath(os.path.join(bases[0], word)))]
        bases = list(dict.fromkeys([*bases, *filter(os.path.isdir, folders)]))[:MAX_BASES]
        names: dict[str, None] = {}
        for word in words:
            names |= dict.fromkeys([word, *(f"{word}{suffix}" for suffix in SUFFIXES)])
            names |= dict.fromkeys(PROGRAM_FILES.get(re.sub(r"(?<=python)[\d.]+$", "", os.path.basename(word)), ()))
            names |= dict.fromkeys(list_module_files(word))
        for base in bases:
            for name in [*names, *(ENTRY_FILES if base != self.root else ())]:
                path = os.path.join(base, name)
                if self.has(os.path.normpath(path)) and os.path.lexists(path) and not self.is_known(path):
                    real = os.path.realpath(path)
                    if not os.path.isdir(real) or not self.has(real):
                        self.add(path, named=True)
                        self.add_manifest(real)

    def add_manifest(self, path: str) -> None:
        """Add the files that a manifest names."""
        if (keys := MANIFEST_KEYS.get(os.path.basename(path))) and self.has(path):
            self.add_named(self.list_texts(path, keys), [os.path.dirname(path)])

    def list_texts(self, path: str, keys: Collection[str] = ()) -> list[str]:
        """List all texts in a file of settings, or those in the tables `keys`; none if it cannot be parsed."""
        try:
            with open_file(Path(path), Path(self.root)) as file:
                text = file.read(MAX_BYTES).decode("utf-8-sig")
            data: Any = json.loads(text) if path.endswith(".json") else tomllib.loads(text)
            tables = [get_nested(data, key.split(".")) for key in keys] if keys else [data]
            return [text for table in tables for text in walk_texts(table)]
        except (UnusableFile, ValueError, RecursionError):  # settings that cannot be parsed are not used
            return []

    def is_known(self, path: str) -> bool:
        return self.to_relative(path) in self.snapshot.files

    def has(self, path: str) -> bool:
        """Test whether a path without links is inside the folder."""
        return path == self.root or path.startswith(self.prefix)

    def to_relative(self, path: str) -> str:
        """Convert a path to one that is relative to the folder, without `..`, and with slashes."""
        return os.path.relpath(path, self.root).replace(os.sep, "/")


def get_nested(data: Any, keys: Sequence[str]) -> Any:
    """Return the value that nested keys lead to; None if there is none."""
    for key in keys:
        data = cast(dict[str, Any], data).get(key) if isinstance(data, dict) else None
    return data


def walk_texts(data: Any) -> Iterator[str]:
    """Yield all texts in a JSON value, names of members included."""
    match data:
        case str():
            yield data
        case dict():
            for key, value in cast(Mapping[str, Any], data).items():
                yield key
                yield from walk_texts(value)
        case list():
            for value in cast(list[Any], data):
                yield from walk_texts(value)
        case _:
            pass


def split_words(text: str) -> Iterator[str]:
    """Yield a text and the words in it that may be paths, without variables, whose values differ between programs."""
    text = VARIABLE.sub(lambda match: match[1] or "", text)[:10_000]
    quoted: list[str] = []
    with suppress(ValueError):  # a quotation mark that nothing closes
        quoted = shlex.split(text)
    for word in (text, *quoted, *WORD_ENDS.split(text)):
        for path in (os.path.expanduser(word), word.lstrip("/")):
            if path.strip(" -") and "\0" not in path and len(path) < 1_000:
                yield path


def list_module_files(word: str) -> Iterator[str]:
    """Yield the files that Python reads for a module of that name."""
    if MODULE.fullmatch(word):
        parts = word.split(".")
        for source in ("", "src/"):
            path = source + "/".join(parts)
            yield from (f"{path}.py", f"{path}/__main__.py")
            yield from (f"{source}{'/'.join(parts[:end])}/__init__.py" for end in range(1, len(parts) + 1))


def show_path(text: str) -> str:
    """Write the bytes of a text that are not UTF-8, as in names of files, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def hash_bytes(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
