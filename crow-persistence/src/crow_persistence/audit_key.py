"""The key that signs the audit chain: a file outside the database, made with the first decision that is stored.

Each machine, and each user of it, has a key of its own. A record names its key, and only who has that key can check or
forge its signature. The key does not protect from a reader of its file: root, and every program that runs as the same
user.
"""

import hmac
import os
import secrets
import tempfile
from collections.abc import Mapping
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path

import crow_system as system
import msgspec
from crow_core.errors import StoreError

KEY_FILE = "audit.key"
"""Name of the file with the key, in crow's data folder."""
KEY_BYTES = 32
LONGEST_FILE = 100_000
"""Bytes that are read of a key file at most."""


class NotAKey(StoreError):
    """The key file holds something else."""


class AuditKey(msgspec.Struct, frozen=True, dict=True):
    """A key, as its file holds it in JSON."""

    key: str
    """KEY_BYTES bytes in hexadecimal."""
    unsigned: dict[str, str] = {}
    """Digests of the heads that `audit.head` held before there was a key, by database. No other head may lack a
    signature."""

    @cached_property
    def secret(self) -> bytes:
        return bytes.fromhex(self.key)

    @cached_property
    def id(self) -> str:
        """The public name of the key, which tells nothing about it."""
        return sha256(b"the id of a key of crow's audit chain\0" + self.secret).hexdigest()[:16]

    def sign(self, kind: str, text: str) -> str:
        """Return the signature (HMAC-SHA256, in hexadecimal) of a text. Signatures of one kind fit no other kind."""
        return hmac.digest(self.secret, f"{kind}\0{text}".encode(), "sha256").hex()


def load(folder: Path) -> AuditKey | None:
    """Load the key of a data folder, None if there is none yet. Raises StoreError."""
    file = folder / KEY_FILE
    try:
        handle = os.open(file, os.O_RDONLY | system.NO_WAIT | system.BINARY)  # a pipe would block
        try:
            return decode(os.read(handle, LONGEST_FILE))
        finally:
            os.close(handle)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(
            f"{file} cannot be read ({error.strerror}), so records are neither signed nor checked. Make it readable."
        ) from error
    except ValueError as error:  # also msgspec.DecodeError
        raise NotAKey(
            f"{file} does not hold a key ({error}), so records are neither signed nor checked. Put the earlier file "
            "back, or go on with a new key by `crow audit repair`."
        ) from error


@lru_cache(maxsize=4)
def decode(content: bytes) -> AuditKey:
    """Decode the content of a key file. Raises ValueError."""
    found = msgspec.json.decode(content, type=AuditKey)
    if len(found.secret) != KEY_BYTES:
        raise ValueError("its key is too short or too long")
    return found


def create(folder: Path, unsigned: Mapping[str, str]) -> AuditKey:
    """Make a key file that only its owner can read. Raises OSError.

    It comes into being complete and on the disk: a key that a power failure took would leave records that nobody can
    check.
    """
    made = AuditKey(secrets.token_bytes(KEY_BYTES).hex(), dict(unsigned))
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f"{KEY_FILE}.")
    try:
        with open(handle, "wb") as opened:
            opened.write(msgspec.json.encode(made))
            opened.flush()
            os.fsync(opened.fileno())
        system.replace_file(temporary, folder / KEY_FILE)
    except BaseException:
        os.unlink(temporary)
        raise
    system.sync_folder(folder)
    return made


def find_faults_of_mode(folder: Path) -> list[str]:
    """Return a sentence if others than the owner may open the key file."""
    file = folder / KEY_FILE
    try:
        mode = system.get_mode(file.stat())
    except OSError:
        return []
    if not mode & 0o077:
        return []
    why = "who copied it can forge records"
    return [f"{file} is open to other users, as its mode is {mode:o}: {why}. Close it with `chmod 600 {file}`."]


def mend(folder: Path) -> None:
    """Close the key file to other users; keep one that holds no key under another name. Raises StoreError."""
    file = folder / KEY_FILE
    try:
        if find_faults_of_mode(folder):
            file.chmod(0o600)
        load(folder)
    except NotAKey:
        system.replace_file(file, file.with_name(f"{KEY_FILE}.damaged"))
    except OSError as error:
        raise StoreError(f"{file} cannot be closed to other users ({error.strerror}). Do so as its owner.") from error
