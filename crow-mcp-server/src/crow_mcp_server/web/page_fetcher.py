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

from crow_mcp_server.refusal import Refusal
from crow_mcp_server.web.network import Reply, get, open_client, parse
from crow_mcp_server.web.page_text import kind_of, read

AGENT = f"crow-mcp-server/{version('crow-mcp-server')}"
ROBOT = "crow-mcp-server"  # what robots.txt may call us

TIMEOUT = 20.0  # seconds for everything that is asked of servers in a call
MAX_KEPT = 16 * 1024 * 1024  # bytes of pages kept
ROBOTS_LIMIT = 512 * 1024  # bytes of a robots.txt that are read
ROBOTS_AGE = 3600.0  # seconds it is good for
ROBOTS_KEPT = 500


@dataclass
class Page:
    """A page as it was fetched, and what was read of it."""

    reply: Reply
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

    async def text(self, *, raw: bool) -> str:
        """What a model reads of it. Raises Unreadable."""
        if raw not in self.texts:
            kind = kind_of(self.reply.body, self.reply.type)
            charset = httpx2.Response(200, headers=self.reply.headers).charset_encoding
            shown = "text" if raw and kind in ("html", "feed", "json") else kind
            self.texts[raw] = await read(self.reply.body, shown, charset, self.reply.url)
        return self.texts[raw]


class Web:
    """Fetches, asks robots.txt before, and keeps what it has fetched."""

    def __init__(self, guard: httpcore2.AsyncNetworkBackend, *, robots: bool = True, stays: bool = False) -> None:
        self._guard = guard
        self._robots = robots
        self._stays = stays  # on the host that was asked for
        self._rules: OrderedDict[str, tuple[float, Protego | None]] = OrderedDict()
        self._kept: OrderedDict[str, Page] = OrderedDict()

    async def page(self, url: str, *, again: bool = False, robot: bool = True) -> Page:
        """A page; `again`, the one fetched before if it is still there. `robot`: nobody asked for this very page.

        Raises Refusal.
        """
        asked = parse(url)
        kept = self._kept.get(str(asked))
        if kept and again:
            return kept
        agent = f"{AGENT} ({'autonomous' if robot else 'user-initiated'}; MCP)"
        try:
            with anyio.fail_after(TIMEOUT):
                async with open_client(self._guard, agent) as client:

                    async def permit(before: httpx2.URL, after: httpx2.URL) -> None:
                        if self._stays and _site(before) != _site(after):
                            raise Refusal(f"{before} redirects to another host. To go there, fetch {after}")
                        if robot and self._robots:
                            await self._ask_robots(client, after)

                    known = {kept.reply.url: kept.validators} if kept else {}
                    reply = await get(client, asked, permit=permit, known=known)
        except TimeoutError:
            raise Refusal(f"{asked.host} took more than {TIMEOUT:g} seconds. Try again later, or elsewhere.") from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            direct = " Proxies of the environment are not used." if getproxies_environment() else ""
            raise Refusal(
                f"{asked} could not be read: {_reason(error)}. Check the URL, or try another.{direct}"
            ) from None
        if kept and reply.status == 304:
            return kept
        page = Page(reply)
        if reply.status == 200 and "no-store" not in reply.headers.get("cache-control", ""):
            self._keep(str(asked), page)
        return page

    def _keep(self, url: str, page: Page) -> None:
        self._kept[url] = page
        self._kept.move_to_end(url)
        while len(self._kept) > 1 and sum(page.size for page in self._kept.values()) > MAX_KEPT:
            self._kept.popitem(last=False)

    async def _ask_robots(self, client: httpx2.AsyncClient, url: httpx2.URL) -> None:
        origin = str(url.copy_with(raw_path=b"/robots.txt"))
        since, rules = self._rules.get(origin, (0.0, None))
        if not since or monotonic() - since > ROBOTS_AGE:
            rules = await self._fetch_rules(client, origin)
            self._rules[origin] = monotonic(), rules
            if len(self._rules) > ROBOTS_KEPT:
                self._rules.popitem(last=False)
        if rules and not rules.can_fetch(str(url), ROBOT):
            raise Refusal(
                f"{origin} asks programs not to fetch {url}. Use another source, or ask the user to open the page."
            )

    async def _fetch_rules(self, client: httpx2.AsyncClient, origin: str) -> Protego | None:
        async def permit(before: httpx2.URL, after: httpx2.URL) -> None: ...

        reply = await get(client, parse(origin), permit=permit, known={}, limit=ROBOTS_LIMIT, whole=False)
        if reply.status in (401, 403) or reply.status >= 500:
            raise Refusal(f"{origin} answers {reply.status}, so programs may fetch nothing there. Use another source.")
        return None if reply.status >= 400 else Protego.parse(reply.body.decode("utf-8", "replace"))


def _site(url: httpx2.URL) -> tuple[str, int | None]:
    return url.host.removeprefix("www."), url.port


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__).rstrip(".")
