"""`crow trust`: show what a folder's settings would run, ask whether to trust them, list and revoke."""

import json
import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from crow_agent.settings.config import PROJECT_MAY, list_ignored_settings
from crow_agent.settings.home import Home
from crow_agent.settings.project_files import ProjectFile, Snapshot, UnusableFolder, show_path, take_snapshot
from crow_agent.settings.trust import TrustedFolders, list_changes
from crow_core.masking import LIKELY_SECRET_NAMES
from crow_system.shortening import describe_left_out, format_count, leave_out

from crow_cli.console import AS_JSON, format_time, print_json, print_note, print_table
from crow_cli.process import fail

REFERENCE = re.compile(r"\$\{(?:env:)?(\w+)")
"""A variable of crow's environment in the settings of a server."""
MAX_ITEMS = 6
"""Servers, skills and other things of one kind that are named; the others are counted."""
MAX_DIFF, MAX_FILE_DIFF = 24, 12
"""Lines of all diffs together, and of the diff of one file."""
MAX_DIFFED = 20
"""Changed files whose diffs are made; the others are counted."""
HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Categories of characters that are not seen, or that control a terminal."""
DOWNLOADERS = {"npx", "pnpx", "bunx", "uvx", "pipx", "docker", "podman"}
"""Programs that run what they download."""


class TrustGroup(click.Group):
    """Takes `crow trust FOLDER` as `crow trust add FOLDER`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        is_command = bool(args) and (args[0] in self.commands or args[0] in ("-h", "--help"))
        return super().parse_args(ctx, args if is_command else ["add", *args])


@click.group(cls=TrustGroup)
def trust() -> None:
    """Trust a folder's settings as they are now, and use them.

    `crow trust FOLDER` is short for `crow trust add FOLDER`, and `crow trust` for `crow trust add .`.
    """


@trust.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path), default=".")
@click.option("--yes", is_flag=True, help="Do not ask.")
def add(folder: Path, yes: bool) -> None:
    """Show what a FOLDER's settings would run, and what has changed since they were trusted, and ask.

    They are its .mcp.json, .crow/config.toml, prompts, commands, skills with all files in their folders, and the files
    in the folder that its settings name. After a change the folder has to be trusted again. In a trusted folder, a git
    command that a permission rule allows runs the hooks and other programs that the repository names, as they are then.
    """
    if not yes and not (sys.stdin and sys.stdin.isatty()):
        fail(f"crow trust asks, and there is no terminal to ask on. To trust {show(str(folder))} unasked: --yes")
    folders, folder = TrustedFolders(Home.find(os.environ).data), folder.absolute()
    try:
        snapshot = take_snapshot(folder, keep=True)
        if not snapshot.files and not os.path.lexists(folder / ".git"):
            fail(
                f"{show(str(folder))} has no .mcp.json, .crow/config.toml, prompts, skills or commands, and no git "
                "repository: there is nothing to trust."
            )
        if folders.is_broken:
            print_note(
                f"{folders.file} cannot be read, so no folder is trusted. It is kept beside a new list if you go on."
            )
        hide = make_mask(snapshot)
        record = folders.read().get(str(snapshot.folder))
        before = folders.read_contents(snapshot.folder) if record else None
        print_summary(snapshot, hide)
        if record and record["fingerprint"] == snapshot.fingerprint:
            click.echo(f"\nTrusted since {format_time(record['since'])}, and unchanged.")
            return
        if record and before is not None:
            print_changes(before, snapshot, hide, format_time(record["since"]))
        click.echo()
        if not yes and not click.confirm("Trust this folder?", default=False):
            print_note("Nothing was trusted.")
            sys.exit(1)
        folders.add(snapshot, hide)
        if take_snapshot(folder).fingerprint != snapshot.fingerprint:
            fail("Its settings have changed while you read this, so they are not trusted. Run crow trust again.")
    except UnusableFolder as error:
        fail(f"{show(str(folder))} cannot be trusted: {show(str(error))}.")
    except OSError as error:
        fail(f"{show(os.fsdecode(error.filename or folder))}: {error.strerror}. Nothing was trusted.")
    click.echo(f"Trusted as it is now; after a change you are asked again: {show(str(snapshot.folder))}")


@trust.command("list")
@AS_JSON
def list_(as_json: bool) -> None:
    """List the trusted folders: since when, and whether they are valid, changed or gone."""
    folders = TrustedFolders(Home.find(os.environ).data)
    rows: list[dict[str, Any]] = []
    for key, record in sorted(folders.read().items()):
        change = folders.find_change(Path(key))
        state = "gone" if not os.path.isdir(key) else "changed" if change else "valid"
        rows.append({"folder": key, "since": record["since"], "state": state, "reason": change or ""})
    if folders.is_broken:
        print_note(f"{folders.file} cannot be read, so no folder is trusted. The next crow trust begins a new list.")
    if as_json:
        print_json(rows)
    elif rows:
        cells = [(show(row["folder"]), format_time(row["since"]), describe_state(row)) for row in rows]
        print_table(("FOLDER", "SINCE", "STATE"), cells)
    elif not folders.is_broken:
        print_note("No folder is trusted.")
    sys.exit(folders.is_broken)


def describe_state(row: Mapping[str, Any]) -> str:
    return f"changed ({show(row['reason'])})" if row["state"] == "changed" else row["state"]


@trust.command()
@click.argument("folders", nargs=-1, metavar="[FOLDER]...")
@click.option("--all", "every", is_flag=True, help="Trust no folder any more.")
def revoke(folders: tuple[str, ...], every: bool) -> None:
    """Trust a FOLDER's settings no more. It need not exist any more."""
    trusted = TrustedFolders(Home.find(os.environ).data)
    if bool(folders) == every:
        fail("name a folder to revoke, or give --all. crow trust list shows the folders.")
    keys = list(trusted.read()) if every else [key for each in folders for key in {each, os.path.realpath(each)}]
    try:
        revoked = trusted.revoke(keys)
    except OSError as error:
        fail(f"{trusted.file} cannot be written ({error.strerror}). Nothing was revoked.")
    for key in revoked:
        click.echo(f"Not trusted any more: {show(key)}")
    missing = [each for each in folders if each not in revoked and os.path.realpath(each) not in revoked]
    if missing:
        fail(f"{show(missing[0])} was not trusted. crow trust list shows the folders.")
    if not revoked:
        print_note("No folder was trusted.")


def show(text: str) -> str:
    """Escape all characters of a text of others that are not seen, or that control a terminal."""
    text = show_path(text)
    if text.isascii() and text.isprintable():
        return text
    return "".join(f"\\u{ord(c):04x}" if unicodedata.category(c) in HIDDEN else c for c in text)


def cut(text: str, lines: int = 1, indent: int = 2) -> str:
    """Show a text on so many lines of the terminal; of a longer one, leave out the middle."""
    text = show(text)
    room = lines * (shutil.get_terminal_size().columns - indent) - indent
    if len(text) <= room:
        return text
    half = max((room - len(describe_left_out(len(text), len(text))) - 2) // 2, 10)
    return leave_out(text, 2 * half, tail=half, space=" ")


def make_mask(snapshot: Snapshot) -> Callable[[str], str]:
    """Make the function that masks the secrets of a folder's settings in a text."""
    from crow_core.masking import find_secrets, mask

    secrets = frozenset(secret for table in parse_settings(snapshot).values() for secret in find_secrets(table))
    return partial(mask, secrets=secrets)


def parse_settings(snapshot: Snapshot) -> dict[str, dict[str, Any]]:
    """Parse the settings in a snapshot, by the names of their files; leave out all but tables."""
    import json
    import tomllib

    parsed: dict[str, dict[str, Any]] = {}
    for name, path in snapshot.real.items():
        file = snapshot.files.get(path)
        if file and file.content is not None and name.endswith((".json", ".toml")):
            try:
                text = file.content.decode("utf-8-sig")
                data: Any = json.loads(text) if name.endswith(".json") else tomllib.loads(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(data, dict):
                parsed[name] = data
    return parsed


def get_table(data: Any, *keys: str) -> dict[str, Any]:
    """Return the table that nested keys lead to; an empty one if there is none."""
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return data if isinstance(data, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def print_summary(snapshot: Snapshot, hide: Callable[[str], str]) -> None:
    """Print on about one screen what a folder's settings are, and when what of them would run."""
    settings = parse_settings(snapshot)
    json_file, toml_file = settings.get(".mcp.json"), settings.get(".crow/config.toml")
    servers = {
        **get_table(json_file, "servers"),
        **get_table(json_file, "mcpServers"),
        **get_table(toml_file, "mcp", "servers"),
    }
    agents = get_table(toml_file, "agents")
    problems = [
        f"{pattern}: {command}"
        for pattern, commands in get_table(toml_file, "diagnostics").items()
        for command in (commands if isinstance(commands, list) else [commands])  # pyright: ignore[reportUnknownVariableType]
        if isinstance(command, str)
    ]
    rules = [(kind, rule) for kind in ("ask", "deny") for rule in list_of(get_table(toml_file, "permissions"), kind)]
    skills = [os.path.basename(os.path.dirname(path)) for path in snapshot.files if is_skill(path)]
    commands = [name_of(path) for path in snapshot.files if "/commands/" in path and path.endswith(".md")]
    prompts = [name_of(path) for path in snapshot.files if path.endswith(".md.j2")]
    size = sum(file.size for file in snapshot.files.values())
    nouns = ("server", "agent", "skill", "check", "command", "prompt", "rule")
    things = (servers, agents, skills, problems, commands, prompts, rules)
    counts = [format_count(len(each), noun) for each, noun in zip(things, nouns, strict=True)]
    files = f"{format_count(len(snapshot.files), 'file')}, {size:,} bytes"
    kinds = ", ".join(each for each in counts if not each.startswith("0 "))
    click.echo(f"{show(str(snapshot.folder))}: {kinds or 'nothing that runs'}; {files}")
    for name in (".mcp.json", ".crow/config.toml"):
        file = snapshot.files.get(snapshot.real.get(name, ""))
        if file and file.kind == "file" and name not in settings:
            click.echo(f"  {name} cannot be parsed, so a session here fails until it is corrected.")
    started = [f"{name}: {describe_server(server)}" for name, server in servers.items()]
    print_items("Starts with every session here, without a question:", map(hide, started), lines=3)
    print_items("Files in the folder that the settings name:", snapshot.named)
    setup = get_table(toml_file, "worktree").get("setup")
    print_items("Starts in each new worktree of crow -w:", [hide(setup)] if isinstance(setup, str) and setup else [])
    called = [f"{name}: {describe_server(agent)}" for name, agent in agents.items()]
    print_items("Starts when the model asks it something:", map(hide, called), lines=3)
    print_items("Runs before and after an edit, to look for problems:", map(hide, problems), lines=3)
    print_items("Goes to the model instead of crow's own prompts:", prompts)
    print_items("Goes to the model when a prompt or the model calls for it (skills):", skills)
    print_items("Goes to the model when you type it (commands):", (f"/{command}" for command in commands))
    print_items("Rules, which can only tighten yours:", (f"{kind} {rule}" for kind, rule in rules))
    if os.path.lexists(snapshot.folder / ".git"):
        click.secho("Runs with git commands that your rules allow: the repository's hooks and programs.", bold=True)
    print_items(f"Ignored, because {PROJECT_MAY}:", list_ignored_settings(toml_file or {}))
    print_items("Not used:", snapshot.left_out)
    print_items("May change without a question:", list_uncovered(snapshot, servers, agents))


def print_items(title: str, items: Iterable[str], *, lines: int = 1) -> None:
    """Print a title with the first items below it; nothing without items."""
    if items := list(items):
        click.secho(title, bold=True)
        for item in items[:MAX_ITEMS]:
            click.echo(f"  {cut(item, lines)}")
        if len(items) > MAX_ITEMS:
            click.echo(f"  … and {len(items) - MAX_ITEMS:,} more")


def list_uncovered(snapshot: Snapshot, servers: Mapping[str, Any], agents: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences about what may change in what runs although the folder stays trusted."""
    yield from snapshot.uncovered
    programs = {os.path.basename(str(get_table(each).get("command"))) for each in (*servers.values(), *agents.values())}
    if loaders := sorted(programs & DOWNLOADERS):
        yield f"what {' and '.join(loaders)} downloads"
    if any("url" in get_table(each) for each in servers.values()):
        yield "what the servers with an address answer"
    if programs:
        yield "what these programs and files load or start themselves"
    if any(is_skill(path) for path in snapshot.files):
        yield "files outside of the skills' own folders that they name"


def describe_server(server: Any) -> str:
    """Describe a server or an agent as a command line with its variables, or as an address."""
    import shlex

    table = get_table(server)
    keys = sorted({name for name in REFERENCE.findall(json.dumps(table)) if LIKELY_SECRET_NAMES.search(name)})
    gets = f" [gets your {', '.join(keys)}]" if keys else ""
    if address := next((str(table[key]) for key in ("url", "httpUrl", "serverUrl") if table.get(key)), ""):
        return address + gets
    variables = [f"{name}={shlex.quote(str(value))}" for name, value in get_table(table, "env").items()]
    words = [str(table.get("command", "")), *map(str, list_of(table, "args"))]
    place = f" (in {table['cwd']})" if table.get("cwd") else ""
    off = " (disabled)" if table.get("disabled") is True else ""
    return " ".join([*variables, *map(shlex.quote, words)]) + place + off + gets


def list_of(table: Mapping[str, Any], key: str) -> list[Any]:
    value = table.get(key)
    return value if isinstance(value, list) else []  # pyright: ignore[reportUnknownVariableType]


def is_skill(path: str) -> bool:
    return os.path.basename(path) in ("SKILL.md", "skill.md")


def name_of(path: str) -> str:
    return os.path.basename(path).removesuffix(".j2").removesuffix(".md")


def print_changes(
    before: Mapping[str, Mapping[str, Any]], now: Snapshot, hide: Callable[[str], str], since: str
) -> None:
    """Print the changes since a folder was trusted: diffs of a few lines, and the others as counts."""
    paths = list_changes(before, now)
    click.secho(f"Changed since {since}: {format_count(len(paths), 'file')}", bold=True)
    room = MAX_DIFF
    for number, path in enumerate(paths[:MAX_DIFFED]):
        if room < 2:
            paths = paths[number:]
            break
        lines = describe_change(path, before.get(path), now.files.get(path), hide)
        shown = lines[: min(MAX_FILE_DIFF, room)]
        if len(lines) > len(shown):
            shown.append(f"    … {len(lines) - len(shown):,} more lines")
        for line in shown:
            click.secho(line, fg={"+": "green", "-": "red"}.get(line[4:5]))
        room -= len(shown)
    else:
        paths = paths[MAX_DIFFED:]
    if paths:
        click.echo(f"  … and {format_count(len(paths), 'more file')}")


def describe_change(
    path: str, before: Mapping[str, Any] | None, now: ProjectFile | None, hide: Callable[[str], str]
) -> list[str]:
    """Describe how one file changed, in lines: its name, then a diff if both texts are known."""
    from crow_agent.settings.trust import to_stored

    after = to_stored(now, hide) if now else None
    if before is None or after is None:
        file, verb = (after, "added") if after else (before, "removed")
        return [f"  {cut(path)}: {verb} ({(file or {}).get('size', 0):,} bytes)"]
    head = f"  {cut(path)}: {before.get('size', 0):,} bytes before, {after['size']:,} now"
    old, new = before.get("text"), after.get("text")
    if not isinstance(old, str) or not isinstance(new, str):
        return [f"{head} (not shown: no short text)"]
    if old == new:
        return [f"{head} (only masked secrets differ)"]
    return [head, *make_diff(old.splitlines(), new.splitlines())]


def make_diff(old: Sequence[str], new: Sequence[str]) -> list[str]:
    import difflib

    lines = list(difflib.unified_diff(old, new, lineterm="", n=1))[2:]
    return [f"    {line[:1]}{cut(line[1:].expandtabs(4), indent=5)}" for line in lines]
