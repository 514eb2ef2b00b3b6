"""The structs of the settings: the tables of `config.toml`, a project's configuration and mcp.json."""

from typing import Annotated, Any, Literal

from crow_core.models.model_call import Prices
from crow_extensions.agent_settings import AgentSettings
from crow_permissions.rules import parse_rules
from msgspec import Meta, Struct, field

ProgramLevel = Literal["workspace", "read-only", "off"]
"""The access of a program in a sandbox to files: it may change those of its folders, none, or all."""


class ModelSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    """The settings of a model: `[models.NAME]`."""

    base_url: str
    """The endpoint's address, up to and including `/v1` where it has one."""
    model: str
    """The model's name at the endpoint."""
    api_key: str = ""
    """The endpoint's key; usually `"${SOME_KEY}"`, so that the key itself stays in the environment."""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    """HTTP headers that are added to every request."""
    parameters: dict[str, Any] = field(default_factory=dict[str, Any])
    """Parameters that are added to every request, such as `temperature`."""
    window: Annotated[int, Meta(ge=1)] | None = None
    """Tokens that fit into one request and its reply. crow never uses more, whatever the endpoint reports."""
    idle_timeout: Annotated[float, Meta(gt=0)] | None = None
    """Seconds without a byte after which a request fails. Default: 3,600 on private networks, else 120."""
    quirks: dict[str, Any] = field(default_factory=dict[str, Any])
    """Differences of the endpoint, which override those that crow knows. `crow doctor --save` writes them."""
    prices: Prices | None = None
    """Prices for a million tokens, for costs and budgets."""
    fallback: list[str] = field(default_factory=list[str])
    """Names of other models that answer, in this order, while this one has no quota left, is overloaded or is down."""


class UnusableModel(ModelSettings, kw_only=True):
    """A model whose settings use a variable that is not set. It is made here, never read from a file."""

    base_url: str = ""
    model: str = ""
    error: str
    """The sentence that says what is wrong and what to do."""


class OAuthSettings(Struct, kw_only=True):
    """The settings of a login: `oauth` of a server, for one to which clients cannot register themselves (RFC 6749).

    With `auth = "client_credentials"`, crow gets its tokens with the secret alone, without a user.
    """

    client_id: str = ""
    """The id that the server's owner issued, or the https address of a document that describes the client."""
    client_secret: str = ""
    """The secret that the server's owner issued with the id."""
    client_secret_file: str = ""
    """The absolute path of a file with the secret, which is read each time that the server starts."""
    issuer: str = ""
    """The address of the authorization server that issued the secret; client credentials are sent to no other."""
    scopes: list[str] = field(default_factory=list[str])
    """The scopes to ask for."""
    callback_port: int = 0
    """The local port to which the browser is redirected after the login; 0 means any free one."""


class ServerSettings(Struct, kw_only=True):
    """The settings of a server: `[mcp.servers.NAME]`, or an entry of mcp.json. Unknown keys are ignored."""

    command: str = ""
    """The program to start. A server has either a command or a URL."""
    args: list[str] = field(default_factory=list[str])
    """The command's arguments."""
    env: dict[str, str] = field(default_factory=dict[str, str])
    """Variables that are added to the command's environment."""
    cwd: str = ""
    """The command's working directory, relative to the session's folder, which is the default."""
    url: str = ""
    """The address of a remote server."""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    """HTTP headers that are added to every request to the address."""
    type: Literal["", "stdio", "http", "streamable-http", "streamableHttp", "sse"] = ""
    """`sse` means the old transport; any other server with a URL uses streamable HTTP."""
    allow: list[str] = field(default_factory=list[str])
    """Patterns of the names of the tools to offer, such as `read_*`; empty means all."""
    deny: list[str] = field(default_factory=list[str])
    """Patterns of the names of the tools to leave out."""
    trust: bool = False
    """True if tools that the server declares as read-only run without permission. A project cannot set it."""
    timeout: float | None = None
    """Seconds that a tool call may be silent. A value of 10,000 or more counts as milliseconds, which other programs
    write. Default: 600."""
    start_timeout: float | None = None
    """Seconds, or milliseconds as in `timeout`, that the server may take to start. Default: 30, or 330 with a login."""
    auth: Literal["", "oauth", "client_credentials"] = ""
    """`oauth` logs the user in with a browser; `client_credentials` logs in with a secret alone."""
    oauth: OAuthSettings | None = None
    """The settings of the login. A table without `auth` means `oauth`."""
    sandbox: ProgramLevel = "off"
    """With `workspace`, the command may change the folders of the session and its own temporary files. With
    `read-only`, it may change only the temporary files. In both it sees no credentials. A project cannot set `off`."""
    network: bool = False
    """True if the command has the network in its sandbox. A project cannot set it."""
    disabled: bool = False
    """True if crow leaves the server out."""
    shared: bool = True
    """True if sessions in the same folder may use one connection. Set false for a server that keeps something for one
    conversation, such as the page of a browser."""

    def __post_init__(self) -> None:
        self.timeout, self.start_timeout = to_seconds(self.timeout), to_seconds(self.start_timeout)

    @property
    def wants_login(self) -> bool:
        """True if the user has to log in to it."""
        return self.auth != "client_credentials" and (self.auth == "oauth" or self.oauth is not None)


class UnusableServer(ServerSettings, kw_only=True):
    """A server whose settings use a variable that is not set. It is made here, never read from a file."""

    error: str
    """The sentence that says what is wrong and what to do."""


class PluginServer(ServerSettings, kw_only=True):
    """A server of an Agent Plugin. It is made here, never read from a file of settings."""

    plugin: str
    """The name of the plugin."""
    data: str = ""
    """The folder in which its command keeps files, PLUGIN_DATA; empty for a remote server."""


class PermissionSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    """The permission mode and rules: `[permissions]`."""

    mode: Literal["ask", "accept-edits", "plan", "yolo"] = "ask"
    """The mode of new sessions."""
    allow: list[str] = field(default_factory=list[str])
    """Rules for tool calls that run without a question."""
    ask: list[str] = field(default_factory=list[str])
    """Rules for tool calls that crow asks about. They beat `allow`."""
    deny: list[str] = field(default_factory=list[str])
    """Rules for tool calls that crow refuses. They beat `ask` and `allow`."""
    protected: list[str] = field(default_factory=list[str])
    """Patterns of files, such as `deploy/**`. crow asks before it changes them, as for the protected files it knows."""
    private: list[str] = field(default_factory=list[str])
    """Patterns of files, such as `customers/**`, that hold private data, in addition to the files that crow knows."""
    taint: bool = True
    """True if a session that has read private data and untrusted content asks before data can leave."""

    def __post_init__(self) -> None:
        parse_rules(self.allow, allows=True)
        parse_rules([*self.ask, *self.deny])


EXPOSED = ("ssh-agent", "gpg-agent", "docker")
"""The programs that commands in the sandbox may reach."""


class SandboxSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    """The settings of the sandbox, in which commands run that no rule allows or forbids: `[sandbox]`."""

    level: Literal["review", "off"] | None = None
    """`review` runs such a command on a copy of the folders, and asks about what it changed; `off` asks before it runs.
    Default: `review` where this machine can do it and a person answers. With `review`, commands also run so where
    nobody answers: what changed is discarded in the mode `ask`. crow tells where the machine cannot do it."""
    expose: list[str] = field(default_factory=list[str])
    """Programs that commands in the sandbox may reach: `ssh-agent`, `gpg-agent`, or `docker`, which is root on this
    machine. Also patterns of private files of the project that they may read, such as `.env`."""
    hosts: list[str] = field(default_factory=list[str])
    """Patterns of the hosts that commands in the sandbox reach unasked, such as `pypi.org` and `*.example.com`."""
    yolo: Literal["workspace", "off"] = "off"
    """With `workspace`, commands in the mode `yolo` write only to the folders of the session. They see no credentials
    but those in `expose`, and have the whole network. crow asks before one that cannot run so."""

    def __post_init__(self) -> None:
        for name in self.expose:
            if name not in EXPOSED and not {*"./*"} & {*name}:
                raise ValueError(f"{name!r} is neither a file, such as '.env', nor one of {', '.join(EXPOSED)}")


class McpSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    """The settings for MCP: `[mcp]`."""

    servers: dict[str, ServerSettings] = field(default_factory=dict[str, ServerSettings])
    """MCP servers by name."""
    project_sandbox: ProgramLevel | None = None
    """The sandbox of the commands that trusted projects name as servers, always without network. `off` starts them
    like your own. Default: `workspace`, or `off` where this machine has no sandbox. A project cannot set it."""
    client_document: Annotated[str, Meta(pattern=r"^(https://[^/\s]+/\S+)?$")] = ""
    """The https address of a client id metadata document, which describes your crow to authorization servers. It is
    used for each login without `oauth.client_id`. crow registers itself if the server does not take such documents."""


class PromptSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    """The settings of prompts: `[prompts]`."""

    system: str = ""
    """The path of a Jinja2 template that replaces crow's own; relative to the folder of `config.toml`."""


class FetchSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    """The settings of the tool `fetch`: `[fetch]`."""

    allow_hosts: list[str] = field(default_factory=list[str])
    """Private hosts to fetch from, as `HOST` (every port) or `HOST:PORT`. A project cannot set it."""


class DatabaseSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    """The settings of the database: `[database]`."""

    url: str = ""
    """`postgresql+psycopg://…` or `sqlite:///…`; empty means the file `crow.db` in crow's data."""
    synchronous: Literal["normal", "full"] = "normal"
    """For SQLite. With `full`, each commit waits for the disk, so that a power failure loses nothing."""


DiagnosticTable = dict[str, str | list[str] | float]
"""The commands that look for problems after an edit, by the pattern of its file; and `timeout`: `[diagnostics]`."""


def check_diagnostics(table: DiagnosticTable) -> None:
    """Raise ValueError for a value that is not the timeout, a command or a list of commands."""
    for key, value in table.items():
        if (key == "timeout") != isinstance(value, int | float) or value == 0:
            wanted = "a number of seconds above 0" if key == "timeout" else "a command or a list of commands"
            raise ValueError(f"{key!r} in [diagnostics] is not {wanted}")


class WorktreeSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    """The settings of worktrees, in which sessions of `crow -w` work: `[worktree]`."""

    setup: str = ""
    """A shell command that runs once in each new worktree, such as `npm ci`. A trusted project may set it."""


class Config(Struct, kw_only=True, forbid_unknown_fields=True):
    """The user's configuration: `config.toml`."""

    model: str = ""
    """The name of the default model, one of `[models]`; empty means the first."""
    max_requests: Annotated[int, Meta(ge=1)] = 200
    """The most model calls that one turn may make."""
    servers_wait: float | None = None
    """Seconds that prompts wait for an MCP server after it was started. Default: 5."""
    models: dict[str, ModelSettings] = field(default_factory=dict[str, ModelSettings])
    """Models by the names that you choose."""
    permissions: PermissionSettings = field(default_factory=PermissionSettings)
    sandbox: SandboxSettings = field(default_factory=SandboxSettings)
    mcp: McpSettings = field(default_factory=McpSettings)
    agents: dict[str, AgentSettings] = field(default_factory=dict[str, AgentSettings])
    """Other ACP agents by name, each a tool of the model."""
    fetch: FetchSettings = field(default_factory=FetchSettings)
    database: DatabaseSettings = field(default_factory=DatabaseSettings)
    prompts: PromptSettings = field(default_factory=PromptSettings)
    worktree: WorktreeSettings = field(default_factory=WorktreeSettings)
    extensions: dict[str, dict[str, Any] | bool] = field(default_factory=dict[str, dict[str, Any] | bool])
    """`[extensions.NAME]` holds the options of an extension; `NAME = false` leaves out one of crow's own."""
    diagnostics: DiagnosticTable = field(default_factory=DiagnosticTable)
    """`"PATTERN" = COMMAND`, or a list of them: what looks for new problems after an edit. `timeout` is in seconds."""
    hooks: dict[str, Any] = field(default_factory=dict[str, Any])
    """`[[hooks.MOMENT]]` runs a command at a moment of the session. A project cannot set it."""

    def __post_init__(self) -> None:
        check_diagnostics(self.diagnostics)


class ProjectPermissions(Struct, kw_only=True):
    """The rules of a project: `[permissions]`."""

    ask: list[str] = field(default_factory=list[str])
    deny: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        parse_rules([*self.ask, *self.deny])


class ProjectConfig(Struct, kw_only=True):
    """The configuration of a project: `.crow/config.toml`.

    It may only add servers, agents and diagnostics, set up worktrees, and tighten permissions. Other settings are
    ignored, and named to the user.
    """

    permissions: ProjectPermissions = field(default_factory=ProjectPermissions)
    mcp: McpSettings = field(default_factory=McpSettings)
    agents: dict[str, AgentSettings] = field(default_factory=dict[str, AgentSettings])
    diagnostics: DiagnosticTable = field(default_factory=DiagnosticTable)
    worktree: WorktreeSettings = field(default_factory=WorktreeSettings)

    def __post_init__(self) -> None:
        check_diagnostics(self.diagnostics)


class McpFile(Struct, kw_only=True):
    """The content of `mcp.json` or `.mcp.json`, in the format of other programs."""

    servers: dict[str, ServerSettings] = field(name="mcpServers", default_factory=dict[str, ServerSettings])
    """VS Code calls the key `servers`."""


def to_seconds(duration: float | None) -> float | None:
    """Convert a duration to seconds: from 10,000 on it is in milliseconds."""
    return duration / 1000 if duration and duration >= 10_000 else duration
