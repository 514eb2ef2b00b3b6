"""`crow serve`: the agent behind a WebSocket, for clients that connect to it instead of starting it."""

import asyncio
import logging
import os
import re
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from secrets import token_urlsafe

import click
from crow_core.acp.websocket import PATH, AccessPolicy, WebSocketServer
from crow_core.agent import Agent
from crow_core.app import Crow
from crow_core.errors import ConfigError

from crow_cli.house import build

REMOTE = (
    "crow: {url} can be reached from other machines. Whoever has the token can do what you can, and all that is said"
    " passes unencrypted, the token included. An SSH tunnel to a loopback address, or a TLS proxy, is safer."
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
    """Serve clients until a signal comes; then their turns are cancelled and answered, and all is put away."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="crow: %(message)s")
    secret, hint = choose_token(token, token_file)
    pages = [whole_origin(origin) for origin in origins]
    listener, address = listen(host, port, allow_remote)
    with listener:
        crow = await build(os.environ, model=model, known=[secret])
        shown = f"[{address}]" if address.version == 6 else str(address)
        url = f"ws://{shown}:{listener.getsockname()[1]}{PATH}"
        names = {"localhost", "127.0.0.1", "[::1]", shown, host.lower()}
        if not address.is_loopback:
            click.echo(REMOTE.format(url=url), err=True)
            names.add(socket.gethostname().lower())
        gate = AccessPolicy(secret, names, pages, accepts_any_address=address.is_unspecified)
        server = WebSocketServer(gate, lambda transport: Agent(transport, crow).serve(), max_connections)
        try:
            await warm_up(crow)
            await server.listen(listener)
            click.echo(f"{url} Authorization: Bearer {hint}")
            os.dup2(2, 1)  # what else is printed in this process goes elsewhere
            with suppress(asyncio.CancelledError):
                await asyncio.get_running_loop().create_future()  # until a signal comes
            await server.close()
        finally:
            await crow.shut_down()
    return 0


async def warm_up(crow: Crow) -> None:
    """Load what is slow before anybody waits for it: the database, and the built-in tools. Raises StoreError."""
    for server in crow.servers:
        server.connect()
    await crow.list_sessions.run("", "", 1)
    await asyncio.wait([server.connect() for server in crow.servers])


def choose_token(token: str, file: Path | None) -> tuple[str, str]:
    """The token, and what to show of it: all of it only when it was made here. Raises ConfigError."""
    if token and file:
        raise ConfigError("--token or --token-file: give one of them.")
    if file:
        try:
            token = file.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--token-file: {file} cannot be read ({error}).") from error
    elif not token:
        made = token_urlsafe(32)
        return made, made
    if not re.fullmatch(r"[\w.~-]{16,}", token, re.ASCII):
        where = f"--token-file: what {file} holds" if file else "--token: it"
        raise ConfigError(f"{where} has to be 16 or more letters, digits, or any of . _ ~ -, on one line.")
    return token, f"(what {file} holds)" if file else "(your --token)"


def whole_origin(origin: str) -> str:
    """An origin as browsers write it. Raises ConfigError."""
    origin = origin.lower().rstrip("/")
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#*@\s]+", origin):
        raise ConfigError(
            f"--allow-origin: {origin!r} is no origin. Write it like https://example.org or http://localhost:5173."
        )
    return origin


def listen(host: str, port: int, allow_remote: bool) -> tuple[socket.socket, IPv4Address | IPv6Address]:
    """A socket that listens, and its address. Raises ConfigError."""
    try:
        family, _, _, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host: {host!r} is not an address ({error}).") from error
    address = ip_address(str(found[0]).partition("%")[0])
    if not address.is_loopback and not allow_remote:
        raise ConfigError(f"--host: {address} can be reached from other machines. Add --allow-remote if it is to be.")
    try:
        return socket.create_server(found[:2], family=family), address
    except OSError as error:
        why = os.strerror(error.errno or 0)
        words = f"--port: {port} of {address} cannot be had ({why}). Choose another; 0 is any free one."
        raise ConfigError(words) from error
