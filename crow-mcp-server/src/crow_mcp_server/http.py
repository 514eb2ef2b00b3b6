"""Serve over HTTP, to clients that send the token."""

import hmac
import secrets
import socket
import sys
from ipaddress import ip_address

from fastmcp import FastMCP
from fastmcp.server.auth import AccessToken, TokenVerifier

MCP_PATH = "/mcp"
MIN_TOKEN_LENGTH = 16  # characters of a token


class BearerTokenVerifier(TokenVerifier):
    """Accepts one fixed token."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token.encode()

    async def verify_token(self, token: str) -> AccessToken | None:
        if hmac.compare_digest(token.encode(errors="replace"), self._token):
            return AccessToken(token=token, client_id="bearer", scopes=[])
        return None


def load_token(file: str | None) -> str:
    """Return the token in a file; without a file, make a token and print it on standard error.

    Raises OSError, and ValueError if the file holds no token or a weak one.
    """
    if file is None:
        token = secrets.token_urlsafe(32)
        print(f"Token for this run: {token}", file=sys.stderr)  # noqa: T201
        return token
    with open(file, encoding="utf-8") as opened:
        token = opened.read().strip()
    if len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(
            f"it needs one word of at least {MIN_TOKEN_LENGTH} characters, such as the output of `openssl rand -hex 32`"
        )
    return token


def open_listener(address: str) -> socket.socket:
    """Return a listening socket for `HOST:PORT`, `:PORT` or `PORT`.

    The default host is 127.0.0.1; port 0 means any free port. Raises OSError, and ValueError for an invalid address.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ValueError("it is not HOST:PORT")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    [(family, _, _, _, place), *_] = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen()  # before the address is printed: its readers may connect at once
    except OSError:
        listener.close()
        raise
    return listener


def serve(server: FastMCP, listener: socket.socket, token: str) -> None:
    """Serve until the process is told to end.

    Requests without the token, for another host name or from another origin are refused.
    """
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"Serving MCP on http://{shown}:{port}{MCP_PATH}", file=sys.stderr, flush=True)  # noqa: T201
    if not ip_address(host).is_loopback:
        print("Others can connect, and nothing is encrypted: put a proxy with TLS in front.", file=sys.stderr)  # noqa: T201
    server.auth = BearerTokenVerifier(token)
    server.run(
        transport="http",
        host=host,
        port=port,
        path=MCP_PATH,
        sockets=[listener],
        show_banner=False,
        host_origin_protection=True,
        uvicorn_config={"log_level": "error", "access_log": False},
    )
