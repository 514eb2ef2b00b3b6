"""Put a backup in the place of a SQLite database. The present files are moved aside, never deleted."""

import os
import sqlite3
import tempfile
from collections.abc import Generator
from contextlib import closing, contextmanager
from datetime import datetime
from itertools import count
from pathlib import Path
from urllib.parse import quote

import crow_system as system
from crow_core.errors import StoreError
from crow_system.files import make_private_folder

from crow_persistence.database import LATEST_REVISION, Database
from crow_persistence.queue import QueueStuck, wait_in_queue
from crow_persistence.sqlite_files import back_up, file_identity, has_content, lock_file, shm_file, wal_file

SHARED_BYTE = 0x40000002
"""The first of the bytes that each connection to a SQLite file locks: https://sqlite.org/src/file/src/os.h"""


def restore(database: Database, backup: Path) -> list[Path]:
    """Put a copy of a backup in the place of a database's file. Return the files that were there, where they are now.

    The write-ahead log is moved with its file: SQLite would replay it into the copy. Raises StoreError, and changes
    nothing, if the backup is damaged or of another program, or if a process has the database open.
    """
    file = database.file
    if not file:
        raise StoreError("crow restores SQLite files. Restore PostgreSQL with psql or pg_restore.")
    if not backup.is_file():
        raise StoreError(f"{backup} is not a file. Name one that `crow db backup` has made.")
    if file_identity(backup) == file_identity(file):
        raise StoreError(f"{backup} is the database itself. Name a copy of it.")
    try:
        make_private_folder(file.parent)
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=f"{file.name}.") as folder:
            copy_checked(backup, copy := Path(folder, file.name))
            with wait_in_queue(lock_file(file), timeout=10), closed_elsewhere(file):
                moved = move_aside(file)
                system.replace_file(copy, file)
    except QueueStuck as stuck:
        raise StoreError(f"{file} is held by crow ({stuck}). End it, then try again.") from None
    except OSError as error:
        raise StoreError(f"{file} cannot be replaced ({error.strerror}). Make room, or close what uses it.") from error
    return moved


def copy_checked(backup: Path, copy: Path) -> None:
    """Copy a backup, and check the copy. Raises StoreError, OSError."""
    alone = "" if has_content(wal_file(backup)) else "&immutable=1"
    try:
        with closing(sqlite3.connect(f"file:{quote(str(backup))}?mode=ro{alone}", uri=True)) as source:
            back_up(source, copy)
        with closing(sqlite3.connect(copy)) as connection:
            damage = [str(line) for (line,) in connection.execute("PRAGMA integrity_check(1)")]
            names = {str(name) for (name,) in connection.execute("SELECT name FROM sqlite_master")}
            is_ours = {"sessions", "messages", "alembic_version"} <= names
            found = connection.execute("SELECT * FROM alembic_version").fetchone() if is_ours else None
    except sqlite3.Error as error:
        raise StoreError(f"{backup} cannot be used: {error}. Nothing was changed.") from error
    if damage != ["ok"]:
        raise StoreError(f"{backup} is damaged: {' '.join(damage[0].split())}. Nothing was changed.")
    revision, *oldest = found or ("",)
    if not str(revision).isdecimal():
        raise StoreError(f"{backup} is not a database of crow. Nothing was changed.")
    if min(str(each) for each in (revision, *oldest) if each) > LATEST_REVISION:
        raise StoreError(f"{backup} was written by a newer crow. Update crow first. Nothing was changed.")


@contextmanager
def closed_elsewhere(file: Path) -> Generator[None]:
    """Keep other processes from opening a SQLite file in the block. Raises StoreError if one has it open, OSError."""
    if not file.exists():
        yield
        return
    descriptor = os.open(file, os.O_RDWR | system.BINARY)
    try:
        if not system.lock_byte(descriptor, SHARED_BYTE):
            raise StoreError(f"{file} is open in another process. End every crow, then try again.")
        yield
    finally:
        os.close(descriptor)


def move_aside(file: Path) -> list[Path]:
    """Rename a SQLite file and the files next to it. Return the new paths. Raises OSError."""
    names = (f"{file.name}.replaced-{datetime.now():%Y%m%d-%H%M%S}{'' if n == 1 else f'-{n}'}" for n in count(1))
    asides = (file.with_name(name) for name in names)
    aside = next(each for each in asides if not each.exists() and not wal_file(each).exists())
    moved: list[Path] = []
    for old, new in ((wal_file(file), wal_file(aside)), (shm_file(file), shm_file(aside)), (file, aside)):
        if old.exists():
            system.replace_file(old, new)
            moved.append(new)
    return moved[::-1]
