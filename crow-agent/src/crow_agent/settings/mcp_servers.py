"""Make MCP servers of their settings, with their logins and credentials."""

import os.path
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from crow_core.acp.schema import EnvVariable, HttpHeader, McpServer
from crow_core.errors import ConfigError
from crow_core.masking import find_secrets
from crow_core.mcp.limit import Limit
from crow_core.mcp.server import Server
from crow_core.mcp.server_source import from_acp
from crow_system.files import make_private_folder
from msgspec import UNSET

from crow_agent.settings.faults import to_read_error
from crow_agent.settings.structs import OAuthSettings, PluginServer, ServerSettings, UnusableServer

if TYPE_CHECKING:
    from crow_core.mcp.oauth import Visit

TOKENS_FOLDER = "oauth"
"""The folder in crow's data for OAuth tokens, used where there is no keyring."""

LOGIN_TIMEOUT = 330.0
"""Seconds that a server may take to start if the user may have to log in to it."""


def to_server(
    name: str,
    settings: ServerSettings,
    cwd: str,
    *,
    tokens: Path,
    visit: "Visit",
    limit: Limit | None = None,
    document: str = "",
) -> Server:
    """Make a server from its settings, for a session whose folder is `cwd`.

    `tokens` is the folder for OAuth tokens; `visit` opens a URL for the user; `limit` starts a command in
    its sandbox. `document` is the address of a document that describes crow to authorization servers. A server that
    cannot be used reports why when it starts.
    """

    oauth = settings.oauth or OAuthSettings()

    def login() -> Any:
        from crow_core.mcp.oauth import Login  # imports FastMCP

        return Login(
            settings.url,
            tokens,
            visit,
            client_id=oauth.client_id or document,
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
        if isinstance(settings, PluginServer) and settings.data:
            make_private_folder(Path(settings.data))
    except OSError as error:
        return Server(name, partial(raise_error, ConfigError(f"Its folder for data cannot be made: {error}.")))
    except ConfigError as error:
        return Server(name, partial(raise_error, error))
    has_credentials, wants_login = settings.auth == "client_credentials", settings.wants_login
    auth = present_credentials if has_credentials else login if wants_login else None
    server = from_acp(config, os.path.join(cwd, os.path.expanduser(settings.cwd)), auth, limit)
    server.advice = "" if limit is None else describe_sandbox(settings)
    server.secrets = find_secrets(settings)
    server.allow, server.deny, server.trust = settings.allow or server.allow, settings.deny, settings.trust
    server.timeout = settings.timeout or server.timeout
    server.start_timeout = settings.start_timeout or (LOGIN_TIMEOUT if wants_login else server.start_timeout)
    return server


def describe_sandbox(settings: ServerSettings) -> str:
    """Return the advice to add to the error of a sandboxed server that does not start."""
    network = "with" if settings.network else "without"
    return (
        f" It runs in a sandbox ({settings.sandbox}, {network} network). To change that, set sandbox and network of "
        "this server; for the servers of projects, run: crow config set mcp.project_sandbox off"
    )


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
