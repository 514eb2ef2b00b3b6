"""What is fetched from the web: asked for politely, checked for changes, kept for a while."""

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
from crow_mcp_server.web.page_text import detect_kind, to_text

USER_AGENT = f"crow-mcp-server/{version('crow-mcp-server')}"
ROBOT_NAME = "crow-mcp-server"  # what robots.txt may call us

FETCH_TIMEOUT = 20.0  # seconds for everything that is asked of servers in a call
MAX_CACHE_BYTES = 16 * 1024 * 1024  # bytes of pages kept
MAX_ROBOTS_BYTES = 512 * 1024  # bytes of a robots.txt that are read
MAX_ROBOTS_AGE = 3600.0  # seconds it is good for
MAX_ROBOTS_FILES = 500


@dataclass
class FetchedPage:
    """A page as it was fetched, and what was read of it."""

    reply: WebReply
    texts: dict[bool, str] = field(default_factory=dict[bool, str])
    """What the model reads, by whether it is raw."""

    @property
    def size(self) -> int:
        return len(self.reply.body) + sum(map(len, self.texts.values()))

    @property
    def validators(self) -> dict[str, str]:
        """The headers that ask whether it is still so."""
        pairs = (("etag", "If-None-Match"), ("last-modified", "If-Modified-Since"))
        return {ask: self.reply.headers[name] for name, ask in pairs if name in self.reply.headers}

    async def read_text(self, *, raw: bool) -> str:
        """What a model reads of it. Raises Unreadable."""
        if raw not in self.texts:
            kind = detect_kind(self.reply.body, self.reply.media_type)
            charset = httpx2.Response(200, headers=self.reply.headers).charset_encoding
            shown = "text" if raw and kind in ("html", "feed", "json") else kind
            self.texts[raw] = await to_text(self.reply.body, shown, charset, self.reply.url)
        return self.texts[raw]


class PageFetcher:
    """Fetches, asks robots.txt before, and keeps what it has fetched."""

    def __init__(
        self, guard: httpcore2.AsyncNetworkBackend, *, robots: bool = True, stay_on_host: bool = False
    ) -> None:
        self._guard = guard
        self._robots = robots
        self._stay_on_host = stay_on_host  # on the host that was asked for
        self._rules: OrderedDict[str, tuple[float, Protego | None]] = OrderedDict()
        self._cache: OrderedDict[str, FetchedPage] = OrderedDict()

    async def fetch(self, url: str, *, use_cache: bool = False, autonomous: bool = True) -> FetchedPage:
        """A page; `again`, the one fetched before if it is still there. `robot`: nobody asked for this very page.

        Raises Refusal.
        """
        asked = parse_url(url)
        kept = self._cache.get(str(asked))
        if kept and use_cache:
            return kept
        agent = f"{USER_AGENT} ({'autonomous' if autonomous else 'user-initiated'}; MCP)"
        try:
            with anyio.fail_after(FETCH_TIMEOUT):
                async with open_client(self._guard, agent) as client:

                    async def permit(before: httpx2.URL, after: httpx2.URL) -> None:
                        if self._stay_on_host and _get_site(before) != _get_site(after):
                            raise ToolRefusal(f"{before} redirects to another host. To go there, fetch {after}")
                        if autonomous and self._robots:
                            await self._check_robots(client, after)

                    known = {kept.reply.url: kept.validators} if kept else {}
                    reply = await fetch_url(client, asked, permit=permit, url_headers=known)
        except TimeoutError:
            raise ToolRefusal(
                f"{asked.host} took more than {FETCH_TIMEOUT:g} seconds. Try again later, or elsewhere."
            ) from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            direct = " Proxies of the environment are not used." if getproxies_environment() else ""
            raise ToolRefusal(
                f"{asked} could not be read: {_describe_error(error)}. Check the URL, or try another.{direct}"
            ) from None
        if kept and reply.status == 304:
            return kept
        page = FetchedPage(reply)
        if reply.status == 200 and "no-store" not in reply.headers.get("cache-control", ""):
            self._cache_page(str(asked), page)
        return page

    def _cache_page(self, url: str, page: FetchedPage) -> None:
        self._cache[url] = page
        self._cache.move_to_end(url)
        while len(self._cache) > 1 and sum(page.size for page in self._cache.values()) > MAX_CACHE_BYTES:
            self._cache.popitem(last=False)

    async def _check_robots(self, client: httpx2.AsyncClient, url: httpx2.URL) -> None:
        origin = str(url.copy_with(raw_path=b"/robots.txt"))
        since, rules = self._rules.get(origin, (0.0, None))
        if not since or monotonic() - since > MAX_ROBOTS_AGE:
            rules = await self._fetch_robots(client, origin)
            self._rules[origin] = monotonic(), rules
            if len(self._rules) > MAX_ROBOTS_FILES:
                self._rules.popitem(last=False)
        if rules and not rules.can_fetch(str(url), ROBOT_NAME):
            raise ToolRefusal(
                f"{origin} asks programs not to fetch {url}. Use another source, or ask the user to open the page."
            )

    async def _fetch_robots(self, client: httpx2.AsyncClient, origin: str) -> Protego | None:
        async def permit(before: httpx2.URL, after: httpx2.URL) -> None: ...

        reply = await fetch_url(
            client, parse_url(origin), permit=permit, url_headers={}, limit=MAX_ROBOTS_BYTES, whole=False
        )
        if reply.status in (401, 403) or reply.status >= 500:
            raise ToolRefusal(
                f"{origin} answers {reply.status}, so programs may fetch nothing there. Use another source."
            )
        return None if reply.status >= 400 else Protego.parse(reply.body.decode("utf-8", "replace"))


def _get_site(url: httpx2.URL) -> tuple[str, int | None]:
    return url.host.removeprefix("www."), url.port


def _describe_error(error: Exception) -> str:
    return (str(error) or type(error).__name__).rstrip(".")
