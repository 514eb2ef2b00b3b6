"""The tool `web_search`, against local servers that answer as the providers document."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from time import monotonic
from typing import Any
from urllib.parse import parse_qs, urlsplit

import crow_mcp_server
import pytest
from crow_mcp_server import create_server
from crow_mcp_server.web import search_providers as searching
from crow_mcp_server.web import search_settings
from crow_mcp_server.web.search_providers import parse_retry_after
from crow_mcp_server.web.search_settings import PROVIDER_KEYS
from crow_testing.listening import listen
from fastmcp import Client

pytestmark = pytest.mark.anyio

KEY = "key-0123456789-canary"
BRAVE = {
    "type": "search",
    "web": {
        "type": "search",
        "results": [
            {
                "title": "Crows &amp; numbers",
                "url": "https://example.com/crows",
                "description": "They <strong>count</strong> &#x27;out loud&#x27;.",
                "page_age": "2026-05-24T00:00:00",
                "age": "3 days ago",
            }
        ],
    },
}
TAVILY = {
    "query": "crows",
    "answer": None,
    "results": [{"title": "Crows", "url": "https://example.com/t", "content": "c" * 900, "score": 0.9}],
}
EXA = {
    "requestId": "1",
    "results": [
        {
            "title": None,
            "url": "https://example.com/e",
            "publishedDate": "2026-01-02T00:00:00.000Z",
            "highlights": ["one", "two"],
        }
    ],
}
SEARXNG = {
    "query": "crows",
    "results": [
        {"title": f"Crow {n}", "url": f"https://example.com/{n}", "content": "caw", "publishedDate": None}
        for n in range(30)
    ],
    "unresponsive_engines": [],
}

DUCKDUCKGO = """<!DOCTYPE html><html><body><div class="serp__results"><div id="links" class="results">
<div class="result results_links results_links_deep result--ad"><div class="links_main links_deep result__body">
<h2 class="result__title"><a rel="nofollow" class="result__a" href="https://duckduckgo.com/y.js?ad_domain=x.test">Buy</a>
</h2><a class="result__snippet" href="https://duckduckgo.com/y.js?ad_domain=x.test">Feeders</a></div></div>
<div class="result results_links results_links_deep web-result"><div class="links_main links_deep result__body">
<h2 class="result__title"><a rel="nofollow" class="result__a" href="https://example.com/crows?a=1&amp;b=2">Crows &amp;
numbers</a></h2><div class="result__extras"><div class="result__extras__url"><a class="result__url"
href="https://example.com/crows?a=1&amp;b=2">example.com/crows</a></div></div><a class="result__snippet"
href="https://example.com/crows?a=1&amp;b=2">They <b>count</b> out loud.</a><div class="clear"></div></div></div>
<div class="result results_links results_links_deep web-result"><div class="links_main links_deep result__body">
<h2 class="result__title"><a rel="nofollow" class="result__a" href="https://example.org/ravens">Ravens</a></h2>
<a class="result__snippet" href="https://example.org/ravens">They plan.</a></div></div></div></div></body></html>"""


@dataclass
class Engine:
    """An HTTP server that gives each request the next answer, and repeats the last one."""

    url: str = ""
    answers: list[tuple[int, dict[str, str], bytes]] = field(default_factory=list[tuple[int, dict[str, str], bytes]])
    asked: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list[tuple[str, dict[str, str], bytes]])

    def answer(self, body: object, status: int = 200, **headers: str) -> None:
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.answers.append((status, {k.replace("_", "-"): v for k, v in headers.items()}, text))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            start, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            self.asked.append((start, headers, body))
            status, more, text = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            head = [f"HTTP/1.1 {status} Word", f"Content-Length: {len(text)}", "Connection: close"]
            writer.write("\r\n".join([*head, *(f"{k}: {v}" for k, v in more.items()), "", ""]).encode() + text)
            await writer.drain()


@asynccontextmanager
async def engine() -> AsyncIterator[Engine]:
    engine = Engine()
    async with listen(engine.serve) as port:
        engine.url = f"http://127.0.0.1:{port}"
        yield engine


@pytest.fixture
async def one() -> AsyncIterator[Engine]:
    async with engine() as made:
        yield made


@pytest.fixture
async def two() -> AsyncIterator[Engine]:
    async with engine() as made:
        yield made


@pytest.fixture(autouse=True)
def without_ddgs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the extra `duckduckgo` if it is installed."""
    monkeypatch.setattr(search_settings, "find_spec", lambda name: None)


async def search(env: dict[str, str], *queries: str, **arguments: Any) -> list[Any]:
    """Return the answers of one server with this environment to each query."""
    async with Client(create_server(only=["web_search"], env=env)) as client:
        return [await client.call_tool_mcp("web_search", {"query": query} | arguments) for query in queries]


@pytest.mark.parametrize("env", [{}, {"SEARXNG_URL": ""}, {"BRAVE_API_URL": "https://example.com"}])
async def test_search_without_a_provider_is_not_offered(env: dict[str, str]):
    async with Client(create_server(env=env)) as client:
        assert "web_search" not in {tool.name for tool in await client.list_tools()}
    assert "web_search" not in {tool["name"] for tool in crow_mcp_server.tools(env)}


@pytest.mark.parametrize("name", ["SEARXNG_URL", *PROVIDER_KEYS])
async def test_search_with_a_provider_is_offered(name: str):
    async with Client(create_server(env={name: "x"})) as client:
        assert "web_search" in {tool.name for tool in await client.list_tools()}
    assert crow_mcp_server.tools({name: "x"}) == crow_mcp_server.tools()


async def test_search_that_is_named_without_a_provider_says_what_to_configure():
    [answer] = await search({}, "crows")
    assert answer.is_error
    for name in ("SEARXNG_URL", "BRAVE_API_KEY", "TAVILY_API_KEY", "EXA_API_KEY", "ddgs"):
        assert name in answer.content[0].text


async def test_searxng_is_asked_even_on_this_machine(one: Engine):
    one.answer(SEARXNG)
    [answer] = await search({"SEARXNG_URL": one.url + "/"}, "crows & numbers", count=3)
    assert answer.content[0].text.splitlines()[:3] == ["1. Crow 0", "   https://example.com/0", "   caw"]
    assert len(answer.structured_content["results"]) == 3
    line = one.asked[0][0]
    assert line.startswith("GET /search?")
    assert parse_qs(urlsplit(line.split(" ")[1]).query) == {"q": ["crows & numbers"], "format": ["json"]}


async def test_brave_is_asked_as_documented(one: Engine):
    one.answer(BRAVE)
    [answer] = await search({"BRAVE_API_KEY": KEY, "BRAVE_API_URL": one.url}, "crows", count=5)
    assert answer.structured_content == {
        "provider": "Brave",
        "results": [
            {
                "title": "Crows & numbers",
                "url": "https://example.com/crows",
                "snippet": "They count 'out loud'.",
                "date": "2026-05-24T00:00:00",
            }
        ],
    }
    assert "2026-05-24T00:00:00 · They count" in answer.content[0].text
    start, headers, _ = one.asked[0]
    assert start.startswith("GET /res/v1/web/search?")
    assert headers["x-subscription-token"] == KEY
    assert parse_qs(urlsplit(start.split(" ")[1]).query)["count"] == ["5"]


async def test_tavily_is_asked_as_documented(one: Engine):
    one.answer(TAVILY)
    [answer] = await search({"TAVILY_API_KEY": KEY, "TAVILY_API_URL": one.url}, "crows", count=5)
    [found] = answer.structured_content["results"]
    assert found == {"title": "Crows", "url": "https://example.com/t", "snippet": "c" * 499 + "…"}
    start, headers, body = one.asked[0]
    assert start.startswith("POST /search ")
    assert headers["authorization"] == f"Bearer {KEY}"
    assert json.loads(body) == {"query": "crows", "max_results": 5}


async def test_exa_is_asked_as_documented(one: Engine):
    one.answer(EXA)
    [answer] = await search({"EXA_API_KEY": KEY, "EXA_API_URL": one.url}, "crows", count=5)
    [found] = answer.structured_content["results"]
    assert found == {
        "title": "https://example.com/e",
        "url": "https://example.com/e",
        "snippet": "one … two",
        "date": "2026-01-02T00:00:00.000Z",
    }
    start, headers, body = one.asked[0]
    assert start.startswith("POST /search ")
    assert headers["x-api-key"] == KEY
    assert json.loads(body) == {"query": "crows", "numResults": 5, "contents": {"highlights": True}}


BOTH = [
    (503, b"down"),
    (403, b"format json is off"),
    (200, b"<html>not json"),
    (200, b"[]"),
    (200, b'{"results": [{"title": "no url"}]}'),
    (200, b'{"results": 7}'),
    (200, b'{"results": []}'),
]


@pytest.mark.parametrize(("status", "body"), BOTH)
async def test_next_provider_is_asked_when_one_fails_or_finds_nothing(
    one: Engine, two: Engine, status: int, body: bytes
):
    one.answer(body, status)
    two.answer(TAVILY)
    [answer] = await search({"TAVILY_API_KEY": KEY, "TAVILY_API_URL": two.url, "SEARXNG_URL": one.url}, "crows")
    assert answer.structured_content["provider"] == "Tavily"
    assert len(one.asked) == 1


async def test_first_configured_provider_is_asked(one: Engine, two: Engine):
    one.answer(SEARXNG)
    two.answer(TAVILY)
    env = {"TAVILY_API_KEY": KEY, "TAVILY_API_URL": two.url, "SEARXNG_URL": one.url}
    [answer] = await search(env, "crows")
    assert answer.structured_content["provider"] == "SearXNG"
    assert two.asked == []


async def test_failure_of_all_providers_is_explained_without_their_keys(one: Engine):
    one.answer({"detail": {"error": f"Unauthorized: {KEY}"}}, 401)
    address = one.url.replace("http://", f"http://user:{KEY}@")
    env = {
        "SEARXNG_URL": address,
        "BRAVE_API_KEY": KEY,
        "BRAVE_API_URL": "http://127.0.0.1:1",
        "TAVILY_API_KEY": KEY,
        "TAVILY_API_URL": f"http://{KEY} /",
    }
    [answer] = await search(env, "crows")
    assert answer.is_error
    said = answer.content[0].text
    assert "SearXNG answered 401 Word; Brave could not be reached; Tavily could not be reached" in said
    assert KEY not in str(answer)


async def test_retry_after_of_a_provider_is_respected(one: Engine, two: Engine):
    one.answer(b"", 429, Retry_After="600")
    two.answer(TAVILY)
    env = {"SEARXNG_URL": one.url, "TAVILY_API_KEY": KEY, "TAVILY_API_URL": two.url}
    answers = await search(env, "one", "two", "three")
    assert [answer.structured_content["provider"] for answer in answers] == ["Tavily"] * 3
    assert len(one.asked) == 1
    [first, second] = await search({"SEARXNG_URL": one.url}, "one", "two")
    assert "answered 429" in first.content[0].text
    assert "accepts no request for another" in second.content[0].text


async def test_requests_to_a_provider_keep_the_minimum_interval(one: Engine):
    one.answer(BRAVE)
    begun = monotonic()
    answers = await search({"BRAVE_API_KEY": KEY, "BRAVE_API_URL": one.url}, "one", "two")
    assert monotonic() - begun > 0.99  # Brave's minimum interval is a second
    assert not any(answer.is_error for answer in answers)


async def test_provider_with_a_long_wait_is_skipped(one: Engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(searching, "monotonic", lambda: 100.0)
    monkeypatch.setattr(searching, "MAX_WAIT", 0.5)
    one.answer(BRAVE)
    [first, second] = await search({"BRAVE_API_KEY": KEY, "BRAVE_API_URL": one.url}, "one", "two")
    assert not first.is_error
    assert "Brave accepts no request for another 1 s" in second.content[0].text


async def test_no_results_are_not_an_error(one: Engine):
    one.answer({"results": []})
    [answer] = await search({"SEARXNG_URL": one.url}, "xyzzy")
    assert not answer.is_error
    assert answer.content[0].text == "Nothing was found. Try other words."


async def test_duckduckgo_is_asked_last_and_needs_no_key(one: Engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    monkeypatch.setenv("DDGS_PROXY", "http://127.0.0.1:1")  # so that no request leaves this machine
    one.answer(b"", 500)
    [answer] = await search({"SEARXNG_URL": one.url}, "crows")
    assert "SearXNG answered 500 Word; DuckDuckGo gave an answer that cannot be read" in answer.content[0].text


async def test_page_of_duckduckgo_becomes_results(one: Engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    monkeypatch.setattr("ddgs.engines.duckduckgo.Duckduckgo.search_url", f"{one.url}/html/")
    one.answer(DUCKDUCKGO.encode(), Content_Type="text/html; charset=UTF-8")
    [answer] = await search({}, "crows & numbers", count=5)
    assert answer.structured_content == {
        "provider": "DuckDuckGo",
        "results": [
            {
                "title": "Crows & numbers",
                "url": "https://example.com/crows?a=1&b=2",
                "snippet": "They count out loud.",
            },
            {"title": "Ravens", "url": "https://example.org/ravens", "snippet": "They plan."},
        ],
    }
    [(start, _, body)] = one.asked
    assert start.startswith("POST /html/ ")
    assert parse_qs(body.decode())["q"] == ["crows & numbers"]


async def test_an_empty_query_is_refused():
    [answer] = await search({"SEARXNG_URL": "http://127.0.0.1:1"}, "  ")
    assert "query is empty" in answer.content[0].text


async def test_commands_do_not_see_provider_keys(monkeypatch: pytest.MonkeyPatch):
    for name in PROVIDER_KEYS:
        monkeypatch.setenv(name, KEY)
    async with Client(create_server()) as client:
        told = await client.call_tool_mcp("terminal", {"command": "env"})
    assert KEY not in told.content[0].text


@pytest.mark.parametrize(("told", "seconds"), [("7", 7), ("99999", 3600), ("-1", 0), ("soon", 60), ("", 60)])
def test_retry_after_is_parsed(told: str, seconds: float):
    assert parse_retry_after(told) == seconds


def test_retry_after_may_be_a_date():
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=1000), usegmt=True)
    assert 900 < parse_retry_after(date) <= 1000
