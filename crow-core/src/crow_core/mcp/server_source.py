"""The servers that a client or the configuration names: their processes and addresses."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from msgspec import UNSET

from crow_core.acp.schema import McpServer
from crow_core.masking import find_secrets, find_secrets_in_text
from crow_core.mcp.limit import Limit
from crow_core.mcp.server import Server
from crow_core.mcp.watchdog import MARK


@dataclass(eq=False)
class ServerSource:
    """The `source` of a server that a client or the configuration names: makes its transport."""

    config: McpServer
    cwd: str
    """The working directory of a command."""
    auth: Callable[[], Any] | None
    """Returns the object that logs in to a URL; None sends only the configured headers."""
    limit: Limit | None = None
    """Runs a command in a sandbox; None runs it as it is."""
    server: Server = field(init=False)
    """Set by `from_acp`."""

    def __call__(self) -> Any:
        from crow_core.mcp.oauth import NoLogin  # these import FastMCP
        from crow_core.mcp.remote import EVENT_LIMIT, HttpClientFactory, UrlTransport
        from crow_core.mcp.sdk import SSETransport
        from crow_core.mcp.stdio import CommandTransport

        config = self.config
        if config.url is UNSET:
            env = {} if config.env is UNSET else {variable.name: variable.value for variable in config.env or ()}
            env[MARK] = f"{os.environ.get(MARK, '')}:{self.server.mark}"
            args = () if config.args is UNSET else config.args or ()
            return CommandTransport(str(config.command), args, env, self.cwd, self.server.calls.find_folder, self.limit)
        headers = {} if config.headers is UNSET else {header.name: header.value for header in config.headers or ()}
        http, auth = (
            HttpClientFactory(self.server.calls.find_folder, self._add_secret),
            self.auth() if self.auth else NoLogin(),
        )
        if config.type != "sse":
            return UrlTransport(str(config.url), headers, auth, http)
        http.limit = EVENT_LIMIT
        return SSETransport(str(config.url), headers, auth, httpx_client_factory=http)

    def _add_secret(self, authorization: str) -> None:
        """Mask the value of an `Authorization` header from now on."""
        self.server.secrets = {*self.server.secrets, *find_secrets_in_text(authorization, "authorization")}


def from_acp(config: McpServer, cwd: str, auth: Callable[[], Any] | None = None, limit: Limit | None = None) -> Server:
    """Convert a server of ACP to a `Server`. `auth` returns the object that logs in to its URL; `limit` runs its
    command in a sandbox."""
    source = ServerSource(config, cwd, auth, limit)
    mark = uuid4().hex if config.url is UNSET else ""
    source.server = Server(config.name, source, mark=mark, secrets=find_secrets(config))
    return source.server
