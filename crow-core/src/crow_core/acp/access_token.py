"""Checks whether a WebSocket request may connect: by its token, its Host header and its Origin header."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from hmac import compare_digest
from ipaddress import ip_address
from re import fullmatch

from starlette.datastructures import Headers
from starlette.types import Scope

SUBPROTOCOL = "acp"
"""The subprotocol that the server selects; a client that sends its token as a subprotocol offers this one, too."""


@dataclass(frozen=True)
class AccessPolicy:
    """Rules for requests: they need the token, a known Host header and, from a web page, an allowed origin."""

    token: str = field(repr=False)
    hosts: Collection[str]
    """Names and addresses (IPv6 in brackets) that a Host header may have. A DNS rebinding attack has another one."""
    origins: Collection[str] = ()
    """Origins of web pages that may connect, as `https://example.org`; requests without an origin are allowed."""
    accepts_any_address: bool = False
    """True if a Host header may have any IP address; DNS rebinding needs a name."""

    def check(self, scope: Scope) -> tuple[int, str] | None:
        """Return the HTTP status and the reason if a request is refused, None if it is allowed."""
        headers = Headers(scope=scope)
        if not self.accepts_host(headers.get("host", "")):
            return 403, "This server does not go by the name in your Host header."
        if (origin := headers.get("origin")) is not None and origin.lower() not in self.origins:
            return 403, "Pages of your origin may not connect."
        if not any(compare_digest(token.encode(), self.token.encode()) for token in read_tokens(scope, headers)):
            return 401, (
                "Send the token that the server was started with, as the header Authorization: Bearer TOKEN,"
                f" or offer the subprotocols {SUBPROTOCOL} and bearer.TOKEN."
            )
        return None

    def accepts_host(self, host: str) -> bool:
        """Return whether the name in a Host header, which may end with a port, is allowed."""
        match = fullmatch(r"(\[[^]]*\]|[^:]*)(:\d*)?", host.lower())
        return match is not None and (match[1] in self.hosts or (self.accepts_any_address and is_address(match[1])))


def is_address(host: str) -> bool:
    """Return whether a host is an IP address, which may be in brackets."""
    try:
        ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def read_tokens(scope: Scope, headers: Headers) -> Iterator[str]:
    """Yield the tokens of a request, from its header and, since web pages cannot set that, its subprotocols."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        yield token.strip()
    for subprotocol in scope.get("subprotocols", ()):
        if subprotocol.startswith("bearer."):
            yield subprotocol.removeprefix("bearer.")
