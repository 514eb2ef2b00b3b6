"""`crow config`: show the settings and where each comes from, and change them."""

import json
import os
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

import click
import msgspec
from crow_agent.settings.config import load_config, load_environment
from crow_agent.settings.faults import find_line_number, to_read_error
from crow_agent.settings.home import Home
from crow_agent.settings.reading import ALIASES, VARIABLE
from crow_agent.settings.structs import Config, ProjectConfig
from crow_agent.settings.trust import TrustedFolders
from crow_core.errors import ConfigError
from crow_core.masking import MASK, find_secrets, mask
from crow_core.text import escape_controls

from crow_cli.console import escape_line, print_json, print_note, shorten_path
from crow_cli.settings_file import edit_config, join_keys, read_file, split_keys, to_toml

DEFAULT = "default"
VARIABLES = {"CROW_MODEL": "model", "OPENAI_BASE_URL": "", "OPENAI_API_KEY": "", "CROW_HOME": ""}
"""The variables that crow reads, and the setting that each overrides."""


@dataclass(frozen=True)
class Setting:
    """A setting and its place."""

    keys: tuple[str, ...]
    value: Any
    """The value as it is written, with `${NAME}` for a variable. Secrets are masked."""
    source: str
    """`FILE:LINE`, the name of a variable, or `default`."""
    remark: str = ""

    @property
    def name(self) -> str:
        return join_keys(self.keys)


def print_settings(everything: bool, as_json: bool) -> None:
    """Print all settings that hold in this folder. Raises ConfigError."""
    home = Home.find(os.environ)
    settings = [one for one in list_settings(home, os.environ, Path.cwd()) if everything or one.source != DEFAULT]
    if as_json:
        print_json(
            [{"key": one.name, "value": one.value, "source": one.source, "remark": one.remark} for one in settings]
        )
        return
    for one in settings:
        remark = f", {one.remark}" if one.remark else ""
        place = shorten_path(one.source, 70)
        comment = click.style(escape_line(f"# {place}{remark}"), dim=True)
        click.echo(f"{escape_line(f'{one.name} = {to_toml(one.value)}')}  {comment}")
    if not everything:
        print_note("--all also shows the settings that have their default value.")
    load_config(home, os.environ)  # so that a fault is told


def print_setting(key: str, as_json: bool) -> None:
    """Print the value of a setting, or of the settings in a table. Raises ConfigError."""
    keys = tuple(split_keys(key))
    found = [
        one for one in list_settings(Home.find(os.environ), os.environ, Path.cwd()) if one.keys[: len(keys)] == keys
    ]
    if not found:
        if find_type(keys) is None:
            raise ConfigError(f"There is no setting {key!r}. `crow config show --all` lists all.")
        print_note(f"{key} is not set.")
        raise SystemExit(1)
    if as_json:
        print_json([{"key": one.name, "value": one.value, "source": one.source} for one in found])
        return
    for one in found:
        text = one.value if isinstance(one.value, str) else to_toml(one.value)
        click.echo(escape_controls(text if one.keys == keys else f"{one.name} = {to_toml(one.value)}"))
    print_note("\n".join(dict.fromkeys(one.source + (f", {one.remark}" if one.remark else "") for one in found)))


def change_setting(key: str, value: str) -> None:
    """Set a setting in `config.toml`. Raises ConfigError."""
    keys, home = split_keys(key), Home.find(os.environ)
    env = load_environment(home, os.environ)
    faults: list[ConfigError] = []
    for candidate in parse_candidates(value):
        try:
            edit = edit_config(home, [(keys, candidate)], env)
        except ConfigError as error:
            faults.append(error)
            continue
        edit.write()
        line = find_line_number(edit.new, keys)
        shown = mask_setting(keys, candidate)
        click.echo(escape_line(f"{edit.path}:{line}: {join_keys(keys)} = {to_toml(shown)}"))
        if shown != candidate:
            print_note("This key is in the file as it is. `crow setup` keeps keys in the system's keyring.")
        if (variable := find_override(keys, env)) is not None:
            print_note(f"{variable} is set in the environment, and overrides it.")
        return
    raise ConfigError(f"{faults[0]} Nothing was changed.")


def parse_candidates(value: str) -> list[Any]:
    """Return what the text of a value may mean: the TOML value, then the text itself."""
    try:
        parsed: Any = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return [value]
    return [parsed["value"], *([] if isinstance(parsed["value"], str) else [value])] if len(parsed) == 1 else [value]


def find_override(keys: Sequence[str], env: Mapping[str, str]) -> str | None:
    """Return the variable that overrides a setting, if it is set."""
    return next((name for name, key in VARIABLES.items() if key and [key] == [*keys] and env.get(name)), None)


def list_settings(home: Home, env: Mapping[str, str], folder: Path) -> Iterator[Setting]:
    """Yield the settings that hold in a folder: of the files, of variables, then the defaults. Raises ConfigError."""
    path = home.config / "config.toml"
    written = list(list_in_file(path, "TOML", env))
    seen = {one.keys for one in written}
    variables = load_environment(home, env)
    for one in written:
        overridden = find_override(one.keys, variables)
        yield replace(one, remark=f"overridden by {overridden}") if overridden else one
    yield from list_in_file(home.config / "mcp.json", "JSON", env)
    for name, key in VARIABLES.items():
        if value := variables.get(name):
            place = name if env.get(name) else f"{home.config / '.env'}"
            keys = (key,) if key else (name,)
            yield Setting(keys, MASK if "KEY" in name else mask(value, find_secrets({name: value})), place)
            seen.add(keys)
    yield from list_of_project(folder, TrustedFolders(home.data), env)
    for keys, value in list_defaults(Config, seen):
        if not any(one[: len(keys)] == keys for one in seen):
            yield Setting(keys, value, DEFAULT)


def list_of_project(folder: Path, trust: TrustedFolders, env: Mapping[str, str]) -> Iterator[Setting]:
    """Yield the settings of a folder's own files that crow uses, if the folder is trusted. Raises ConfigError."""
    remark = "of this folder" if trust.is_trusted(folder) else "not used: this folder is not trusted"
    used = {field.encode_name for field in msgspec.structs.fields(ProjectConfig)}
    for path, form in ((folder / ".crow" / "config.toml", "TOML"), (folder / ".mcp.json", "JSON")):
        try:
            for one in list_in_file(path, form, env):
                ignored = form == "TOML" and (one.keys[0] not in used or one.keys[-1] == "allow" == one.keys[1])
                yield replace(one, remark="not used: a project cannot set it" if ignored else remark)
        except ConfigError as error:
            print_note(str(error))


def list_in_file(path: Path, form: str, env: Mapping[str, str]) -> Iterator[Setting]:
    """Yield the settings in a file. Raises ConfigError if it cannot be parsed."""
    try:
        text = (read_file(path) or b"").decode("utf-8-sig")
        data: Any = tomllib.loads(text) if form == "TOML" else json.loads(text or "{}")
    except UnicodeDecodeError as error:
        raise to_read_error(path, error) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid {form}: {error}.") from error
    if form == "JSON" and isinstance(data, dict):
        file = cast(dict[str, Any], data)
        data = {"mcp": {"servers": file.get("mcpServers") or file.get("servers") or {}}} if file else {}
    for keys, value in list_leaves(data):
        at = find_line_number(text, [*keys[2:]] if form == "JSON" else [*keys])
        unset = [name for name, default in list_variables(value) if not env.get(name) and default is None]
        remark = f"{', '.join(unset)} is not set" if unset else ""
        yield Setting(keys, mask_setting(keys, value), f"{path}:{at}" if at else str(path), remark)


def list_variables(value: Any) -> list[tuple[str, str | None]]:
    """List the variables in a value, each with its default."""
    return [(match[1], match[2]) for match in VARIABLE.finditer(json.dumps(value, default=str))]


def list_leaves(data: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the values in nested tables with the keys that lead to them; an empty table is a value."""
    if isinstance(data, dict) and data:
        for key, value in cast(dict[str, Any], data).items():
            yield from list_leaves(value, (*keys, key))
    elif keys:
        yield keys, data


def list_defaults(
    kind: Any, written: Collection[tuple[str, ...]], keys: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the settings of a struct with their default values, also in the tables whose keys are `written`. Those
    without a default, and None, are left out."""
    types = get_type_hints(kind)
    for field in msgspec.structs.fields(kind):
        path = (*keys, field.encode_name)
        inner = types[field.name]
        if is_struct(inner):
            yield from list_defaults(inner, written, path)
            continue
        if get_origin(inner) is dict and is_struct(get_args(inner)[1]):
            names = {one[len(path)]: None for one in written if one[: len(path)] == path and len(one) > len(path)}
            for name in names:
                yield from list_defaults(get_args(inner)[1], written, (*path, name))
        default = field.default if field.default is not msgspec.NODEFAULT else None
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        if default is not None:
            yield path, default


def is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def find_type(keys: Sequence[str]) -> Any:
    """Return the type of a setting; None if there is no such setting."""
    kind: Any = Config
    for key in keys:
        choices: list[Any] = [kind, *get_args(kind)]
        if get_origin(kind) is dict:
            kind = get_args(kind)[1]
        elif structs := [one for one in choices if is_struct(one)]:
            kind = get_type_hints(structs[0]).get(ALIASES.get(key, key))
        elif tables := [one for one in choices if get_origin(one) is dict]:
            kind = get_args(tables[0])[1]
        elif kind is not Any:
            return None
    return kind


def mask_setting(keys: Sequence[str], value: Any) -> Any:
    """Mask the secrets in a value, as the names of its tables tell them."""
    nested: Any = value
    for key in reversed(keys):
        nested = {key: nested}
    masked: Any = mask(value, {one for one in find_secrets(nested) if not VARIABLE.fullmatch(one)})
    if keys[-1] == "api_key" and isinstance(value, str) and value and not VARIABLE.search(value):
        return value if value.startswith("keyring:") else MASK
    return masked
