"""Read and parse the files of the settings, and replace the variables that they use."""

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
from crow_core.errors import ConfigError
from crow_system.files import is_inside

from crow_agent.settings.faults import blank_comments, describe_line, find_fault, to_config_error, to_read_error
from crow_agent.settings.structs import Config, McpFile, ProjectConfig, ServerSettings, UnusableModel, UnusableServer

T = TypeVar("T", bound="Config | ProjectConfig | McpFile")

VARIABLE = re.compile(r"\$\{(?:env:)?(\w+)(?::-([^}]*))?\}")
"""A use of a variable: its name and, after `:-`, its default."""


ALIASES = {
    "transport": "type",
    "httpUrl": "url",
    "serverUrl": "url",
    "http_headers": "headers",
    "includeTools": "allow",
    "enabled_tools": "allow",
    "excludeTools": "deny",
    "disabledTools": "deny",
    "disabled_tools": "deny",
    "tool_timeout_sec": "timeout",
    "startup_timeout_sec": "start_timeout",
    "clientId": "client_id",
    "clientSecret": "client_secret",
    "callbackPort": "callback_port",
}
"""Other programs' names for a server's settings, with crow's names."""


def read_env(path: Path) -> dict[str, str]:
    """Read the variables of a `.env` file; return none if there is no such file. Raises ConfigError."""
    if not path.is_file():
        return {}
    from dotenv.parser import parse_stream  # few users have the file, and the import takes longer than all else here

    try:
        with path.open(encoding="utf-8") as file:
            bindings = [*parse_stream(file)]
    except (OSError, UnicodeDecodeError) as error:
        raise to_read_error(path, error) from error
    if fault := next((binding.original for binding in bindings if binding.error), None):
        raise ConfigError(f"{path}, line {fault.line}, is not NAME=value. Correct it, or remove it.")
    return {binding.key: binding.value for binding in bindings if binding.key and binding.value is not None}


def read_toml(path: Path, kind: type[T], env: Mapping[str, str], root: Path | None = None) -> T | None:
    """Read a TOML file as settings, as `read_file` does. Raises ConfigError."""
    return read_file(path, kind, env, tomllib.loads, tomllib.TOMLDecodeError, root)


def read_servers(path: Path, env: Mapping[str, str], root: Path | None = None) -> dict[str, ServerSettings]:
    """Read the servers of an mcp.json, as `read_file` does. Raises ConfigError."""
    file = read_file(path, McpFile, env, parse_mcp_json, json.JSONDecodeError, root)
    return file.servers if file else {}


def parse_servers(path: Path, text: str, env: Mapping[str, str]) -> dict[str, ServerSettings]:
    """Parse the text of an mcp.json; messages call it `path`. Raises ConfigError."""
    return parse_file(path, text, McpFile, env, parse_mcp_json, json.JSONDecodeError).servers


def parse_mcp_json(text: str) -> Any:
    """Parse an mcp.json; VS Code's key `servers` becomes `mcpServers`. Raises JSONDecodeError."""
    data = json.loads(text)  # its errors name the line, unlike msgspec's
    match data:
        case {"servers": servers, **others} if "mcpServers" not in others:
            return {**others, "mcpServers": servers}
        case _:
            return data


def read_file(
    path: Path,
    kind: type[T],
    env: Mapping[str, str],
    parse: Callable[[str], Any],
    parse_error: type[Exception],
    root: Path | None = None,
) -> T | None:
    """Read a file as settings of a kind; return None if there is no such file. Raises ConfigError.

    There is none in `root`, either, if a link leads the path out of there, or if it is a pipe or a device.
    """
    try:
        if root and not (is_inside(path, root) and path.is_file()):
            return None
        text = path.read_text("utf-8-sig")  # some editors begin a file with a byte order mark
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise to_read_error(path, error) from error
    return parse_file(path, text, kind, env, parse, parse_error)


def parse_file(
    path: Path,
    text: str,
    kind: type[T],
    env: Mapping[str, str],
    parse: Callable[[str], Any],
    parse_error: type[Exception],
) -> T:
    """Parse the text of a file as settings of a kind. Raises ConfigError.

    A variable that is not set makes only the model or the server unusable whose settings use it.
    """
    try:
        data = parse(text)
        servers, models = dict(find_servers(data)), dict(find_models(data))
        find_servers(data).clear()  # their variables are expanded one server and one model at a time, below
        find_models(data).clear()
        data = expand_variables(data, env)
    except parse_error as error:
        raise ConfigError(f"{path} is not valid {path.suffix[1:].upper()}: {error}.") from error
    except KeyError as error:
        raise ConfigError(describe_unset_variable(error.args[0], path, text)) from error
    unusable: dict[str, UnusableServer] = {}
    for name, server in servers.items():
        try:
            find_servers(data)[name] = expand_variables(rename_keys(server), env)
        except KeyError as error:
            unusable[name] = UnusableServer(error=describe_unset_variable(error.args[0], path, text))
            find_servers(data)[name] = {}
    without: dict[str, UnusableModel] = {}
    for name, model in models.items():
        try:
            find_models(data)[name] = expand_variables(model, env)
        except KeyError as error:
            without[name] = UnusableModel(error=describe_unset_variable(error.args[0], path, text))
    if fault := find_fault(data, kind):
        raise to_config_error(path, text, fault)
    settings = msgspec.convert(data, kind)
    if isinstance(settings, Config):
        settings.models = {name: without.get(name) or settings.models[name] for name in models}
    (settings.servers if isinstance(settings, McpFile) else settings.mcp.servers).update(unusable)
    return settings


def find_servers(data: Any) -> dict[str, Any]:
    """Return the table of servers in a file's data; an empty one if there is none."""
    match data:
        case {"mcp": {"servers": dict()}}:
            return data["mcp"]["servers"]
        case {"mcpServers": dict()}:
            return data["mcpServers"]
        case _:
            return {}


def find_models(data: Any) -> dict[str, Any]:
    """Return the table of models in a file's data; an empty one if there is none."""
    match data:
        case {"models": dict()}:
            return data["models"]
        case _:
            return {}


def rename_keys(server: Any) -> Any:
    """Replace other programs' names of a server's settings by crow's own."""
    if not isinstance(server, dict):
        return server
    own = {ALIASES.get(key, key): value for key, value in cast(dict[str, Any], server).items()}
    if own.pop("enabled", True) is False:
        own["disabled"] = True
    return {**own, "oauth": rename_keys(own["oauth"])} if "oauth" in own else own


def expand_variables(value: Any, env: Mapping[str, str]) -> Any:
    """Replace every `${NAME}`, `${NAME:-default}` and `${env:NAME}` in the texts of a value.

    Raises KeyError with the name of a variable that is unset or empty and has no default.
    """
    match value:
        case str(text):
            return VARIABLE.sub(lambda match: env.get(match[1]) or get_default(match), text)
        case dict():
            return {key: expand_variables(inner, env) for key, inner in value.items()}  # pyright: ignore[reportUnknownVariableType]
        case list():
            return [expand_variables(inner, env) for inner in value]  # pyright: ignore[reportUnknownVariableType]
        case _:
            return value


def get_default(variable: re.Match[str]) -> str:
    if variable[2] is None:
        raise KeyError(variable[1])
    return variable[2]


def describe_unset_variable(name: str, path: Path, text: str) -> str:
    """Return the sentence about a variable that a file uses and that is not set."""
    text = blank_comments(text)
    uses = (match.start() for match in VARIABLE.finditer(text) if match[1] == name and match[2] is None)
    line = describe_line(text, next(uses, -1))
    return f"{path}{line} uses ${{{name}}}, which is not set. Set {name} or change the line."
