"""Resources of MCP servers: list them, read them, and convert the reading of one to a tool call."""

import asyncio
import glob
import logging
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from crow_core.masking import mask
from crow_core.mcp.served_skills import find_mismatch, find_skill, refresh_skill
from crow_core.mcp.server import Server
from crow_core.mcp.server_answers import describe_error, list_or_empty
from crow_core.mcp.tool import ToolCall
from crow_core.mcp.toolbox import Toolbox
from crow_core.messages.message import RawToolCall
from crow_core.text import to_line

NAME = "mcp_resources"
"""The name of the tool that reads resources."""
RESOURCE_TIMEOUT = 30.0
"""Seconds a server may take to list its resources, or to read one."""
LIST_TIMEOUT = 5.0
"""Seconds to wait for the lists of several servers."""
IMAGE_LIMIT = 8_000_000
"""Characters of an image, in base64."""
EXPRESSION = re.compile(r"\{[^{}]*\}")
"""A variable part of a URI template (RFC 6570)."""

READ_DEFINITION: dict[str, Any] = {"name": NAME, "description": "Read a resource by its URI."}
"""The tool that stands for reading a resource of one server, in rules and permissions."""

logger = logging.getLogger("crow")


@dataclass(frozen=True)
class Resource:
    """A resource, or a template for several."""

    server: Server
    uri: str
    name: str
    about: str = ""
    template: bool = False

    def matches(self, uri: str) -> bool:
        """Test whether this is the resource of a URI, or a template that may produce it."""
        if not self.template:
            return uri == self.uri
        return fnmatchcase(uri, "*".join(map(glob.escape, EXPRESSION.split(self.uri))))


def to_mention_name(name: str) -> str:
    """Return the name of a server as it is written in a mention."""
    return re.sub(r"[^\w.-]", "_", name)


async def list_resources(server: Server) -> list[Resource]:
    """Return the resources and templates of a server, or an empty list if it does not list any."""
    try:
        client = await server.client()
        if not (client.server_capabilities and client.server_capabilities.resources):
            return []
        async with asyncio.timeout(RESOURCE_TIMEOUT):
            plain, templates = await client.list_resources(), await list_or_empty(client.list_resource_templates())
    except ConnectionError:
        return []  # the list of its tools reports this
    except Exception as error:  # a server may answer with anything, and the SDK may raise anything for it
        reason = mask(describe_error(error), server.secrets)
        logger.warning("MCP server %s did not list its resources: %s", to_line(server.name), reason)
        return []
    return [
        *(Resource(server, str(each.uri), each.name, each.description or "") for each in plain),
        *(Resource(server, each.uri_template, each.name, each.description or "", True) for each in templates),
    ]


async def list_several(servers: Iterable[Server]) -> list[Resource]:
    """Return the resources of several servers; leave out those that do not list them within LIST_TIMEOUT seconds."""

    async def list_soon(server: Server) -> list[Resource]:
        with suppress(TimeoutError):
            async with asyncio.timeout(LIST_TIMEOUT):
                return await list_resources(server)
        return []

    return [resource for resources in await asyncio.gather(*map(list_soon, servers)) for resource in resources]


async def read_blocks(server: Server, uri: str) -> list[dict[str, Any]]:
    """Read a resource as MCP content blocks. Raises ConnectionError, also for a file of a skill with a wrong digest.

    If it is not, the entry of the skill is requested again, once: the server may have changed both.
    """
    contents = await read_contents(server, uri)
    if fault := find_mismatch(server, uri, contents):
        await refresh_skill(server, find_skill(server, uri))
        contents = await read_contents(server, uri)
        fault = find_mismatch(server, uri, contents)
    if fault:
        raise ConnectionError(fault)
    return [to_block(each) for each in contents]


async def read_contents(server: Server, uri: str) -> list[dict[str, Any]]:
    """Read the contents of a resource. Raises ConnectionError."""
    try:
        client = await server.client()
        async with asyncio.timeout(RESOURCE_TIMEOUT):
            contents = await client.read_resource(uri)
    except TimeoutError as error:
        raise ConnectionError(f"the MCP server did not answer within {RESOURCE_TIMEOUT:.0f} s") from error
    except Exception as error:  # as above
        raise ConnectionError(mask(describe_error(error), server.secrets)) from error
    return [each.model_dump(mode="json", by_alias=True, exclude_none=True) for each in contents]


def to_block(resource: dict[str, Any]) -> dict[str, Any]:
    """Convert the contents of a resource to a block: text or an image, or for other data a note of its size."""
    match resource:
        case {"blob": str(data), "mimeType": str(kind)} if kind.startswith("image/") and len(data) <= IMAGE_LIMIT:
            return {"type": "image", "data": data, "mimeType": kind}
        case {"blob": str(data), **others}:
            about = f"{len(data) * 3 // 4:,} bytes of {others.get('mimeType', 'unknown type')}"
            return {"type": "text", "text": f"[{others.get('uri')}: {about}, which cannot be shown]"}
        case _:
            return {"type": "resource", "resource": resource}


def to_read_call(toolbox: Toolbox, tool_call: ToolCall, server: Server, uri: str) -> ToolCall:
    """Convert a tool call to the call that reads a resource of one server. Its kind is `read` for a trusted server."""
    tool, arguments = toolbox.make_tool(server, READ_DEFINITION), {"uri": uri}
    text = msgspec.json.encode(arguments).decode()
    use: RawToolCall = {**tool_call.use, "function": {"name": tool.name, "arguments": text}}
    return ToolCall(use, arguments, original=arguments, kind="read" if server.trust else "fetch", tool=tool)
