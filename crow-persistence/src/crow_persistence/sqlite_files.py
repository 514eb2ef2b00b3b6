"""The files of a SQLite database: the database itself, its log, its locks and copies of it."""

import os
import sqlite3
import tempfile
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import quote

import crow_system as system


def connect_to_read(file: Path, *, alone: bool) -> sqlite3.Connection:
    """Connect to a file that cannot be written. `alone` is true if no other process has it open."""
    options = "mode=ro&immutable=1" if alone else "mode=ro"
    driver = sqlite3.connect(f"file:{quote(str(file))}?{options}", uri=True, check_same_thread=False)
    driver.isolation_level, driver.text_factory = None, decode_text
    return driver


def decode_text(data: bytes) -> str:
    """Decode text from SQLite. Damaged bytes become surrogate escapes, so that the rest stays readable."""
    return data.decode("utf-8", "surrogateescape")


def back_up(source: sqlite3.Connection, to: Path) -> None:
    """Copy a SQLite database, as last committed, to a file that only its owner can read. Others may write meanwhile.
    Raises OSError, sqlite3.Error."""
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=to.name) as folder:
        new = Path(folder, to.name)
        new.touch(0o600)
        with closing(sqlite3.connect(new)) as target:
            source.backup(target)
        system.replace_file(new, to)


def wal_file(file: Path) -> Path:
    """Return the path of SQLite's write-ahead log for a file."""
    return file.with_name(f"{file.name}-wal")


def shm_file(file: Path) -> Path:
    """Return the path of the file that the processes which have a SQLite file open share."""
    return file.with_name(f"{file.name}-shm")


def has_content(file: Path) -> bool:
    """Test whether there is a file, and it is not empty."""
    return file.exists() and file.stat().st_size > 0


def lock_file(file: Path) -> Path:
    """Return the path of the file that the writers of a SQLite file lock."""
    return file.with_name(f"{file.name}-lock")


def may(mode: int, file: Path) -> bool:
    """Test whether this process may use a file as `os.access` names it, with its effective user where there is one."""
    return os.access(file, mode, effective_ids=os.access in os.supports_effective_ids)


def file_identity(file: Path) -> tuple[int, int] | None:
    """Return a file's device and inode; None when there is no file."""
    with suppress(OSError):
        found = file.stat()
        return found.st_dev, found.st_ino
    return None
