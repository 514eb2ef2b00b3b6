"""The file `audit.head`: the end of each audit chain that a data folder knows, signed with the folder's key.

Only who has the key can forge such a record. One with a wrong signature is left for `verify` to report.
"""

import hashlib
import json
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import crow_system as system
import msgspec
from crow_core.errors import StoreError
from crow_system.files import make_private_folder

from crow_persistence import audit_key
from crow_persistence.audit_key import AuditKey
from crow_persistence.database import Database

HEAD_FILE = "audit.head"
"""Name of the file with the chain heads, in crow's data folder."""


class ChainHead(msgspec.Struct, frozen=True):
    """The last row of a chain; `count` is its number, 0 for an empty chain."""

    count: int = 0
    hash: str = ""


class AnchoredHead(ChainHead, frozen=True, omit_defaults=True):
    """The head of a chain as the file records it."""

    next: ChainHead | None = None
    """The head after a transaction that was announced; it may be in progress, or may never have been committed."""


class SignedHead(AnchoredHead, frozen=True, omit_defaults=True):
    """The record of a database in the file."""

    key: str = ""
    """Id of the key that signed it; "" if there was no key yet."""
    mac: str = ""

    def to_anchored(self) -> AnchoredHead:
        return AnchoredHead(self.count, self.hash, self.next)

    def is_trusted(self, database: Database, key: AuditKey | None) -> bool:
        """Test whether its signature fits, or whether it was unsigned already when the key was made."""
        if key is None:
            return not self.mac
        if self.mac:
            return self.mac == key.sign("head", to_signed_text(self.to_anchored(), database))
        return key.unsigned.get(database.address) == digest(msgspec.to_builtins(self))


def sign_head(head: AnchoredHead, database: Database, key: AuditKey | None) -> SignedHead:
    """Sign a head; leave it unsigned if there is no key."""
    mac = key.sign("head", to_signed_text(head, database)) if key else ""
    return SignedHead(head.count, head.hash, head.next, key.id if key else "", mac)


def to_signed_text(head: AnchoredHead, database: Database) -> str:
    """Return the text that the signature of a head is for: the database belongs to it."""
    coming = head.next or ChainHead()
    return "\n".join((database.address, str(head.count), head.hash, str(coming.count), coming.hash))


def update_file(database: Database, change: Callable[[AnchoredHead], AnchoredHead | None]) -> bool:
    """Change a database's head in the file; `change` returns None to leave it. Return whether it was changed. A damaged
    file, or a record with a wrong signature, is left for `verify` to report. Raises StoreError."""
    file = database.folder / HEAD_FILE
    try:
        with lock_file(file):
            heads, name = read_file(file), database.address
            head = heads.get(name)
            try:
                key = audit_key.load(database.folder)
            except StoreError:
                return False
            if head and not head.is_trusted(database, key):
                return False
            if changed := change(head.to_anchored() if head else AnchoredHead()):
                signed = sign_head(changed, database, key)
                write_file(file, {**heads, name: signed}, is_durable=database.is_durable)
            return changed is not None
    except msgspec.DecodeError:
        return False
    except OSError as error:
        raise StoreError(f"{file} cannot be written ({error.strerror}). Make it writable, or make room.") from error


def replace_head(database: Database, head: AnchoredHead) -> None:
    """Write a database's head to the file, whatever it holds; a damaged file is kept under another name. Raises
    StoreError."""
    file = database.folder / HEAD_FILE
    try:
        with lock_file(file):
            try:
                heads = read_file(file)
            except msgspec.DecodeError:
                system.replace_file(file, file.with_suffix(".damaged"))
                heads = {}
            signed = sign_head(head, database, audit_key.load(database.folder))
            write_file(file, {**heads, database.address: signed})
    except OSError as error:
        raise StoreError(f"{file} cannot be written ({error.strerror}). Make it writable, or make room.") from error


def get_key(database: Database) -> AuditKey | None:
    """Return the key of a database's folder; the first call makes it. Return None if its file cannot be used, which
    `verify` reports. Raises StoreError if it cannot be made."""
    try:
        if key := audit_key.load(database.folder):
            return key
    except StoreError:
        return None
    file = database.folder / HEAD_FILE
    try:
        with lock_file(file):
            try:
                heads = read_file(file)
            except (OSError, msgspec.DecodeError):  # reported when it is written
                heads = {}
            unsigned = {name: digest(msgspec.to_builtins(head)) for name, head in heads.items() if not head.mac}
            return audit_key.load(database.folder) or audit_key.create(database.folder, unsigned)
    except OSError as error:
        why = f"{database.folder / audit_key.KEY_FILE} cannot be written ({error.strerror})"
        raise StoreError(f"{why}. Make its folder writable, or make room.") from error


def read_secrets(database: Database) -> list[str]:
    """Return what must not be stored: the key, if there is one."""
    with suppress(StoreError):
        if key := audit_key.load(database.folder):
            return [key.key]
    return []


def read_file(file: Path) -> dict[str, SignedHead]:
    """Return the recorded heads by database. Raises OSError, msgspec.DecodeError."""
    return msgspec.json.decode(file.read_bytes(), type=dict[str, SignedHead]) if file.exists() else {}


def write_file(file: Path, heads: Mapping[str, SignedHead], *, is_durable: bool = False) -> None:
    """Replace the contents of the file in one write, so that a killed process leaves the old or the new. With
    `is_durable`, wait until the disk has it. Raises OSError."""
    begun = file if file.exists() else file.with_suffix(".new")
    with open(os.open(begun, os.O_WRONLY | os.O_CREAT, 0o600), "wb", buffering=0) as opened:
        opened.write(msgspec.json.encode(heads).ljust(os.fstat(opened.fileno()).st_size))
        if is_durable:
            os.fsync(opened.fileno())
    if begun != file:
        system.replace_file(begun, file)


@contextmanager
def lock_file(file: Path, *, needed: bool = True) -> Generator[None]:
    """Hold a lock that keeps other processes from writing the file; no lock if it cannot be made and is not `needed`.
    Raises OSError."""
    try:
        make_private_folder(file.parent)
        opened = os.open(file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        if needed:
            raise
        yield
        return
    with open(opened, "rb") as lock:
        system.lock(lock.fileno(), wait=True)
        yield


def digest(value: Any) -> str:
    """Return the SHA-256 digest of a value as canonical JSON, in hexadecimal."""
    return hashlib.sha256(to_canonical_json(value).encode()).hexdigest()


def to_canonical_json(value: Any) -> str:
    """Encode a value as ASCII JSON with sorted keys and no white space. Bytes, as in a damaged row, become their
    `repr`."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=repr)
