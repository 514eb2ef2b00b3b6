"""`crow mcp add https://host`, which finds the server's card, and `crow mcp search`, with a copy of the registry."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from crow_testing.fixtures import serve
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

pytestmark = pytest.mark.anyio

CATALOG = "/.well-known/ai-catalog.json"
CARD_TYPE = "application/mcp-server-card+json"


def card(url: str, **fields: Any) -> dict[str, Any]:
    remote = {"type": "streamable-http", "url": url, "supportedProtocolVersions": ["2026-07-28"]}
    schema = "https://static.modelcontextprotocol.io/schemas/v1/server-card.schema.json"
    known = {"$schema": schema, "name": "com.example/weather", "version": "1.2", "description": "The weather."}
    return {**known, "remotes": [remote], "unknown": {"more": 1}, **fields}


def catalog(*entries: Any) -> dict[str, Any]:
    return {
        "specVersion": "1.0",
        "entries": [{"identifier": "urn:air:x", "type": CARD_TYPE, **each} for each in entries],
    }


def site(pages: Callable[[str], Mapping[str, Any]]) -> Callable[[str], Any]:
    """Make a function that makes an app: it answers each path with its JSON, or with its Response."""

    def make(url: str) -> Any:
        async def answer(request: Request) -> Response:
            page = pages(url).get(request.url.path)
            if isinstance(page, Response):
                return page
            return JSONResponse(page) if page is not None else Response(status_code=404)

        return Starlette(routes=[Route("/{path:path}", answer)])

    return make


def servers_in(machine: "Machine") -> dict[str, Any]:
    file = Path(machine.env["CROW_HOME"], "mcp.json")
    return json.loads(file.read_text())["mcpServers"] if file.exists() else {}


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ("", CATALOG),
        ("/mcp", "/mcp/server-card"),
        ("/cards/one.json", "/cards/one.json"),
        ("", "/.well-known/mcp/server-card.json"),
    ],
)
async def test_server_is_found_by_the_card_of_its_host(given: str, place: str, machine: "Machine"):
    def pages(url: str) -> dict[str, Any]:
        entry = {"url": f"{url}/mcp/server-card"} if given else {"data": card(f"{url}/mcp")}
        return {place: catalog(entry) if place == CATALOG else card(f"{url}/mcp")}

    async with serve(site(pages)) as url:
        done = await machine.crow("mcp", "add", url + given)
    assert (done.code, servers_in(machine)) == (0, {"weather": {"type": "http", "url": f"{url}/mcp"}})
    assert "com.example/weather 1.2: The weather." in done.err


async def test_catalog_leads_to_the_card(machine: "Machine"):
    def pages(url: str) -> dict[str, Any]:
        return {CATALOG: catalog({"url": "/mcp/server-card"}), "/mcp/server-card": card(f"{url}/mcp")}

    async with serve(site(pages)) as url:
        done = await machine.crow("mcp", "add", url)
    assert (done.code, [*servers_in(machine)]) == (0, ["weather"])


def inline(*remotes: Any, url: str = "https://x.example/mcp", **fields: Any) -> dict[str, Any]:
    """Make the pages of a host whose catalog has one card in it."""
    more = {"remotes": [*remotes], **fields} if remotes else fields
    return {CATALOG: catalog({"data": card(url, **more)})}


def key_remote(url: str) -> dict[str, Any]:
    return {"type": "sse", "url": f"{url}/mcp", "headers": [{"name": "X-Key", "isRequired": True, "value": "{key}"}]}


ELSEWHERE = "https://other.example/mcp"
TEMPLATE = "https://{tenant}.example/mcp"
REFUSED: list[tuple[Callable[[str], dict[str, Any]], str]] = [
    (lambda url: inline(url=ELSEWHERE), f"names a server on another host: {ELSEWHERE}. Nothing was added."),
    (
        lambda url: {CATALOG: catalog({"url": "https://other.example/card"})},
        "names a card on another host: https://other.example/card. Nothing was added.",
    ),
    (
        lambda url: inline(url=TEMPLATE),
        f"has parts to fill in: {TEMPLATE}. Add it with them: crow mcp add weather URL",
    ),
    (lambda url: inline({"type": "pigeon", "url": url}), "names no address of a server that crow can connect to"),
    (
        lambda url: inline(key_remote(url)),
        "com.example/weather needs the header X-Key. Add it by: crow mcp add",
    ),
    (lambda url: {CATALOG: catalog({"url": f"{url}/a"}, {"url": f"{url}/b"})}, "has 2 MCP servers. Add one:"),
    (lambda url: {CATALOG: catalog()}, "has no card of an MCP server that can be read"),
    (lambda url: {CATALOG: catalog({"data": {"name": 5}})}, "has no card of an MCP server that can be read"),
    (lambda url: {CATALOG: ["nonsense"]}, "publishes no card of an MCP server"),
    (lambda url: {CATALOG: Response("{")}, "publishes no card of an MCP server"),
    (lambda url: {CATALOG: RedirectResponse("https://other.example/")}, "publishes no card of an MCP server"),
    (lambda url: {}, "publishes no card of an MCP server"),
]


@pytest.mark.parametrize(("pages", "reason"), REFUSED)
async def test_card_that_cannot_be_used_is_one_sentence_and_nothing_is_added(
    pages: Callable[[str], dict[str, Any]], reason: str, machine: "Machine"
):
    async with serve(site(pages)) as url:
        done = await machine.crow("mcp", "add", url)
    assert (done.code, servers_in(machine)) == (2, {})
    assert reason in done.err
    assert "Traceback" not in done.err


async def test_name_that_is_taken_stays_as_it_is(machine: "Machine"):
    assert (await machine.crow("mcp", "add", "weather", "--", "true")).code == 0
    async with serve(site(lambda url: {"/": card(f"{url}/mcp")})) as url:
        done = await machine.crow("mcp", "add", f"{url}/")
    assert done.code == 2
    assert "has a server 'weather' already" in done.err
    assert servers_in(machine)["weather"]["command"] == "true"


async def test_address_has_to_be_https_and_a_name_needs_a_target(machine: "Machine"):
    assert "is no https address" in (await machine.crow("mcp", "add", "http://example.com")).err
    assert "crow mcp add NAME URL" in (await machine.crow("mcp", "add", "weather")).err


def listed(name: str, status: str = "active", **fields: Any) -> dict[str, Any]:
    meta = {"io.modelcontextprotocol.registry/official": {"status": status, "isLatest": True}}
    return {"server": {"name": name, "version": "1.0.2", "description": "Birds\nof the day", **fields}, "_meta": meta}


BIRDS = [
    listed("io.example/birds", remotes=[{"type": "streamable-http", "url": "https://birds.example/mcp"}]),
    listed(
        "io.example/nests",
        packages=[
            {
                "registryType": "npm",
                "identifier": "@example/nests",
                "version": "2.0.0",
                "environmentVariables": [{"name": "KEY", "isRequired": True, "isSecret": True}],
            }
        ],
    ),
    listed("io.example/eggs", packages=[{"registryType": "pypi", "identifier": "eggs", "version": "3"}]),
    listed("io.example/evil", packages=[{"registryType": "npm", "identifier": "x; rm -rf ~", "version": "1"}]),
    listed("io.example/gone", status="deleted"),
    {"server": {"name": 5}},
    "nonsense",
]


async def test_registry_is_searched_and_says_how_to_add_what_is_found(machine: "Machine"):
    asked: list[str] = []

    def make(url: str) -> Any:
        async def answer(request: Request) -> Response:
            asked.append(str(request.url).removeprefix(url))
            return JSONResponse({"servers": BIRDS, "metadata": {"count": len(BIRDS), "nextCursor": "x"}, "more": 1})

        return Starlette(routes=[Route("/v0.1/servers", answer)])

    async with serve(make) as url:
        machine.env["CROW_MCP_REGISTRY"] = url
        done = await machine.crow("mcp", "search", "small", "birds")
        as_json = await machine.crow("mcp", "search", "birds", "--json", "--limit", "1")
    assert asked[0] == "/v0.1/servers?search=small+birds&limit=20&version=latest"
    assert done.out.splitlines()[1].split() == ["io.example/birds", "1.0.2", "Birds", "of", "the", "day"]
    assert done.err.splitlines() == [
        "crow mcp add birds https://birds.example/mcp",
        "crow mcp add nests --env KEY -- npx -y @example/nests@2.0.0",
        "crow mcp add eggs -- uvx eggs==3",
        "io.example/evil has no package or address that crow can use",
    ]
    assert [each["add"] for each in json.loads(as_json.out)] == ["crow mcp add birds https://birds.example/mcp"]


@pytest.mark.parametrize("answer", ["nonsense", {"servers": 5}, []])
async def test_registry_that_answers_nonsense_is_one_sentence(answer: Any, machine: "Machine"):
    async with serve(site(lambda url: {"/v0.1/servers": answer})) as url:
        machine.env["CROW_MCP_REGISTRY"] = url
        done = await machine.crow("mcp", "search", "birds")
    assert (done.code, done.out) == (2, "")
    assert "did not answer as a registry of MCP servers" in done.err


async def test_search_that_finds_nothing_says_so(machine: "Machine"):
    async with serve(site(lambda url: {"/v0.1/servers": {"servers": []}})) as url:
        machine.env["CROW_MCP_REGISTRY"] = url
        done = await machine.crow("mcp", "search", "birds")
    assert (done.code, done.err) == (0, "The registry has no server for 'birds'.\n")
