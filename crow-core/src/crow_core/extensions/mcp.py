"""What a person types to reach MCP servers: their prompts, as `/server:prompt`, and `/mcp`."""

import asyncio
import logging
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from crow_core.acp.connection import ConnectionClosed
from crow_core.acp.decoding import lenient
from crow_core.acp.schema import ContentBlock, ElicitationSchema, StringPropertySchema, TextBlock
from crow_core.app import Crow
from crow_core.content import to_user_message
from crow_core.errors import ElicitationError
from crow_core.masking import mask
from crow_core.mcp.server import Server, describe_error
from crow_core.messages import Message, make_unique
from crow_core.session import Command, Session
from crow_core.text import to_line

if TYPE_CHECKING:
    from mcp_types import Prompt, PromptMessage

CALM = 0.2
"""Seconds without another change before a list that changed is asked for."""
PATIENCE = 30.0
"""Seconds a server may take to list its prompts, or to give one."""
MOST = 200
"""Prompts of one server that become commands."""

logger = logging.getLogger("crow")


def mcp(crow: Crow) -> None:
    """Bring /mcp, and a slash command for every prompt of the session's MCP servers, as they come up and change.

    To be used after what brings other commands.
    """

    @crow.commands
    def status(session: Session) -> list[Command]:
        return [Command("mcp", "The MCP servers, and how they are", show)]

    @crow.session_start
    def follow(session: Session) -> None:
        session.state["prompts"] = [Prompts(session, server) for server in session.toolbox.external_servers()]

    @crow.session_end
    async def leave(session: Session) -> None:
        for prompts in session.state.pop("prompts", ()):
            await prompts.close()


async def show(session: Session, words: str) -> str:
    lines = [
        f"- **{to_line(server.name)}**: {state_of(server, session)}" for server in session.toolbox.external_servers()
    ]
    return "\n".join(lines) or "There are no MCP servers. Add one: crow mcp add NAME -- COMMAND"


def state_of(server: Server, session: Session) -> str:
    """How a server is, in a few words."""
    if server.error:
        return server.error
    tools = sum(tool.server is server for tool in session.toolbox.tools.values())
    prompts = sum(len(found.names) for found in session.state.get("prompts", ()) if found.server is server)
    has = counted(tools, "tool") + (f", {counted(prompts, 'prompt')}" if prompts else "")
    if server.connected:
        return has
    return f"{has}; not connected, as long as nobody needs it" if tools else "starting"


def counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


@dataclass(eq=False)
class Prompts:
    """One server's prompts as commands of one session."""

    session: Session
    server: Server
    names: list[str] = field(default_factory=list[str])
    """Of its commands."""

    def __post_init__(self) -> None:
        self.listing = asyncio.ensure_future(self.list(0))
        self.server.listeners.append(self.hear)

    def hear(self, what: str) -> None:
        """Ask once more, when what changes has come to rest."""
        if what == "prompts":
            self.listing.cancel()
            self.listing = asyncio.ensure_future(self.list(CALM))

    async def list(self, wait: float) -> None:
        await asyncio.sleep(wait)
        if wait and not self.server.connected:
            return  # one that dies of the question is not started again for it
        try:
            client = await self.server.client()
            offered = client.server_capabilities and client.server_capabilities.prompts
            async with asyncio.timeout(PATIENCE):
                prompts = await client.list_prompts() if offered else []
        except ConnectionError:
            return  # which is said where its tools are waited for
        except Exception as error:
            said = mask(describe_error(error), self.server.secrets)
            logger.warning("MCP server %s did not list its prompts: %s", to_line(self.server.name), said)
            return
        await self.session.turns.id_known.wait()
        if prompts or self.names:
            with suppress(ConnectionClosed):
                await self.announce(prompts)

    async def announce(self, prompts: "Sequence[Prompt]") -> None:
        commands = self.session.commands
        for name in self.names:
            del commands[name]
        self.names.clear()
        for prompt in sorted(prompts, key=lambda prompt: prompt.name)[:MOST]:
            name = make_unique(re.sub(r"[^\w.:-]", "_", f"{self.server.name}:{prompt.name}")[:100], {*commands})
            commands[name] = command_of(name, prompt, self.server)
            self.names.append(name)
        await self.session.announce_commands()

    async def close(self) -> None:
        self.server.listeners.remove(self.hear)
        self.listing.cancel()
        await asyncio.wait([self.listing])


def command_of(name: str, prompt: "Prompt", server: Server) -> Command:
    """A prompt as a slash command."""
    arguments = prompt.arguments or []
    hint = " ".join(f"<{each.name}>" if each.required else f"[{each.name}]" for each in arguments)
    about = prompt.description or prompt.title or f"A prompt of {server.name}"
    shown, hint = mask([to_line(about), to_line(hint)], server.secrets)
    return Command(name, shown[:500], partial(use, name, prompt, server), hint=hint[:200])


async def use(name: str, prompt: "Prompt", server: Server, session: Session, words: str) -> str | Message:
    """The user message that a prompt stands for, or why there is none."""
    wanted = prompt.arguments or []
    given = arguments_in(words, [each.name for each in wanted])
    if lacking := [each for each in wanted if each.required and not given.get(each.name)]:
        fields = {
            each.name: StringPropertySchema(description=about[:500] or UNSET, min_length=1)
            for each in lacking
            for about in [mask(to_line(each.description or ""), server.secrets)]
        }
        usage = " ".join(f"<{each.name}>" if each.required else f"[{each.name}]" for each in wanted)
        try:
            form = ElicitationSchema(properties={**fields}, required=[*fields])
            answer = await session.user.elicit(
                f"/{name} of the MCP server {to_line(server.name)} needs more:", form=form
            )
        except ElicitationError:
            missing = ", ".join(each.name for each in lacking)
            return to_line(f"/{name} needs {missing}. Type: /{name} {usage} (in this order, or as name=value).")
        if answer.action != "accept":
            return f"/{name} was not used."
        given |= answer.content
    try:
        client = await server.client()
        async with asyncio.timeout(PATIENCE):
            result = await client.get_prompt(prompt.name, given)
        blocks = blocks_in(result.messages)
    except TimeoutError:
        return f"/{name}: the MCP server did not answer within {PATIENCE:.0f} s."
    except Exception as error:
        return f"/{name} could not be used: {mask(describe_error(error), server.secrets)}."
    message: Message = mask(to_user_message(blocks), session.secrets)
    message["crow"] = {"blocks": [{"type": "text", "text": f"/{name} {words}".strip()}]}
    return message if message.get("content") else f"/{name} gave an empty prompt."


def arguments_in(words: str, names: Sequence[str]) -> dict[str, str]:
    """The arguments in what was typed: `name=value` where the name is known, else in order; what is left over belongs
    to the last."""
    try:
        typed = shlex.split(words)
    except ValueError:  # a quotation mark that is an apostrophe
        typed = words.split()
    named = dict(word.split("=", 1) for word in typed if word.partition("=")[0] in names and "=" in word)
    rest = [word for word in typed if word.partition("=")[0] not in named]
    open_ = [name for name in names if name not in named]
    placed = dict(zip(open_, rest, strict=False))
    if placed and len(rest) > len(open_):
        placed[open_[-1]] = " ".join(rest[len(open_) - 1 :])
    return named | placed


def blocks_in(messages: "Sequence[PromptMessage]") -> list[ContentBlock]:
    """The content of a prompt's messages; who speaks is said where it is not the user alone."""
    alone = all(message.role == "user" for message in messages)
    blocks: list[ContentBlock] = []
    for message in messages:
        if not alone:
            blocks.append(TextBlock(text=f"{message.role.capitalize()}:"))
        content: dict[str, Any] = message.content.model_dump(mode="json", by_alias=True, exclude_none=True)
        blocks += lenient([content], list[ContentBlock])
    return blocks
