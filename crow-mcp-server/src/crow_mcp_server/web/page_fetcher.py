"""Fetch pages from the web, obey robots.txt, and cache the pages."""

from collections import OrderedDict
from dataclasses import dataclass, field
from importlib.metadata import version
from time import monotonic
from urllib.request import getproxies_environment

import anyio
import httpcore2
import httpx2
from protego import Protego  # pyright: ignore[reportMissingTypeStubs]

from crow_mcp_server.refusal import ToolRefusal
from crow_mcp_server.web.network import WebReply, fetch_url, open_client, parse_url
from crow_mcp_server.web.page_text import SOURCE_KINDS, detect_kind, to_text

USER_AGENT = f"crow-mcp-server/{version('crow-mcp-server')}"
ROBOT_NAME = "crow-mcp-server"  # this program's name in robots.txt

FETCH_TIMEOUT = 20.0  # seconds for all requests of one tool call
MAX_CACHE_BYTES = 16 * 1024 * 1024  # of all pages
MAX_ROBOTS_BYTES = 512 * 1024  # of one robots.txt; the rest is ignored
MAX_ROBOTS_AGE = 3600.0  # seconds after which a robots.txt is fetched again
MAX_ROBOTS_FILES = 500  # in the cache


@dataclass
class FetchedPage:
    """A fetched page and its text."""

    reply: WebReply
    texts: dict[bool, str] = field(default_factory=dict[bool, str])
    """The text for the model; the key says whether it is raw."""

    @property
    def size(self) -> int:
        return len(self.reply.body) + sum(map(len, self.texts.values()))

    @property
    def validators(self) -> dict[str, str]:
        """The request headers that ask for the page only if it has changed."""
        pairs = (("etag", "If-None-Match"), ("last-modified", "If-Modified-Since"))
        return {ask: self.reply.headers[name] for name, ask in pairs if name in self.reply.headers}

    async def read_text(self, *, raw: bool) -> str:
        """Return the text for the model; `raw` means the source of HTML, feeds and JSON. Raises UnreadablePage."""
        if raw not in self.texts:
            kind = detect_kind(self.reply.body, self.reply.media_type)
            charset = httpx2.Response(200, headers=self.reply.headers).charset_encoding
            kind = "text" if raw and kind in SOURCE_KINDS else kind
            self.texts[raw] = await to_text(self.reply.body, kind, charset, self.reply.url)
        return self.texts[raw]


class PageFetcher:
    """Fetches pages and caches them; checks robots.txt before each request."""

    def __init__(
        self, network: httpcore2.AsyncNetworkBackend, *, obey_robots: bool = True, stay_on_host: bool = False
    ) -> None:
        self._network = network
        self._obey_robots = obey_robots
        self._stay_on_host = stay_on_host
        self._rules: OrderedDict[str, tuple[float, Protego | None]] = OrderedDict()
        self._cache: OrderedDict[str, FetchedPage] = OrderedDict()

    async def fetch(self, url: str, *, use_cache: bool = False, autonomous: bool = True) -> FetchedPage:
        """Fetch a page; with `use_cache`, return the cached one without a request if there is one.

        `autonomous` means that no person asked for this page, so that robots.txt is obeyed. Raises ToolRefusal.
        """
        parsed = parse_url(url)
        cached = self._cache.get(str(parsed))
        if cached and use_cache:
            return cached
        agent = f"{USER_AGENT} ({'autonomous' if autonomous else 'user-initiated'}; MCP)"
        try:
            with anyio.fail_after(FETCH_TIMEOUT):
                async with open_client(self._network, agent) as client:

                    async def permit(before: httpx2.URL, after: httpx2.URL) -> None:
                        if self._stay_on_host and _get_site(before) != _get_site(after):
                            raise ToolRefusal(f"{before} redirects to another host. To go there, fetch {after}")
                        if autonomous and self._obey_robots:
                            await self._check_robots(client, after)

                    url_headers = {cached.reply.url: cached.validators} if cached else {}
                    reply = await fetch_url(client, parsed, permit=permit, url_headers=url_headers)
        except TimeoutError:
            raise ToolRefusal(
                f"{parsed.host} took more than {FETCH_TIMEOUT:g} seconds. Try again later, or elsewhere."
            ) from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            direct = " Proxies of the environment are not used." if getproxies_environment() else ""
            raise ToolRefusal(
                f"{parsed} could not be read: {_describe_error(error)}. Check the URL, or try another.{direct}"
            ) from None
        if cached and reply.status == 304:
            return cached
        page = FetchedPage(reply)
        if reply.status == 200 and "no-store" not in reply.headers.get("cache-control", ""):
            self._cache_page(str(parsed), page)
        return page

    def _cache_page(self, url: str, page: FetchedPage) -> None:
        self._cache[url] = page
        self._cache.move_to_end(url)
        while len(self._cache) > 1 and sum(page.size for page in self._cache.values()) > MAX_CACHE_BYTES:
            self._cache.popitem(last=False)

    async def _check_robots(self, client: httpx2.AsyncClient, url: httpx2.URL) -> None:
        robots_url = str(url.copy_with(raw_path=b"/robots.txt"))
        fetched_at, rules = self._rules.get(robots_url, (0.0, None))
        if not fetched_at or monotonic() - fetched_at > MAX_ROBOTS_AGE:
            rules = await self._fetch_robots(client, robots_url)
            self._rules[robots_url] = monotonic(), rules
            if len(self._rules) > MAX_ROBOTS_FILES:
                self._rules.popitem(last=False)
        if rules and not rules.can_fetch(str(url), ROBOT_NAME):
            raise ToolRefusal(
                f"{robots_url} asks programs not to fetch {url}. Use another source, or ask the user to open the page."
            )

    async def _fetch_robots(self, client: httpx2.AsyncClient, robots_url: str) -> Protego | None:
        async def permit(before: httpx2.URL, after: httpx2.URL) -> None:
            if self._stay_on_host and _get_site(before) != _get_site(after):
                raise RobotsElsewhere(f"{before} redirects to another host.")

        try:
            reply = await fetch_url(
                client, parse_url(robots_url), permit=permit, url_headers={}, limit=MAX_ROBOTS_BYTES, whole=False
            )
        except RobotsElsewhere:
            return None  # nobody has allowed that host, and this one has no rules of its own
        if reply.status in (401, 403) or reply.status >= 500:
            raise ToolRefusal(
                f"{robots_url} answers {reply.status}, so programs may fetch nothing there. Use another source."
            )
        return None if reply.status >= 400 else Protego.parse(reply.body.decode("utf-8", "replace"))


class RobotsElsewhere(ToolRefusal):
    """A robots.txt redirects to another host."""


def _get_site(url: httpx2.URL) -> tuple[str, int | None]:
    """Return the host, without "www.", and the port; both stay when a redirect stays on the host."""
    return url.host.removeprefix("www."), url.port


def _describe_error(error: Exception) -> str:
    return (str(error) or type(error).__name__).rstrip(".")
