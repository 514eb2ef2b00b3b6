"""What MCP servers have to read: for the person as `@server:uri` and as links, for the model by a tool."""

import asyncio
import logging
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from msgspec import Struct, ValidationError

from crow_core.acp.decoding import lenient
from crow_core.acp.schema import ContentBlock, ResourceLinkBlock, TextBlock
from crow_core.app import Crow
from crow_core.content import attach_blocks, to_blocks
from crow_core.masking import mask
from crow_core.mcp.result import ToolResult
from crow_core.mcp.server import Server, describe_error, list_or_empty
from crow_core.mcp.tool import ToolCall
from crow_core.messages import Message
from crow_core.session import Session
from crow_core.text import to_line

PATIENCE = 30.0
"""Seconds a server may take to list its resources, or to read one."""
SOON = 5.0
"""Seconds that are waited for a server that is not up."""
MENTIONS = 50
"""Resources that one prompt may name in its text, and as many by links."""
ROOM = 200_000
"""Characters of resources that one prompt takes in."""
LARGEST = 8_000_000
"""Characters of an image, in base64."""
MOST = 1_000
"""Resources that are listed for the model."""

MENTION = re.compile(r"(?<![\w@/])@([\w.-]+):(\S+)")

DEFINITION: dict[str, Any] = {
    "name": "mcp_resources",
    "description": "Read a resource of an MCP server by its URI, or, without a URI, list what there is to read.",
    "inputSchema": {
        "type": "object",
        "properties": {
            "uri": {"type": "string", "description": "of a resource, or made from a template"},
            "server": {"type": "string", "description": "only this server's"},
        },
    },
    "_meta": {"crow/kind": "read"},
}

logger = logging.getLogger("crow")


class Wanted(Struct):
    """The arguments of a call."""

    uri: str = ""
    server: str = ""


@dataclass(frozen=True)
class Resource:
    """One thing to read, or a template for many."""

    server: Server
    uri: str
    name: str
    about: str = ""
    template: bool = False

    def fits(self, uri: str) -> bool:
        """Whether a URI is this one's, or may be made from this template."""
        return uri.startswith(self.uri.partition("{")[0]) if self.template else uri == self.uri


@dataclass(eq=False)
class Offer(Server):
    """The tool, offered as soon as one of a session's servers is up and has something to read."""

    session: Session | None = None

    async def list(self) -> list[dict[str, Any]]:
        assert self.session
        asking = [asyncio.ensure_future(listing(server)) for server in self.session.toolbox.external_servers()]
        try:
            for found in asyncio.as_completed(asking):
                if await found:
                    return [DEFINITION]
        finally:
            for task in asking:
                task.cancel()
        return []


def resources(crow: Crow) -> None:
    """Put what a prompt mentions behind it, and let the model list and read. To be used after `commands`."""

    @crow.mcp_servers
    def offer(session: Session) -> Sequence[Server]:
        session.state["resources"] = Offer("resources", None, built_in=True, session=session)
        return [session.state["resources"]]

    @crow.before_tool
    async def answer(session: Session, tool_call: ToolCall) -> ToolResult | None:
        if not tool_call.is_for(session.state["resources"]):
            return None
        try:
            wanted = lenient(tool_call.arguments, Wanted)
        except ValidationError as error:
            return ToolResult.error(f"Nothing was read: {error}.")
        return await (read_for_model(session, wanted) if wanted.uri else list_for_model(session, wanted.server))

    @crow.before_prompt
    async def embed(message: Message, session: Session) -> Message:
        room, blocks = ROOM, list[dict[str, Any]]()
        for server, uri in dict.fromkeys(await mentioned(message, session)):
            try:
                found = await contents(server, uri)
            except ConnectionError as error:
                await session.notice(f"{to_line(uri)} was not read: {error}.", "warning")
                continue
            for block in found:
                blocks.append(short := shortened(block, room))
                room = max(room - len(str(short.get("resource", {}).get("text", ""))), 0)
        return attach_blocks(message, lenient(mask(blocks, session.secrets), list[ContentBlock]))


async def mentioned(message: Message, session: Session) -> list[tuple[Server, str]]:
    """The resources that a prompt names, in its text or by links: their servers and URIs."""
    servers = {word(server.name): server for server in reversed(session.toolbox.external_servers())}
    said: list[tuple[Server, str]] = []
    links: list[str] = []
    for block in to_blocks(message):
        match block:
            case TextBlock(text=text):
                said += [(servers[name], what) for name, what in MENTION.findall(text) if name in servers]
            case ResourceLinkBlock(uri=uri):
                links.append(uri)
            case _:
                pass
    named = {server for server, _ in said}
    has = await every(
        server for server in session.toolbox.external_servers() if server in named or (links and server.connected)
    )
    found: list[tuple[Server, str]] = []
    for server, what in said[:MENTIONS]:
        if uri := uri_of(what, [resource for resource in has if resource.server is server]):
            found.append((server, uri))
        else:
            about = f"The MCP server {to_line(server.name)!r} has no {to_line(what)!r} to read"
            await session.notice(f"{about}. /mcp shows how it is.", "warning")
    for uri in links[:MENTIONS]:
        found += [(resource.server, uri) for resource in has if resource.fits(uri)][:1]
    return found


def word(name: str) -> str:
    """A server's name as it is written in a mention."""
    return re.sub(r"[^\w.-]", "_", name)


def uri_of(said: str, has: Sequence[Resource]) -> str:
    """The URI that a mention means, by itself or by a resource's name; the end of a sentence may be stuck to it."""
    for each in (said, said.rstrip(".,;:!?)]}'\"")):
        for resource in has:
            if resource.fits(each) or (each == resource.name and not resource.template):
                return each if resource.fits(each) else resource.uri
    return ""


async def listing(server: Server) -> list[Resource]:
    """What a server has to read; nothing where it is not up, or does not say."""
    try:
        client = await server.client()
        if not (client.server_capabilities and client.server_capabilities.resources):
            return []
        async with asyncio.timeout(PATIENCE):
            have, templates = await client.list_resources(), await list_or_empty(client.list_resource_templates())
    except ConnectionError:
        return []  # which is said where its tools are waited for
    except Exception as error:
        said = mask(describe_error(error), server.secrets)
        logger.warning("MCP server %s did not list its resources: %s", to_line(server.name), said)
        return []
    return [
        *(Resource(server, str(each.uri), each.name, each.description or "") for each in have),
        *(Resource(server, each.uri_template, each.name, each.description or "", True) for each in templates),
    ]


async def every(servers: Iterable[Server]) -> list[Resource]:
    """What several servers have to read, as far as they say so soon."""

    async def soon(server: Server) -> list[Resource]:
        with suppress(TimeoutError):
            async with asyncio.timeout(SOON):
                return await listing(server)
        return []

    return [resource for has in await asyncio.gather(*map(soon, servers)) for resource in has]


async def contents(server: Server, uri: str) -> list[dict[str, Any]]:
    """What a resource holds, as MCP content blocks. Raises ConnectionError."""
    try:
        client = await server.client()
        async with asyncio.timeout(PATIENCE):
            found = await client.read_resource(uri)
    except TimeoutError as error:
        raise ConnectionError(f"the MCP server did not answer within {PATIENCE:.0f} s") from error
    except Exception as error:
        raise ConnectionError(mask(describe_error(error), server.secrets)) from error
    return [as_block(each.model_dump(mode="json", by_alias=True, exclude_none=True)) for each in found]


def as_block(resource: dict[str, Any]) -> dict[str, Any]:
    """A resource's content as a block: text and images as such, of all else how much it is."""
    match resource:
        case {"blob": str(data), "mimeType": str(kind)} if kind.startswith("image/") and len(data) <= LARGEST:
            return {"type": "image", "data": data, "mimeType": kind}
        case {"blob": str(data), **others}:
            about = f"{len(data) * 3 // 4:,} bytes of {others.get('mimeType', 'unknown type')}"
            return {"type": "text", "text": f"[{others.get('uri')}: {about}, which cannot be shown]"}
        case _:
            return {"type": "resource", "resource": resource}


def shortened(block: dict[str, Any], room: int) -> dict[str, Any]:
    """A block whose text has at most so many characters."""
    match block:
        case {"type": "resource", "resource": {"text": str(text), **others}} if len(text) > room:
            left_out = f"\n[{len(text) - room:,} characters left out]"
            return {"type": "resource", "resource": {**others, "text": text[:room] + left_out}}
        case _:
            return block


async def read_for_model(session: Session, wanted: Wanted) -> ToolResult:
    """A resource; without a server's name, of the first that has it."""
    servers = [
        server for server in session.toolbox.external_servers() if wanted.server in ("", server.name, word(server.name))
    ]
    has = await every(servers)
    of = next((resource.server for resource in has if resource.fits(wanted.uri)), None)
    if of is None and wanted.server and len(servers) == 1:
        of = servers[0]  # it may know more than it lists
    if of is None:
        return ToolResult.error(f"No MCP server lists {wanted.uri!r}. Call without a URI to see what there is.")
    try:
        return ToolResult(await contents(of, wanted.uri) or ToolResult.text("(empty)").content)
    except ConnectionError as error:
        return ToolResult.error(f"{wanted.uri!r} was not read: {error}.")


async def list_for_model(session: Session, name: str) -> ToolResult:
    """A line for each resource and template."""
    servers = session.toolbox.external_servers()
    has = await every(server for server in servers if name in ("", server.name, word(server.name)))
    lines = [described(resource) for resource in has[:MOST]]
    if len(has) > MOST:
        lines.append(f"[{len(has) - MOST:,} more are left out]")
    if not lines:
        names = ", ".join(to_line(server.name) for server in servers)
        return ToolResult.text(f"There is nothing to read. The servers are: {names}.")
    return ToolResult.text("\n".join(lines))


def described(resource: Resource) -> str:
    what = " (a template: fill in the braces)" if resource.template else ""
    about = f": {resource.about}" if resource.about else ""
    return to_line(f"{resource.server.name}: {resource.uri}{what}, {resource.name}{about}"[:1000])
