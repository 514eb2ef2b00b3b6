"""Read the configuration files and check them. Nothing here starts a program or a connection.

Settings override each other in this order, the strongest last: `config.toml` and `mcp.json` in crow's home; `.mcp.json`
and `.crow/config.toml` of a trusted project, which may only add servers and agents, and tighten permissions; the
environment; the command line.
"""

import inspect
import json
import os.path
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from crow_core.acp.schema import EnvVariable, HttpHeader, McpServer
from crow_core.errors import ConfigError
from crow_core.masking import find_secrets
from crow_core.mcp.server import Server, from_acp
from crow_core.models.chat import Prices
from crow_extensions.agent_settings import AgentSettings
from crow_permissions.rules import parse_rules
from crow_system.files import UnusableFile, is_inside, open_file
from msgspec import UNSET, Meta, Struct, field

if TYPE_CHECKING:
    from crow_core.mcp.oauth import Visit

T = TypeVar("T", bound="Config | ProjectConfig | McpFile")

TOKENS_FOLDER = "oauth"
"""The folder in crow's data for OAuth tokens, used where there is no keyring."""

LOGIN_TIMEOUT = 330.0
"""Seconds that a server may take to start if the user may have to log in to it."""

VARIABLE = re.compile(r"\$\{(?:env:)?(\w+)(?::-([^}]*))?\}")
"""A use of a variable: its name and, after `:-`, its default."""

UNKNOWN_KEY = "no such setting. Remove it, or correct its name"
FORMER_KEYS = {"max_turns": "max_requests", "extensions.budgets.turns": "requests"}
"""The present names of settings by their former names."""


class ModelSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    """The settings of a model: `[models.NAME]`."""

    base_url: str
    model: str
    """The model's name at the endpoint."""
    api_key: str = ""
    """The endpoint's key; usually `"${SOME_KEY}"`, so that the key itself stays in the environment."""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    parameters: dict[str, Any] = field(default_factory=dict[str, Any])
    """Parameters added to every request, such as `temperature`."""
    window: Annotated[int, Meta(ge=1)] | None = None
    """Tokens that fit into one request and its reply; None if unknown."""
    idle_timeout: Annotated[float, Meta(gt=0)] | None = None
    """Seconds without a byte after which a request fails; None means the default."""
    quirks: dict[str, Any] = field(default_factory=dict[str, Any])
    """Fields of `Quirks` that override the rules of `quirks.toml`; `crow doctor` finds them."""
    prices: Prices | None = None
    """Prices for a million tokens."""


class OAuthSettings(Struct, kw_only=True):
    """The settings of a login: `oauth` of a server, for one to which clients cannot register themselves (RFC 6749).

    With `auth = "client_credentials"`, crow gets its tokens with the secret alone, without a user.
    """

    client_id: str = ""
    """The id that the server's owner issued, or the https address of a document that describes the client."""
    client_secret: str = ""
    client_secret_file: str = ""
    """The absolute path of a file with the secret, which is read each time that the server starts."""
    issuer: str = ""
    """The address of the authorization server that issued the secret; client credentials are sent to no other."""
    scopes: list[str] = field(default_factory=list[str])
    callback_port: int = 0
    """The local port to which the browser is redirected after the login; 0 means any free one."""


class ServerSettings(Struct, kw_only=True):
    """The settings of a server: `[mcp.servers.NAME]`, or an entry of mcp.json. Unknown keys are ignored."""

    command: str = ""
    args: list[str] = field(default_factory=list[str])
    env: dict[str, str] = field(default_factory=dict[str, str])
    cwd: str = ""
    """The command's working directory, relative to the session's folder, which is the default."""
    url: str = ""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    type: Literal["", "stdio", "http", "streamable-http", "streamableHttp", "sse"] = ""
    """`sse` means the old transport; any other server with a URL uses streamable HTTP."""
    allow: list[str] = field(default_factory=list[str])
    """Patterns of the names of the tools to offer, such as `read_*`; empty means all."""
    deny: list[str] = field(default_factory=list[str])
    """Patterns of the names of the tools to leave out."""
    trust: bool = False
    """Whether a tool that the server declares as read-only runs without permission. A project cannot set it."""
    timeout: float | None = None
    """Seconds that a tool call may be silent. From 10,000 on, milliseconds, which other programs write."""
    start_timeout: float | None = None
    """Seconds that the server may take to start; in milliseconds like `timeout`."""
    auth: Literal["", "oauth", "client_credentials"] = ""
    oauth: OAuthSettings | None = None
    disabled: bool = False
    shared: bool = True
    """Whether sessions in the same folder may use one connection. A server that keeps something for one conversation,
    such as the page of a browser, should not be shared."""

    def __post_init__(self) -> None:
        self.timeout, self.start_timeout = to_seconds(self.timeout), to_seconds(self.start_timeout)

    @property
    def wants_login(self) -> bool:
        """Whether the user has to log in to it."""
        return self.auth != "client_credentials" and (self.auth == "oauth" or self.oauth is not None)


class UnusableServer(ServerSettings, kw_only=True):
    """A server whose settings use a variable that is not set. It is made here, never read from a file."""

    error: str
    """The sentence that says what is wrong and what to do."""


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


class PermissionSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    """The permission mode and rules: `[permissions]`."""

    mode: Literal["ask", "accept-edits", "plan", "yolo"] = "ask"
    allow: list[str] = field(default_factory=list[str])
    ask: list[str] = field(default_factory=list[str])
    deny: list[str] = field(default_factory=list[str])
    protected: list[str] = field(default_factory=list[str])
    """Patterns of files, such as `deploy/**`, whose changes are asked about, beside those that crow knows."""
    private: list[str] = field(default_factory=list[str])
    """Patterns of files, such as `customers/**`, that hold private data, beside those that crow knows."""
    taint: bool = True
    """Whether a session that has read private data and untrusted content asks before data can leave."""

    def __post_init__(self) -> None:
        parse_rules(self.allow, allows=True)
        parse_rules([*self.ask, *self.deny])


class McpSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    """The settings for MCP: `[mcp]`."""

    servers: dict[str, ServerSettings] = field(default_factory=dict[str, ServerSettings])


class PromptSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    """The settings of prompts: `[prompts]`."""

    system: str = ""
    """The path of a Jinja2 template that replaces crow's own; relative to the folder of `config.toml`."""


class FetchSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    """The settings of the tool `fetch`: `[fetch]`."""

    allow_hosts: list[str] = field(default_factory=list[str])
    """Each is a `HOST` or `HOST:PORT` that is not public and may be fetched from. A project cannot set it."""


class DatabaseSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    """The settings of the database: `[database]`."""

    url: str = ""
    """`postgresql+psycopg://…` or `sqlite:///…`; empty means the file `crow.db` in crow's data."""
    synchronous: Literal["normal", "full"] = "normal"
    """`full` waits at each commit until the disk has it, so that a power failure loses nothing; for SQLite."""


class Config(Struct, kw_only=True, forbid_unknown_fields=True):
    """The user's configuration: `config.toml`."""

    model: str = ""
    """The name of the default model in `models`; empty means the first."""
    max_requests: Annotated[int, Meta(ge=1)] = 200
    """The most model calls that one turn may make."""
    servers_wait: float | None = None
    """Seconds for which prompts wait for an MCP server, from its start; None means the app's default."""
    models: dict[str, ModelSettings] = field(default_factory=dict[str, ModelSettings])
    permissions: PermissionSettings = field(default_factory=PermissionSettings)
    mcp: McpSettings = field(default_factory=McpSettings)
    agents: dict[str, AgentSettings] = field(default_factory=dict[str, AgentSettings])
    fetch: FetchSettings = field(default_factory=FetchSettings)
    database: DatabaseSettings = field(default_factory=DatabaseSettings)
    prompts: PromptSettings = field(default_factory=PromptSettings)
    extensions: dict[str, dict[str, Any] | bool] = field(default_factory=dict[str, dict[str, Any] | bool])
    """`[extensions.NAME]`: options of an extension, checked by `parse_options`; false leaves out one of crow's own."""
    hooks: dict[str, Any] = field(default_factory=dict[str, Any])
    """`[[hooks.MOMENT]]`: commands for the extension `shell_hooks`. A project cannot set them."""


class ProjectPermissions(Struct, kw_only=True):
    """The rules of a project: `[permissions]`."""

    ask: list[str] = field(default_factory=list[str])
    deny: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        parse_rules([*self.ask, *self.deny])


class ProjectConfig(Struct, kw_only=True):
    """The configuration of a project: `.crow/config.toml`.

    It may only add servers and agents, and tighten permissions. Other settings are ignored, and named to the user.
    """

    permissions: ProjectPermissions = field(default_factory=ProjectPermissions)
    mcp: McpSettings = field(default_factory=McpSettings)
    agents: dict[str, AgentSettings] = field(default_factory=dict[str, AgentSettings])


class McpFile(Struct, kw_only=True):
    """The content of `mcp.json` or `.mcp.json`, in the format of other programs."""

    servers: dict[str, ServerSettings] = field(name="mcpServers", default_factory=dict[str, ServerSettings])
    """VS Code calls the key `servers`."""


class Home(Struct, frozen=True):
    """The folders of crow's own files."""

    config: Path
    data: Path

    @classmethod
    def find(cls, env: Mapping[str, str]) -> "Home":
        """Return `$CROW_HOME` for both, else the XDG folders (XDG Base Directory Specification), if absolute.

        Raises ConfigError where none of them is set and the user has no home folder.
        """
        try:
            user = Path(env.get("HOME") or Path.home())
        except RuntimeError as error:
            if not env.get("CROW_HOME"):
                raise ConfigError("crow finds no home folder for its files. Set HOME, or CROW_HOME.") from error
            user = Path(env["CROW_HOME"])

        def get_path(variable: str) -> Path:
            return Path(re.sub("^~(?=/|$)", lambda _: str(user), env.get(variable, "")))

        def get_xdg_path(variable: str, default: str) -> Path:
            return get_path(variable) if get_path(variable).is_absolute() else user / default

        if env.get("CROW_HOME"):
            home = get_path("CROW_HOME").absolute()
            return cls(home, home)
        config = get_xdg_path("XDG_CONFIG_HOME", ".config")
        return cls(config / "crow", get_xdg_path("XDG_DATA_HOME", ".local/share") / "crow")


def load_environment(home: Home, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `.env` in crow's home, overridden by the environment `env`. Raises ConfigError."""
    return {**read_env(home.config / ".env"), **env}


def load_config(home: Home, env: Mapping[str, str]) -> Config:
    """Read the user's own settings and replace each `${NAME}` by the variable's value. Raises ConfigError."""
    env = load_environment(home, env)
    config = read_toml(home.config / "config.toml", Config, env) or Config()
    for name, server in read_servers(home.config / "mcp.json", env).items():
        config.mcp.servers.setdefault(name, server)
    check_default_model(home.config / "config.toml", config)
    return config


def check_default_model(path: Path, config: Config) -> None:
    """Raise ConfigError if the default model is none of those configured."""
    if config.model and config.model not in config.models:
        configured = ", ".join(config.models) or "none"
        raise ConfigError(
            f"{path}: model = {config.model!r} names no [models.{config.model}]. Configured are: {configured}."
        )


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


PROJECT_MAY = "a project may only add servers and agents, and tighten permissions by ask and deny"
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
        case {"servers": {**servers}}:
            trusted = [name for name, server in servers.items() if isinstance(server, dict) and "trust" in server]
            ignored += [f"trust of [mcp.servers.{name}]" for name in trusted]
        case _:
            pass
    return sorted(ignored)


def to_server(name: str, settings: ServerSettings, cwd: str, *, tokens: Path, visit: "Visit") -> Server:
    """Make a server from its settings, for a session whose folder is `cwd`.

    `tokens` is the folder for OAuth tokens; `visit` opens a URL for the user. A server that cannot be used reports
    why when it starts.
    """

    oauth = settings.oauth or OAuthSettings()

    def login() -> Any:
        from crow_core.mcp.oauth import Login  # imports FastMCP

        return Login(
            settings.url,
            tokens,
            visit,
            client_id=oauth.client_id,
            client_secret=read_client_secret(oauth),
            scopes=oauth.scopes,
            callback_port=oauth.callback_port,
        )

    def present_credentials() -> Any:
        from crow_core.mcp.oauth import ClientCredentials  # imports FastMCP

        secret = read_client_secret(oauth)
        server.secrets = {*server.secrets, secret}
        return ClientCredentials(settings.url, oauth.client_id, secret, oauth.scopes, oauth.issuer)

    try:
        config = to_mcp_server(name, settings)
        check_credentials(settings)
    except ConfigError as error:
        return Server(name, partial(raise_error, error))
    has_credentials, wants_login = settings.auth == "client_credentials", settings.wants_login
    auth = present_credentials if has_credentials else login if wants_login else None
    server = from_acp(config, os.path.join(cwd, os.path.expanduser(settings.cwd)), auth)
    server.secrets = find_secrets(settings)
    server.allow, server.deny, server.trust = settings.allow or server.allow, settings.deny, settings.trust
    server.timeout = settings.timeout or server.timeout
    server.start_timeout = settings.start_timeout or (LOGIN_TIMEOUT if wants_login else server.start_timeout)
    return server


def check_credentials(settings: ServerSettings) -> None:
    """Raise ConfigError if client credentials lack a setting, or if their secret is given in two ways."""
    oauth = settings.oauth or OAuthSettings()
    if oauth.client_secret and oauth.client_secret_file:
        raise ConfigError("It has both oauth.client_secret and oauth.client_secret_file. Remove one of them.")
    if settings.auth != "client_credentials":
        return
    given = {
        "url": settings.url,
        "oauth.client_id": oauth.client_id,
        "oauth.client_secret (or client_secret_file)": oauth.client_secret or oauth.client_secret_file,
        "oauth.issuer": oauth.issuer,
    }
    if missing := [key for key, value in given.items() if not value]:
        raise ConfigError(f'auth = "client_credentials" needs {" and ".join(missing)}. Set it for this server.')
    if not oauth.issuer.startswith(("https://", "http://")):
        raise ConfigError("oauth.issuer is no web address. Set it to that of the authorization server.")


def read_client_secret(oauth: OAuthSettings) -> str:
    """Return the secret of a client, from its setting or its file. Raises ConfigError."""
    if not oauth.client_secret_file:
        return oauth.client_secret
    path = Path(os.path.expanduser(oauth.client_secret_file))
    if not path.is_absolute():
        raise ConfigError(f"oauth.client_secret_file {str(path)!r} is no absolute path. Begin it with / or ~.")
    try:
        secret = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"oauth.client_secret_file: {to_read_error(path, error)}") from None
    if not secret:
        raise ConfigError(f"oauth.client_secret_file: {path} is empty.")
    return secret


def describe_missing_login(name: str) -> str:
    """Return the reason why a server did not start that the user has to log in to."""
    return f"it wants you to log in. Run: crow mcp login {shlex.quote(name)}"


def raise_error(error: Exception) -> NoReturn:
    raise error


def to_mcp_server(name: str, settings: ServerSettings) -> McpServer:
    """Convert a server's settings to the ACP value with which a client would name it. Raises ConfigError."""
    if isinstance(settings, UnusableServer):
        raise ConfigError(settings.error)
    if settings.url:
        return McpServer(
            name=name,
            type="sse" if settings.type == "sse" else "http",
            url=settings.url,
            headers=[HttpHeader(name=key, value=value) for key, value in settings.headers.items()],
        )
    if not settings.command:
        raise ConfigError("It has neither command nor url. Give it one of them.")
    env = [EnvVariable(name=key, value=value) for key, value in settings.env.items()]
    command = os.path.expanduser(settings.command)
    return McpServer(name=name, command=command, args=settings.args, env=env, type=UNSET)


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


def to_read_error(path: Path, error: OSError | UnicodeDecodeError) -> ConfigError:
    return ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.")


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


def parse_config(path: Path, text: str, env: Mapping[str, str]) -> Config:
    """Parse the text of a `config.toml` as `load_config` does; `path` is for the messages. Raises ConfigError."""
    config = parse_file(path, text, Config, env, tomllib.loads, tomllib.TOMLDecodeError)
    check_default_model(path, config)
    return config


def parse_file(
    path: Path,
    text: str,
    kind: type[T],
    env: Mapping[str, str],
    parse: Callable[[str], Any],
    parse_error: type[Exception],
) -> T:
    """Parse the text of a file as settings of a kind. Raises ConfigError.

    A variable that is not set makes only the server unusable whose settings use it.
    """
    try:
        data = parse(text)
        servers = dict(find_servers(data))
        find_servers(data).clear()  # their variables are expanded one server at a time, below
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
    if fault := find_fault(data, kind):
        raise to_config_error(path, text, fault)
    settings = msgspec.convert(data, kind)
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


def rename_keys(server: Any) -> Any:
    """Replace other programs' names of a server's settings by crow's own."""
    if not isinstance(server, dict):
        return server
    own = {ALIASES.get(key, key): value for key, value in cast(dict[str, Any], server).items()}
    if own.pop("enabled", True) is False:
        own["disabled"] = True
    return {**own, "oauth": rename_keys(own["oauth"])} if "oauth" in own else own


def to_seconds(duration: float | None) -> float | None:
    """Convert a duration to seconds: from 10,000 on it is in milliseconds."""
    return duration / 1000 if duration and duration >= 10_000 else duration


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


class Fault(NamedTuple):
    """A value that its type does not allow."""

    keys: list[str]
    """The keys that lead to it. An item of a list counts as the list."""
    sentence: str


def find_fault(data: Any, kind: Any) -> Fault | None:
    """Return the first value in parsed data that does not fit the type, or None if all of it does."""
    try:
        msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        sentence = str(error)
    else:
        return None
    for keys, inner, inner_kind in list_parts(data, kind):
        if inner_kind is None:
            return Fault(keys, UNKNOWN_KEY)
        if fault := find_fault(inner, inner_kind):
            return Fault([*keys, *fault.keys], fault.sentence)
    return Fault([], sentence)


def list_parts(data: Any, kind: Any) -> list[tuple[list[str], Any, Any]]:
    """List what a table or a list holds: its keys, the value and the value's type; None is the type of an unknown key.

    Return nothing for other values.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return list_parts(data, arguments[0])
    if origin in (Union, UnionType):
        return [part for choice in arguments for part in list_parts(data, choice)]
    match data:
        case dict() if len(arguments) == 2:
            return [([key], value, arguments[1]) for key, value in cast(dict[str, Any], data).items()]
        case dict() if isinstance(kind, type) and issubclass(kind, Struct):
            types = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
            parts = [([key], value, types.get(key)) for key, value in cast(dict[str, Any], data).items()]
            return [part for part in parts if part[2] or kind.__struct_config__.forbid_unknown_fields]
        case list() if len(arguments) == 1:
            return [([], value, arguments[0]) for value in cast(list[Any], data)]
        case _:
            return []


def to_config_error(path: Path, text: str, fault: Fault) -> ConfigError:
    """Make the error that names the file, the line and the key of a fault; `text` is the file's content."""
    key = ".".join(fault.keys)
    sentence = f"{fault.sentence[:1].lower()}{fault.sentence[1:]}"
    if fault.sentence == UNKNOWN_KEY and key in FORMER_KEYS:
        sentence = f"this setting is called {FORMER_KEYS[key]} now. Rename it"
    return ConfigError(f"{path}{find_line(text, fault.keys)}{f' {key}' if key else ''}: {sentence}.")


def find_line(text: str, keys: list[str]) -> str:
    """Return `, line N,` of the last of these nested keys in TOML or JSON; "" if none of them is found."""
    return describe_line(blank_comments(text), find_key(text, keys))


def find_line_number(text: str, keys: list[str]) -> int:
    """Return the number of the line of the last of these nested keys in TOML or JSON; 0 if none of them is found."""
    at = find_key(text, keys)
    return blank_comments(text).count("\n", 0, at) + 1 if at >= 0 else 0


def find_key(text: str, keys: list[str]) -> int:
    """Return the index of the last of these nested keys in TOML or JSON without its comments; -1 if none is found."""
    at, text = -1, blank_comments(text)
    for key in keys:
        match = re.compile(rf"""(?m)(?:^|[\[.{{,])\s*["']?({re.escape(key)})["']?\s*[].=:]""").search(text, at + 1)
        at = match.start(1) if match else at
    return at


def describe_line(text: str, at: int) -> str:
    """Return `, line N,` for a character's index; "" for a negative one."""
    return f", line {text.count(chr(10), 0, at) + 1}," if at >= 0 else ""


def blank_comments(text: str) -> str:
    """Empty the comment lines of TOML, so that nothing is found in them."""
    return re.sub(r"(?m)^[ \t]*#.*", "", text)
