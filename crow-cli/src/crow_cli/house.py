"""Puts the house together: configuration in, a `Crow` with its models, tools and extensions out."""

import logging
import os
import shlex
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import crow_mcp_server
from crow_compact.extension import compact
from crow_core.app import Crow
from crow_core.editor import ClientWorkspace, terminals
from crow_core.errors import ConfigError, ElicitationError
from crow_core.extensions.ask_user import ask_user
from crow_core.extensions.broken_replies import broken_replies
from crow_core.extensions.budgets import budgets
from crow_core.extensions.commands import commands
from crow_core.extensions.context_window import context_window
from crow_core.extensions.cut_prompts import cut_prompts
from crow_core.extensions.empty_replies import empty_replies
from crow_core.extensions.loop_guard import loop_guard
from crow_core.extensions.mask_secrets import mask_secrets
from crow_core.extensions.mcp import mcp
from crow_core.extensions.permissions import permissions
from crow_core.extensions.plan import plan
from crow_core.extensions.printed_calls import printed_calls
from crow_core.extensions.reasoning_effort import reasoning_effort
from crow_core.extensions.refused_prompts import refused_prompts
from crow_core.extensions.resources import resources
from crow_core.extensions.shell_hooks import shell_hooks
from crow_core.extensions.subagents import subagents
from crow_core.extensions.telemetry import telemetry
from crow_core.extensions.templates import templates
from crow_core.extensions.titles import titles
from crow_core.extensions.tool_search import tool_search
from crow_core.extensions.truncate import truncate
from crow_core.extensions.undo import undo
from crow_core.extensions.until_done import until_done
from crow_core.extensions.usage import usage
from crow_core.masking import find_secrets
from crow_core.mcp.server import Server
from crow_core.messages import Message, drop_rewound
from crow_core.models.chat import Model
from crow_core.prompts import Prompt
from crow_core.session import Session
from crow_core.settings.config import (
    TOKENS_FOLDER,
    Config,
    Home,
    ServerSettings,
    describe_missing_login,
    get_database_url,
    load_config,
    load_environment,
    load_project_config,
    parse_options,
    to_read_error,
    to_server,
)
from crow_core.settings.discovery import find_models
from crow_core.settings.trust import TrustedFolders, list_project_files
from crow_core.text import to_line
from crow_mcp_server.workspace import Workspace, local_workspace
from crow_persistence.extension import persistence
from crow_skills.agents import agents
from crow_skills.command_files import command_files
from crow_skills.files import get_user_folders
from crow_skills.mentions import mentions
from crow_skills.skills import skills

Mode = Literal["ask", "accept-edits", "plan", "yolo"]
THROUGH_ACP = ("plan", "ask_user")
"""Tools that extensions have of the same name, with the client's own means."""

ALWAYS = {
    extension.__name__: extension
    for extension in (
        command_files,  # first: what the others bring takes the place of a file of the same name
        *(commands, mcp, resources, tool_search, reasoning_effort, context_window, cut_prompts, usage),
        *(printed_calls, broken_replies, empty_replies, refused_prompts, loop_guard, truncate, titles, undo, plan),
        *(mentions, agents, skills),
    )
}
"""What everybody has, in the order of use, unless `[extensions]` says `NAME = false`."""
NAMED = {extension.__name__: extension for extension in (budgets, until_done, subagents)}
"""What those have whose `[extensions]` names it."""
LAST = {"compact": compact}
"""As ALWAYS, for what looks at all the others have done."""


async def build(
    env: Mapping[str, str],
    *,
    model: str = "",
    mode: Mode | None = None,
    max_requests: int | None = None,
    models: Mapping[str, Model] | None = None,
    remember: bool = True,
    asks: bool = True,
    known: Sequence[str] = (),
) -> Crow:
    """An app as the user's files, the environment and the command line want it; it may be one that remembers nothing,
    or has nobody whom the model could ask. `known` are further secrets to be written nowhere.

    Raises ConfigError for a setting that cannot be used, ModelError when there is no model to ask.
    """
    logging.getLogger("stamina").setLevel(logging.ERROR)  # each wait is shown to the user as it is
    home = Home.find(env)
    config, env = load_config(home, env), load_environment(home, env)
    crow = Crow(
        await find_models(config, env, model) if models is None else models,
        system=system_prompt(config, home),
        max_requests=max_requests or config.max_requests,
    )
    if config.servers_wait is not None:
        crow.servers_wait = config.servers_wait
    crow.servers.append(built_in_tools(crow, hidden(env, config), env, config.fetch.allow_hosts))
    rules = config.permissions
    trust = TrustedFolders(home.data)
    if remember:  # before all others: so it hears last that a session ends, and what they say then is stored
        crow.use(persistence, url=get_database_url(config, home), folder=home.data)
    crow.use(telemetry)
    crow.use(mask_secrets, known=[*find_secrets(config, env), *known])
    crow.use(templates, files=lambda session: prompt_files(config, home, trust, session.cwd))
    crow.use(shell_hooks, **parse_options(partial(shell_hooks), config.hooks, ["hooks"], home))
    crow.use(
        permissions,
        mode=mode or rules.mode,
        allow=rules.allow,
        ask=rules.ask,
        deny=rules.deny,
        own=[str(home.config), str(home.data)],
        project=lambda cwd: project_rules(trust, cwd, env),
    )
    crow.use(terminals)
    crow.use(configured_servers, config=config, home=home)
    crow.use(project_servers, trust=trust, env=env, home=home)
    user = Path(env.get("HOME") or Path.home())
    told: dict[str, dict[str, Any]] = {
        "command_files": {"user": get_user_folders(home.config, user, "commands"), "trusted": trust.is_trusted},
        "agents": {"user": [home.config]},
        "skills": {"user": get_user_folders(home.config, user, "skills"), "trusted": trust.is_trusted},
    }
    for name in {**ALWAYS, **dict.fromkeys(name for name in config.extensions if name not in LAST), **LAST}:
        if (table := config.extensions.get(name, {})) is not False:
            extension = partial(find_extension(name, home), **told.get(name, {}))
            try:
                crow.use(
                    extension, **parse_options(extension, {} if table is True else table, ["extensions", name], home)
                )
            except (TypeError, ValueError) as error:
                raise ConfigError(f"[extensions.{name}] cannot be used: {error}.") from error
    if asks:
        crow.use(ask_user)
    return crow


def find_extension(name: str, home: Home) -> Callable[..., None]:
    """An extension by its name: one of crow's own, a function of that name in `extensions/NAME.py` in crow's home, or
    the entry point `NAME` that an installed package has in the group `crow.extensions`. Raises ConfigError."""
    if found := (ALWAYS | NAMED | LAST).get(name):
        return found
    import importlib.metadata  # not above: few have any
    import importlib.util

    try:
        if (file := home.config / "extensions" / f"{name}.py").is_file():
            spec = importlib.util.spec_from_file_location(f"crow_extension_{name}", file)
            assert spec
            assert spec.loader
            spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
            return getattr(module, name)
        for point in importlib.metadata.entry_points(group="crow.extensions", name=name):
            return point.load()
    except Exception as error:  # whatever the code of others brings about when it is loaded
        raise ConfigError(f"[extensions.{name}] cannot be loaded: {type(error).__name__}: {error}.") from error
    raise ConfigError(
        f"{home.config / 'config.toml'}: there is no extension {name!r}. Install the package that has it, "
        f"write {file}, or remove [extensions.{name}]. crow's own are: {', '.join(sorted(ALWAYS | NAMED | LAST))}."
    )


def built_in_tools(
    crow: Crow, hidden_env: Sequence[str] = (), env: Mapping[str, str] = os.environ, allow_hosts: Sequence[str] = ()
) -> Server:
    """Our own tools, in this process; described by a file, so that they are loaded only when one is called."""
    tools = [tool for tool in crow_mcp_server.tools() if tool["name"] not in THROUGH_ACP]

    def source() -> Any:
        return crow_mcp_server.create_server(
            lambda meta: workspace_for(crow, meta), hidden_env, allow_hosts=allow_hosts, stay_on_host=True, env=env
        )

    crow.session_end(end_terminals)
    return Server("crow", source, definitions=tools, built_in=True, shared=True)


def workspace_for(crow: Crow, meta: dict[str, Any]) -> Workspace:
    """Where a call works: with the files and terminals of its session's client, as far as that offers them."""
    here = local_workspace(meta)
    if (session := crow.sessions.get(here.session)) is None:
        return here
    editor = ClientWorkspace(session, str(meta.get("crow/call")))
    return replace(
        here,
        files=editor,
        terminals=editor if editor.runs else None,
        watch=editor.show_output,
        changes=lambda: changes_in(session.log),
        at_end=session.state.setdefault("at_end", []).append,
    )


def changes_in(log: Sequence[Message]) -> list[dict[str, Any]]:
    """What the edits of a session changed, but for those that were taken back with their turns."""
    return [change for entry in drop_rewound(log) for change in entry.get("crow", {}).get("changes", [])]


async def end_terminals(session: Session) -> None:
    """End what a session's commands have left running."""
    for end in session.state.pop("at_end", ()):
        await end()


def hidden(env: Mapping[str, str], config: Config) -> list[str]:
    """The names of the variables that hold this agent's own keys; no command it runs sees them."""
    keys = {settings.api_key for settings in config.models.values()} | {env.get("OPENAI_API_KEY", "")}
    return [name for name, value in env.items() if value and value in keys]


def system_prompt(config: Config, home: Home) -> Prompt:
    """The user's own template if there is one. Raises ConfigError."""
    if not config.prompts.system:
        return Prompt.from_package("system")
    path = home.config / Path(config.prompts.system).expanduser()
    try:
        return Prompt.from_file("system", path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts.system: {to_read_error(path, error)}") from error


def prompt_files(config: Config, home: Home, trust: TrustedFolders, cwd: str) -> dict[str, Path]:
    """The templates that stand in for crow's own: the user's, and a trusted project's."""
    files = prompts_below(home.config / "prompts")
    if config.prompts.system:
        files["system"] = home.config / Path(config.prompts.system).expanduser()
    project = Path(cwd)
    if trust.is_trusted(project):
        files |= prompts_below(project / ".crow" / "prompts")
    return files


def prompts_below(folder: Path) -> dict[str, Path]:
    """The templates in a folder, by the name of the prompt they are."""
    return {path.name.removesuffix(".md.j2"): path for path in sorted(folder.glob("*.md.j2"))}


def configured_servers(crow: Crow, *, config: Config, home: Home) -> None:
    """Connect the user's own MCP servers in every session."""

    @crow.mcp_servers
    def servers(session: Session) -> Sequence[Server]:
        return for_session(session, config.mcp.servers, home)


def for_session(session: Session, wanted: Mapping[str, ServerSettings], home: Home) -> list[Server]:
    """Configured servers as a session connects them."""
    return [
        to_server(name, settings, session.cwd, tokens=home.data / TOKENS_FOLDER, visit=partial(sent, session, name))
        for name, settings in wanted.items()
        if not settings.disabled
    ]


@asynccontextmanager
async def sent(session: Session, name: str, url: str) -> AsyncGenerator[None]:
    """Send the person to log in to a server, by way of the client. Raises ConnectionError."""
    await session.turns.id_known.wait()
    try:
        answer = await session.user.elicit(f"The MCP server {to_line(name)} wants you to log in.", url=url)
    except ElicitationError as error:
        raise ConnectionError(describe_missing_login(name)) from error
    if answer.action != "accept":
        raise ConnectionError(describe_missing_login(name))
    yield
    await session.user.complete(answer.id)


def project_servers(crow: Crow, *, trust: TrustedFolders, env: Mapping[str, str], home: Home) -> None:
    """Connect a trusted folder's MCP servers, and say so where a folder is not trusted."""

    @crow.mcp_servers
    def servers(session: Session) -> Sequence[Server]:
        folder = Path(session.cwd)
        files = list_project_files(folder)
        if files and not trust.is_trusted(folder):
            names = " and ".join(dict.fromkeys("/".join(file.relative_to(folder).parts[:2]) for file in files))
            command = f"crow trust {shlex.quote(session.cwd)}"
            session.state["untrusted"] = f"{names} in {folder} ignored until you trust it: {command}"
            return []
        return for_session(session, load_project_config(folder, env).mcp.servers, home)

    @crow.before_prompt
    async def say(message: Any, session: Session) -> None:
        if text := session.state.pop("untrusted", ""):
            await session.notice(text, "warning")


def project_rules(trust: TrustedFolders, cwd: str, env: Mapping[str, str]) -> tuple[Sequence[str], Sequence[str]]:
    """A trusted folder's own rules; they can only tighten."""
    folder = Path(cwd)
    if not trust.is_trusted(folder):
        return (), ()
    rules = load_project_config(folder, env).permissions
    return rules.ask, rules.deny
