"""HTTP to public addresses only, and to hosts that the user allowed."""

import socket
import ssl
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

import anyio
import httpcore2
import httpx2
from crow_system.addresses import is_public
from httpcore2 import AsyncNetworkBackend, AsyncNetworkStream, ConnectError, ConnectTimeout

from crow_mcp_server.refusal import ToolRefusal

MAX_BYTES = 10 * 1024 * 1024  # of a reply's body, both compressed and decompressed
MAX_REDIRECTS = 10
MAX_ADDRESSES = 4  # of a host that are tried
CONNECT_TIMEOUT = 10.0  # seconds for each address
ENCODINGS = {"", "identity", "gzip", "deflate"}

HostResolver = Callable[[str, int], Awaitable[list[str]]]


async def resolve_host(host: str, port: int) -> list[str]:
    """Return the addresses of a host name, or of an address in any spelling. Raises ConnectError."""
    try:
        addresses = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConnectError(f"no address is known for {host}") from error
    return list(dict.fromkeys(address[4][0] for address in addresses))


class PublicNetwork(AsyncNetworkBackend):
    """Connects to public addresses and allowed hosts only.

    It resolves a host itself and connects to the addresses that it checked, so a DNS answer that changes in between
    has no effect.
    """

    def __init__(
        self,
        allowed: Collection[str] = (),
        resolve: HostResolver = resolve_host,
        dial: AsyncNetworkBackend | None = None,
    ) -> None:
        self._allowed = {host.lower() for host in allowed}
        self._resolve = resolve
        self._dial: AsyncNetworkBackend = dial or httpcore2.AnyIOBackend()  # pyright: ignore[reportAttributeAccessIssue]

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> AsyncNetworkStream:
        resolved = await self._resolve(host, port)
        allowed = bool(self._allowed & {host.lower(), f"{host}:{port}".lower(), f"[{host}]:{port}".lower()})
        addresses = [address for address in resolved if allowed or is_public(address)][:MAX_ADDRESSES]
        if not addresses:
            raise _make_refusal(host, resolved)
        failed: Exception | None = None
        for address in addresses:
            try:
                stream = await self._dial.connect_tcp(address, port, timeout, local_address, socket_options)
            except (ConnectError, ConnectTimeout) as error:
                failed = error
                continue
            here, there = stream.get_extra_info("client_addr"), stream.get_extra_info("server_addr")
            if allowed or not here or here[0] != there[0]:
                return stream
            await stream.aclose()  # a public address of this machine
            raise _make_refusal(host, [address])
        raise failed or ConnectError(f"no address is known for {host}")

    async def sleep(self, seconds: float) -> None:
        await anyio.sleep(seconds)


def _make_refusal(host: str, addresses: list[str]) -> ToolRefusal:
    where = "" if addresses == [host] else f" ({', '.join(addresses)})"
    return ToolRefusal(
        f"{host}{where} is not on the public internet, and this tool reaches nothing else. "
        "If the user wants it reached, they can allow it: --allow-host HOST when crow-mcp-server is started, "
        "allow_hosts of [fetch] in crow's config.toml."
    )


class GuardedTransport(httpx2.AsyncHTTPTransport):
    """HTTP over a given network, without proxies: a proxy would connect to addresses that nobody checked."""

    def __init__(self, network: AsyncNetworkBackend) -> None:
        super().__init__(verify=_make_ssl_context(), trust_env=False)
        self._pool = httpcore2.AsyncConnectionPool(ssl_context=_make_ssl_context(), network_backend=network)


@cache
def _make_ssl_context() -> ssl.SSLContext:
    return httpx2.create_ssl_context()  # respects SSL_CERT_FILE


@dataclass(frozen=True)
class WebReply:
    """A complete HTTP response."""

    url: str
    """The URL after redirects."""
    status: int
    reason: str
    headers: httpx2.Headers
    body: bytes

    @property
    def media_type(self) -> str:
        """The media type in lower case, without parameters; "" if the server sent none."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


def open_client(network: AsyncNetworkBackend, agent: str) -> httpx2.AsyncClient:
    """Return an HTTP client over a network. Its timeouts hold for each step, so callers must also limit the whole."""
    headers = {
        "User-Agent": agent,
        "Accept": "text/markdown, text/html;q=0.9, application/xhtml+xml;q=0.9, */*;q=0.8",
        "Accept-Language": "en, *;q=0.5",
        "Accept-Encoding": "gzip, deflate",
    }
    timeout = httpx2.Timeout(30.0, connect=CONNECT_TIMEOUT)
    return httpx2.AsyncClient(transport=GuardedTransport(network), trust_env=False, headers=headers, timeout=timeout)


def parse_url(url: str) -> httpx2.URL:
    """Parse and normalize a URL. Raises ToolRefusal when it cannot be fetched."""
    try:
        parsed = httpx2.URL(url.strip())
    except (httpx2.InvalidURL, ValueError) as error:
        raise ToolRefusal(
            f"{url[:200]!r} is not a URL: {error}. Give one that starts with https:// or http://."
        ) from None
    if parsed.scheme not in ("http", "https") or not parsed.host or (parsed.port or 0) > 65535:
        raise ToolRefusal(f"{url[:200]!r} is not on the web. Give a URL that starts with https:// or http://.")
    if parsed.userinfo:
        raise ToolRefusal("The URL has a user name or a password before an @. Give it without.")
    return parsed.copy_with(fragment=None)


async def fetch_url(
    client: httpx2.AsyncClient,
    url: httpx2.URL,
    *,
    permit: Callable[[httpx2.URL, httpx2.URL], Awaitable[None]],
    url_headers: Mapping[str, Mapping[str, str]],
    limit: int = MAX_BYTES,
    whole: bool = True,
) -> WebReply:
    """Fetch a URL and follow its redirects.

    `permit(before, after)` runs before each request and may raise; `url_headers` has request headers by URL, such as
    cache validators. A body of more than `limit` bytes is refused if `whole`, else cut. Raises ToolRefusal and
    httpx2's errors.
    """
    start, before = url, url
    for _ in range(MAX_REDIRECTS + 1):
        await permit(before, url)
        async with client.stream("GET", url, headers=dict(url_headers.get(str(url), {}))) as response:
            if response.next_request is None:
                body = await _read_body(response, limit, whole)
                return WebReply(str(url), response.status_code, response.reason_phrase, response.headers, body)
            before, url = url, parse_url(str(response.next_request.url))
    raise ToolRefusal(f"{start} redirects more than {MAX_REDIRECTS} times, so it leads nowhere. Try another URL.")


async def _read_body(response: httpx2.Response, limit: int, whole: bool) -> bytes:
    encoding = response.headers.get("content-encoding", "").strip().lower()
    if encoding not in ENCODINGS:  # also refuses several layers: decompression bombs
        raise ToolRefusal(
            f"{response.url.host} sends the page packed as {encoding!r}, which this tool does not unpack."
        )
    body = bytearray()
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > limit or response.num_bytes_downloaded > limit:
            if not whole:
                break
            raise ToolRefusal(
                f"{response.url} has more than the {limit:,} bytes this tool reads. "
                "Download it in the terminal (curl -o FILE URL) and read parts of it."
            )
    return bytes(body[:limit])
