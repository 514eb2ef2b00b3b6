"""Read the configuration files and check them. Nothing here starts a program or a connection.

Settings override each other in this order, the strongest last: `config.toml` and `mcp.json` in crow's home; `.mcp.json`
and `.crow/config.toml` of a trusted project; the environment; the command line. A project may only add servers, agents
and diagnostics, set up worktrees, and tighten permissions.
"""

import inspect
import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
from crow_core.errors import ConfigError
from crow_system.files import UnusableFile, open_file

from crow_agent.settings.faults import Fault, find_fault, to_config_error
from crow_agent.settings.home import Home
from crow_agent.settings.reading import parse_file, read_env, read_servers, read_toml
from crow_agent.settings.structs import Config, ProjectConfig, ProjectPermissions


def load_environment(home: Home, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `.env` in crow's home, overridden by the environment `env`. Raises ConfigError."""
    return {**read_env(home.config / ".env"), **env}


def load_config(home: Home, env: Mapping[str, str]) -> Config:
    """Read the user's own settings and replace each `${NAME}` by the variable's value. Raises ConfigError.

    `CROW_SANDBOX` is `level` in `[sandbox]` for one process.
    """
    env = load_environment(home, env)
    config = read_toml(home.config / "config.toml", Config, env) or Config()
    for name, server in read_servers(home.config / "mcp.json", env).items():
        config.mcp.servers.setdefault(name, server)
    check_models(home.config / "config.toml", config)
    if level := env.get("CROW_SANDBOX"):
        if level not in ("review", "off"):
            raise ConfigError(f"CROW_SANDBOX is {level!r}. Set it to review or off, or remove it.")
        config.sandbox.level = "review" if level == "review" else "off"
    return config


def check_models(path: Path, config: Config) -> None:
    """Raise ConfigError if the default model, or a fallback, is none of those configured."""
    named = [("model", config.model)] if config.model else []
    named += [(f"fallback of [models.{name}]", other) for name, one in config.models.items() for other in one.fallback]
    for setting, name in named:
        if name not in config.models:
            configured = ", ".join(config.models) or "none"
            raise ConfigError(f"{path}: {setting} = {name!r} names no [models.{name}]. Configured are: {configured}.")


def parse_options(
    extension: partial[None], table: Mapping[str, Any], keys: Sequence[str], home: Home
) -> dict[str, Any]:
    """Check a table of `config.toml` against an extension's parameters and return it as keyword arguments.

    `keys` lead to the table. The annotations of the parameters that `extension` does not bind yet say which values
    the table may hold. Raises ConfigError.
    """
    given = dict(table)
    _, *parameters = inspect.signature(extension.func).parameters.values()
    parameters = [parameter for parameter in parameters if parameter.name not in extension.keywords]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return given
    try:
        types = get_type_hints(extension.func, include_extras=True)
    except NameError:  # an annotation's type is imported for type checkers only
        types = {}
    fields: list[Any] = [
        (one.name, types.get(one.name, Any), *([] if one.default is one.empty else [None])) for one in parameters
    ]
    options = msgspec.defstruct("Options", fields, kw_only=True, forbid_unknown_fields=True)
    if fault := find_fault(given, options):
        path = home.config / "config.toml"
        text = path.read_text("utf-8-sig") if path.is_file() else ""
        raise to_config_error(path, text, Fault([*keys, *fault.keys], fault.sentence))
    checked = msgspec.convert(given, options)
    return {key: getattr(checked, key) for key in given}


def get_database_url(config: Config, home: Home) -> str:
    """Return the address of the database that stores the sessions."""
    url = config.database.url or f"sqlite:///{home.data / 'crow.db'}"
    if config.database.synchronous == "normal" or not url.startswith("sqlite"):
        return url
    return f"{url}{'&' if '?' in url else '?'}synchronous={config.database.synchronous}"


def load_project_config(folder: Path, env: Mapping[str, str]) -> ProjectConfig:
    """Read the settings of a trusted folder; leave out a file that a link leads out of it. Raises ConfigError."""
    config = read_toml(folder / ".crow" / "config.toml", ProjectConfig, env, folder) or ProjectConfig()
    for name, server in read_servers(folder / ".mcp.json", env, folder).items():
        config.mcp.servers.setdefault(name, server)
    for server in config.mcp.servers.values():
        server.trust = False
    return config


PROJECT_MAY = (
    "a project may only add servers, agents and diagnostics, set up worktrees, and tighten permissions by ask and deny"
)
"""Why other settings of a project are ignored."""


def find_ignored_settings(folder: Path) -> list[str]:
    """Find the settings in a folder's `.crow/config.toml` that a project cannot set."""
    try:
        with open_file(folder / ".crow" / "config.toml", folder) as file:
            return list_ignored_settings(tomllib.loads(file.read().decode("utf-8-sig")))
    except (OSError, ValueError, UnusableFile):
        return []  # there are none, or `load_project_config` reports it


def list_ignored_settings(settings: Mapping[str, Any]) -> list[str]:
    """List the tables and keys of a project's settings that are ignored, such as `[hooks]`."""
    others = {key: value for key, value in settings.items() if key not in ProjectConfig.__struct_fields__}
    ignored = [f"[{key}]" if isinstance(value, dict | list) else key for key, value in others.items()]
    match settings.get("permissions"):
        case {**keys}:
            ignored += [f"{key} of [permissions]" for key in keys if key not in ProjectPermissions.__struct_fields__]
        case _:
            pass
    match settings.get("mcp"):
        case {**keys}:
            ignored += [f"{key} of [mcp]" for key in keys if key != "servers"]
        case _:
            pass
    match settings.get("mcp"):
        case {"servers": {**servers}}:
            for name, server in servers.items():
                own = [key for key in ("trust", "network") if isinstance(server, dict) and key in server]
                ignored += [f"{key} of [mcp.servers.{name}]" for key in own]
        case _:
            pass
    return sorted(ignored)


def parse_config(path: Path, text: str, env: Mapping[str, str]) -> Config:
    """Parse the text of a `config.toml` as `load_config` does; `path` is for the messages. Raises ConfigError."""
    config = parse_file(path, text, Config, env, tomllib.loads, tomllib.TOMLDecodeError)
    check_models(path, config)
    return config
