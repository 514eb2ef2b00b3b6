"""An HTTP endpoint: its URLs, and a client for it.

The HTTP client is imported where it is used: importing it takes a third of the start-up time, and `initialize` is
answered without it.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import httpx2

LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1", "0.0.0.0"})

CONNECT_TIMEOUT = 10.0
"""Seconds that it may take to connect."""


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
        timeout=httpx2.Timeout(timeout, connect=min(timeout, CONNECT_TIMEOUT)),
        # Reading the system's certificates takes longer than everything else here, and plain HTTP needs none of them.
        # A context without certificates is safe if a redirect leads to https.
        verify=ssl.create_default_context()
        if base_url.lower().startswith("https:")
        else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        trust_env=not is_local(base_url),
        transport=transport,
    )
