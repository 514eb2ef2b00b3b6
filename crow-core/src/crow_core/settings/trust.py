"""Trusted folders: the user trusts a folder's settings, which can start programs, until they change."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

PROJECT_FILES = (
    ".mcp.json",
    ".crow/config.toml",
    ".crow/prompts/*.md.j2",
    *(f"{folder}/skills/*/**/*" for folder in (".crow", ".agents", ".claude")),
    *(f"{folder}/commands/**/*.md" for folder in (".crow", ".claude")),
)
"""A project's files that can start programs, or change permissions and prompts."""


class TrustedFolders:
    """The trusted folders, stored in crow's data."""

    def __init__(self, data: Path) -> None:
        self.file = data / "trust.json"

    def is_trusted(self, folder: Path) -> bool:
        """Return whether the user trusted this folder with its present settings."""
        try:
            trusted = self.read().get(str(folder.resolve()))
            return trusted is not None and trusted == hash_project_files(folder)
        except OSError:
            return False  # the user has not agreed to what cannot be read

    def add(self, folder: Path) -> None:
        """Trust a folder's present settings. Raises OSError."""
        trusted = {**self.read(), str(folder.resolve()): hash_project_files(folder)}
        self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        new = self.file.with_suffix(f".{os.getpid()}.tmp")
        new.write_bytes(msgspec.json.encode(trusted))
        new.chmod(0o600)
        new.replace(self.file)

    def read(self) -> Mapping[str, str]:
        """Return the hashes of the trusted folders' files, by the folders' paths."""
        try:
            return msgspec.json.decode(self.file.read_bytes(), type=dict[str, str])
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return {}  # without a list no folder is trusted


def list_project_files(folder: Path) -> list[Path]:
    """List the files of a folder's settings and skills, without Python's caches."""
    paths = (path for name in PROJECT_FILES for path in sorted(folder.glob(name)))
    return [path for path in paths if path.is_file() and path.parent.name != "__pycache__"]


def hash_project_files(folder: Path) -> str:
    """Return a hash of the names and contents of a folder's settings."""
    digest = hashlib.sha256()
    for path in list_project_files(folder):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
