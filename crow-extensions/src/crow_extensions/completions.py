"""The method `_crow/complete`: completes the arguments of commands, and resources of MCP servers behind `@`.

The client knows the commands and the files itself. An argument is completed by its command (`Command.complete`), a URI
by the server whose template it is made from.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from crow_core.acp.complete_method import COMPLETE_METHOD, Completion
from crow_core.acp.connection import RpcError
from crow_core.acp.schema import INVALID_PARAMS
from crow_core.app import Crow
from crow_core.mcp.argument_values import VALUE_LIMIT, complete_template
from crow_core.mcp.resources import Resource, list_resources, to_mention_name
from crow_core.mcp.server import Server
from crow_core.session.session import Session
from crow_core.session_state import StateKey
from crow_core.text import to_line

COMMAND = re.compile(r"/(\S+) (.*)", re.DOTALL)
"""A command and its arguments."""
MENTION = re.compile(r"(?<![\w@/])@([\w.-]+)(?::(\S*))?$")
"""The mention of a resource that is being typed: the server, and the URI or name behind it."""
SHOWN_LIMIT = 50
"""Completions of one answer."""


@dataclass
class ListedResources:
    """The resources of servers, as they were listed, with the number of changes at that time."""

    by_server: dict[Server, tuple[int, list[Resource]]] = field(
        default_factory=dict[Server, tuple[int, list[Resource]]]
    )

    async def list(self, server: Server) -> list[Resource]:
        """List the resources of a server, anew only if they have changed."""
        changes = server.changes["resources"]
        if server not in self.by_server or self.by_server[server][0] != changes:
            self.by_server[server] = changes, await list_resources(server)
        return self.by_server[server][1]


LISTED = StateKey("completions", ListedResources)


def completions(crow: Crow) -> None:
    """Answer the method `_crow/complete`, by which clients complete what a user is typing."""
    crow.methods[COMPLETE_METHOD] = complete


async def complete(session: Session, params: dict[str, Any]) -> dict[str, Any]:
    """Answer the method `_crow/complete`. Raises RpcError."""
    text = params.get("text")
    if not isinstance(text, str):
        raise RpcError(INVALID_PARAMS, "Invalid params: text: the text before the cursor has to be a string")
    found: list[Completion] = []
    if match := COMMAND.fullmatch(text):
        command = session.commands.get(match[1])
        found += await command.complete(session, match[2]) if command and command.complete else []
    if match := MENTION.search(text):
        found += await complete_mention(session, match[1], match[2])
    return {"completions": found[:SHOWN_LIMIT]}


async def complete_mention(session: Session, name: str, typed: str | None) -> list[Completion]:
    """Complete the mention of a resource: the name of its server, or its URI."""
    servers = [each for each in session.toolbox.external_servers() if each.connected]
    listed = session.state[LISTED]
    if typed is None:
        fitting = [each for each in servers if to_mention_name(each.name).lower().startswith(name.lower())]
        return [
            Completion(f"@{label}:", len(name) + 1, f"@{label}:", "resources of an MCP server")
            for each in fitting
            for label in [to_mention_name(each.name)]
            if await listed.list(each)
        ]
    server = next((each for each in servers if to_mention_name(each.name) == name), None)
    return await complete_uri(server, await listed.list(server), typed) if server else []


async def complete_uri(server: Server, resources: list[Resource], typed: str) -> list[Completion]:
    """Complete the URI of a resource: first resources that contain the typed text, then templates."""
    found = {
        each.uri: to_line(each.about or each.name)[:VALUE_LIMIT]
        for each in resources
        if not each.template and typed.lower() in f"{each.uri} {each.name}".lower()
    }
    for each in resources:
        if each.template and len(found) < SHOWN_LIMIT:
            about = to_line(each.about or each.name)[:VALUE_LIMIT]
            found |= {uri: about for uri in await complete_template(server, each.uri, typed) if uri not in found}
    named = [(uri, about) for uri, about in found.items() if re.fullmatch(r"\S+", uri) and uri.isprintable()]
    return [Completion(uri, len(typed), uri, about) for uri, about in named if uri != typed]
