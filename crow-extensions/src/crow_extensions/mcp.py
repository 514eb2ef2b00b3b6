"""Slash commands for MCP servers: `/mcp`, and `/server:prompt` for each prompt of a server."""

import asyncio
import logging
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from crow_core.acp.complete_method import Completion
from crow_core.acp.connection import ConnectionClosed
from crow_core.acp.decoding import convert_leniently
from crow_core.acp.schema import ContentBlock, ElicitationSchema, StringPropertySchema, TextBlock
from crow_core.app import Crow
from crow_core.content import to_user_message
from crow_core.errors import ElicitationError
from crow_core.masking import mask
from crow_core.mcp.argument_values import complete_value
from crow_core.mcp.server import Server
from crow_core.mcp.server_answers import describe_error
from crow_core.messages.message import Message, make_unique
from crow_core.session.session import Command, Session
from crow_core.session_state import StateKey
from crow_core.text import to_line
from crow_system.shortening import format_count
from msgspec import UNSET

if TYPE_CHECKING:
    from mcp_types import Prompt, PromptMessage

SETTLE_DELAY = 0.2
"""Seconds without another change until a changed list of prompts is requested."""
PROMPT_TIMEOUT = 30.0
"""Seconds a server may take to list its prompts, or to return one."""
PROMPTS_LIMIT = 200
"""Prompts of one server that become commands."""

logger = logging.getLogger("crow")


def mcp(crow: Crow) -> None:
    """Add /mcp, and a slash command for each prompt of a session's MCP servers.

    Use it after other extensions that add commands.
    """

    @crow.commands
    def status(session: Session) -> list[Command]:
        return [Command("mcp", "The MCP servers, and how they are", show_servers)]

    @crow.session_start
    def follow(session: Session) -> None:
        session.state[PROMPTS] = [PromptCommands(session, server) for server in session.toolbox.external_servers()]

    @crow.session_end
    async def leave(session: Session) -> None:
        for prompts in session.state.pop(PROMPTS):
            await prompts.close()


async def show_servers(session: Session, text: str) -> str:
    """Return a line for each server with its state."""
    lines = [
        f"- **{to_line(server.name)}**: {describe_state(server, session)}"
        for server in session.toolbox.external_servers()
    ]
    return "\n".join(lines) or "There are no MCP servers. Add one: crow mcp add NAME -- COMMAND"


def describe_state(server: Server, session: Session) -> str:
    """Return the state of a server as a short text."""
    if server.error:
        return server.error
    tools = sum(tool.server is server for tool in session.toolbox.tools.values())
    prompts = sum(len(each.names) for each in session.state[PROMPTS] if each.server is server)
    has = format_count(tools, "tool") + (f", {format_count(prompts, 'prompt')}" if prompts else "")
    if server.connected:
        return has
    return f"{has}; not connected until it is needed" if tools else "starting"


@dataclass(eq=False)
class PromptCommands:
    """The prompts of one server as commands of one session."""

    session: Session
    server: Server
    names: list[str] = field(default_factory=list[str])
    """The names of its commands."""

    def __post_init__(self) -> None:
        self.listing = asyncio.ensure_future(self.list(0))
        self.server.listeners.append(self.handle_change)

    def handle_change(self, what: str) -> None:
        """List the prompts again once there is no further change."""
        if what == "prompts":
            self.listing.cancel()
            self.listing = asyncio.ensure_future(self.list(SETTLE_DELAY))

    async def list(self, wait: float) -> None:
        """List the server's prompts after `wait` seconds, and announce them as commands."""
        await asyncio.sleep(wait)
        if wait and not self.server.connected:
            return  # a server that ended is not started again for this
        try:
            client = await self.server.client()
            offered = client.server_capabilities and client.server_capabilities.prompts
            async with asyncio.timeout(PROMPT_TIMEOUT):
                prompts = await client.list_prompts() if offered else []
        except ConnectionError:
            return  # the list of its tools reports this
        except Exception as error:
            reason = mask(describe_error(error), self.server.secrets)
            logger.warning("MCP server %s did not list its prompts: %s", to_line(self.server.name), reason)
            return
        await self.session.turns.id_known.wait()
        if prompts or self.names:
            with suppress(ConnectionClosed):
                await self.announce(prompts)

    async def announce(self, prompts: "Sequence[Prompt]") -> None:
        """Replace the commands of this server, and send the client all commands."""
        commands = self.session.commands
        for name in self.names:
            del commands[name]
        self.names.clear()
        for prompt in sorted(prompts, key=lambda prompt: prompt.name)[:PROMPTS_LIMIT]:
            name = make_unique(re.sub(r"[^\w.:-]", "_", f"{self.server.name}:{prompt.name}")[:100], {*commands})
            commands[name] = to_command(name, prompt, self.server)
            self.names.append(name)
        await self.session.announce_commands()

    async def close(self) -> None:
        """Stop listing."""
        self.server.listeners.remove(self.handle_change)
        self.listing.cancel()
        await asyncio.wait([self.listing])


PROMPTS = StateKey("prompts", list[PromptCommands])
"""The commands of a session for the prompts of its servers."""


def to_command(name: str, prompt: "Prompt", server: Server) -> Command:
    arguments = prompt.arguments or []
    hint = " ".join(f"<{each.name}>" if each.required else f"[{each.name}]" for each in arguments)
    about = prompt.description or prompt.title or f"A prompt of {server.name}"
    description, hint = mask([to_line(about), to_line(hint)], server.secrets)
    complete = partial(complete_prompt, prompt, server)
    return Command(name, description[:500], partial(use_prompt, name, prompt, server), hint[:200], complete)


async def complete_prompt(prompt: "Prompt", server: Server, session: Session, text: str) -> list[Completion]:
    """Return the values that the server offers for the argument of a prompt that is being typed."""
    from mcp_types import PromptReference  # imported with FastMCP

    names = [each.name for each in prompt.arguments or []]
    if (place := find_typed_argument(text, names)) is None:
        return []
    name, value, known = place
    found = await complete_value(server, PromptReference(name=prompt.name), name, value, known)
    return [Completion(shlex.quote(each), len(value), each) for each in found]


def find_typed_argument(text: str, names: Sequence[str]) -> tuple[str, str, dict[str, str]] | None:
    """Find the argument in which `text` ends: its name, its value so far, and the arguments before it."""
    start = text.rfind(" ") + 1
    word, known = text[start:], parse_prompt_arguments(text[:start], names)
    name, equals, value = word.partition("=")
    if equals and name in names:
        return name, value, {each: known[each] for each in known if each != name}
    left = [each for each in names if each not in known]
    return (left[0], word, known) if left else None


async def use_prompt(name: str, prompt: "Prompt", server: Server, session: Session, text: str) -> str | Message:
    """Return the user message of a prompt, or a text for the user if there is none. Asks for missing arguments."""
    arguments = prompt.arguments or []
    values = parse_prompt_arguments(text, [each.name for each in arguments])
    if missing := [each for each in arguments if each.required and not values.get(each.name)]:
        fields = {
            each.name: StringPropertySchema(description=about[:500] or UNSET, min_length=1)
            for each in missing
            for about in [mask(to_line(each.description or ""), server.secrets)]
        }
        usage = " ".join(f"<{each.name}>" if each.required else f"[{each.name}]" for each in arguments)
        try:
            form = ElicitationSchema(properties={**fields}, required=[*fields])
            answer = await session.user.elicit(
                f"/{name} of the MCP server {to_line(server.name)} needs more:", form=form
            )
        except ElicitationError:
            names = ", ".join(each.name for each in missing)
            return to_line(f"/{name} needs {names}. Type: /{name} {usage} (in this order, or as name=value).")
        if answer.action != "accept":
            return f"/{name} was not used."
        values |= answer.content
    try:
        client = await server.client()
        async with asyncio.timeout(PROMPT_TIMEOUT):
            result = await client.get_prompt(prompt.name, values)
        blocks = to_prompt_blocks(result.messages)
    except TimeoutError:
        return f"/{name}: the MCP server did not answer within {PROMPT_TIMEOUT:.0f} s."
    except Exception as error:
        return f"/{name} could not be used: {mask(describe_error(error), server.secrets)}."
    message: Message = mask(to_user_message(blocks), session.secrets)
    message["crow"] = {"blocks": [{"type": "text", "text": f"/{name} {text}".strip()}]}
    return message if message.get("content") else f"/{name} gave an empty prompt."


def parse_prompt_arguments(text: str, names: Sequence[str]) -> dict[str, str]:
    """Return the arguments in a typed text: `name=value` for a known name, else by position.

    The last argument takes the words that are left.
    """
    try:
        typed = shlex.split(text)
    except ValueError:  # an apostrophe is no quotation mark
        typed = text.split()
    named = dict(word.split("=", 1) for word in typed if word.partition("=")[0] in names and "=" in word)
    rest = [word for word in typed if word.partition("=")[0] not in named]
    unnamed = [name for name in names if name not in named]
    positional = dict(zip(unnamed, rest, strict=False))
    if positional and len(rest) > len(unnamed):
        positional[unnamed[-1]] = " ".join(rest[len(unnamed) - 1 :])
    return named | positional


def to_prompt_blocks(messages: "Sequence[PromptMessage]") -> list[ContentBlock]:
    """Return the content of a prompt's messages; each begins with its role if the user is not the only one."""
    only_user = all(message.role == "user" for message in messages)
    blocks: list[ContentBlock] = []
    for message in messages:
        if not only_user:
            blocks.append(TextBlock(text=f"{message.role.capitalize()}:"))
        content: dict[str, Any] = message.content.model_dump(mode="json", by_alias=True, exclude_none=True)
        blocks += convert_leniently([content], list[ContentBlock])
    return blocks
