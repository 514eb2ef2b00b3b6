"""`crow status`: the model and why this one, the files that are read, rules, servers, data, and the cost of today."""

import asyncio
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import click
from crow_agent.settings.config import (
    PROJECT_MAY,
    find_ignored_settings,
    get_database_url,
    load_config,
    load_environment,
)
from crow_agent.settings.discovery import search_models
from crow_agent.settings.home import Home
from crow_agent.settings.project_files import list_settings as list_project_settings
from crow_agent.settings.structs import Config
from crow_agent.settings.trust import TrustedFolders
from crow_core.errors import ConfigError, ModelError, StoreError
from crow_core.models.chat_model import ChatModel, get_window
from crow_core.models.window import find_window
from crow_permissions.kept_answers import KeptAnswers

from crow_cli.config_values import DEFAULT, list_settings
from crow_cli.console import escape_line, print_json, shorten_path
from crow_cli.sandbox_commands import find_programs_standing, find_standing

WINDOW_TIMEOUT = 1.0
"""Seconds that the server may take to tell its window."""


def print_status(as_json: bool) -> None:
    """Print what crow would use in this folder. Raises ConfigError for settings that cannot be used."""
    status = asyncio.run(collect(os.environ, Path.cwd()))
    if as_json:
        print_json(status)
        return
    for name, value in to_rows(status):
        click.echo(f"{click.style(f'{name:<9}', bold=True)} {escape_line(value)}")


async def collect(env: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Collect the facts, for JSON. Raises ConfigError."""
    home = Home.find(env)
    config, variables = load_config(home, env), load_environment(home, env)
    trust = TrustedFolders(home.data)
    return {
        "model": await describe_model(config, variables),
        "files": list_files(home, folder, trust),
        "permissions": list_rules(home, env, folder, config),
        "sandbox": {
            **dict(zip(("level", "says"), await find_standing(config, home), strict=True)),
            "programs": dict(zip(("level", "says"), await find_programs_standing(home), strict=True)),
        },
        "servers": list_servers(config, home, env, folder),
        "plugins": describe_plugins(home, env, folder, trust),
        "extensions": list(config.extensions),
        "folders": {"config": str(home.config), "data": str(home.data)},
        "trusted": trust.is_trusted(folder),
        "ignored": find_ignored_settings(folder) if trust.is_trusted(folder) else [],
        **await asyncio.to_thread(describe_database, config, home),
    }


async def describe_model(config: Config, env: Mapping[str, str]) -> dict[str, Any]:
    """Describe the default model, or say why there is none."""
    try:
        found = await search_models(config, env)
    except (ModelError, ConfigError) as error:
        return {"error": str(error)}
    name, model = next(iter(found.models.items()))
    about: dict[str, Any] = {"name": name, "why": found.reason, "others": [*found.models][1:]}
    if not isinstance(model, ChatModel):
        return about
    window, source = get_window(model), "the settings or the quirks"
    if not window:
        with suppress(TimeoutError):
            window, source = await asyncio.wait_for(find_window(model), WINDOW_TIMEOUT), "the server"
    about |= {"at_endpoint": model.name, "endpoint": model.display_url, "has_key": bool(model.api_key)}
    return {**about, "window": window, "window_from": source if window else None}


def list_files(home: Home, folder: Path, trust: TrustedFolders) -> list[dict[str, Any]]:
    """List the files of settings, whether each exists, and whether crow uses it."""
    own = [home.config / name for name in ("config.toml", "mcp.json", ".env")]
    files: list[dict[str, Any]] = [{"path": str(path), "read": path.is_file()} for path in own]
    trusted = trust.is_trusted(folder)
    with suppress(OSError):
        project = list_project_settings(folder)
        files += [{"path": str(folder / path), "read": trusted, "of_project": True} for path in project]
    return files


def list_rules(home: Home, env: Mapping[str, str], folder: Path, config: Config) -> dict[str, Any]:
    """List the permission mode and the rules, each with its place."""
    found = [one for one in list_settings(home, env, folder) if one.keys[0] == "permissions"]
    rules = [
        {"kind": one.keys[1], "rules": as_list(one.value), "from": one.source, "remark": one.remark}
        for one in found
        if one.source != DEFAULT and one.keys[1] != "mode"
    ]
    kept = KeptAnswers(home.data)
    rules += [{"kind": "answer", "rules": [str(one)], "from": str(home.data), "remark": ""} for one in kept.list_all()]
    place = next((one.source for one in found if one.keys[1] == "mode" and not one.remark), DEFAULT)
    return {"mode": config.permissions.mode, "mode_from": place, "rules": rules}


def as_list(value: Any) -> list[Any]:
    """Return a list of rules as it is, and a setting that is true or false as the list of its text."""
    return cast("list[Any]", value) if isinstance(value, list) else [str(value).lower()]


def list_servers(config: Config, home: Home, env: Mapping[str, str], folder: Path) -> list[dict[str, Any]]:
    """List the MCP servers with their places."""
    places: dict[str, tuple[str, str]] = {}
    for one in list_settings(home, env, folder):
        if one.keys[:2] == ("mcp", "servers") and len(one.keys) > 2:
            places.setdefault(one.keys[2], (one.source.rpartition(":")[0] or one.source, one.remark))
    servers: list[dict[str, Any]] = []
    for name, (place, remark) in places.items():
        settings = config.mcp.servers.get(name)
        state = "disabled" if settings and settings.disabled else getattr(settings, "error", "") or remark
        kind = "" if settings is None else "http" if settings.url else "stdio"
        servers.append({"name": name, "kind": kind, "from": place, "remark": state})
    return servers


def describe_plugins(home: Home, env: Mapping[str, str], folder: Path, trust: TrustedFolders) -> dict[str, Any]:
    """List the plugins, each with its skills and servers, and sentences about what is not used of them."""
    if not home.has_plugins(env, folder):
        return {"used": [], "faults": []}
    from crow_agent.settings.plugins import find_plugins
    from crow_skills.skill_file import find_skills

    found, used, faults = find_plugins(home, env, folder, trust), list[dict[str, Any]](), list[str]()
    for plugin in found.plugins:
        index = find_skills([plugin.skill_folder])
        about = {"name": plugin.name, "from": str(plugin.root), "of_project": plugin.is_project}
        used.append({**about, "skills": [*index.skills], "servers": [*plugin.servers]})
        faults += index.left_out
    return {"used": used, "faults": [*found.faults, *faults]}


def describe_database(config: Config, home: Home) -> dict[str, Any]:
    """Describe the database, and the model calls since midnight."""
    from crow_persistence.database import Database  # imports SQLAlchemy, which is slow to load
    from crow_persistence.requests import sum_model_calls

    try:
        database = Database(get_database_url(config, home), home.data)
        about: dict[str, Any] = {"database": database.name}
        if database.file and not database.file.exists():
            return {**about, "database_state": "made with the first session"}
        midnight = datetime.now().astimezone().replace(hour=0, minute=0, second=0, microsecond=0)
        with database.begin_read() as connection:
            totals = sum_model_calls(connection, round(midnight.timestamp() * 1000))
        return {**about, "database_state": "ok", "today": totals}
    except StoreError as error:
        return {"database": config.database.url.partition("@")[2] or "crow.db", "database_state": str(error)}


def to_rows(status: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Yield the lines for a person: a name and a text each."""
    model = status["model"]
    if "error" in model:
        for at, line in enumerate(model["error"].splitlines()):
            yield "" if at else "Model", line
    else:
        at_endpoint = f" ({model['at_endpoint']})" if model.get("at_endpoint") not in (None, model["name"]) else ""
        yield "Model", f"{model['name']}{at_endpoint}: {model['why']}"
    if model.get("endpoint"):
        yield "Endpoint", f"{model['endpoint']}, {'with a key' if model['has_key'] else 'without a key'}"
        window = f"{model['window']:,} tokens, from {model['window_from']}" if model["window"] else "unknown"
        yield "Window", window
    if model.get("others"):
        shown = ", ".join(model["others"][:8])
        yield "Others", shown + (f" and {len(model['others']) - 8} more" if len(model["others"]) > 8 else "")
    for at, file in enumerate(status["files"]):
        state = "" if file["read"] else " (not used: run crow trust)" if file.get("of_project") else " (none)"
        yield "" if at else "Files", shorten_path(file["path"], 90) + state
    if status["ignored"]:
        yield "", f"ignored of .crow/config.toml, because {PROJECT_MAY}: {', '.join(status['ignored'])}"
    rules = status["permissions"]
    yield "Mode", f"{rules['mode']}, from {shorten_path(rules['mode_from'], 70)}"
    sandbox = status["sandbox"]
    yield "Sandbox", f"{sandbox['level']}. {sandbox['says']}"
    yield "", f"For servers, hooks and checks: {sandbox['programs']['level']}. {sandbox['programs']['says']}"
    for rule in rules["rules"]:
        remark = f", {rule['remark']}" if rule["remark"] else ""
        yield (
            rule["kind"].capitalize(),
            f"{', '.join(map(str, rule['rules']))}  # {shorten_path(rule['from'], 70)}{remark}",
        )
    for at, server in enumerate(status["servers"]):
        about = ", ".join(filter(None, (server["kind"], shorten_path(server["from"], 60), server["remark"])))
        yield "" if at else "Servers", f"{server['name']}: {about}"
    for at, plugin in enumerate(status["plugins"]["used"]):
        has = [f"skill {name}" for name in plugin["skills"]] + [f"server {name}" for name in plugin["servers"]]
        yield "" if at else "Plugins", f"{plugin['name']}: {', '.join([*has, shorten_path(plugin['from'], 60)])}"
    yield from (("", fault) for fault in status["plugins"]["faults"])
    yield "Data", shorten_path(status["folders"]["data"], 90)
    state = "" if status["database_state"] == "ok" else f": {status['database_state']}"
    yield "Database", shorten_path(status["database"], 90) + state
    if today := status.get("today"):
        cost = (
            ", ".join(f"{amount:.4f} {currency}" for currency, amount in today["cost"].items()) or "no prices are set"
        )
        yield (
            "Today",
            f"{today['calls']:,} model calls, {today['input']:,} tokens in, {today['output']:,} out; cost: {cost}",
        )
        yield "Browser", "crow web shows sessions, requests, permissions and costs"
