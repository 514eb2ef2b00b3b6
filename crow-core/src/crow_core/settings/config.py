"""Files and environment become settings, checked; nothing here starts anything.

The order, each stronger than the one before: `config.toml` and `mcp.json` in crow's home, the project's `.mcp.json` and
`.crow/config.toml` (a trusted folder only, and only to add servers and to tighten), the environment, the command line.
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
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeVar, cast, get_type_hints

import msgspec
from msgspec import UNSET, Meta, Struct, field
from msgspec.structs import asdict

from crow_core.acp.schema import EnvVariable, HttpHeader, McpServer
from crow_core.errors import ConfigError
from crow_core.masking import find_secrets
from crow_core.mcp.server import Server, from_acp
from crow_core.models.chat import Prices
from crow_core.settings.rules import parse_rules

if TYPE_CHECKING:
    from crow_core.mcp.oauth import Visit

T = TypeVar("T")

TOKENS = "oauth"
"""The folder, among crow's data, of what logins gave, where there is no keyring."""

LOGIN_TIMEOUT = 330.0
"""Seconds a server may take to start that a person may have to log in to."""

VARIABLE = re.compile(r"\$\{(?:env:)?(\w+)(?::-([^}]*))?\}")

FORMER_KEYS = {"extensions.budgets.turns": "requests"}
"""The present names of settings by their former names."""


class ModelSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    """`[models.NAME]`"""

    base_url: str
    model: str
    """What the endpoint calls it."""
    api_key: str = ""
    """Usually `"${SOME_KEY}"`, so that the key itself stays in the environment."""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    parameters: dict[str, Any] = field(default_factory=dict[str, Any])
    """Added to every request, such as `temperature`."""
    window: Annotated[int, Meta(ge=1)] | None = None
    """Tokens that fit."""
    idle_timeout: Annotated[float, Meta(gt=0)] | None = None
    """Seconds of silence after which the endpoint counts as hung."""
    quirks: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the endpoint does differently, beside what crow knows; `crow doctor` finds out."""
    prices: Prices | None = None
    """For a million tokens: input, output, cached, currency."""


class OAuthSettings(Struct, kw_only=True):
    """`oauth` of a server that lets no client register itself, or wants more than the default; names as in RFC 6749."""

    client_id: str = ""
    """As the server's owner gave it, or the https address of a document that describes the client."""
    client_secret: str = ""
    scopes: list[str] = field(default_factory=list[str])
    callback_port: int = 0
    """On this machine, where the browser comes back to; 0 is any free one."""


class ServerSettings(Struct, kw_only=True):
    """`[mcp.servers.NAME]`, and an entry of `mcpServers` in mcp.json; keys of other programs are ignored."""

    command: str = ""
    args: list[str] = field(default_factory=list[str])
    env: dict[str, str] = field(default_factory=dict[str, str])
    cwd: str = ""
    """Where the command runs: relative to the session's folder, which is the default."""
    url: str = ""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    type: Literal["", "stdio", "http", "streamable-http", "streamableHttp", "sse"] = ""
    """`sse` for the old transport; everything else with a URL is streamable HTTP."""
    allow: list[str] = field(default_factory=list[str])
    """Patterns of its tools' names, such as `read_*`; empty means all."""
    deny: list[str] = field(default_factory=list[str])
    """The same, for those to leave out."""
    trust: bool = False
    """Its word that a tool only reads is taken: such a tool runs without a question. Not for a project to say."""
    timeout: float | None = None
    """Seconds a call may be silent. From 10,000 on milliseconds, as other programs write them; so is the next."""
    start_timeout: float | None = None
    """Seconds it may take to start."""
    auth: Literal["", "oauth"] = ""
    oauth: OAuthSettings | None = None
    disabled: bool = False
    error: str = ""
    """Why it cannot be used, as a sentence; no setting, but what became of one."""

    def __post_init__(self) -> None:
        self.timeout, self.start_timeout = seconds(self.timeout), seconds(self.start_timeout)


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
"""What other programs call a server's settings."""


class PermissionSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    """`[permissions]`"""

    mode: Literal["ask", "accept-edits", "plan", "yolo"] = "ask"
    allow: list[str] = field(default_factory=list[str])
    ask: list[str] = field(default_factory=list[str])
    deny: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        parse_rules([*self.allow, *self.ask, *self.deny])


class McpSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    """`[mcp]`"""

    servers: dict[str, ServerSettings] = field(default_factory=dict[str, ServerSettings])


class PromptSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    """`[prompts]`"""

    system: str = ""
    """A Jinja2 template in place of crow's own; relative to the configuration's folder."""


class FetchSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    """`[fetch]`"""

    allow_hosts: list[str] = field(default_factory=list[str])
    """`HOST` or `HOST:PORT` that may be fetched from though not public. Not for a project to say."""


class DatabaseSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    """`[database]`"""

    url: str = ""
    """`postgresql+psycopg://…` or `sqlite:///…`; empty means the file crow.db among crow's data."""


class Config(Struct, kw_only=True, forbid_unknown_fields=True):
    """`config.toml`"""

    model: str = ""
    """The name of one of `models`."""
    max_turns: Annotated[int, Meta(ge=1)] = 200
    """Model requests one prompt may take."""
    servers_wait: float | None = None
    """Seconds the first prompt of a session waits for MCP servers that are still starting; None means the app's own."""
    models: dict[str, ModelSettings] = field(default_factory=dict[str, ModelSettings])
    permissions: PermissionSettings = field(default_factory=PermissionSettings)
    mcp: McpSettings = field(default_factory=McpSettings)
    fetch: FetchSettings = field(default_factory=FetchSettings)
    database: DatabaseSettings = field(default_factory=DatabaseSettings)
    prompts: PromptSettings = field(default_factory=PromptSettings)
    extensions: dict[str, dict[str, Any] | bool] = field(default_factory=dict[str, dict[str, Any] | bool])
    """`[extensions.NAME]`: options of an extension, as `options_of` checks them; false leaves out one of crow's own."""
    hooks: dict[str, Any] = field(default_factory=dict[str, Any])
    """`[[hooks.MOMENT]]`: commands to run, as the extension `shell_hooks` takes them. Never a project's."""


class ProjectPermissions(Struct, kw_only=True):
    """`[permissions]` of a project; what would loosen them is ignored."""

    ask: list[str] = field(default_factory=list[str])
    deny: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        parse_rules([*self.ask, *self.deny])


class ProjectConfig(Struct, kw_only=True):
    """`.crow/config.toml`: a project may bring servers and tighten permissions, nothing more."""

    permissions: ProjectPermissions = field(default_factory=ProjectPermissions)
    mcp: McpSettings = field(default_factory=McpSettings)


class McpFile(Struct, kw_only=True):
    """`mcp.json` and `.mcp.json`, as other programs write them."""

    servers: dict[str, ServerSettings] = field(name="mcpServers", default_factory=dict[str, ServerSettings])
    """`servers` in a file of VS Code's."""


class Home(Struct, frozen=True):
    """Where crow keeps its own files."""

    config: Path
    data: Path

    @classmethod
    def find(cls, env: Mapping[str, str]) -> "Home":
        """`$CROW_HOME` for both, else the XDG folders (XDG Base Directory Specification: a relative one is ignored)."""
        user = Path(env.get("HOME") or Path.home())

        def named(variable: str) -> Path:
            return Path(re.sub("^~(?=/|$)", lambda _: str(user), env.get(variable, "")))

        def base(variable: str, default: str) -> Path:
            return named(variable) if named(variable).is_absolute() else user / default

        if env.get("CROW_HOME"):
            home = named("CROW_HOME").absolute()
            return cls(home, home)
        return cls(base("XDG_CONFIG_HOME", ".config") / "crow", base("XDG_DATA_HOME", ".local/share") / "crow")


def variables(home: Home, env: Mapping[str, str]) -> dict[str, str]:
    """The environment, over what `.env` in crow's own home says. Raises ConfigError."""
    return {**read_env(home.config / ".env"), **env}


def load(home: Home, env: Mapping[str, str]) -> Config:
    """The user's own settings, with `${NAME}` filled in from `variables`. Raises ConfigError."""
    env = variables(home, env)
    config = read_toml(home.config / "config.toml", Config, env) or Config()
    for name, server in read_servers(home.config / "mcp.json", env).items():
        config.mcp.servers.setdefault(name, server)
    if config.model and config.model not in config.models:
        known = ", ".join(config.models) or "none"
        raise ConfigError(
            f"{home.config / 'config.toml'}: model = {config.model!r} names no [models.{config.model}]. "
            f"Configured are: {known}."
        )
    return config


def options_of(extension: partial[None], table: Mapping[str, Any], keys: Sequence[str], home: Home) -> dict[str, Any]:
    """A table of `config.toml`, which stands at these keys, as the keyword arguments that an extension still lacks:
    their annotations say what may be in it. Raises ConfigError."""
    given = dict(table)
    _, *arguments = inspect.signature(extension.func).parameters.values()
    arguments = [argument for argument in arguments if argument.name not in extension.keywords]
    if any(argument.kind is argument.VAR_KEYWORD for argument in arguments):
        return given
    try:
        types = get_type_hints(extension.func, include_extras=True)
    except NameError:  # one that is imported for type checkers only
        types = {}
    fields: list[Any] = [
        (one.name, types.get(one.name, Any), *([] if one.default is one.empty else [None])) for one in arguments
    ]
    options = msgspec.defstruct("Options", fields, kw_only=True, forbid_unknown_fields=True)
    path, data, kind = home.config / "config.toml", given, options
    for key in reversed(keys):
        data, kind = {key: data}, dict[str, kind]
    if complaint := complaint_about(data, kind):
        text = path.read_text("utf-8-sig") if path.is_file() else ""
        raise ConfigError(f"{path}{explained(complaint, data, kind, text)}.")
    checked = msgspec.convert(given, options)
    return {key: getattr(checked, key) for key in given}


def database_url(config: Config, home: Home) -> str:
    """Where sessions are remembered."""
    return config.database.url or f"sqlite:///{home.data / 'crow.db'}"


def load_project(folder: Path, env: Mapping[str, str]) -> ProjectConfig:
    """A trusted folder's settings. Raises ConfigError."""
    config = read_toml(folder / ".crow" / "config.toml", ProjectConfig, env) or ProjectConfig()
    for name, server in read_servers(folder / ".mcp.json", env).items():
        config.mcp.servers.setdefault(name, server)
    for server in config.mcp.servers.values():
        server.trust = False
    return config


def to_server(name: str, settings: ServerSettings, cwd: str, *, tokens: Path, visit: "Visit") -> Server:
    """A configured server, to be connected from a session's folder; one that cannot be used says why when it starts.

    `tokens` is the folder for what OAuth remembers, `visit` sends a person to an address.
    """

    def auth() -> Any:
        from crow_core.mcp.oauth import Login  # it brings FastMCP

        return Login(settings.url, tokens, visit, **asdict(settings.oauth or OAuthSettings()))

    try:
        config = to_acp(name, settings)
    except ConfigError as error:
        return Server(name, partial(fail, error))
    wants_login = settings.auth == "oauth" or settings.oauth is not None
    server = from_acp(config, os.path.join(cwd, os.path.expanduser(settings.cwd)), auth if wants_login else None)
    server.secrets = find_secrets(settings)
    server.allow, server.deny, server.trust = settings.allow or server.allow, settings.deny, settings.trust
    server.timeout = settings.timeout or server.timeout
    server.start_timeout = settings.start_timeout or (LOGIN_TIMEOUT if wants_login else server.start_timeout)
    return server


def login_first(name: str) -> str:
    """Why a server did not start that a person has to log in to."""
    return f"it wants you to log in. Run: crow mcp login {shlex.quote(name)}"


def fail(error: Exception) -> NoReturn:
    raise error


def to_acp(name: str, settings: ServerSettings) -> McpServer:
    """A configured server in the words in which a client would name it. Raises ConfigError."""
    if settings.error:
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
    """The variables of a `.env` file; none when there is no such file. Raises ConfigError."""
    if not path.is_file():
        return {}
    from dotenv.parser import parse_stream  # few have the file; the import costs more than reading the rest

    try:
        with path.open(encoding="utf-8") as file:
            found = [*parse_stream(file)]
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from error
    if fault := next((each.original for each in found if each.error), None):
        raise ConfigError(f"{path}, line {fault.line}, is not NAME=value. Correct it, or remove it.")
    return {each.key: each.value for each in found if each.key and each.value is not None}


def unreadable(path: Path, error: OSError | UnicodeDecodeError) -> ConfigError:
    return ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.")


def read_toml(path: Path, kind: type[T], env: Mapping[str, str]) -> T | None:
    """A TOML file as settings; None when there is no such file. Raises ConfigError."""
    return read(path, kind, env, tomllib.loads, tomllib.TOMLDecodeError)


def read_servers(path: Path, env: Mapping[str, str]) -> dict[str, ServerSettings]:
    """The servers of an mcp.json. Raises ConfigError."""
    found = read(path, McpFile, env, parse_servers, json.JSONDecodeError)
    return found.servers if found else {}


def parse_servers(text: str) -> Any:
    data = json.loads(text)  # it names the line of a fault, msgspec does not
    match data:
        case {"servers": servers, **others} if "mcpServers" not in others:
            return {**others, "mcpServers": servers}
        case _:
            return data


def read(
    path: Path, kind: type[T], env: Mapping[str, str], parse: Callable[[str], Any], fault: type[Exception]
) -> T | None:
    try:
        text = path.read_text("utf-8-sig")  # some editors begin with a mark
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from error
    try:
        data = parse(text)
        servers = dict(servers_in(data))
        servers_in(data).clear()  # they are filled in one by one: what one of them lacks is no harm to the others
        data = filled(data, env)
    except fault as error:
        raise ConfigError(f"{path} is not valid {path.suffix[1:].upper()}: {error}.") from error
    except KeyError as error:
        raise ConfigError(unset(error.args[0], path, text)) from error
    for name, server in servers.items():
        try:
            servers_in(data)[name] = filled(renamed(server), env)
        except KeyError as error:
            servers_in(data)[name] = {"error": unset(error.args[0], path, text)}
    if complaint := complaint_about(data, kind):
        raise ConfigError(f"{path}{explained(complaint, data, kind, text)}.")
    return msgspec.convert(data, kind)


def servers_in(data: Any) -> dict[str, Any]:
    """The servers in a file's data."""
    match data:
        case {"mcp": {"servers": dict()}}:
            return data["mcp"]["servers"]
        case {"mcpServers": dict()}:
            return data["mcpServers"]
        case _:
            return {}


def renamed(server: Any) -> Any:
    """A server's settings under the names they have here."""
    if not isinstance(server, dict):
        return server
    own = {ALIASES.get(key, key): value for key, value in cast(dict[str, Any], server).items()}
    if own.pop("enabled", True) is False:
        own["disabled"] = True
    return {**own, "oauth": renamed(own["oauth"])} if "oauth" in own else own


def seconds(given: float | None) -> float | None:
    """A time that may be in milliseconds."""
    return given / 1000 if given and given >= 10_000 else given


def filled(value: Any, env: Mapping[str, str]) -> Any:
    """Every `${NAME}`, `${NAME:-default}` and `${env:NAME}` replaced by the variable's value; raises KeyError for one
    that is not set or is empty, and has no default."""
    match value:
        case str(text):
            return VARIABLE.sub(lambda match: env.get(match[1]) or match[2] or missing(match), text)
        case dict():
            return {key: filled(inner, env) for key, inner in value.items()}  # pyright: ignore[reportUnknownVariableType]
        case list():
            return [filled(inner, env) for inner in value]  # pyright: ignore[reportUnknownVariableType]
        case _:
            return value


def missing(match: re.Match[str]) -> str:
    if match[2] is None:
        raise KeyError(match[1])
    return ""


def unset(name: str, path: Path, text: str) -> str:
    """What is said of a variable that is not set."""
    plain = without_comments(text)
    found = next((match for match in VARIABLE.finditer(plain) if match[1] == name and match[2] is None), None)
    where = numbered(plain, found.start() if found else -1)
    return f"{path}{where} uses ${{{name}}}, which is not set. Set {name} or change the line."


def complaint_about(data: Any, kind: type[Any]) -> str:
    """What the checker says of the data; nothing when they are right."""
    try:
        msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        return str(error)
    return ""


def explained(complaint: str, data: Any, kind: type[Any], text: str) -> str:
    """The checker's complaint with the line and the key it is about, as the end of a sentence about the file."""
    said, _, path = complaint.partition(" - at `$")
    keys: list[str] = []
    place = data
    for key in re.findall(r"\.\.\.|[\w-]+", path):
        if key.isdecimal():
            break  # an item of a list stands where the list does
        if key == "...":  # any key of a table: the one is meant that alone brings the same complaint
            key = next(name for name in place if complaint_about(only(data, keys, name), kind) == complaint)
        keys.append(key)
        place = place[key]
    if unknown := re.search(r"unknown field `(.+?)`", said):
        keys.append(unknown[1])
        said = "no such setting. Remove it, or correct its name"
        if name := FORMER_KEYS.get(".".join(keys)):
            said = f"this setting is called {name} now. Rename it"
    return f"{line_of(text, keys)} {'.'.join(keys)}: {said[:1].lower()}{said[1:]}".replace(" :", ":")


def only(data: dict[str, Any], keys: list[str], name: str) -> dict[str, Any]:
    """The data with nothing but `name` in the table at `keys`."""
    if not keys:
        return {name: data[name]}
    return {**data, keys[0]: only(data[keys[0]], keys[1:], name)}


def line_of(text: str, keys: list[str]) -> str:
    """`, line N,` of the last of these keys, each inside the one before, in TOML or JSON; nothing where it is not."""
    at, text = -1, without_comments(text)
    for key in keys:
        found = re.compile(rf"""(?m)(?:^|[\[.{{,])\s*["']?({re.escape(key)})["']?\s*[].=:]""").search(text, at + 1)
        at = found.start(1) if found else at
    return numbered(text, at)


def numbered(text: str, at: int) -> str:
    return f", line {text.count(chr(10), 0, at) + 1}," if at >= 0 else ""


def without_comments(text: str) -> str:
    """TOML with its comment lines empty, so that what is only an example is not found."""
    return re.sub(r"(?m)^[ \t]*#.*", "", text)
