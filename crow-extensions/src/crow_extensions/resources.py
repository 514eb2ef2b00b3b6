"""Resources of MCP servers: the user attaches them as `@server:uri` or links, the model reads them with a tool.

The user's own mentions and links are read without a question. When the model reads, it sends the URI to the server.
This is judged as a call of the tool `SERVER_mcp_resources` of that server. Only resources that the server lists, or has
a template for, are read.
"""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from crow_core.acp.decoding import convert_leniently
from crow_core.acp.schema import ContentBlock, ResourceLinkBlock, TextBlock
from crow_core.app import Crow
from crow_core.content import attach_blocks, to_blocks
from crow_core.masking import mask
from crow_core.mcp.resources import (
    NAME,
    Resource,
    list_resources,
    list_several,
    read_blocks,
    to_mention_name,
    to_read_call,
)
from crow_core.mcp.result import ToolResult
from crow_core.mcp.server import Server
from crow_core.mcp.tool import ToolCall
from crow_core.messages.message import Message
from crow_core.session.session import Session
from crow_core.session_state import StateKey
from crow_core.text import to_line
from crow_system.shortening import leave_out
from msgspec import Struct, ValidationError

MENTIONS_LIMIT = 50
"""Resources that the text of one prompt may mention; as many again by links."""
TEXT_LIMIT = 200_000
"""Characters of resources that are added to one prompt."""
LIST_LIMIT = 1_000
"""Resources in a list for the model."""

ATTACHED = StateKey("attached_resources", dict[tuple[Server, str], int])
"""The resources that prompts of a session have attached, each with the count of its changes at that time."""
MENTION = re.compile(r"(?<![\w@/])@([\w.-]+):(\S+)")
DEFINITION: dict[str, Any] = {
    "name": NAME,
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


class ReadArguments(Struct):
    """The arguments of the tool `mcp_resources`."""

    uri: str = ""
    server: str = ""


@dataclass(eq=False)
class ResourceTool(Server):
    """Offers the tool as soon as one of a session's servers lists a resource."""

    session: Session | None = None

    async def list(self) -> list[dict[str, Any]]:
        assert self.session
        tasks = [asyncio.ensure_future(list_resources(server)) for server in find_readable_servers(self.session)]
        try:
            for listing in asyncio.as_completed(tasks):
                if await listing:
                    return [DEFINITION]
        finally:
            for task in tasks:
                task.cancel()
        return []


def resources(crow: Crow) -> None:
    """Attach the resources that a prompt mentions, and add the tool for the model. Use it after `commands`."""

    @crow.mcp_servers
    def offer(session: Session) -> Sequence[Server]:
        return [ResourceTool("resources", handlers={NAME: answer}, built_in=True, session=session)]

    @crow.before_prompt
    async def embed(message: Message, session: Session) -> Message:
        if session.parent:
            return message  # the prompt of a sub-agent is written by a model
        remaining, blocks = TEXT_LIMIT, list[dict[str, Any]]()
        mentioned = dict.fromkeys(await find_mentioned(message, session))
        changed = [uri for server, uri in find_changed(session) if (server, uri) not in mentioned]
        for server, uri in mentioned:
            try:
                await follow(session, server, uri)
                resource = await read_blocks(server, uri)
            except ConnectionError as error:
                await session.notice(f"{to_line(uri)} was not read: {error}.", "warning")
                continue
            for block in resource:
                blocks.append(short := shorten_block(block, remaining))
                remaining = max(remaining - len(str(short.get("resource", {}).get("text", ""))), 0)
        blocks += [{"type": "text", "text": describe_change(uri)} for uri in changed]
        return attach_blocks(message, convert_leniently(mask(blocks, session.secrets), list[ContentBlock]))


async def follow(session: Session, server: Server, uri: str) -> None:
    """Subscribe to updates of a resource that is attached now. Raises ConnectionError."""
    await server.follow_resource(uri)
    session.state[ATTACHED][server, uri] = server.changes[uri]


def find_changed(session: Session) -> list[tuple[Server, str]]:
    """Return the attached resources that have changed since the model was last told of them."""
    attached = session.state[ATTACHED]
    changed = [(server, uri) for (server, uri), count in attached.items() if server.changes[uri] != count]
    attached |= {(server, uri): server.changes[uri] for server, uri in changed}
    return changed


def describe_change(uri: str) -> str:
    """Return the sentence for the model about a resource that has changed since it was attached."""
    return f"[The resource {to_line(uri)} may have changed since it was attached. Read it again with {NAME} if needed.]"


async def find_mentioned(message: Message, session: Session) -> list[tuple[Server, str]]:
    """Return server and URI of each resource that a prompt mentions in its text or links to."""
    external = session.toolbox.external_servers()
    servers = {to_mention_name(server.name): server for server in reversed(external)}
    mentions: list[tuple[Server, str]] = []
    links: list[str] = []
    for block in to_blocks(message):
        match block:
            case TextBlock(text=text):
                mentions += [(servers[name], what) for name, what in MENTION.findall(text) if name in servers]
            case ResourceLinkBlock(uri=uri):
                links.append(uri)
            case _:
                pass
    mentioned = {server for server, _ in mentions}
    resources = await list_several(server for server in external if server in mentioned or (links and server.connected))
    found: list[tuple[Server, str]] = []
    for server, what in mentions[:MENTIONS_LIMIT]:
        if uri := find_uri(what, [resource for resource in resources if resource.server is server]):
            found.append((server, uri))
        else:
            about = f"The MCP server {to_line(server.name)!r} has no {to_line(what)!r} to read"
            await session.notice(f"{about}. /mcp shows how it is.", "warning")
    for uri in links[:MENTIONS_LIMIT]:
        found += [(resource.server, uri) for resource in resources if resource.matches(uri)][:1]
    return found


def find_uri(mention: str, resources: Sequence[Resource]) -> str:
    """Return the URI that a mention means: itself, or that of the resource with this name; else an empty string.

    Punctuation at the end is removed if it is not part of the URI.
    """
    for each in (mention, mention.rstrip(".,;:!?)]}'\"")):
        for resource in resources:
            if resource.matches(each) or (each == resource.name and not resource.template):
                return each if resource.matches(each) else resource.uri
    return ""


def shorten_block(block: dict[str, Any], limit: int) -> dict[str, Any]:
    """Return a block with its text cut at a number of characters."""
    match block:
        case {"type": "resource", "resource": {"text": str(text), **others}} if len(text) > limit:
            return {"type": "resource", "resource": {**others, "text": leave_out(text, limit)}}
        case _:
            return block


def find_readable_servers(session: Session, name: str = "") -> list[Server]:
    """Return the servers whose resources the model may list, all of them or those of this name.

    The settings of a server can leave the tool out, as any other of its tools.
    """
    servers = [server for server in session.toolbox.external_servers() if server.offers(NAME)]
    return [each for each in servers if name in ("", each.name, to_mention_name(each.name))]


async def answer(session: Session, tool_call: ToolCall) -> ToolResult:
    """Answer a call of the tool: read what its URI names, or list what there is."""
    try:
        arguments = convert_leniently(tool_call.arguments, ReadArguments)
    except ValidationError as error:
        return ToolResult.error(f"Nothing was read: {error}.")
    if not arguments.uri:
        return await list_for_model(session, arguments.server)
    return await read_for_model(session, tool_call, arguments)


async def read_for_model(session: Session, tool_call: ToolCall, arguments: ReadArguments) -> ToolResult:
    """Read a resource for the model, from the first server that has it unless a server is named."""
    uri = arguments.uri
    resources = await list_several(find_readable_servers(session, arguments.server))
    fitting = sorted((each for each in resources if each.matches(uri)), key=lambda resource: resource.template)
    fitting += [
        Resource(each, uri, uri)
        for each in find_readable_servers(session, arguments.server)
        if uri in each.skill_files  # which a server need not list as resources
    ]
    if not fitting:
        return ToolResult.error(f"No MCP server lists {uri!r}. Call without a URI to see what there is.")
    server = fitting[0].server
    if refusal := await session.permit(to_read_call(session.toolbox, tool_call, server, uri)):
        return refusal
    try:
        return ToolResult(await read_blocks(server, uri) or ToolResult.text("(empty)").content)
    except ConnectionError as error:
        return ToolResult.error(f"{uri!r} was not read: {error}.")


async def list_for_model(session: Session, name: str) -> ToolResult:
    """List resources and templates for the model, one in a line."""
    resources = await list_several(find_readable_servers(session, name))
    lines = [describe(resource) for resource in resources[:LIST_LIMIT]]
    if len(resources) > LIST_LIMIT:
        lines.append(f"[{len(resources) - LIST_LIMIT:,} more are left out]")
    if not lines:
        names = ", ".join(to_line(server.name) for server in find_readable_servers(session))
        return ToolResult.text(f"There is nothing to read. The servers are: {names}.")
    return ToolResult.text("\n".join(lines))


def describe(resource: Resource) -> str:
    """Return a resource as a line of a list."""
    what = " (a template: fill in the braces)" if resource.template else ""
    about = f": {resource.about}" if resource.about else ""
    return to_line(f"{resource.server.name}: {resource.uri}{what}, {resource.name}{about}"[:1000])
