"""Who searches the web for `web_search`: providers, one small protocol wide, asked one after the other."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from html import unescape
from importlib.util import find_spec
from time import monotonic
from typing import Any, Protocol

import anyio
import httpx2

from crow_mcp_server.refusal import Refusal
from crow_mcp_server.web.search_results import KEYS, Result, Results

UNCONFIGURED = (
    "Web search is not set up. Tell the user to set one of SEARXNG_URL (the address of a SearXNG whose settings allow "
    f"the format json), {', '.join(KEYS)}, or to install crow-mcp-server[duckduckgo], which needs no key."
)

TIMEOUT = 15.0  # seconds for one provider
MAX_WAIT = 3.0  # seconds that a call waits for its turn with a provider; else the next one is asked
MAX_REST = 3600.0  # seconds that a provider is left alone at most
REST = 60.0  # seconds for which one is left alone that does not say how long
MAX_SNIPPET = 500  # characters
TAG = re.compile(r"<[^>]{1,100}>")


class Provider(Protocol):
    """Someone who searches the web."""

    @property
    def name(self) -> str: ...

    @property
    def gap(self) -> float:
        """Seconds between two requests."""
        ...

    async def search(self, query: str, count: int) -> Sequence[Result]:
        """At most `count` results. Raises httpx2's errors, ValueError and LookupError for an answer that is none."""
        ...


@dataclass(frozen=True)
class HttpProvider:
    """A provider that answers HTTP requests with JSON."""

    name: str
    request: Callable[[str, int], httpx2.Request]
    """A query and a count, as it wants to be asked."""
    results: Callable[[Any], list[dict[str, Any]]]
    """The list of results in what it answers."""
    snippet: Callable[[dict[str, Any]], str]
    date: str
    """The name of the field with the date."""
    gap: float = 0.0

    async def search(self, query: str, count: int) -> Sequence[Result]:
        async with httpx2.AsyncClient(timeout=TIMEOUT) as client:
            response = await client.send(self.request(query, count))
        response.raise_for_status()
        return [
            result(each["title"], each["url"], self.snippet(each), each.get(self.date))
            for each in self.results(response.json())[:count]
        ]


def searxng(url: str) -> Provider:
    """A SearXNG of the user's own, wherever it is; its settings must allow the format json."""

    def request(query: str, count: int) -> httpx2.Request:
        return httpx2.Request("GET", f"{url.rstrip('/')}/search", params={"q": query, "format": "json"})

    return HttpProvider(
        "SearXNG", request, lambda answer: answer["results"], lambda each: each.get("content") or "", "publishedDate"
    )


def brave(key: str, url: str = "https://api.search.brave.com") -> Provider:
    """Brave; its smallest plan answers once a second."""

    def request(query: str, count: int) -> httpx2.Request:
        params = {"q": query[:400], "count": str(min(count, 20)), "text_decorations": "false"}
        headers = {"X-Subscription-Token": key, "Accept": "application/json"}
        return httpx2.Request("GET", f"{url}/res/v1/web/search", params=params, headers=headers)

    return HttpProvider(
        "Brave",
        request,
        lambda answer: answer.get("web", {}).get("results", []),
        lambda each: each.get("description") or "",
        "page_age",
        gap=1.0,
    )


def tavily(key: str, url: str = "https://api.tavily.com") -> Provider:
    def request(query: str, count: int) -> httpx2.Request:
        body = {"query": query, "max_results": min(count, 20)}
        return httpx2.Request("POST", f"{url}/search", json=body, headers={"Authorization": f"Bearer {key}"})

    return HttpProvider(
        "Tavily", request, lambda answer: answer["results"], lambda each: each.get("content") or "", "published_date"
    )


def exa(key: str, url: str = "https://api.exa.ai") -> Provider:
    def request(query: str, count: int) -> httpx2.Request:
        body = {"query": query, "numResults": count, "contents": {"highlights": True}}
        return httpx2.Request("POST", f"{url}/search", json=body, headers={"x-api-key": key})

    def snippet(each: dict[str, Any]) -> str:
        return " … ".join(each.get("highlights") or []) or each.get("text") or ""

    return HttpProvider("Exa", request, lambda answer: answer["results"], snippet, "publishedDate", gap=0.2)


class DuckDuckGo:
    """DuckDuckGo, through the library ddgs: needs no key."""

    name = "DuckDuckGo"
    gap = 1.0

    async def search(self, query: str, count: int) -> Sequence[Result]:
        from ddgs import DDGS  # pyright: ignore[reportUnknownVariableType] - an extra, and not small
        from ddgs.exceptions import DDGSException

        def ask() -> list[dict[str, Any]]:
            return DDGS(timeout=int(TIMEOUT)).text(query, max_results=count, backend="duckduckgo")

        try:
            found = await anyio.to_thread.run_sync(ask, abandon_on_cancel=True)
        except DDGSException as error:
            raise ValueError(str(error)) from error
        return [result(each["title"], each["href"], each["body"], None) for each in found]


def providers(env: Mapping[str, str]) -> list[Provider]:
    """Those that are set up, in the order they are asked. `BRAVE_API_URL` and the like name a gateway."""
    found: list[Provider] = []
    if url := env.get("SEARXNG_URL"):
        found.append(searxng(url))
    for name, make in (("BRAVE", brave), ("TAVILY", tavily), ("EXA", exa)):
        if key := env.get(f"{name}_API_KEY"):
            gateway = env.get(f"{name}_API_URL")
            found.append(make(key, gateway.rstrip("/")) if gateway else make(key))
    if find_spec("ddgs"):
        found.append(DuckDuckGo())
    return found


class Search:
    """Asks providers one after the other, none of them more often than it wants."""

    def __init__(self, providers: Sequence[Provider]) -> None:
        self._providers = providers
        self._ready: dict[str, float] = {}  # when each may be asked again

    async def search(self, query: str, count: int) -> Results:
        """What the first provider finds that finds something. Raises Refusal when none could answer."""
        failed: list[str] = []
        for provider in self._providers:
            now = monotonic()
            turn = max(now, self._ready.get(provider.name, 0.0))
            if turn - now > MAX_WAIT:
                failed.append(f"{provider.name} wants to be left alone for another {turn - now:.0f} s")
                continue
            self._ready[provider.name] = turn + provider.gap
            await anyio.sleep(turn - now)
            try:
                with anyio.fail_after(TIMEOUT):
                    if found := await provider.search(query, count):
                        return Results(provider=provider.name, results=list(found))
            except httpx2.HTTPStatusError as error:  # its text has the address, and that may have a password
                response = error.response
                if response.status_code in (429, 503):
                    self._ready[provider.name] = monotonic() + rest(response.headers.get("retry-after", ""))
                failed.append(f"{provider.name} answered {response.status_code} {response.reason_phrase}".rstrip())
            except (httpx2.HTTPError, httpx2.InvalidURL, TimeoutError):
                failed.append(f"{provider.name} could not be reached")
            except (ValueError, LookupError, TypeError, AttributeError):
                failed.append(f"{provider.name} gave no answer that can be read")
        if not self._providers:
            raise Refusal(UNCONFIGURED)
        if len(failed) == len(self._providers):
            raise Refusal(f"The web was not searched: {'; '.join(failed)}. Try again later, or go on without.")
        return Results(provider="", results=[])


def result(title: Any, url: Any, snippet: Any, date: Any) -> Result:
    """A result as it is shown: text without tags, and not too much of it. Raises ValueError."""
    if not isinstance(url, str):
        raise ValueError("a result without a URL")
    shown = Result(title=plain(title) or url, url=url, snippet=plain(snippet))
    if isinstance(date, str) and date:
        shown["date"] = date
    return shown


def plain(text: Any) -> str:
    """The words of a snippet."""
    words = " ".join(unescape(TAG.sub("", text)).split()) if isinstance(text, str) else ""
    return words if len(words) <= MAX_SNIPPET else words[: MAX_SNIPPET - 1] + "…"


def rest(retry_after: str) -> float:
    """The seconds that a `Retry-After` asks for."""
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(retry_after) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError):
            return REST
    return min(max(seconds, 0.0), MAX_REST)
