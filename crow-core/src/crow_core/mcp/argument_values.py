"""Completion of the arguments of prompts and of resource templates, by the server that has them."""

import asyncio
import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from crow_core.masking import mask
from crow_core.mcp.server import Server
from crow_core.mcp.server_answers import describe_error
from crow_core.text import to_line

if TYPE_CHECKING:
    from mcp_types import PromptReference, ResourceTemplateReference

COMPLETION_TIMEOUT = 5.0
"""Seconds a server may take to complete an argument."""
VALUES_LIMIT = 100
"""Values of one answer that are used, which is MCP's own limit."""
VALUE_LIMIT = 500
"""Characters of a value; a longer one is left out."""
VARIABLE = re.compile(r"\{[+#./;?&]?(\w+)\*?(?::\d+)?\}")
"""An expression of a URI template (RFC 6570) that has one variable."""

logger = logging.getLogger("crow")


async def complete_value(
    server: Server,
    reference: "PromptReference | ResourceTemplateReference",
    name: str,
    value: str,
    known: Mapping[str, str],
) -> list[str]:
    """Return the values that a server offers for an argument. `value` is the typed part, `known` the other arguments.

    The list is empty if the server is not connected, completes nothing, or fails; a failure is in the log.
    """
    if not server.connected:
        return []
    try:
        client = await server.client()
        if client.server_capabilities is None or client.server_capabilities.completions is None:
            return []
        async with asyncio.timeout(COMPLETION_TIMEOUT):
            found = await client.complete(reference, {"name": name, "value": value}, {**known} or None)
    except Exception as error:  # a server may answer with anything, and the SDK may raise anything for it
        reason = mask(describe_error(error), server.secrets)
        logger.info("MCP server %s did not complete %s: %s", to_line(server.name), to_line(name), reason)
        return []
    values = [each for each in found.values if each.isprintable() and 0 < len(each) <= VALUE_LIMIT]
    return [each for each in values if mask(each, server.secrets) == each][:VALUES_LIMIT]


async def complete_template(server: Server, template: str, typed: str) -> list[str]:
    """Return URIs that begin as `typed` does, from a URI template: each as far as the server completes it."""
    from mcp_types import ResourceTemplateReference  # imported with FastMCP

    before = re.split(r"\{[^{}]*\}", template)[0]
    if len(typed) < len(before):
        return [before] if before.startswith(typed) else []
    if (place := find_variable(template, typed)) is None:
        return []
    name, value, known = place
    reference = ResourceTemplateReference(uri=template)
    start = typed[: len(typed) - len(value)]
    return [start + each for each in await complete_value(server, reference, name, value, known)]


def find_variable(template: str, typed: str) -> tuple[str, str, dict[str, str]] | None:
    """Find the variable of a URI template in which `typed` ends: its name, its value so far, and the earlier ones."""
    names = VARIABLE.findall(template)
    texts = VARIABLE.split(template)[::2]
    if any("{" in text for text in texts):
        return None  # an expression with several variables
    for count in range(len(names), 0, -1):
        pattern = (
            "".join(f"{re.escape(text)}(.*?)" for text in texts[: count - 1]) + f"{re.escape(texts[count - 1])}(.*)"
        )
        if found := re.fullmatch(pattern, typed):
            *known, value = found.groups()
            return names[count - 1], value, dict(zip(names, known, strict=False))
    return None
