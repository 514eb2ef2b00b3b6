"""The search providers behind `web_search`, and the order and pace in which they are asked."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from html import unescape
from time import monotonic
from typing import Any, Protocol

import anyio
import httpx2
from crow_system.shortening import shorten_line

from crow_mcp_server.refusal import ToolRefusal
from crow_mcp_server.web.search_results import WebSearchResult, WebSearchResults
from crow_mcp_server.web.search_settings import PROVIDER_KEYS, has_ddgs

NOT_CONFIGURED = (
    "Web search is not set up. Tell the user to set one of SEARXNG_URL (the address of a SearXNG whose settings allow "
    f"the format json), {', '.join(PROVIDER_KEYS)}, or to install the library ddgs, which needs no key."
)

PROVIDER_TIMEOUT = 15.0  # seconds for one provider
MAX_WAIT = 3.0  # seconds that a tool call waits for a provider that is not ready; otherwise the next one is asked
MAX_PAUSE = 3600.0  # seconds without requests to a provider that refused one
DEFAULT_PAUSE = 60.0  # the same, if the provider does not say how long
MAX_SNIPPET_CHARACTERS = 500
TAG = re.compile(r"<[^>]{1,100}>")


class SearchProvider(Protocol):
    """A service that searches the web."""

    @property
    def name(self) -> str: ...

    @property
    def min_interval(self) -> float:
        """The minimum number of seconds between two requests."""
        ...

    async def search(self, query: str, count: int) -> Sequence[WebSearchResult]:
        """Return at most `count` results. Raises httpx2's errors, and ValueError or LookupError for a bad answer."""
        ...


@dataclass(frozen=True)
class HttpSearchProvider:
    """A provider with a JSON API over HTTP."""

    name: str
    request: Callable[[str, int], httpx2.Request]
    """Makes the request for a query and a number of results."""
    results: Callable[[Any], list[dict[str, Any]]]
    """Returns the list of results in an answer."""
    snippet: Callable[[dict[str, Any]], str]
    """Returns the snippet of a result."""
    date: str
    """The key of a result's date."""
    min_interval: float = 0.0

    async def search(self, query: str, count: int) -> Sequence[WebSearchResult]:
        async with httpx2.AsyncClient(timeout=PROVIDER_TIMEOUT) as client:
            response = await client.send(self.request(query, count))
        response.raise_for_status()
        return [
            to_search_result(each["title"], each["url"], self.snippet(each), each.get(self.date))
            for each in self.results(response.json())[:count]
        ]


def make_searxng(url: str) -> SearchProvider:
    """Return the provider for the user's own SearXNG, whose settings must allow the format json."""

    def request(query: str, count: int) -> httpx2.Request:
        return httpx2.Request("GET", f"{url.rstrip('/')}/search", params={"q": query, "format": "json"})

    return HttpSearchProvider(
        "SearXNG", request, lambda answer: answer["results"], lambda each: each.get("content") or "", "publishedDate"
    )


def make_brave(key: str, url: str = "https://api.search.brave.com") -> SearchProvider:
    """Return the provider for Brave, whose smallest plan allows one request per second."""

    def request(query: str, count: int) -> httpx2.Request:
        params = {"q": query[:400], "count": str(min(count, 20)), "text_decorations": "false"}
        headers = {"X-Subscription-Token": key, "Accept": "application/json"}
        return httpx2.Request("GET", f"{url}/res/v1/web/search", params=params, headers=headers)

    return HttpSearchProvider(
        "Brave",
        request,
        lambda answer: answer.get("web", {}).get("results", []),
        lambda each: each.get("description") or "",
        "page_age",
        min_interval=1.0,
    )


def make_tavily(key: str, url: str = "https://api.tavily.com") -> SearchProvider:
    def request(query: str, count: int) -> httpx2.Request:
        body = {"query": query, "max_results": min(count, 20)}
        return httpx2.Request("POST", f"{url}/search", json=body, headers={"Authorization": f"Bearer {key}"})

    return HttpSearchProvider(
        "Tavily", request, lambda answer: answer["results"], lambda each: each.get("content") or "", "published_date"
    )


def make_exa(key: str, url: str = "https://api.exa.ai") -> SearchProvider:
    def request(query: str, count: int) -> httpx2.Request:
        body = {"query": query, "numResults": count, "contents": {"highlights": True}}
        return httpx2.Request("POST", f"{url}/search", json=body, headers={"x-api-key": key})

    def snippet(each: dict[str, Any]) -> str:
        return " … ".join(each.get("highlights") or []) or each.get("text") or ""

    return HttpSearchProvider(
        "Exa", request, lambda answer: answer["results"], snippet, "publishedDate", min_interval=0.2
    )


class DuckDuckGo:
    """DuckDuckGo, through the library ddgs. It needs no key."""

    name = "DuckDuckGo"
    min_interval = 1.0

    async def search(self, query: str, count: int) -> Sequence[WebSearchResult]:
        from ddgs import DDGS  # pyright: ignore[reportUnknownVariableType] - optional, and slow to import
        from ddgs.exceptions import DDGSException

        def ask() -> list[dict[str, Any]]:
            return DDGS(timeout=int(PROVIDER_TIMEOUT)).text(query, max_results=count, backend="duckduckgo")

        try:
            results = await anyio.to_thread.run_sync(ask, abandon_on_cancel=True)
        except DDGSException as error:
            raise ValueError(str(error)) from error
        return [to_search_result(each["title"], each["href"], each["body"], None) for each in results]


def find_providers(env: Mapping[str, str]) -> list[SearchProvider]:
    """Return the configured providers in the order in which they are asked.

    A variable such as `BRAVE_API_URL` replaces the provider's address, for a gateway.
    """
    providers: list[SearchProvider] = []
    if url := env.get("SEARXNG_URL"):
        providers.append(make_searxng(url))
    for name, make in (("BRAVE", make_brave), ("TAVILY", make_tavily), ("EXA", make_exa)):
        if key := env.get(f"{name}_API_KEY"):
            gateway = env.get(f"{name}_API_URL")
            providers.append(make(key, gateway.rstrip("/")) if gateway else make(key))
    if has_ddgs():
        providers.append(DuckDuckGo())
    return providers


class WebSearch:
    """Asks providers one after the other, and keeps to each one's minimum interval."""

    def __init__(self, providers: Sequence[SearchProvider]) -> None:
        self._providers = providers
        self._ready_at: dict[str, float] = {}  # monotonic time from which a provider may be asked again, by name

    async def search(self, query: str, count: int) -> WebSearchResults:
        """Return the results of the first provider that finds something. Raises ToolRefusal when all fail."""
        failed: list[str] = []
        for provider in self._providers:
            now = monotonic()
            start = max(now, self._ready_at.get(provider.name, 0.0))
            if start - now > MAX_WAIT:
                failed.append(f"{provider.name} accepts no request for another {start - now:.0f} s")
                continue
            self._ready_at[provider.name] = start + provider.min_interval
            await anyio.sleep(start - now)
            try:
                with anyio.fail_after(PROVIDER_TIMEOUT):
                    if found := await provider.search(query, count):
                        return WebSearchResults(provider=provider.name, results=list(found))
            except httpx2.HTTPStatusError as error:  # its text contains the URL, which may contain a password
                response = error.response
                if response.status_code in (429, 503):
                    self._ready_at[provider.name] = monotonic() + parse_retry_after(
                        response.headers.get("retry-after", "")
                    )
                failed.append(f"{provider.name} answered {response.status_code} {response.reason_phrase}".rstrip())
            except (httpx2.HTTPError, httpx2.InvalidURL, TimeoutError):
                failed.append(f"{provider.name} could not be reached")
            except (ValueError, LookupError, TypeError, AttributeError):
                failed.append(f"{provider.name} gave an answer that cannot be read")
        if not self._providers:
            raise ToolRefusal(NOT_CONFIGURED)
        if len(failed) == len(self._providers):
            raise ToolRefusal(f"The web was not searched: {'; '.join(failed)}. Try again later, or go on without.")
        return WebSearchResults(provider="", results=[])


def to_search_result(title: Any, url: Any, snippet: Any, date: Any) -> WebSearchResult:
    """Convert a provider's values to a result with short plain text. Raises ValueError when there is no URL."""
    if not isinstance(url, str):
        raise ValueError("a result without a URL")
    result = WebSearchResult(title=to_plain_text(title) or url, url=url, snippet=to_plain_text(snippet))
    if isinstance(date, str) and date:
        result["date"] = date
    return result


def to_plain_text(text: Any) -> str:
    """Remove tags and line breaks from a snippet, and shorten it."""
    words = " ".join(unescape(TAG.sub("", text)).split()) if isinstance(text, str) else ""
    return shorten_line(words, MAX_SNIPPET_CHARACTERS)


def parse_retry_after(retry_after: str) -> float:
    """Return the number of seconds in a `Retry-After` header, at most MAX_PAUSE."""
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(retry_after) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError):
            return DEFAULT_PAUSE
    return min(max(seconds, 0.0), MAX_PAUSE)
