"""Find MCP servers: by the card that a host publishes (SEP-2127), and by a search of the official registry."""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast
from urllib.parse import urljoin, urlsplit

import click
import msgspec
from crow_core.acp.decoding import convert_leniently
from crow_core.models.endpoint import is_local
from crow_core.text import escape_controls, to_line
from msgspec import Struct, ValidationError, field

from crow_cli.console import AS_JSON, escape_line, limit_option, print_json, print_note, print_table, shorten
from crow_cli.menu import has_terminal
from crow_cli.process import fail

CARD_TYPE = "application/mcp-server-card+json"
CATALOG_PATH = "/.well-known/ai-catalog.json"
CARD_PATHS = ("server-card", "/.well-known/mcp/server-card.json")
"""The places of a card: below the address of its server (a path segment), and one that earlier drafts had."""
REGISTRY = "https://registry.modelcontextprotocol.io"
REGISTRY_VARIABLE = "CROW_MCP_REGISTRY"
TIMEOUT = 15.0
"""Seconds for one answer."""
SIZE_LIMIT = 2_000_000
"""Bytes of an answer."""
RUNNERS = {"npm": ("npx", "-y", "{}@{}"), "pypi": ("uvx", "{}=={}")}
"""The command that runs a package of a registry."""


class KeyInput(Struct, rename="camel"):
    """A header, or a variable of the environment, that a server takes."""

    name: str = ""
    value: str = ""
    is_required: bool = False


class RemoteEndpoint(Struct, rename="camel"):
    """An address of a server."""

    url: str = ""
    type: str = ""
    headers: list[KeyInput] = field(default_factory=list[KeyInput])


class PublishedPackage(Struct, rename="camel"):
    """A package that is a server."""

    identifier: str = ""
    registry_type: str = ""
    version: str = ""
    environment_variables: list[KeyInput] = field(default_factory=list[KeyInput])


class PublishedServer(Struct, rename="camel"):
    """A server as a card or the registry describes it. Other fields are ignored."""

    name: str
    version: str = ""
    description: str = ""
    remotes: list[RemoteEndpoint] = field(default_factory=list[RemoteEndpoint])
    packages: list[PublishedPackage] = field(default_factory=list[PublishedPackage])

    @property
    def short_name(self) -> str:
        """A name for the configuration: the last part of its own."""
        return re.sub(r"[^\w.-]", "-", self.name.rpartition("/")[2], flags=re.ASCII)[:64] or "server"


class CatalogEntry(Struct):
    """An entry of a host's catalog (AI Catalog)."""

    type: str = ""
    url: str = ""
    data: Any = None
    """The card itself."""


class RegistryEntry(Struct):
    """An entry of the registry."""

    server: PublishedServer
    meta: Any = field(name="_meta", default=None)


def discover(url: str) -> tuple[str, dict[str, Any]]:
    """Find the server of an address by its card, and return its name and settings. Exit with code 2 if that fails."""
    if not is_safe(url):
        fail(f"{escape_controls(url)} is no https address.")
    card = find_card(url)
    host, remote = urlsplit(url).netloc, find_remote(card, url)
    if urlsplit(remote.url).netloc != host:
        ask_about(f"The card of {host} names a server on another host: {remote.url}")
    if not is_safe(remote.url):
        fail(escape_controls(f"The card of {host} names {remote.url}, which is no https address."))
    name, command = card.short_name, f"crow mcp add {card.short_name} {remote.url}"
    if wanted := [each.name for each in remote.headers if each.is_required and not is_whole(each.value)]:
        options = " ".join(f"--header '{each}: ${{VARIABLE}}'" for each in wanted)
        fail(escape_controls(f"{card.name} needs the header {', '.join(wanted)}. Add it by: {command} {options}"))
    server: dict[str, Any] = {"type": "sse" if remote.type == "sse" else "http", "url": remote.url}
    if headers := {each.name: each.value for each in remote.headers if is_whole(each.value)}:
        server["headers"] = headers
    print_note(escape_line(f"{card.name} {card.version}: {card.description[:300]}"))
    return name, server


def is_safe(url: str) -> bool:
    """Return whether an address is https, or on this machine."""
    with suppress(ValueError):
        return urlsplit(url).scheme == "https" or (urlsplit(url).scheme == "http" and is_local(url))
    return False


def is_whole(value: str) -> bool:
    """Return whether a value is there, and has no variables to fill in."""
    return bool(value) and "{" not in value and value.isprintable()


def find_card(url: str) -> PublishedServer:
    """Find the card of an address: at the address, below it, or in the catalog of its host. Exit if there is none."""
    places = [url, f"{url.rstrip('/')}/{CARD_PATHS[0]}"]
    for place in [*places, urljoin(url, CARD_PATHS[1])]:
        if (card := read_card(fetch(place, CARD_TYPE))) is not None:
            return card
    entries = list_field(fetch(urljoin(url, CATALOG_PATH), "application/ai-catalog+json"), "entries")
    if entries is None:
        host, how = urlsplit(url).netloc, f"If {url} is the server: crow mcp add NAME {url}"
        fail(escape_controls(f"{host} publishes no card of an MCP server. {how}"))
    return choose_card(url, entries)


def list_field(value: Any, name: str) -> list[Any] | None:
    """Return the list in a field of JSON; None if it is not there."""
    found: Any = cast("dict[str, Any]", value).get(name) if isinstance(value, dict) else None
    return cast("list[Any]", found) if isinstance(found, list) else None


def choose_card(url: str, entries: Sequence[Any]) -> PublishedServer:
    """Return the card of a catalog. Exit with the list of the cards if there are several."""
    host = urlsplit(url).netloc
    cards: list[CatalogEntry] = []
    for each in entries:
        with suppress(ValidationError):
            cards.append(convert_leniently(each, CatalogEntry))
    cards = [each for each in cards if each.type == CARD_TYPE]
    if len(cards) > 1:
        places = [escape_line(f"  crow mcp add {urljoin(url, each.url)}") for each in cards[:20] if each.url]
        fail("\n".join([f"{escape_controls(host)} has {len(cards)} MCP servers. Add one:", *places]))
    card = read_entry_card(url, cards[0]) if cards else None
    if card is None:
        fail(f"The catalog of {escape_controls(host)} has no card of an MCP server that can be read.")
    return card


def read_entry_card(url: str, entry: CatalogEntry) -> PublishedServer | None:
    """Return the card in an entry of a catalog, or at its address; None if it cannot be read."""
    if entry.data is not None:
        return read_card(entry.data)
    place, host = urljoin(url, entry.url), urlsplit(url).netloc
    if urlsplit(place).netloc != host:
        ask_about(f"The catalog of {host} names a card on another host: {place}")
    return read_card(fetch(place, CARD_TYPE)) if is_safe(place) else None


def find_remote(card: PublishedServer, url: str) -> RemoteEndpoint:
    """Return the first address of a card that crow can connect to. Exit if there is none."""
    remotes = [each for each in card.remotes if each.type in ("streamable-http", "sse") and each.url.isprintable()]
    if not remotes:
        host = escape_controls(urlsplit(url).netloc)
        fail(f"The card of {host} names no address of a server that crow can connect to.")
    remote = next((each for each in remotes if is_whole(each.url)), None)
    if remote is None:
        how = f"Add it with them: crow mcp add {card.short_name} URL"
        fail(escape_controls(f"The address of {card.name} has parts to fill in: {remotes[0].url}. {how}"))
    return remote


def ask_about(warning: str) -> None:
    """Ask whether to go on in spite of a warning. Exit with code 2 if not, or if there is nobody to ask."""
    if not (has_terminal() and click.confirm(escape_controls(f"{warning}. Go on?"), err=True)):
        fail(escape_controls(f"{warning}. Nothing was added. If you trust it, add it by its own address."))


def read_card(value: Any) -> PublishedServer | None:
    """Convert JSON to a card; None if it is not one."""
    with suppress(ValidationError):
        card = convert_leniently(value, PublishedServer)
        return card if card.remotes and card.name.isprintable() else None
    return None


def fetch(url: str, accept: str = "application/json") -> Any:
    """Return the JSON at an address; None if there is none. Redirects are not followed."""
    import httpx2  # imported here because it is slow to load

    data = b""
    try:
        with (
            httpx2.Client(timeout=TIMEOUT, follow_redirects=False) as http,
            http.stream("GET", url, headers={"Accept": accept}) as response,
        ):
            if response.status_code != 200:
                return None
            for part in response.iter_bytes():
                data += part
                if len(data) > SIZE_LIMIT:
                    return None
        return msgspec.json.decode(data)
    except (httpx2.HTTPError, httpx2.InvalidURL, UnicodeError, msgspec.DecodeError, RecursionError):
        return None


@click.command()
@click.argument("words", nargs=-1, required=True)
@limit_option(20)
@AS_JSON
def search(words: tuple[str, ...], limit: int, as_json: bool) -> None:
    """Search the official registry of MCP servers, and show how to add what it finds.

    The variable CROW_MCP_REGISTRY names another registry with the same interface. Nobody has reviewed the servers in
    the registry.
    """
    from urllib.parse import urlencode

    registry = os.environ.get(REGISTRY_VARIABLE) or REGISTRY
    query = urlencode({"search": " ".join(words), "limit": limit, "version": "latest"})
    entries = list_field(fetch(f"{registry.rstrip('/')}/v0.1/servers?{query}"), "servers")
    if entries is None:
        fail(f"{escape_controls(registry)} did not answer as a registry of MCP servers. Try again later.")
    found = [server for entry in entries[:limit] if (server := read_entry(entry)) is not None]
    if as_json:
        print_json([{**msgspec.to_builtins(server), "add": describe_addition(server)} for server in found])
    elif found:
        rows = [[server.name, server.version, shorten(to_line(server.description), 60)] for server in found]
        print_table(("NAME", "VERSION", "WHAT"), [[escape_line(cell) for cell in row] for row in rows])
        for server in found:
            print_note(
                escape_line(describe_addition(server) or f"{server.name} has no package or address that crow can use")
            )
    else:
        print_note(f"The registry has no server for {escape_controls(' '.join(words))!r}.")


def read_entry(value: Any) -> PublishedServer | None:
    """Convert an entry of the registry to a server; None for one that cannot be read or was deleted."""
    with suppress(ValidationError):
        entry = convert_leniently(value, RegistryEntry)
        match entry.meta:
            case {"io.modelcontextprotocol.registry/official": {"status": "deleted"}}:
                return None
            case _:
                return entry.server
    return None


def describe_addition(server: PublishedServer) -> str:
    """Return the command that adds a server; empty if crow cannot use it."""
    for remote in server.remotes:
        if remote.type in ("streamable-http", "sse") and is_whole(remote.url) and is_safe(remote.url):
            headers = "".join(f" --header '{each.name}: ${{VARIABLE}}'" for each in remote.headers if each.is_required)
            kind = " --transport sse" if remote.type == "sse" else ""
            return f"crow mcp add {server.short_name} {remote.url}{kind}{headers}"
    for package in server.packages:
        if (runner := RUNNERS.get(package.registry_type)) and re.fullmatch(r"[\w@./-]+", package.identifier):
            command = " ".join(runner).format(package.identifier, package.version or "latest")
            variables = "".join(f" --env {each.name}" for each in package.environment_variables if each.is_required)
            return f"crow mcp add {server.short_name}{variables} -- {command}"
    return ""
