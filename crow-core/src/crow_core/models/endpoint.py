"""An HTTP endpoint: its URLs, and a client for it.

The HTTP client is imported where it is used: importing it takes a third of the start-up time, and `initialize` is
answered without it.
"""

import re
from asyncio import AbstractEventLoop, get_running_loop
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    import httpx2

LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1", "0.0.0.0"})

CONNECT_TIMEOUT = 10.0
"""Seconds that it may take to connect."""
MAX_CONNECTIONS = 100
"""Connections to one endpoint at a time, and those that are kept for further requests."""


@dataclass(eq=False)
class HttpPool:
    """A client for one endpoint with its connections, for all models of an event loop whose settings are equal."""

    pools: "dict[Hashable, HttpPool]"
    """The pools of the event loop."""
    settings: Hashable
    client: "httpx2.AsyncClient"
    users: int = 0

    async def release(self) -> None:
        """Close the connections if no other model uses them."""
        self.users -= 1
        if self.users == 0:
            del self.pools[self.settings]
            await self.client.aclose()


POOLS: WeakKeyDictionary[AbstractEventLoop, dict[Hashable, HttpPool]] = WeakKeyDictionary()
"""The pools in use, by event loop and settings."""


def share_http_pool(
    base_url: str,
    key: str,
    timeout: float,
    headers: Mapping[str, str],
    transport: "httpx2.AsyncBaseTransport | None" = None,
) -> HttpPool:
    """Return the pool with these settings, to be released after use; they are those of `create_http_client`.

    Raises UnicodeEncodeError.
    """
    settings = (base_url, key, timeout, tuple(headers.items()), transport)
    pools = POOLS.setdefault(get_running_loop(), {})
    if settings not in pools:
        pools[settings] = HttpPool(pools, settings, create_http_client(base_url, key, timeout, headers, transport))
    pools[settings].users += 1
    return pools[settings]


def join_url(base_url: str, path: str) -> str:
    """Return the URL of a path below `base_url`, which may also be the whole URL of the chat completions."""
    root, mark, query = base_url.partition("?")
    return f"{root.rstrip('/').removesuffix('/chat/completions')}/{path}{mark}{query}"


def to_display_url(url: str) -> str:
    """Return a URL without user, password, query and fragment, which may be secret."""
    return re.sub(r"^((?:[a-z][a-z0-9+.-]*:)?//)?[^/?#]*@|/*([?#].*)?$", r"\1", url, flags=re.I | re.S)


def is_local(url: str) -> bool:
    """Return whether a URL is one of a server on this machine."""
    try:
        return urlsplit(url).hostname in LOOPBACK_HOSTS
    except ValueError:
        return False


def find_proxy(url: str) -> str:
    """Return the proxy that the environment, or the system, sets for a URL; "" if there is none."""
    from urllib.request import getproxies, proxy_bypass  # only an error needs it

    parts, proxies = urlsplit(url), getproxies()
    if is_local(url) or proxy_bypass(parts.hostname or ""):
        return ""
    return proxies.get(parts.scheme) or proxies.get("all") or ""


def is_on_private_network(url: str) -> bool:
    """Return whether a URL is one of a server on this machine or on a private network."""
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        return False
    if is_local(url) or "." not in host or host.endswith((".local", ".lan", ".internal")):
        return True
    try:
        return ip_address(host).is_private
    except ValueError:
        return False


def create_http_client(
    base_url: str,
    key: str,
    timeout: float,
    headers: Mapping[str, str],
    transport: "httpx2.AsyncBaseTransport | None" = None,
) -> "httpx2.AsyncClient":
    """Create a client for one endpoint; `timeout` is in seconds, `transport` replaces the network.

    Raises UnicodeEncodeError for a key that no header can hold.
    """
    import ssl

    import httpx2

    return httpx2.AsyncClient(
        headers={**({"Authorization": f"Bearer {key.strip()}"} if key else {}), **headers},
        # A request waits for a free connection as long as it takes: its turn may be one of a thousand.
        timeout=httpx2.Timeout(timeout, connect=min(timeout, CONNECT_TIMEOUT), pool=None),
        # SSL_CERT_FILE, or the certificates of the system, on macOS of its keychain. Reading them takes longer than
        # everything else here, and plain HTTP needs none: a context without any is safe if a redirect leads to https.
        verify=httpx2.create_ssl_context()
        if base_url.lower().startswith("https:")
        else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        # A connection is kept for the next request also where many sessions are at work; httpx2 keeps 20 of 100.
        limits=httpx2.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS),
        trust_env=not is_local(base_url),
        transport=transport,
    )
