"""The MCP servers of a session: the user's own, those of a program, of a trusted folder and of plugins."""

import asyncio
import shlex
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from crow_core.app import Crow
from crow_core.errors import ElicitationError
from crow_core.mcp.elicitation import can_ask
from crow_core.mcp.server import Server
from crow_core.mcp.shared_servers import share_server
from crow_core.session.session import Session
from crow_core.session_state import StateKey
from crow_core.text import to_line
from crow_skills.text_files import find_project_folders
from msgspec.json import encode as to_json

from crow_agent.program_limits import can_limit, find_project_level, limit_server, tighten
from crow_agent.settings.config import PROJECT_MAY, find_ignored_settings, load_project_config
from crow_agent.settings.home import Home
from crow_agent.settings.mcp_servers import TOKENS_FOLDER, describe_missing_login, to_server
from crow_agent.settings.project_files import FOLDERS, SETTINGS, list_settings, show_path
from crow_agent.settings.structs import Config, ServerSettings
from crow_agent.settings.trust import TrustedFolders

TRUST_NOTICES = StateKey("trust_notices", list[str])
PLUGIN_NOTICES = StateKey("plugin_notices", list[str])
MAX_IGNORED = 6
"""Settings that a notice names; the others are counted."""


def configured_servers(crow: Crow, *, config: Config, home: Home) -> None:
    """Connect the user's own MCP servers in every session."""

    @crow.mcp_servers
    def servers(session: Session) -> Sequence[Server]:
        return to_servers(session, config.mcp.servers, home, config.mcp.client_document)


def given_servers(crow: Crow, *, given: Mapping[str, Any], env: Mapping[str, str]) -> None:
    """Connect the MCP servers that a program hands in, in every session; as settings, or as the server itself."""
    home = Home.find(env)

    @crow.mcp_servers
    def servers(session: Session) -> Sequence[Server]:
        wanted = {name: settings for name, settings in given.items() if isinstance(settings, ServerSettings)}
        objects = {name: server for name, server in given.items() if name not in wanted}
        return to_servers(session, wanted, home) + [
            share_server((name, id(server)), partial(Server, name, lambda server=server: server))
            for name, server in objects.items()
        ]


def project_servers(crow: Crow, *, trust: TrustedFolders, env: Mapping[str, str], config: Config, home: Home) -> None:
    """Connect a trusted folder's MCP servers, and warn where a folder has some and is not trusted."""

    @crow.mcp_servers
    async def servers(session: Session) -> Sequence[Server]:
        folder = Path(session.cwd)
        is_trusted = trust.is_trusted(folder)
        own = {folder, Path(env.get("HOME") or Path.home())}  # crow uses the skills of the user's home anyway
        above = [each for each in reversed(find_project_folders(folder)) if each not in own]
        session.state[TRUST_NOTICES] = [
            *(describe_left_out(trust, folder) if is_trusted else [describe_untrusted(trust, folder)]),
            *(describe_untrusted(trust, each, FOLDERS) for each in above if not trust.is_trusted(each)),
        ]
        wanted = load_project_config(folder, env).mcp.servers if is_trusted else {}
        if any(map(can_limit, wanted.values())):
            level, why = await find_project_level(config, home)
            if why:
                session.state[TRUST_NOTICES].append(f"The MCP servers of this project run without a sandbox: {why}")
            wanted = {name: tighten(settings, level) for name, settings in wanted.items()}
        return to_servers(session, wanted, home, config.mcp.client_document)

    @crow.before_prompt
    async def warn(message: Any, session: Session) -> None:
        for text in filter(None, session.state.pop(TRUST_NOTICES)):
            await session.notice(to_line(show_path(text)), "warning")


def plugin_servers(crow: Crow, *, trust: TrustedFolders, env: Mapping[str, str], config: Config, home: Home) -> None:
    """Connect the MCP servers of the user's plugins and of a trusted project's, and report what is not used of them."""

    @crow.mcp_servers
    async def servers(session: Session) -> Sequence[Server]:
        session.state[PLUGIN_NOTICES] = []
        if not home.has_plugins(env, Path(session.cwd)):
            return []
        from crow_agent.settings.plugins import find_plugins

        found = await asyncio.to_thread(find_plugins, home, env, Path(session.cwd), trust)
        session.state[PLUGIN_NOTICES] = found.faults
        wanted: dict[str, ServerSettings] = {**found.find_servers(of_project=True)}
        if any(map(can_limit, wanted.values())):
            level, _ = await find_project_level(config, home)
            wanted = {name: tighten(settings, level) for name, settings in wanted.items()}
        wanted = {**found.find_servers(of_project=False), **wanted}
        wanted = {name: wanted[name] for name in wanted if name not in config.mcp.servers}
        return to_servers(session, wanted, home, config.mcp.client_document)

    @crow.before_prompt
    async def warn(message: Any, session: Session) -> None:
        for text in session.state.pop(PLUGIN_NOTICES):
            await session.notice(to_line(show_path(text)), "warning")


def to_servers(session: Session, wanted: Mapping[str, ServerSettings], home: Home, document: str = "") -> list[Server]:
    """Find or make the servers that a session connects to from their settings, without those that are disabled."""
    used = ((name, settings) for name, settings in wanted.items() if not settings.disabled)
    return [find_server(session, name, settings, home, document) for name, settings in used]


def find_server(session: Session, name: str, settings: ServerSettings, home: Home, document: str) -> Server:
    """Return the server that other sessions use, if this one may use it, too; else make it.

    Sessions share a server if its settings and their folders are equal. If a user can fill in its forms, it must be
    certain whom a form is for; if a user can log in to it, each session does.
    """
    capabilities, tokens = session.client.capabilities, home.data / TOKENS_FOLDER
    make = partial(
        to_server,
        name,
        settings,
        session.cwd,
        tokens=tokens,
        visit=partial(send_to_login, session, name),
        limit=limit_server(settings, session.folders.roots, home),
        document=document,
    )
    if not settings.shared or (settings.wants_login and can_ask(capabilities, "url")):
        return make()
    has_forms = can_ask(capabilities, "form")
    definition = (name, to_json(settings, order="sorted"), tokens, *session.folders.roots, has_forms)
    return share_server(definition, make, must_name_calls=has_forms)


@asynccontextmanager
async def send_to_login(session: Session, name: str, url: str) -> AsyncGenerator[None]:
    """Ask the user, through the client, to log in at a URL; the block runs meanwhile. Raises ConnectionError."""
    if not can_ask(session.client.capabilities, "url"):
        raise ConnectionError(describe_missing_login(name))
    await session.turns.id_known.wait()
    try:
        answer = await session.user.elicit(f"The MCP server {to_line(name)} wants you to log in.", url=url)
    except ElicitationError as error:
        raise ConnectionError(describe_missing_login(name)) from error
    if answer.action != "accept":
        raise ConnectionError(describe_missing_login(name))
    yield
    await session.user.complete(answer.id)


def describe_untrusted(trust: TrustedFolders, folder: Path, wanted: Sequence[str] = (*SETTINGS, *FOLDERS)) -> str:
    """Return the sentence about those of the `wanted` settings that an untrusted folder has; "" if it has none."""
    names = list_settings(folder, wanted)
    if not names:
        return ""
    listed = " and ".join([*names[:4], *([f"{len(names) - 4} more"] if len(names) > 4 else [])])
    change = trust.find_change(folder)
    since = f" again ({change} since)" if change else ""
    broken = f" ({trust.file} cannot be read, so no folder is trusted)" if trust.is_broken else ""
    return f"{listed} in {folder} ignored until you trust it{since}{broken}: crow trust {shlex.quote(str(folder))}"


def describe_left_out(trust: TrustedFolders, folder: Path) -> Iterator[str]:
    """Yield a sentence about the paths in a trusted folder's settings that are not used."""
    if left_out := trust.list_left_out(folder):
        more = f", and {len(left_out) - 1:,} more" if len(left_out) > 1 else ""
        yield f"Left out of the settings of {folder}: {left_out[0]}{more}."
    if ignored := find_ignored_settings(folder):
        more = f" and {len(ignored) - MAX_IGNORED:,} more" if len(ignored) > MAX_IGNORED else ""
        where = folder / ".crow" / "config.toml"
        yield f"{', '.join(ignored[:MAX_IGNORED])}{more} in {where} ignored: {PROJECT_MAY}"
