"""`crow mcp`: which MCP servers there are, how they are, and logging in to them."""

import asyncio
import fcntl
import json
import os
import re
import sys
import tempfile
import webbrowser
from collections.abc import AsyncGenerator, Coroutine, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import click
from crow_core.errors import ConfigError
from crow_core.masking import find_secrets, mask
from crow_core.mcp.server import describe_error, import_sdk, list_or_empty, run_in_thread
from crow_core.settings.config import (
    TOKENS_FOLDER,
    Config,
    Home,
    ProjectConfig,
    ServerSettings,
    UnusableServer,
    describe_missing_login,
    load_environment,
    read_servers,
    read_toml,
    to_server,
)
from crow_core.settings.trust import TrustedFolders

from crow_cli.ending import complete, wrong
from crow_cli.history import AS_JSON, one_line, print_json, print_table, say, tail
from crow_cli.screen import spelled_out

if TYPE_CHECKING:
    from crow_core.mcp.oauth import Visit
    from crow_core.mcp.server import Server

NAME = click.argument("name")


@dataclass(eq=False)
class Entry:
    """A server as a file names it."""

    name: str
    settings: ServerSettings
    file: Path
    trusted: bool = True
    """Not one of a folder that was never trusted, or not as it is now."""

    @property
    def transport(self) -> str:
        if not self.settings.url:
            return "stdio"
        return "sse" if self.settings.type == "sse" else "http"

    @property
    def what(self) -> str:
        """The command line or the address, without its secrets."""
        settings = self.settings
        text = settings.url or " ".join([settings.command, *settings.args])
        return mask(text, find_secrets(settings, load_environment(Home.find(os.environ), os.environ)))

    def server(self, visit: "Visit") -> "Server":
        home = Home.find(os.environ)
        return to_server(self.name, self.settings, os.getcwd(), tokens=home.data / TOKENS_FOLDER, visit=visit)


@click.group()
def mcp() -> None:
    """The MCP servers that bring more tools, resources and prompts."""


@mcp.command("list")
@click.option("--check", is_flag=True, help="Start each, and say how it is. Exit code 1 if one does not start.")
@AS_JSON
def list_(check: bool, as_json: bool) -> None:
    """The servers that are configured, by the user and by this folder."""
    found = entries()
    to_check = [entry for entry in found if check and entry.trusted and not entry.settings.disabled]
    states: dict[Entry, Mapping[str, Any]] = dict(
        zip(to_check, work(examine_all(to_check)) if to_check else [], strict=True)
    )
    if as_json:
        print_json([{**told(entry), **states.get(entry, {})} for entry in found])
    elif found:
        heads = ("NAME", "FROM", "TRANSPORT", "STATE", "WHAT") if check else ("NAME", "FROM", "TRANSPORT", "WHAT")
        rows = [
            [
                entry.name,
                tail(str(entry.file), 40),
                entry.transport,
                *([state_of(entry, states)] if check else []),
                entry.what,
            ]
            for entry in found
        ]
        print_table(heads, rows)
        for entry in found:
            state = states.get(entry, {})
            fault = entry.settings.error if isinstance(entry.settings, UnusableServer) else ""
            if error := fault or state.get("error") or state.get("warning"):
                say(one_line(f"{entry.name}: {error}"))
            elif not entry.trusted:
                say(one_line(f"{entry.name} does not count until you trust its folder: crow trust"))
    else:
        say("There are no MCP servers. Add one: crow mcp add NAME -- COMMAND")
    sys.exit(any("error" in state for state in states.values()))


@mcp.command()
@NAME
@click.argument("target", nargs=-1, required=True, metavar="(URL | -- COMMAND [ARG]...)", type=click.UNPROCESSED)
@click.option("--env", multiple=True, metavar="K[=V]", help="A variable; without a value, the one of that name then.")
@click.option("--header", multiple=True, metavar="K:V", help="A header of each request.")
@click.option("--transport", type=click.Choice(["stdio", "http", "sse"]), help="What it speaks over.")
@click.option("--auth", type=click.Choice(["oauth"]), help="How to log in; then: crow mcp login NAME")
def add(
    name: str,
    target: tuple[str, ...],
    env: tuple[str, ...],
    header: tuple[str, ...],
    transport: str | None,
    auth: str | None,
) -> None:
    """Add a server to mcp.json: crow mcp add time -- uvx mcp-server-time"""
    if not re.fullmatch(r"[\w.-]+", name):
        wrong(f"{spelled_out(name)!r} is no name for a server. Use letters, digits, '-', '_' and '.'.")
    remote = len(target) == 1 and re.match(r"https?://", target[0])
    if (transport in ("http", "sse")) != bool(remote) and transport:
        wrong(f"--transport {transport} takes {'a command' if remote else 'one http or https address'}.")
    if not remote and (header or auth):
        wrong("--header and --auth are for a server with an address; give a command its secrets by --env.")
    if remote and env:
        wrong("--env is for a command; give a server with an address its secrets by --header.")
    if remote:
        server: dict[str, Any] = {"type": transport or "http", "url": target[0]}
        if header:
            server["headers"] = dict(header_of(each) for each in header)
        if auth:
            server["auth"] = auth
    else:
        server = {"command": target[0], "args": [*target[1:]]}
        if env:
            server["env"] = dict(variable_of(each) for each in env)
    file = Home.find(os.environ).config / "mcp.json"
    with alone_in(file.parent), changing(file) as servers:
        if known := [entry for entry in entries() if entry.name == name and entry.file.parent == file.parent]:
            how = f"Remove it first: crow mcp remove {name}" if known[0].file == file else "Change it there"
            wrong(spelled_out(f"{known[0].file} has a server {name!r} already. {how}."))
        servers[name] = server
    say(f"Added {name} to {spelled_out(str(file))}. Try it: crow mcp {'login' if auth else 'test'} {name}")


@mcp.command()
@NAME
def remove(name: str) -> None:
    """Remove a server from mcp.json."""
    file = Home.find(os.environ).config / "mcp.json"
    with alone_in(file.parent), changing(file) as servers:
        if name not in servers:
            known = [entry for entry in entries() if entry.name == name]
            hint = f" It is in {known[0].file}: remove it there." if known else ""
            wrong(spelled_out(f"{file} has no server {name!r}.{hint}"))
        del servers[name]
    say(f"Removed {name} from {spelled_out(str(file))}.")


@mcp.command()
@NAME
@AS_JSON
def test(name: str, as_json: bool) -> None:
    """Start a server and list what it has. Exit codes: 0 it works, 1 it does not."""
    entry = find(name)
    state = work(examine(entry))
    if as_json:
        print_json({**told(entry), **state})
    elif "error" in state:
        click.secho(f"crow: {spelled_out(state['error'])}", fg="red", err=True)
    else:
        click.echo(one_line(f"{name}: {state['server']}, MCP {state['protocol']}, up in {state['seconds']:.2f} s"))
        for what in ("tools", "resources", "templates", "prompts"):
            if found := state[what]:
                click.echo(one_line(f"{what} ({len(found)}): {', '.join(found)}"))
        if state["warning"]:
            say(one_line(state["warning"]))
    sys.exit("error" in state)


@mcp.command()
@NAME
def login(name: str) -> None:
    """Log in to a server that wants it (OAuth), in a browser."""
    entry = login_entry(name)
    server = entry.server(browse)

    async def log_in() -> None:
        try:
            await forget(entry)
            await server.client()
        finally:
            await server.close()

    try:
        work(log_in())
    except ConnectionError as error:
        click.secho(f"crow: MCP server {name!r}: {spelled_out(str(error))}.", fg="red", err=True)
        sys.exit(1)
    say(f"Logged in to {name}.")


@mcp.command()
@NAME
def logout(name: str) -> None:
    """Forget what a login gave."""
    work(forget(login_entry(name)))
    say(f"Logged out of {name}.")


def entries() -> list[Entry]:
    """All servers, the strongest first where several have one name; ends the command where a file is wrong."""
    home, folder = Home.find(os.environ), Path.cwd()
    try:
        env = load_environment(home, os.environ)
        trusted = TrustedFolders(home.data).is_trusted(folder)
        files = {
            home.config / "config.toml": (read_toml(home.config / "config.toml", Config, env) or Config()).mcp.servers,
            home.config / "mcp.json": read_servers(home.config / "mcp.json", env),
        }
        own = {path: [Entry(name, each, path) for name, each in found.items()] for path, found in files.items()}
        settings = folder / ".crow" / "config.toml"
        theirs = {
            settings: (read_toml(settings, ProjectConfig, env) or ProjectConfig()).mcp.servers,
            folder / ".mcp.json": read_servers(folder / ".mcp.json", env),
        }
        projects = [Entry(name, each, path, trusted) for path, found in theirs.items() for name, each in found.items()]
    except ConfigError as error:
        wrong(spelled_out(str(error)))
    return [*(entry for found in own.values() for entry in found), *projects]


@contextmanager
def alone_in(folder: Path) -> Generator[None]:
    """Wait until no other command changes what is in a folder, and keep others waiting."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


@contextmanager
def changing(file: Path) -> Generator[dict[str, Any]]:
    """The servers in a file, to be changed; it keeps what else it holds, and is its owner's alone."""
    file = Path(os.path.realpath(file))  # a link stays one
    data: Any = {}
    try:
        data = json.loads(file.read_text("utf-8-sig"))
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        wrong(f"{spelled_out(str(file))} cannot be changed: {error}. Correct it first.")
    match data:
        case {"mcpServers": dict()}:
            servers = data["mcpServers"]
        case {"servers": dict()}:
            servers = data["servers"]
        case dict() if "mcpServers" not in data and "servers" not in data:
            servers = data["mcpServers"] = {}
        case _:
            wrong(f"{spelled_out(str(file))} is no list of servers. Correct it, or move it away.")
    yield servers
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    opened, new = tempfile.mkstemp(".json", ".mcp-", file.parent)
    try:
        with os.fdopen(opened, "w", encoding="utf-8") as writing:
            writing.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
        os.replace(new, file)
    except BaseException:
        os.unlink(new)
        raise


def variable_of(given: str) -> tuple[str, str]:
    """`K=V`, or `K` for what the environment holds when the server starts."""
    name, equals, value = given.partition("=")
    if not re.fullmatch(r"\w+", name):
        wrong(f"--env {spelled_out(given)}: a variable is KEY=VALUE, or KEY.")
    return name, value if equals else f"${{{name}}}"


def header_of(given: str) -> tuple[str, str]:
    """`K: V`"""
    name, colon, value = given.partition(":")
    if not colon or not re.fullmatch(r"[\w-]+", name) or not value.strip():
        wrong(f"--header {spelled_out(given)}: a header is 'Name: value'.")
    return name, value.strip()


def find(name: str) -> Entry:
    """The server of that name that counts; ends the command where there is none."""
    named = [entry for entry in entries() if entry.name == name]
    if not named:
        wrong(f"There is no MCP server {spelled_out(name)!r}. crow mcp list shows those that there are.")
    if not named[0].trusted:
        wrong(f"{spelled_out(str(named[0].file))} does not count until you trust its folder: crow trust")
    return named[0]


def login_entry(name: str) -> Entry:
    """The same for one that is logged in to."""
    entry = find(name)
    if entry.settings.auth != "oauth" and entry.settings.oauth is None:
        wrong(f'{spelled_out(str(entry.file))} does not say auth = "oauth" of {name!r}. Add that to log in there.')
    return entry


def told(entry: Entry) -> dict[str, Any]:
    """A server for programs."""
    return {
        "name": entry.name,
        "from": str(entry.file),
        "transport": entry.transport,
        "what": entry.what,
        "disabled": entry.settings.disabled,
        "trusted": entry.trusted,
    }


def state_of(entry: Entry, states: Mapping[Entry, Mapping[str, Any]]) -> str:
    if entry.settings.disabled:
        return "disabled"
    if not entry.trusted:
        return "not trusted"
    return "failed" if "error" in states[entry] else f"tools: {len(states[entry]['tools'])}"


async def examine_all(found: list[Entry]) -> list[dict[str, Any]]:
    return await asyncio.gather(*map(examine, found))


async def examine(entry: Entry) -> dict[str, Any]:
    """Start a server: what it has, or why it does not start."""

    @asynccontextmanager
    async def refuse(url: str) -> AsyncGenerator[None]:
        raise ConnectionError(describe_missing_login(entry.name))
        yield

    server, since = entry.server(refuse), monotonic()
    try:
        tools = await server.list()
        if server.error:
            return {"error": server.error}
        client = await server.client()
        took, can, about = monotonic() - since, client.server_capabilities, client.server_info
        protocol = client.protocol_version
        async with asyncio.timeout(server.effective_start_timeout):
            resources = await client.list_resources() if can and can.resources else []
            templates = await list_or_empty(client.list_resource_templates()) if can and can.resources else []
            prompts = await client.list_prompts() if can and can.prompts else []
    except Exception as error:  # whatever a server answers is told, and the others are looked at
        return {"error": f"MCP server {entry.name!r}: {mask(describe_error(error), server.secrets)}."}
    finally:
        await server.close()
    return {
        "server": f"{about.name} {about.version}" if about else "a server without a name",
        "protocol": protocol,
        "seconds": round(took, 3),
        "tools": [tool["name"] for tool in tools],
        "resources": [str(each.uri) for each in resources],
        "templates": [each.uri_template for each in templates],
        "prompts": [each.name for each in prompts],
        "warning": server.warning,
    }


@asynccontextmanager
async def browse(url: str) -> AsyncGenerator[None]:
    """Open a page in the person's browser, by a program and never a shell; its address was looked at before."""
    say(f"Log in with your browser. If none opens, visit:\n{spelled_out(url)}")
    await asyncio.to_thread(webbrowser.open, url)
    yield


async def forget(entry: Entry) -> None:
    """Forget what a login gave, and how crow was registered for it."""
    await run_in_thread(import_sdk)
    from crow_core.mcp.oauth import Login  # not above, as it needs FastMCP

    await Login(entry.settings.url, Home.find(os.environ).data / TOKENS_FOLDER, browse).token_storage_adapter.clear()


def work(task: Coroutine[Any, Any, Any]) -> Any:
    """Run to the end; gives what comes of it."""
    results: list[Any] = []

    async def run() -> int:
        results.append(await task)
        return 0

    try:
        if code := complete(run()):
            sys.exit(code)
    except KeyboardInterrupt:
        sys.exit(130)
    return results[0]
