"""Build the app of the configuration, a `Crow` with its models, tools and extensions, for the command and programs."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from crow_compact.extension import compact
from crow_core.agent.client_files import terminals
from crow_core.app import Crow
from crow_core.errors import ConfigError
from crow_core.masking import find_secrets
from crow_core.models.model_call import Model
from crow_core.session.prompts import Prompt
from crow_core.session.session import Session
from crow_extensions.agent_settings import AgentSettings
from crow_extensions.ask_user import ask_user
from crow_extensions.background import background
from crow_extensions.broken_replies import broken_replies
from crow_extensions.budgets import budgets
from crow_extensions.commands import commands
from crow_extensions.completions import completions
from crow_extensions.context_window import context_window
from crow_extensions.cut_prompts import cut_prompts
from crow_extensions.diagnostics import diagnostics
from crow_extensions.empty_replies import empty_replies
from crow_extensions.fallback import fallback
from crow_extensions.goal import goal
from crow_extensions.loop_guard import loop_guard
from crow_extensions.mask_secrets import mask_secrets
from crow_extensions.mcp import mcp
from crow_extensions.mcp_apps import mcp_apps
from crow_extensions.memory import memory
from crow_extensions.other_agents import other_agents
from crow_extensions.plan import plan
from crow_extensions.printed_calls import printed_calls
from crow_extensions.reasoning_effort import reasoning_effort
from crow_extensions.recorded_folders import recorded_folders
from crow_extensions.refused_images import refused_images
from crow_extensions.refused_prompts import refused_prompts
from crow_extensions.resources import resources
from crow_extensions.shell_hooks import shell_hooks
from crow_extensions.small_models import small_models
from crow_extensions.steering import steering
from crow_extensions.structured_output import structured_output
from crow_extensions.subagents import subagents
from crow_extensions.telemetry import telemetry
from crow_extensions.templates import templates
from crow_extensions.timers import timers
from crow_extensions.titles import titles
from crow_extensions.tool_descriptions import tool_descriptions
from crow_extensions.tool_search import tool_search
from crow_extensions.truncate import truncate
from crow_extensions.undo import undo
from crow_extensions.usage import usage
from crow_extensions.warm_up import warm_up
from crow_mcp_server.web.search_settings import PROVIDER_KEYS
from crow_permissions.extension import permissions
from crow_permissions.kept_answers import KeptAnswers
from crow_permissions.review import ReviewSettings
from crow_permissions.running import RunningAgents
from crow_permissions.taint import taint
from crow_persistence.extension import persistence
from crow_skills.agents import agents
from crow_skills.command_files import command_files
from crow_skills.mentions import mentions
from crow_skills.skill_file import SkillFolder
from crow_skills.skills import skills
from crow_skills.text_files import get_user_folders

from crow_agent.builtin_tools import make_tool_server
from crow_agent.found_diagnostics import find_diagnostics
from crow_agent.program_limits import limit_hook
from crow_agent.prompt_files import find_prompt_files, load_system_prompt
from crow_agent.session_servers import configured_servers, plugin_servers, project_servers
from crow_agent.settings.config import (
    get_database_url,
    load_config,
    load_environment,
    load_project_config,
    parse_options,
)
from crow_agent.settings.discovery import FoundModels, search_models
from crow_agent.settings.home import Home
from crow_agent.settings.mcp_servers import TOKENS_FOLDER
from crow_agent.settings.structs import Config
from crow_agent.settings.trust import TrustedFolders

Mode = Literal["ask", "accept-edits", "plan", "yolo"]
Extension = Callable[..., None]


FIRST_EXTENSIONS: tuple[Extension, ...] = (
    command_files,  # before the others, whose commands replace a file's command of the same name
    *(commands, mcp, mcp_apps, resources, completions, tool_search, reasoning_effort, context_window),
    *(cut_prompts, usage, background),
    *(printed_calls, broken_replies, empty_replies, refused_images, refused_prompts),
    *(loop_guard, truncate, titles, undo, plan, goal, timers),
    *(mentions, agents, skills, recorded_folders, small_models, tool_descriptions, warm_up),
)
"""Used by default, in this order. `NAME = false` in `[extensions]` leaves one out."""
OPTIONAL_EXTENSIONS: tuple[Extension, ...] = (budgets, subagents, memory)
"""Used only when `[extensions]` names them, in the order of the file, as are the user's own."""
LAST_EXTENSIONS: tuple[Extension, ...] = (compact, structured_output)
"""Used by default, after all others: they read what the others add to a session."""

BUILT_IN = {extension.__name__: extension for extension in (*FIRST_EXTENSIONS, *OPTIONAL_EXTENSIONS, *LAST_EXTENSIONS)}
"""crow's own extensions by the names that they have in `[extensions]`."""


ATTENDED = ("approvals", "timers")
"""Extensions that are left out where nobody answers questions, nor reads what a turn says that nobody began."""


async def build(
    env: Mapping[str, str],
    *,
    model: str = "",
    mode: Mode | None = None,
    max_requests: int | None = None,
    models: Mapping[str, Model] | None = None,
    without: Collection[Extension] = (),
    extra_secrets: Sequence[str] = (),
    tools: Collection[str] | None = None,
    allow: Sequence[str] = (),
    deny: Sequence[str] = (),
    database: str = "",
    system: Prompt | None = None,
    attended: bool | None = None,
) -> Crow:
    """Make an app from the user's files, the environment and the options of the command line or of a program.

    `models` replaces the configured models, `tools` names the only tools of crow's own to offer, `database` is the URL
    of another database, `system` replaces the system prompt. `allow` and `deny` are permission rules in addition to the
    configured ones. `without` names extensions to leave out: `persistence` stores sessions, `ask_user` lets the model
    ask the user. `extra_secrets` are values to mask in addition to those of the configuration. `attended` says whether
    a person answers the client's questions, by default if `ask_user` is not left out; else those of ATTENDED
    are. Raises ConfigError for a setting that cannot be used, ModelError when no model is found.
    """
    if mode not in (None, *get_args(Mode)):
        raise ConfigError(f"There is no mode {mode!r}. Give one of: {', '.join(get_args(Mode))}.")
    attended = ask_user not in without if attended is None else attended
    home = Home.find(env)
    config, env = load_config(home, env), load_environment(home, env)
    found = await search_models(config, env, model) if models is None else FoundModels(dict(models), "given")
    crow = Crow(
        found.models,
        system=system or load_system_prompt(config, home),
        max_requests=max_requests or config.max_requests,
    )
    RunningAgents(home.data).add(crow)
    if config.servers_wait is not None:
        crow.servers_wait = config.servers_wait
    hidden = find_key_variables(env, config)
    if tools is None or tools:
        crow.servers.append(make_tool_server(crow, hidden, env, config.fetch.allow_hosts, only=tools))
    rules, trust = config.permissions, TrustedFolders(home.data)

    def find_files(session: Session) -> Mapping[str, Path]:
        project = Path(session.cwd)
        return find_prompt_files(config, home, project if trust.is_trusted(project) else None, system)

    ordered: list[tuple[Extension, Mapping[str, Any]]] = [
        # Hooks that end a session run in reverse order: persistence stores what the other extensions write then.
        (persistence, {"url": database or get_database_url(config, home), "folder": home.data}),
        (telemetry, {}),
        (mask_secrets, {"known": [*find_secrets(config, env), *extra_secrets]}),
        (templates, {"files": find_files}),
        (steering, {}),  # before extensions that read the log in `before_model`
        (
            hooks := partial(shell_hooks, hidden=hidden, limit=partial(limit_hook, home=home)),
            parse_options(hooks, config.hooks, ["hooks"], home),
        ),
        (
            permissions,
            {
                "mode": mode or rules.mode,
                "allow": [*rules.allow, *allow],
                "ask": rules.ask,
                "deny": [*rules.deny, *deny],
                "own": [str(home.config), str(home.data)],
                "protected": rules.protected,
                "project": partial(load_project_rules, trust, env=env),
                "trusted": trust.is_trusted,
                "answers": KeptAnswers(home.data),
                "sandbox": make_review_settings(config, home, attended=attended),
            },
        ),
        *([(fallback, {"chains": chains})] if (chains := find_chains(config)) else []),
        *([(taint, make_taint_options(config, home, trust, env))] if rules.taint else []),
        (diagnostics, {"find": partial(find_diagnostics, config, home, trust, env, hidden)}),
        (terminals, {}),
        (configured_servers, {"config": config, "home": home}),
        (plugin_servers, {"trust": trust, "env": env, "config": config, "home": home}),
        (project_servers, {"trust": trust, "env": env, "config": config, "home": home}),
        (
            other_agents,
            {
                "find": partial(find_agents, config, trust, env),
                "env": env,
                "hidden": hidden,
            },
        ),
        *named_extensions(config, home, trust, env, without, hidden, attended=attended),
        (ask_user, {}),
    ]
    for extension, options in ordered:
        if extension not in without:
            crow.use(extension, **options)
    if found.guessed:
        crow.use(tell_model, sentence=found.describe_guess())
    return crow


def tell_model(crow: Crow, *, sentence: str) -> None:
    """Tell the user of each session that begins with the default model which one it is, as no setting names it."""

    @crow.session_start
    def remark(session: Session) -> None:
        if session.model is next(iter(crow.models.values())) and not session.parent:
            session.options.remarks.append(sentence)


def find_chains(config: Config) -> dict[str, list[str]]:
    """Return the fallbacks of the models that have any, by the name of the model."""
    return {name: settings.fallback for name, settings in config.models.items() if settings.fallback}


def make_review_settings(config: Config, home: Home, *, attended: bool) -> ReviewSettings | None:
    """Make the settings of commands in the sandbox; None if no command runs in one. By default, none is reviewed where
    nobody answers."""
    sandbox, folder = config.sandbox, home.data / "sandbox"
    reviews, limits_yolo = sandbox.level == "review" or (attended and sandbox.level is None), sandbox.yolo != "off"
    if not reviews and not limits_yolo:
        return None
    private = config.permissions.private
    return ReviewSettings(
        folder, sandbox.level == "review", sandbox.expose, sandbox.hosts, private, reviews, limits_yolo
    )


def make_taint_options(config: Config, home: Home, trust: TrustedFolders, env: Mapping[str, str]) -> dict[str, Any]:
    """Make the options of the extension `taint`."""
    files = [home.config / "config.toml", home.config / "mcp.json", home.config / ".env", home.data / TOKENS_FOLDER]
    return {
        "private": config.permissions.private,
        "rules": [*config.permissions.ask, *config.permissions.deny],
        "own": [*map(str, files), *(str(home.data / f"crow.db{end}") for end in ("", "-wal", "-shm"))],
        "project": partial(load_project_rules, trust, env=env),
        "trusted": trust.is_trusted,
    }


def named_extensions(
    config: Config,
    home: Home,
    trust: TrustedFolders,
    env: Mapping[str, str],
    without: Collection[Extension],
    hidden: Sequence[str],
    *,
    attended: bool,
) -> Iterator[tuple[Extension, Mapping[str, Any]]]:
    """Yield the extensions that have a table in `[extensions]`, but for those to do without, and their options, in
    order. Raises ConfigError."""
    user = Path(env.get("HOME") or Path.home())
    preset: dict[str, dict[str, Any]] = {
        "command_files": {"user": get_user_folders(home.config, user, "commands"), "trusted": trust.is_trusted},
        "agents": {"user": [home.config]},
        "goal": {"hidden": hidden},
        "memory": {"folder": home.data / "memory"},
        "skills": {
            "user": get_user_folders(home.config, user, "skills"),
            "trusted": trust.is_trusted,
            "plugins": partial(find_plugin_skills, home, env, trust=trust),
        },
    }
    first, last = ([one.__name__ for one in group] for group in (FIRST_EXTENSIONS, LAST_EXTENSIONS))
    others = [name for name in config.extensions if name not in (*first, *last)]
    for name in (*first, *others, *last):
        if name in ATTENDED and not attended:
            continue
        if (table := config.extensions.get(name, {})) is not False and BUILT_IN.get(name) not in without:
            extension = partial(find_extension(name, home), **preset.get(name, {}))
            options = parse_options(extension, {} if table is True else table, ["extensions", name], home)
            yield partial(use_named, name, extension), options


def use_named(name: str, extension: Extension, crow: Crow, /, **options: Any) -> None:
    """Use an extension. Raises ConfigError, with the name of its table, where it does not accept its options."""
    try:
        crow.use(extension, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"[extensions.{name}] cannot be used: {error}.") from error


def find_extension(name: str, home: Home) -> Extension:
    """Find an extension by its name. It is one of crow's own, the function `NAME` in `extensions/NAME.py` of crow's
    home, or the entry point `NAME` in the group `crow.extensions` of an installed package. Raises ConfigError."""
    if extension := BUILT_IN.get(name):
        return extension
    import importlib.metadata  # imported here because few users have extensions of their own
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
    except Exception as error:  # code of others may raise anything when it is imported
        raise ConfigError(f"[extensions.{name}] cannot be loaded: {type(error).__name__}: {error}.") from error
    raise ConfigError(
        f"{home.config / 'config.toml'}: there is no extension {name!r}. Install the package that has it, "
        f"write {file}, or remove [extensions.{name}]. crow's own are: {', '.join(sorted(BUILT_IN))}."
    )


def find_key_variables(env: Mapping[str, str], config: Config) -> list[str]:
    """List the environment variables that hold crow's own keys: of models, the database and web searches. No command,
    hook, server or other agent inherits them."""
    keys = {settings.api_key for settings in config.models.values()} | {env.get("OPENAI_API_KEY", "")}
    keys |= {config.database.url, *find_secrets(*config.models.values(), config.database)}
    return [name for name, value in env.items() if value and (value in keys or name in PROVIDER_KEYS)]


def find_plugin_skills(
    home: Home, env: Mapping[str, str], project: Path, *, trust: TrustedFolders
) -> list[SkillFolder]:
    """List the folders of skills of the user's plugins, and of those of a trusted project."""
    if not home.has_plugins(env, project):
        return []
    from crow_agent.settings.plugins import find_plugins

    return [plugin.skill_folder for plugin in find_plugins(home, env, project, trust).plugins]


def find_agents(
    config: Config, trust: TrustedFolders, env: Mapping[str, str], session: Session
) -> Mapping[str, AgentSettings]:
    """Find the other agents of a session: those of its folder, if it is trusted, and the user's own."""
    folder = Path(session.cwd)
    project = load_project_config(folder, env).agents if trust.is_trusted(folder) else {}
    return {**project, **config.agents}


def load_project_rules(trust: TrustedFolders, cwd: str, env: Mapping[str, str]) -> tuple[Sequence[str], Sequence[str]]:
    """Load the `ask` and `deny` rules of a trusted folder. A folder has no `allow` rules."""
    folder = Path(cwd)
    if not trust.is_trusted(folder):
        return (), ()
    rules = load_project_config(folder, env).permissions
    return rules.ask, rules.deny
