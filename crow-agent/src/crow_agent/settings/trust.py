"""Trusted folders: the user trusts a folder's settings, which can start programs, until they change."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import crow_system as system
from crow_system.files import lock_folder, write_atomically
from crow_system.repository import find_main_folder

from crow_agent.settings.project_files import (
    MAX_KEPT_FILE,
    Digests,
    ProjectFile,
    Snapshot,
    UnusableFolder,
    take_snapshot,
)


class TrustedFolders:
    """The trusted folders, stored in crow's data."""

    def __init__(self, data: Path) -> None:
        self.file = data / "trust.json"
        self.contents = data / "trust"
        """Has a file for each folder: its settings as they were when they were trusted."""
        self._digests: Digests = {}

    def is_trusted(self, folder: Path) -> bool:
        """Return whether the user trusted this folder with its present settings."""
        return self.find_change(folder) == ""

    def find_change(self, folder: Path) -> str | None:
        """Return why a folder that the user trusted is not trusted now; "" if it is, None if it never was.

        A folder of a linked work tree is trusted as the one of the main work tree is, if its settings are the same.
        """
        try:
            records, key = self.read(), to_key(folder)
            key = key if key in records else find_main_folder(key)
            record = records.get(key)
        except OSError:
            return None
        if record is None:
            return None
        try:
            snapshot = take_snapshot(folder, self._digests)
        except OSError as error:
            return f"{error.filename or folder} cannot be read ({error.strerror})"
        except UnusableFolder as error:
            return str(error)
        if snapshot.fingerprint == record["fingerprint"]:
            return ""
        changed = list_changes(self.read_contents(Path(key)), snapshot)
        more = f" and {len(changed) - 1:,} more" if len(changed) > 1 else ""
        return f"{changed[0]}{more} changed" if changed else "its settings changed"

    def list_left_out(self, folder: Path) -> list[str]:
        """List the paths in the settings of a folder that are not used, as sentences with the reason."""
        try:
            return take_snapshot(folder, self._digests).left_out
        except (OSError, UnusableFolder):
            return []

    def add(self, snapshot: Snapshot, hide: Callable[[str], str] = lambda text: text) -> None:
        """Trust a folder's settings as they are in a snapshot. `hide` masks secrets in the stored texts.

        Raises OSError.
        """
        key = to_key(snapshot.folder)
        files = {path: to_stored(file, hide) for path, file in snapshot.files.items()}
        with self.edit() as records:
            self.contents.mkdir(exist_ok=True, mode=0o700)
            write_atomically(self.get_contents_file(key), to_json({"folder": key, "files": files}))
            records[key] = {"fingerprint": snapshot.fingerprint, "since": int(time.time() * 1000)}

    def revoke(self, keys: Collection[str]) -> list[str]:
        """Trust these folders no more, named as `read` names them. Return those that were trusted. Raises OSError."""
        with self.edit() as records:
            revoked = [key for key in keys if records.pop(key, None)]
        for key in revoked:
            self.get_contents_file(key).unlink(missing_ok=True)
        return revoked

    def read(self) -> Mapping[str, Mapping[str, Any]]:
        """Return `fingerprint` and `since`, in milliseconds since 1970, of the trusted folders by their real paths."""
        return read_records(self.file) or {}

    @property
    def is_broken(self) -> bool:
        """True if the list of trusted folders cannot be read, so that none is trusted."""
        return os.path.lexists(self.file) and read_records(self.file) is None

    def read_contents(self, folder: Path) -> Mapping[str, Mapping[str, Any]]:
        """Return `kind`, `size`, `digest`, and mostly `text`, of each file of a folder when it was trusted, by path."""
        with suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
            files = json.loads(self.get_contents_file(to_key(folder)).read_bytes())["files"]
            if isinstance(files, dict) and all(isinstance(each, dict) for each in cast(dict[str, Any], files).values()):
                return cast(dict[str, Any], files)
        return {}

    def get_contents_file(self, key: str) -> Path:
        return self.contents / f"{hashlib.sha256(os.fsencode(key)).hexdigest()[:32]}.json"

    @contextmanager
    def edit(self) -> Generator[dict[str, Any]]:
        """Give the records to the block, which changes them; then write them. Only one process does so at a time.

        An unreadable file is kept next to the new one. Raises OSError.
        """
        with lock_folder(self.file.parent):
            records = read_records(self.file)
            if records is None and os.path.lexists(self.file):
                system.replace_file(self.file, self.file.with_suffix(f".broken-{time.time_ns()}"))
            yield (changed := dict(records or {}))
            write_atomically(self.file, to_json(changed))


def to_key(folder: Path) -> str:
    """Convert a folder to its real path, the name under which it is trusted."""
    return os.path.realpath(folder)


def read_records(file: Path) -> dict[str, dict[str, Any]] | None:
    """Read the list of trusted folders; None if it cannot be used. A missing one is empty."""
    try:
        records = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        return None
    match records:
        case dict() if all(map(is_record, cast(dict[str, Any], records).values())):
            return cast(dict[str, dict[str, Any]], records)
        case _:
            return None


def is_record(value: Any) -> bool:
    match value:
        case {"fingerprint": str(), "since": int()}:
            return True
        case _:
            return False


def list_changes(before: Mapping[str, Mapping[str, Any]], now: Snapshot) -> list[str]:
    """List the paths of the files that were added, changed or removed."""
    paths = sorted({*before, *now.files}, key=lambda path: (path not in before, path))
    return [path for path in paths if not is_same(before.get(path), now.files.get(path))]


def is_same(before: Mapping[str, Any] | None, now: ProjectFile | None) -> bool:
    if before is None or now is None:
        return False
    return (before.get("kind"), before.get("digest")) == (now.kind, now.digest)


def to_stored(file: ProjectFile, hide: Callable[[str], str]) -> dict[str, Any]:
    """Convert a file to its stored form: the text, if it is a short one, with its secrets masked."""
    stored: dict[str, Any] = {"kind": file.kind, "size": file.size, "digest": file.digest}
    if file.content is not None and b"\0" not in file.content and len(file.content) <= MAX_KEPT_FILE:
        with suppress(UnicodeDecodeError):
            stored["text"] = hide(file.content.decode("utf-8-sig"))
    return stored


def to_json(value: Any) -> bytes:
    """Convert a value to JSON in ASCII: names of files need not be UTF-8."""
    return json.dumps(value).encode()
