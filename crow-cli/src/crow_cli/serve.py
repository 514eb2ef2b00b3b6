"""`crow serve`: serve ACP over WebSocket, for clients that connect to a running agent instead of starting one."""

import asyncio
import os
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from secrets import token_urlsafe

import click
from crow_agent.app import build
from crow_core.acp.access_token import AccessPolicy
from crow_core.acp.websocket import PATH, WebSocketServer
from crow_core.agent.acp_agent import AcpAgent
from crow_core.app import Crow
from crow_core.errors import ConfigError

from crow_cli.process import hide_memory, log_to_stderr

REMOTE_WARNING = (
    "crow: {url} can be reached from other machines. Whoever has the token can do what you can, and all messages"
    " pass unencrypted, the token included. An SSH tunnel to a loopback address, or a TLS proxy, is safer."
)


async def serve(
    model: str,
    host: str,
    port: int,
    token: str,
    token_file: Path | None,
    origins: Sequence[str],
    max_connections: int,
    allow_remote: bool,
) -> int:
    """Serve clients until SIGINT, SIGTERM or SIGHUP; then cancel and answer their turns, close all, and return 0."""
    log_to_stderr()
    secret, hint = choose_token(token, token_file)
    pages = [parse_origin(origin) for origin in origins]
    listener, address = listen(host, port, allow_remote)
    with listener:
        hide_memory()
        crow = await build(os.environ, model=model, extra_secrets=[secret])
        host_in_url = f"[{address}]" if address.version == 6 else str(address)
        url = f"ws://{host_in_url}:{listener.getsockname()[1]}{PATH}"
        names = {"localhost", "127.0.0.1", "[::1]", host_in_url, host.lower()}
        if not address.is_loopback:
            click.echo(REMOTE_WARNING.format(url=url), err=True)
            names.add(socket.gethostname().lower())
        gate = AccessPolicy(secret, names, pages, accepts_any_address=address.is_unspecified)
        server = WebSocketServer(gate, lambda transport: AcpAgent(transport, crow).serve(), max_connections)
        try:
            await preload(crow)
            await server.listen(listener)
            click.echo(f"{url} Authorization: Bearer {hint}")
            os.dup2(2, 1)  # libraries may print: standard output ends with the address
            with suppress(asyncio.CancelledError):
                await asyncio.get_running_loop().create_future()  # until a signal comes
            await server.close()
        finally:
            await crow.shut_down()
    return 0


async def preload(crow: Crow) -> None:
    """Open the database and load the built-in tools before the first client needs them. Raises StoreError."""
    for server in crow.servers:
        server.connect()
    if crow.store is not None:
        await crow.store.list_sessions("", "", 1, "include")
    await asyncio.wait([server.connect() for server in crow.servers])


def choose_token(token: str, file: Path | None) -> tuple[str, str]:
    """Return the token, and the text that is printed in its place: only a new token is printed. Raises ConfigError."""
    if token and file:
        raise ConfigError("--token or --token-file: give one of them.")
    if file:
        try:
            token = file.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--token-file: {file} cannot be read ({error}).") from error
    elif not token:
        new = token_urlsafe(32)
        return new, new
    if not re.fullmatch(r"[\w.~-]{16,}", token, re.ASCII):
        where = f"--token-file: the token in {file}" if file else "--token: the token"
        raise ConfigError(f"{where} has to be 16 or more letters, digits, or any of . _ ~ -, on one line.")
    return token, f"(the token in {file})" if file else "(your --token)"


def parse_origin(origin: str) -> str:
    """Check an origin and return it as browsers write it. Raises ConfigError."""
    origin = origin.lower().rstrip("/")
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#*@\s]+", origin):
        raise ConfigError(
            f"--allow-origin: {origin!r} is not an origin. Write it like https://example.org or http://localhost:5173."
        )
    return origin


def listen(host: str, port: int, allow_remote: bool) -> tuple[socket.socket, IPv4Address | IPv6Address]:
    """Open a listening socket; return it and its address. Raises ConfigError."""
    try:
        family, _, _, _, socket_address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host: {host!r} is not an address ({error}).") from error
    address = ip_address(str(socket_address[0]).partition("%")[0])
    if not address.is_loopback and not allow_remote:
        raise ConfigError(f"--host: {address} can be reached from other machines. Add --allow-remote to allow that.")
    try:
        return socket.create_server(socket_address[:2], family=family), address
    except OSError as error:
        why = os.strerror(error.errno or 0)
        message = f"--port: {port} of {address} cannot be used ({why}). Choose another; 0 chooses a free one."
        raise ConfigError(message) from error
