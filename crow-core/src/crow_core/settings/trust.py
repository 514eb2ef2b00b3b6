"""Which folders may bring settings that run things: none until the user says so, and only as they were then."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

FILES = (
    ".mcp.json",
    ".crow/config.toml",
    ".crow/prompts/*.md.j2",
    *(f"{folder}/skills/*/**/*" for folder in (".crow", ".agents", ".claude")),
    *(f"{folder}/commands/**/*.md" for folder in (".crow", ".claude")),
)
"""A project's files that can start programs, or change what is asked and what the model is told."""


class Trust:
    """The trusted folders, in a file of crow's own."""

    def __init__(self, data: Path) -> None:
        self.file = data / "trust.json"

    def trusts(self, folder: Path) -> bool:
        """Whether the user trusted this folder with its settings exactly as they are now."""
        try:
            known = self.read().get(str(folder.resolve()))
            return known is not None and known == fingerprint(folder)
        except OSError:
            return False  # what cannot be read has not been agreed to

    def remember(self, folder: Path) -> None:
        """Trust a folder's settings as they are. Raises OSError."""
        trusted = {**self.read(), str(folder.resolve()): fingerprint(folder)}
        self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        new = self.file.with_suffix(f".{os.getpid()}.tmp")
        new.write_bytes(msgspec.json.encode(trusted))
        new.chmod(0o600)
        new.replace(self.file)

    def read(self) -> Mapping[str, str]:
        try:
            return msgspec.json.decode(self.file.read_bytes(), type=dict[str, str])
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return {}  # no list, no trust


def settings_in(folder: Path) -> list[Path]:
    """The settings a folder would bring, with all that lies beside a skill, but for what Python leaves there."""
    found = (path for name in FILES for path in sorted(folder.glob(name)))
    return [path for path in found if path.is_file() and path.parent.name != "__pycache__"]


def fingerprint(folder: Path) -> str:
    """A digest of all the settings a folder would bring."""
    digest = hashlib.sha256()
    for path in settings_in(folder):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
