"""An HTTP endpoint: its addresses, whether it is on this machine, and a client for it.

The HTTP client is imported where it is used: importing it takes a third of the start-up time, and `initialize` is
answered without it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import httpx2

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1", "0.0.0.0"})


CONNECT = 10.0
"""Seconds a connection may take."""


def endpoint(base_url: str, path: str) -> str:
    """An address below `base_url`, which may also be the whole address of the chat completions."""
    root, mark, query = base_url.partition("?")
    return f"{root.rstrip('/').removesuffix('/chat/completions')}/{path}{mark}{query}"


def is_local(url: str) -> bool:
    """Whether it is a server on this machine."""
    try:
        return urlsplit(url).hostname in LOOPBACK
    except ValueError:
        return False


def http_client(base_url: str, key: str, patience: float, headers: Mapping[str, str]) -> "httpx2.AsyncClient":
    """A client for one endpoint; `patience` is in seconds. Raises UnicodeEncodeError for a key no header can hold."""
    import ssl

    import httpx2

    return httpx2.AsyncClient(
        headers={**({"Authorization": f"Bearer {key.strip()}"} if key else {}), **headers},
        timeout=httpx2.Timeout(patience, connect=min(patience, CONNECT)),
        # Reading the system's certificates takes longer than all else here; plain HTTP needs none of them, and a
        # context that trusts nobody is safe if a redirect leads elsewhere.
        verify=ssl.create_default_context()
        if base_url.lower().startswith("https:")
        else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        trust_env=not is_local(base_url),
    )
