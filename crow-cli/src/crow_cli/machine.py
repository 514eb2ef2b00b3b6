"""`crow doctor`, without a model: what could be wrong on this machine, each with what to do about it."""

import asyncio
import codecs
import locale
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import crow_system as system
from crow_agent.settings.config import get_database_url, load_config, load_environment, load_project_config
from crow_agent.settings.discovery import add_scheme
from crow_agent.settings.home import Home
from crow_agent.settings.login_path import lacks_login_path, read_login_path
from crow_agent.settings.project_files import list_settings
from crow_agent.settings.structs import Config, UnusableModel, UnusableServer
from crow_agent.settings.trust import TrustedFolders
from crow_core.errors import ConfigError, StoreError
from crow_core.models.quirks import find_quirks

from crow_cli.sandbox_commands import find_programs_standing, find_standing

Verdict = Literal["ok", "partly", "no"]

MIN_SPACE = 200 * 2**20
"""Free bytes below which the user is told."""
EARLIEST = datetime(2026, 1, 1, tzinfo=UTC)
"""A clock that shows less is wrong: certificates would not be valid yet."""
NETWORK_FILESYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs", "9p", "afs", "ceph", "glusterfs", "afpfs"}
"""File systems on which SQLite's locks, and the memory that its log shares, do not work."""
NODE_COMMANDS = {"npx", "npm", "node", "pnpm", "yarn", "bunx", "bun", "deno"}
EDITOR_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
"""The smallest PATH of programs that a desktop starts, such as editors."""
LOCK_WAIT = 0.5
"""Seconds to wait for a lock of the database."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    verdict: Verdict
    sentence: str
    """The finding and, unless the verdict is `ok`, the remedy."""


Check = Callable[["CheckedMachine"], Iterator[tuple[Verdict, str]]]


@dataclass(frozen=True)
class CheckedMachine:
    """The machine as the checks see it."""

    env: Mapping[str, str]
    """The environment of this process."""
    folder: Path
    """The folder in which crow would work."""
    home: Home
    config: Config | None = None
    """The settings; None if they cannot be used."""


def examine(env: Mapping[str, str], folder: Path) -> list[Finding]:
    """Run all checks. A check that fails itself is reported, and the others go on."""
    machine = CheckedMachine(env, folder, Home.find(env))
    with suppress(ConfigError):  # `check_settings` reports it
        machine = replace(machine, config=load_config(machine.home, env))
    findings: list[Finding] = []
    for name, check in CHECKS.items():
        try:
            findings += [Finding(name, verdict, sentence) for verdict, sentence in check(machine)]
        except (OSError, ValueError, sqlite3.Error, subprocess.SubprocessError) as error:
            findings.append(Finding(name, "partly", f"This could not be checked: {error}."))
    return findings


def check_python(machine: CheckedMachine) -> Iterator[tuple[Verdict, str]]:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.flags.optimize > 1:
        yield "partly", f"Python {version} runs with -OO, which removes docstrings. Unset PYTHONOPTIMIZE."
    if sys.dont_write_bytecode and not Path(__file__).with_name("__pycache__").is_dir():
        yield (
            "partly",
            f"Python {version} may write no bytecode, so that crow starts slowly. Unset PYTHONDONTWRITEBYTECODE.",
        )
    yield "ok", f"Python {version}, {sys.executable}."


def check_programs(machine: CheckedMachine) -> Iterator[tuple[Verdict, str]]:
    path = machine.env.get("PATH", os.defpath)
    if git := shutil.which("git", path=path):
        yield "ok", f"git: {git}."
    else:
        yield "no", "There is no git on PATH. Install it: without it, crow knows nothing of branches and changes."
    if rg := shutil.which("rg", path=path) or shutil.which("rg", path=sysconfig.get_path("scripts")):
        yield "ok", f"ripgrep: {rg}."
    else:
        yield "no", "There is no ripgrep (rg), which searches files. Install crow again, or ripgrep."
    shell = "powershell" if system.WINDOWS else "bash"
    if found := shutil.which(shell, path=path):
        yield "ok", f"{shell}: {found}."
    else:
        yield "no", f"There is no {shell} on PATH, which runs the model's commands. Install it."
    if (login := machine.env.get("SHELL")) and not os.access(login, os.X_OK):
        yield "partly", f"SHELL={login} is no program. Set SHELL to your shell."


def check_sandbox(machine: CheckedMachine) -> Iterator[tuple[Verdict, str]]:
    if machine.config is None:
        return
    level, says = asyncio.run(find_standing(machine.config, machine.home))
    yield "ok" if level == "review" or machine.config.sandbox.level == "off" else "partly", says
    level, says = asyncio.run(find_programs_standing(machine.home))
    yield "partly" if level == "off" else "ok", f"For servers, hooks and checks: {level}. {says}"


def check_settings(machine: CheckedMachine) -> Iterator[tuple[Verdict, str]]:
    home, env = machine.home, machine.env
    try:
        config, variables = load_config(home, env), load_environment(home, env)
        from crow_cli.settings_file import check_options

        check_options(home, config, variables)
    except ConfigError as error:
        yield "no", str(error)
        return
    file = home.config / "config.toml"
    if file.is_file():
        yield "ok", f"{file} can be used."
    else:
        yield "ok", f"There is no {file}; `crow setup` writes it."
    name = env.get("CROW_MODEL", "")
    if (
        name
        and config.models
        and name not in config.models
        and not (env.get("OPENAI_BASE_URL") or env.get("OPENAI_API_KEY"))
    ):
        yield (
            "no",
            f"CROW_MODEL={name} is none of the configured models: {', '.join(config.models)}. Unset it, or name one.",
        )
    for model, settings in config.models.items():
        if isinstance(settings, UnusableModel):
            yield "no", f"Model {model}: {settings.error}"
            continue
        find_quirks(settings.base_url, settings.model, settings.quirks)
        if not add_scheme(settings.base_url).startswith(("http://", "https://")):
            yield (
                "no",
                f"{file}: models.{model}.base_url = {settings.base_url!r} is no web address. Begin it with http://.",
            )


def check_servers(machine: CheckedMachine) -> Iterator[tuple[Verdict, str]]:
    config = machine.config
    path = machine.env.get("PATH", os.defpath)
    for name, server in config.mcp.servers.items() if config else ():
        if server.disabled or server.url:
            continue
        if isinstance(server, UnusableServer):
            yield "no", f"MCP server {name}: {server.error}"
        elif shutil.which(os.path.expanduser(server.command), path=server.env.get("PATH", path)) is None:
            advice = " It is part of Node.js: install that."
            if Path(server.command).name not in NODE_COMMANDS:
                advice = " Install it, or correct its command."
            yield (
                "no",
                f"MCP server {name}: there is no program {server.command!r} on PATH.{advice}",
            )
    for name, agent in config.agents.items() if config else ():
        if not agent.disabled and shutil.which(os.path.expanduser(agent.command), path=path) is None:
            yield (
                "no",
                f"Agent {name}: there is no program {agent.command!r} on PATH. Install it, or correct its command.",
            )


def check_folders(machine: CheckedMachine) -> Iterator[tuple[Verdict, str]]:
    home = machine.home
    for folder in dict.fromkeys((home.config, home.data)):
        existing = next(one for one in (folder, *folder.parents) if one.exists())
        if not existing.is_dir():
            yield "no", f"{existing} is a file, where crow needs a folder. Move it away, or set CROW_HOME."
            continue
        if not os.access(existing, os.W_OK | os.X_OK):
            yield "no", f"{existing} cannot be written by you. Correct its owner or its permissions, or set CROW_HOME."
        if folder.is_dir() and system.get_mode(folder.stat()) & (stat.S_IWGRP | stat.S_IWOTH):
            yield (
                "no",
                f"{folder} can be written by other users, who could change what crow runs. Run: chmod go-w '{folder}'",
            )
        if (free := shutil.disk_usage(existing).free) < MIN_SPACE:
            yield "no", f"Only {free / 2**20:.0f} MiB are free for {folder}. Make room: sessions could not be stored."
    yield "ok", f"Settings are in {home.config}, data in {home.data}."
    for name in (".env", "trust.json", "crow.db", "config.toml", "mcp.json"):
        folder = home.data if name in ("trust.json", "crow.db") else home.config
        file = folder / name
        if not file.is_file():
            continue
        mode = system.get_mode(file.stat())
        secret = name != "config.toml" and name != "mcp.json"
        if (secret and mode & 0o077) or mode & (stat.S_IWGRP | stat.S_IWOTH):
            what = "read or changed" if secret else "changed"
            yield "no", f"{file} can be {what} by other users. Run: chmod 600 '{file}'"


def check_database(machine: CheckedMachine) -> Iterator[tuple[Verdict, str]]:
    if machine.config is None:
        return
    from crow_persistence.database import LATEST_REVISION, Database, read_revision  # imports SQLAlchemy

    try:
        database = Database(get_database_url(machine.config, machine.home), machine.home.data)
        if database.file and not database.file.exists():
            yield "ok", f"{database.file} is made with the first session."
        else:
            with database.begin_read() as connection:
                revision = read_revision(connection)
            state = (
                "" if revision == LATEST_REVISION else f", and is updated to {LATEST_REVISION} with the next session"
            )
            yield "ok", f"{database.name} has revision {revision}{state}."
    except StoreError as error:
        yield "no", str(error)
        return
    if database.file is None:
        return
    folder = next(one for one in (database.file.parent, *database.file.parents) if one.exists())
    if (kind := find_filesystem(folder)) in NETWORK_FILESYSTEMS:
        yield (
            "no",
            f"{database.file} is on a network share ({kind}), where SQLite loses data. Set CROW_HOME.",
        )
    if database.file.exists() and os.access(database.file, os.W_OK):
        yield from check_lock(database.file)


def check_lock(file: Path) -> Iterator[tuple[Verdict, str]]:
    """Try whether the database can be written now; nothing is."""
    connection = sqlite3.connect(file, timeout=LOCK_WAIT, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    except sqlite3.OperationalError as error:
        yield "partly", f"{file} cannot be written now: {error}. If that lasts, end the program that holds it."
    finally:
        connection.close()


def find_filesystem(path: Path) -> str:
    """Return the type of the file system that holds a path; "" where it cannot be found out."""
    try:
        lines = Path("/proc/self/mountinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    found = ("", "")
    real = str(path.resolve())
    for line in lines:
        head, _, tail = line.partition(" - ")
        point = codecs.decode(head.split()[4], "unicode_escape")
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(found[0]):
            found = (point, tail.split()[0])
    return found[1]


def check_trust(machine: CheckedMachine) -> Iterator[tuple[Verdict, str]]:
    files = list_settings(machine.folder)
    if not files:
        return
    names = ", ".join(files[:3])
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    if not TrustedFolders(machine.home.data).is_trusted(machine.folder):
        yield "partly", f"{machine.folder} has settings that are not used: {names}{more}. Read and use them: crow trust"
        return
    try:
        load_project_config(machine.folder, machine.env)
        yield "ok", f"{machine.folder} is trusted: {names}{more}."
    except ConfigError as error:
        yield "no", str(error)


def check_path(machine: CheckedMachine) -> Iterator[tuple[Verdict, str]]:
    own = shutil.which("crow", path=machine.env.get("PATH", ""))
    if own is None:
        yield (
            "partly",
            "There is no crow on PATH. Run: uv tool update-shell. `crow acp --print-config` prints its whole path.",
        )
    elif shutil.which("crow", path=EDITOR_PATH) is None:
        yield "ok", f"{own}. An editor needs this whole path, as `crow acp --print-config` prints it."
    if lacks_login_path(machine.env):
        path = read_login_path(machine.env, machine.home.data)
        yield (
            ("ok", f"No shell has set PATH. `crow acp` takes that of the login shell: {path}")
            if path
            else ("partly", "No shell has set PATH, and the login shell does not say its own. Set SHELL to your shell.")
        )
    for name in (one for one in machine.env.get("PATH", "").split(os.pathsep) if not os.path.isabs(one)):
        yield "partly", f"PATH has the relative folder {name!r}: a project could replace programs. Remove it."


def check_locale(machine: CheckedMachine) -> Iterator[tuple[Verdict, str]]:
    encoding = codecs.lookup(locale.getencoding()).name
    if encoding != "utf-8" and not sys.flags.utf8_mode and not system.WINDOWS:  # there, it is always a code page
        yield "partly", f"The locale's encoding is {encoding}: text may be garbled. Set LANG=C.UTF-8."
    elif sys.stdout is not None and codecs.lookup(sys.stdout.encoding or "ascii").name != "utf-8":
        advice = "Set PYTHONUTF8=1" if system.WINDOWS else "Unset PYTHONIOENCODING"
        yield "partly", f"Output is encoded as {sys.stdout.encoding}. {advice}."
    else:
        yield "ok", "Text is UTF-8."


def check_network(machine: CheckedMachine) -> Iterator[tuple[Verdict, str]]:
    env = machine.env
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        if (value := env.get(name)) and not os.access(value, os.R_OK):
            yield "no", f"{name}={value} cannot be read, so that no https address can be reached. Correct or unset it."
    if (value := env.get("SSL_CERT_DIR")) and not any(os.path.isdir(one) for one in value.split(os.pathsep)):
        yield "no", f"SSL_CERT_DIR={value} is no folder. Correct or unset it."
    proxies = {
        name: env[name]
        for one in ("http_proxy", "https_proxy", "all_proxy")
        for name in (one, one.upper())
        if env.get(name)
    }
    for name, value in proxies.items():
        if "://" not in value:
            yield "no", f"{name} is no address: it needs http:// before the host. Correct or unset it."
        elif value.startswith("socks"):
            yield (
                "partly",
                f"{name} is a SOCKS proxy, which may need the package socksio. Install it, or use an HTTP proxy.",
            )
    local = env.get("no_proxy", "") + env.get("NO_PROXY", "")
    if proxies and not any(host in local for host in ("localhost", "127.0.0.1", "*")):
        yield "partly", f"{', '.join(proxies)} also hold for servers on this machine. Set NO_PROXY=localhost,127.0.0.1"
    elif proxies:
        yield "ok", f"Requests go through a proxy ({', '.join(proxies)})."


def check_clock(machine: CheckedMachine) -> Iterator[tuple[Verdict, str]]:
    if (now := datetime.now(UTC)) < EARLIEST:
        yield (
            "no",
            f"The clock says {now:%Y-%m-%d}: https will fail, and sessions are in the wrong order. Set the clock.",
        )


def check_terminal(machine: CheckedMachine) -> Iterator[tuple[Verdict, str]]:
    if sys.stdout is None or not sys.stdout.isatty():
        return
    size, kind = shutil.get_terminal_size(), machine.env.get("TERM", "")
    if kind in ("", "dumb"):
        yield (
            "partly",
            "TERM is not set, or dumb: menus and colours are off. Set TERM=xterm-256color, if the terminal is one.",
        )
    elif size.columns < 40:
        yield "partly", f"The terminal has {size.columns} columns. With 80, tables are readable."
    else:
        yield "ok", f"{kind}, {size.columns} columns{', NO_COLOR is set' if machine.env.get('NO_COLOR') else ''}."


CHECKS: dict[str, Check] = {
    "python": check_python,
    "programs": check_programs,
    "sandbox": check_sandbox,
    "settings": check_settings,
    "servers": check_servers,
    "folders": check_folders,
    "database": check_database,
    "trust": check_trust,
    "path": check_path,
    "text": check_locale,
    "network": check_network,
    "clock": check_clock,
    "terminal": check_terminal,
}


async def examine_in_thread(env: Mapping[str, str]) -> list[Finding]:
    """Run all checks for the current folder."""
    return await asyncio.to_thread(examine, env, Path.cwd())


def to_findings(findings: list[Finding]) -> list[dict[str, Any]]:
    """Convert findings to JSON."""
    return [{"check": one.check, "verdict": one.verdict, "sentence": one.sentence} for one in findings]
