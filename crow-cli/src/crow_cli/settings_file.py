"""Edit `config.toml` and `.env` in crow's home. Comments and order stay; what crow could not read is not written."""

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import crow_system as system
from crow_agent.settings.config import parse_config
from crow_agent.settings.discovery import to_chat_model
from crow_agent.settings.faults import to_read_error
from crow_agent.settings.home import Home
from crow_agent.settings.structs import Config
from crow_agent.settings.trust import TrustedFolders
from crow_core.errors import ConfigError
from crow_system.files import make_private_folder

Change = tuple[Sequence[str], Any]
"""The keys that lead to a setting, and its new value."""

PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+")
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class FileEdit:
    """The content of a file before and after a change. `path` is the file itself, not a link to it."""

    path: Path
    before: bytes | None
    """None if there is no such file."""
    after: bytes

    @property
    def old(self) -> str:
        return decode(self.before or b"")

    @property
    def new(self) -> str:
        return decode(self.after)

    def write(self, mode: int | None = None) -> None:
        """Replace the file in one step. A new file can be read by its owner only; another keeps its mode, unless `mode`
        gives a new one. Raises ConfigError."""
        draft = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        try:
            make_private_folder(self.path.parent)
            if read(self.path) != self.before:
                raise ConfigError(f"{self.path} has been changed meanwhile. Nothing was written; run this again.")
            if mode is None:
                mode = 0o600 if self.before is None else self.path.stat().st_mode & 0o777
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
                system.set_mode(file.fileno(), mode)
                file.write(self.after)
                os.fsync(file.fileno())
            system.replace_file(draft, self.path)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written ({error.strerror}). Nothing was changed.") from error
        finally:
            with suppress(OSError):
                draft.unlink()


def read(path: Path) -> bytes | None:
    """Return the content of a file, None if there is none. Raises OSError."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def read_file(path: Path) -> bytes | None:
    """Like `read`, but raises ConfigError."""
    try:
        return read(path)
    except OSError as error:
        raise to_read_error(path, error) from error


def decode(data: bytes) -> str:
    return data.removeprefix(BOM).decode()


def edit_config(home: Home, changes: Sequence[Change], env: Mapping[str, str]) -> FileEdit:
    """Change settings in the text of `config.toml`, and check that crow can use the result; write nothing.

    `env` has the variables that the settings may use. Raises ConfigError.
    """
    path = (home.config / "config.toml").resolve()
    before = read_file(path)
    try:
        text = decode(before or b"")
    except UnicodeDecodeError as error:
        raise to_read_error(path, error) from error
    new = set_values(path, text, changes)
    check(home, path, new, env)
    mark = BOM if before and before.startswith(BOM) else b""
    return FileEdit(path, before, mark + new.encode())


def set_values(path: Path, text: str, changes: Sequence[Change]) -> str:
    """Set values in the text of a TOML file. Raises ConfigError if it is not valid, or cannot take them."""
    import tomlkit  # imported here because no other command needs it
    from tomlkit.exceptions import TOMLKitError

    try:
        expected = tomllib.loads(text.replace("\r\n", "\n"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}. Correct it first.") from error
    crlf = "\r\n" in text
    try:
        document: Any = tomlkit.parse(text.replace("\r\n", "\n"))
        made: list[Any] = []
        for keys, value in changes:
            table: Any = document
            for depth, key in enumerate(keys[:-1]):
                if key not in table:
                    table[key] = tomlkit.table(is_super_table=depth < len(keys) - 2)
                    made += [table[key]] if depth == len(keys) - 2 else []
                table = table[key]
            table[keys[-1]] = value
            set_value(expected, keys, value)
        for table in made:
            table.add(tomlkit.nl())
        new = tomlkit.dumps(document).rstrip("\n") + "\n"
        matches = tomllib.loads(new) == expected
    except (TOMLKitError, tomllib.TOMLDecodeError, ValueError, TypeError, AttributeError):
        new, matches = "", False
    if not matches:
        lines = "\n".join(f"{join_keys(keys)} = {to_toml(value)}" for keys, value in changes)
        raise ConfigError(f"{path} is written in a way that cannot be edited here. Set this by hand:\n{lines}")
    return new.replace("\n", "\r\n") if crlf else new


def set_value(data: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """Set a value in nested tables. Raises TypeError if one of them is not a table."""
    for key in keys[:-1]:
        data = data.setdefault(key, {})
        if not isinstance(cast(Any, data), dict):
            raise TypeError(key)
    data[keys[-1]] = value


def check(home: Home, path: Path, text: str, env: Mapping[str, str]) -> Config:
    """Check the text of a `config.toml` as crow reads it, with the options of extensions. Raises ConfigError."""
    config = parse_config(path, text, env)
    check_options(home, config, env)
    return config


def check_options(home: Home, config: Config, env: Mapping[str, str]) -> None:
    """Check the quirks of models and the options of extensions. Raises ConfigError."""
    for name, settings in config.models.items():
        to_chat_model(name, settings)
    if config.extensions or config.hooks:
        from crow_agent.app import named_extensions  # imported here because it imports every extension

        for _ in named_extensions(config, home, TrustedFolders(home.data), env, (), (), attended=True):
            pass


def split_keys(key: str) -> list[str]:
    """Split the name of a setting, such as `models."qwen3:8b".window`, as TOML does. Raises ConfigError."""
    try:
        data: Any = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        raise ConfigError(
            f'{key!r} names no setting. Write it as in TOML: permissions.mode, models."a.b".window'
        ) from None
    keys: list[str] = []
    while isinstance(data, dict) and len(cast(dict[str, Any], data)) == 1:
        ((name, data),) = cast(dict[str, Any], data).items()
        keys.append(name)
    return keys


def join_keys(keys: Sequence[str]) -> str:
    """Join keys to the name of a setting, as TOML writes it."""
    return ".".join(key if PLAIN_KEY.fullmatch(key) else to_toml(key) for key in keys)


def to_toml(value: Any) -> str:
    import tomlkit  # see `set_values`

    if not isinstance(value, dict):
        return str(cast(Any, tomlkit.item(value)).as_string())
    table: Any = tomlkit.inline_table()
    table.update(value)
    return str(table.as_string())


def edit_env(home: Home, variable: str, value: str) -> FileEdit:
    """Set a variable in crow's own `.env`; write nothing. Raises ConfigError."""
    path = (home.config / ".env").resolve()
    before = read_file(path)
    line = f"{variable}='{value}'"  # a key holds no quote: see `keys.check`
    lines = [
        each for each in decode(before or b"").splitlines() if not re.match(rf"\s*(export\s+)?{variable}\s*=", each)
    ]
    return FileEdit(path, before, ("\n".join([*lines, line]) + "\n").encode())
