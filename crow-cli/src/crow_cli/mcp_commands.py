"""`crow mcp`: list, add, remove and test MCP servers, and log in to them."""

import asyncio
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
import crow_system as system
from crow_agent.program_limits import can_limit, find_project_level, limit_server, tighten
from crow_agent.settings.config import load_config, load_environment
from crow_agent.settings.home import Home
from crow_agent.settings.mcp_servers import TOKENS_FOLDER, describe_missing_login, to_server
from crow_agent.settings.reading import read_servers, read_toml
from crow_agent.settings.structs import Config, ProgramLevel, ProjectConfig, ServerSettings, UnusableServer
from crow_agent.settings.trust import TrustedFolders
from crow_core.errors import ConfigError
from crow_core.masking import find_secrets, mask
from crow_core.mcp.sdk_import import import_sdk, run_in_thread
from crow_core.mcp.server_answers import describe_error, list_or_empty
from crow_core.text import escape_controls
from crow_system.files import lock_folder, make_private_folder

from crow_cli.console import AS_JSON, escape_line, print_json, print_note, print_table, shorten_path
from crow_cli.mcp_discovery import discover, search
from crow_cli.process import fail, run_to_end

if TYPE_CHECKING:
    from crow_core.mcp.oauth import Visit
    from crow_core.mcp.server import Server

NAME = click.argument("name")


@dataclass(eq=False)
class ConfiguredServer:
    """An MCP server as a configuration file defines it."""

    name: str
    settings: ServerSettings
    file: Path
    trusted: bool = True
    """False for a server of a folder that is not trusted, or has changed since."""

    @property
    def transport(self) -> str:
        if not self.settings.url:
            return "stdio"
        return "sse" if self.settings.type == "sse" else "http"

    @property
    def command_or_url(self) -> str:
        """The command line or the URL, with its secrets masked."""
        settings = self.settings
        text = settings.url or " ".join([settings.command, *settings.args])
        return mask(text, find_secrets(settings, load_environment(Home.find(os.environ), os.environ)))

    def make_server(self, visit: "Visit") -> "Server":
        home = Home.find(os.environ)
        limit = limit_server(self.settings, [os.getcwd()], home)
        tokens = home.data / TOKENS_FOLDER
        document = load_config(home, os.environ).mcp.client_document
        return to_server(
            self.name, self.settings, os.getcwd(), tokens=tokens, visit=visit, limit=limit, document=document
        )


@click.group()
def mcp() -> None:
    """Manage the MCP servers, which add tools, resources and prompts."""


mcp.add_command(search)


@mcp.command("list")
@click.option("--check", is_flag=True, help="Start each server and show its state. Exit code 1 if one does not start.")
@AS_JSON
def list_(check: bool, as_json: bool) -> None:
    """List the servers that the user and this folder configure."""
    found = list_servers()
    to_check = [configured for configured in found if check and configured.trusted and not configured.settings.disabled]
    states: dict[ConfiguredServer, Mapping[str, Any]] = dict(
        zip(to_check, run_coroutine(examine_all(to_check)) if to_check else [], strict=True)
    )
    if as_json:
        print_json([{**to_json(configured), **states.get(configured, {})} for configured in found])
    elif found:
        heads = ("NAME", "FROM", "TRANSPORT", "STATE", "WHAT") if check else ("NAME", "FROM", "TRANSPORT", "WHAT")
        rows = [
            [
                configured.name,
                shorten_path(str(configured.file), 40),
                configured.transport,
                *([describe_state(configured, states)] if check else []),
                configured.command_or_url,
            ]
            for configured in found
        ]
        print_table(heads, rows)
        for configured in found:
            state = states.get(configured, {})
            fault = configured.settings.error if isinstance(configured.settings, UnusableServer) else ""
            if error := fault or state.get("error") or state.get("warning"):
                print_note(escape_line(f"{configured.name}: {error}"))
            elif not configured.trusted:
                print_note(escape_line(f"{configured.name} is ignored until you trust its folder: crow trust"))
    else:
        print_note("There are no MCP servers. Add one: crow mcp add NAME -- COMMAND")
    sys.exit(any("error" in state for state in states.values()))


@mcp.command()
@NAME
@click.argument("target", nargs=-1, metavar="(URL | -- COMMAND [ARG]...)", type=click.UNPROCESSED)
@click.option(
    "--env",
    multiple=True,
    metavar="K[=V]",
    help="Set a variable of the command; without a value, take it from crow's environment at each start.",
)
@click.option("--header", multiple=True, metavar="K:V", help="Send this header with each request.")
@click.option(
    "--transport",
    type=click.Choice(["stdio", "http", "sse"]),
    help="The transport; by default stdio for a command and http for a URL.",
)
@click.option("--auth", type=click.Choice(["oauth"]), help="Log in with OAuth; then run: crow mcp login NAME")
def add(
    name: str,
    target: tuple[str, ...],
    env: tuple[str, ...],
    header: tuple[str, ...],
    transport: str | None,
    auth: str | None,
) -> None:
    """Add a server to mcp.json.

    Example: crow mcp add time -- uvx mcp-server-time

    With an https address alone (crow mcp add https://example.com), the card that the host publishes says the rest.
    """
    if not target and re.match(r"https?://", name):
        if env or header or transport or auth:
            fail("With an address alone, there are no options: the card of the host says the rest. Give a name, too.")
        name, server = discover(name)
        add_server(name, server)
        return
    if not target:
        fail(f"What is the server {escape_controls(name)!r}? crow mcp add NAME URL, or crow mcp add NAME -- COMMAND")
    if not re.fullmatch(r"[\w.-]+", name):
        fail(f"{escape_controls(name)!r} is not a name for a server. Use letters, digits, '-', '_' and '.'.")
    remote = len(target) == 1 and re.match(r"https?://", target[0])
    if (transport in ("http", "sse")) != bool(remote) and transport:
        fail(f"--transport {transport} takes {'a command' if remote else 'one http or https address'}.")
    if not remote and (header or auth):
        fail("--header and --auth are for a server with an address; give a command its secrets by --env.")
    if remote and env:
        fail("--env is for a command; give a server with an address its secrets by --header.")
    if remote:
        server: dict[str, Any] = {"type": transport or "http", "url": target[0]}
        if header:
            server["headers"] = dict(parse_header(each) for each in header)
        if auth:
            server["auth"] = auth
    else:
        server = {"command": target[0], "args": [*target[1:]]}
        if env:
            server["env"] = dict(parse_variable(each) for each in env)
    add_server(name, server)


def add_server(name: str, server: dict[str, Any]) -> None:
    """Add a server to mcp.json. Exit with code 2 if there is one of its name."""
    file = Home.find(os.environ).config / "mcp.json"
    with lock_folder(file.parent), edit_servers(file) as servers:
        if known := [
            configured
            for configured in list_servers()
            if configured.name == name and configured.file.parent == file.parent
        ]:
            how = f"Remove it first: crow mcp remove {name}" if known[0].file == file else "Change it there"
            fail(escape_controls(f"{known[0].file} has a server {name!r} already. {how}."))
        servers[name] = server
    then = "login" if server.get("auth") else "test"
    print_note(f"Added {name} to {escape_controls(str(file))}. Try it: crow mcp {then} {name}")


@mcp.command()
@NAME
def remove(name: str) -> None:
    """Remove a server from mcp.json."""
    file = Home.find(os.environ).config / "mcp.json"
    with lock_folder(file.parent), edit_servers(file) as servers:
        if name not in servers:
            known = [configured for configured in list_servers() if configured.name == name]
            hint = f" It is in {known[0].file}: remove it there." if known else ""
            fail(escape_controls(f"{file} has no server {name!r}.{hint}"))
        del servers[name]
    print_note(f"Removed {name} from {escape_controls(str(file))}.")


@mcp.command()
@NAME
@AS_JSON
def test(name: str, as_json: bool) -> None:
    """Start a server and list its tools, resources and prompts. Exit codes: 0 it works, 1 it does not."""
    configured = find_server(name)
    state = run_coroutine(examine(configured))
    if as_json:
        print_json({**to_json(configured), **state})
    elif "error" in state:
        click.secho(f"crow: {escape_controls(state['error'])}", fg="red", err=True)
    else:
        click.echo(escape_line(f"{name}: {state['server']}, MCP {state['protocol']}, up in {state['seconds']:.2f} s"))
        for what in ("tools", "resources", "templates", "prompts"):
            if found := state[what]:
                click.echo(escape_line(f"{what} ({len(found)}): {', '.join(found)}"))
        if state["warning"]:
            print_note(escape_line(state["warning"]))
    sys.exit("error" in state)


@mcp.command()
@NAME
def login(name: str) -> None:
    """Log in to a server with OAuth, in a browser."""
    configured = find_login_server(name)
    server = configured.make_server(open_browser)

    async def log_in() -> None:
        try:
            await delete_login(configured)
            await server.client()
        finally:
            await server.close()

    try:
        run_coroutine(log_in())
    except ConnectionError as error:
        click.secho(f"crow: MCP server {name!r}: {escape_controls(str(error))}.", fg="red", err=True)
        sys.exit(1)
    print_note(f"Logged in to {name}.")


@mcp.command()
@NAME
def logout(name: str) -> None:
    """Log out of a server: delete its tokens."""
    run_coroutine(delete_login(find_login_server(name)))
    print_note(f"Logged out of {name}.")


def list_servers() -> list[ConfiguredServer]:
    """List the servers of all files, by falling precedence. Exit with code 2 where a file cannot be used."""
    home, folder = Home.find(os.environ), Path.cwd()
    try:
        env = load_environment(home, os.environ)
        trusted = TrustedFolders(home.data).is_trusted(folder)
        config = read_toml(home.config / "config.toml", Config, env) or Config()
        files = {
            home.config / "config.toml": config.mcp.servers,
            home.config / "mcp.json": read_servers(home.config / "mcp.json", env),
        }
        own = {
            path: [ConfiguredServer(name, each, path) for name, each in found.items()] for path, found in files.items()
        }
        settings = folder / ".crow" / "config.toml"
        theirs = {
            settings: (read_toml(settings, ProjectConfig, env, folder) or ProjectConfig()).mcp.servers,
            folder / ".mcp.json": read_servers(folder / ".mcp.json", env, folder),
        }
        level: ProgramLevel = "off"
        if trusted and any(can_limit(each) for found in theirs.values() for each in found.values()):
            level, _ = asyncio.run(find_project_level(config, home))
        projects = [
            ConfiguredServer(name, tighten(each, level), path, trusted)
            for path, found in theirs.items()
            for name, each in found.items()
        ]
        plugins = list_plugin_servers(home, config, folder)
    except ConfigError as error:
        fail(escape_controls(str(error)))
    return [*(configured for found in own.values() for configured in found), *projects, *plugins]


def list_plugin_servers(home: Home, config: Config, folder: Path) -> list[ConfiguredServer]:
    """List the servers of the user's plugins, and of those of a trusted project."""
    if not home.has_plugins(os.environ, folder):
        return []
    from crow_agent.settings.plugins import find_plugins

    plugins = find_plugins(home, os.environ, folder, TrustedFolders(home.data)).plugins
    commands = [each for plugin in plugins if plugin.is_project for each in plugin.servers.values() if can_limit(each)]
    level = asyncio.run(find_project_level(config, home))[0] if commands else "off"
    return [
        ConfiguredServer(name, tighten(each, level) if plugin.is_project else each, plugin.root / "mcp.json")
        for plugin in plugins
        for name, each in plugin.servers.items()
    ]


@contextmanager
def edit_servers(file: Path) -> Generator[dict[str, Any]]:
    """Give the servers in a file to the block, which changes them; then write the file. Its other contents stay, and
    only its owner may read it."""
    file = Path(os.path.realpath(file))  # so that a link stays a link
    data: Any = {}
    try:
        data = json.loads(file.read_text("utf-8-sig"))
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        fail(f"{escape_controls(str(file))} cannot be changed: {error}. Correct it first.")
    match data:
        case {"mcpServers": dict()}:
            servers = data["mcpServers"]
        case {"servers": dict()}:
            servers = data["servers"]
        case dict() if "mcpServers" not in data and "servers" not in data:
            servers = data["mcpServers"] = {}
        case _:
            fail(f"{escape_controls(str(file))} is not a list of servers. Correct it, or move it away.")
    yield servers
    make_private_folder(file.parent)
    descriptor, new = tempfile.mkstemp(".json", ".mcp-", file.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as writing:
            writing.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
        system.replace_file(new, file)
    except BaseException:
        os.unlink(new)
        raise


def parse_variable(given: str) -> tuple[str, str]:
    """Parse `K=V`, or `K` for a variable that is read from the environment when the server starts."""
    name, equals, value = given.partition("=")
    if not re.fullmatch(r"\w+", name):
        fail(f"--env {escape_controls(given)}: a variable is KEY=VALUE, or KEY.")
    return name, value if equals else f"${{{name}}}"


def parse_header(given: str) -> tuple[str, str]:
    """Parse `K: V`."""
    name, colon, value = given.partition(":")
    if not colon or not re.fullmatch(r"[\w-]+", name) or not value.strip():
        fail(f"--header {escape_controls(given)}: a header is 'Name: value'.")
    return name, value.strip()


def find_server(name: str) -> ConfiguredServer:
    """Return the server of that name with the highest precedence. Exit with code 2 where there is none."""
    named = [configured for configured in list_servers() if configured.name == name]
    if not named:
        fail(f"There is no MCP server {escape_controls(name)!r}. crow mcp list shows all servers.")
    if not named[0].trusted:
        fail(f"{escape_controls(str(named[0].file))} is ignored until you trust its folder: crow trust")
    return named[0]


def find_login_server(name: str) -> ConfiguredServer:
    """Like `find_server`, but exit with code 2 unless the server has `auth = "oauth"`."""
    configured = find_server(name)
    if configured.settings.auth == "client_credentials":
        fail(f"{escape_controls(name)} needs no login: it has client credentials. Test it: crow mcp test {name}")
    if configured.settings.auth != "oauth" and configured.settings.oauth is None:
        fail(f'{escape_controls(str(configured.file))} has no auth = "oauth" for {name!r}. Add it to log in there.')
    return configured


def to_json(configured: ConfiguredServer) -> dict[str, Any]:
    """Convert a server to JSON, for programs."""
    return {
        "name": configured.name,
        "from": str(configured.file),
        "transport": configured.transport,
        "what": configured.command_or_url,
        "disabled": configured.settings.disabled,
        "trusted": configured.trusted,
    }


def describe_state(configured: ConfiguredServer, states: Mapping[ConfiguredServer, Mapping[str, Any]]) -> str:
    if configured.settings.disabled:
        return "disabled"
    if not configured.trusted:
        return "not trusted"
    return "failed" if "error" in states[configured] else f"tools: {len(states[configured]['tools'])}"


async def examine_all(found: list[ConfiguredServer]) -> list[dict[str, Any]]:
    return await asyncio.gather(*map(examine, found))


async def examine(configured: ConfiguredServer) -> dict[str, Any]:
    """Start a server. Return its tools, resources and prompts, or why it does not start under `error`."""

    @asynccontextmanager
    async def refuse(url: str) -> AsyncGenerator[None]:
        raise ConnectionError(describe_missing_login(configured.name))
        yield

    server, since = configured.make_server(refuse), monotonic()
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
    except Exception as error:  # any error of a server is reported, and the other servers are still examined
        return {"error": f"MCP server {configured.name!r}: {mask(describe_error(error), server.secrets)}."}
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
async def open_browser(url: str) -> AsyncGenerator[None]:
    """Open a URL, which the caller has validated, in the user's browser, without a shell."""
    print_note(f"Log in with your browser. If none opens, visit:\n{escape_controls(url)}")
    await asyncio.to_thread(webbrowser.open, url)
    yield


async def delete_login(server: ConfiguredServer) -> None:
    """Delete the tokens of a login, and crow's registration for it."""
    await run_in_thread(import_sdk)
    from crow_core.mcp.oauth import Login  # imported here because it loads FastMCP

    await Login(
        server.settings.url, Home.find(os.environ).data / TOKENS_FOLDER, open_browser
    ).token_storage_adapter.clear()


def run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end and return its result. Exit the process after a signal."""
    results: list[Any] = []

    async def store_result() -> int:
        results.append(await coroutine)
        return 0

    try:
        if code := run_to_end(store_result()):
            sys.exit(code)
    except KeyboardInterrupt:
        sys.exit(130)
    return results[0]
