"""`crow web`: show the stored data, and talk, in a browser."""

import os
import socket
import webbrowser
from functools import partial
from typing import TYPE_CHECKING

import click
from crow_cli.process import fail, hide_memory
from crow_cli.storage import open_database
from crow_core.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from crow_persistence.database import Database
    from crow_terminal.agent_connections import AgentLink
    from uvicorn import Server

    from crow_web.app_frames import AppFrames
    from crow_web.chats import Chats

TUNNEL = """\
Only this machine answers. On the phone, an ssh tunnel leads here:
ssh -L {port}:127.0.0.1:{port}{more} this-machine
With --tls, other machines of your network can connect."""
WARNING = "Whoever opens this address first can do what you can. The browser warns of the certificate: compare SHA-256"


@click.command()
@click.argument("session", required=False, default="")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="The port; a free one by default.")
@click.option("--no-open", is_flag=True, help="Print the address, and open no browser.")
@click.option("--read-only", is_flag=True, help="Only show what is stored: no chat, and nothing that changes anything.")
@click.option("--cwd", type=click.Path(exists=True, file_okay=False), default=".", help="The folder of a new session.")
@click.option("--connect", "url", metavar="URL", default="", help="Talk with an agent at a ws:// or wss:// address.")
@click.option("--token", default="", envvar="CROW_TOKEN", help="The token for --connect; $CROW_TOKEN by default.")
@click.option("--of-terminal", is_flag=True, hidden=True, help="Share the session of the terminal on standard input.")
@click.option("--share", is_flag=True, help="Print a QR code, for a phone; see --tls.")
@click.option("--tls", is_flag=True, help="Answer other machines of your network, with a certificate made for it.")
def web(
    session: str,
    port: int,
    no_open: bool,
    read_only: bool,
    cwd: str,
    url: str,
    token: str,
    of_terminal: bool,
    share: bool,
    tls: bool,
) -> None:
    """Talk with crow in a browser, and look at sessions, requests, decisions and costs.

    SESSION is the beginning of a session's id, and opens that one. The address has a token that works once.
    """
    from uvicorn import Config, Server  # imported here, as are the pages: `crow --help` loads this module

    from crow_web.app import make_app
    from crow_web.app_frames import AppFrames, ByPort
    from crow_web.gate import Gate

    place = "/"
    try:
        database = open_database(os.environ, create=not read_only)
        with database.begin_read() as connection:
            from crow_persistence.loader import find_session

            place = f"/session/{find_session(connection, session).id}" if session else "/"
    except StoreError as error:
        fail(str(error))
    listeners = [listen("127.0.0.1", port)]
    number = listeners[0].getsockname()[1]
    context, fingerprint, names = None, "", list[str]()
    if tls:
        from crow_web.sharing import find_address, make_context

        try:
            address = find_address()
        except OSError as error:
            fail(f"--tls: this machine has no address in a network ({os.strerror(error.errno or 0)}).")
        names = [address]
        if address != "127.0.0.1":
            listeners.append(listen(address, number))
        context, fingerprint = make_context(["127.0.0.1", address])
    hide_memory()
    servers: list[Server] = []
    end = partial(end_all, servers) if of_terminal else None
    frames = None
    if not read_only:
        listeners.append(listen("127.0.0.1", 0))
        own = listeners[-1].getsockname()[1]
        listeners += [listen(name, own) for name in names if name != "127.0.0.1"]
        frames = AppFrames(own, number, names=names, uses_tls=tls)
    chats = None if read_only else make_chats(database, cwd, url, token, of_terminal=end, frames=frames)
    app = make_app(database, os.environ, chats=chats, read_only=read_only)
    gate = Gate(app, number, names=names, uses_tls=tls, frames=" ".join(frames.origins) if frames else "'none'")
    scheme = "https" if tls else "http"
    click.echo(address := f"{scheme}://127.0.0.1:{number}{place}?token={gate.token}")
    if share:
        from crow_web.sharing import draw_code

        shared = f"{scheme}://{(names or ['127.0.0.1'])[0]}:{number}{place}?token={gate.add_token()}"
        more = f" -L {frames.port}:127.0.0.1:{frames.port}" if frames else ""
        click.echo(f"\n{draw_code(shared)}\n{shared}")
        click.echo(f"{WARNING}\n{fingerprint}" if tls else TUNNEL.format(port=number, more=more))
    elif tls:
        click.echo(f"{names[0]}: SHA-256 {fingerprint}")
    if not no_open:
        webbrowser.open(address)
    served = ByPort(gate, frames) if frames else gate
    config = Config(
        served, ws="websockets-sansio", log_level="warning", timeout_graceful_shutdown=1, server_header=False
    )
    config.load()
    config.ssl = context
    servers.append(Server(config))
    servers[0].run(sockets=listeners)


def end_all(servers: "list[Server]") -> None:
    for server in servers:
        server.should_exit = True


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens, or exit with a sentence."""
    try:
        return socket.create_server((address, port))
    except OSError as error:
        fail(f"--port: {port} cannot be used ({os.strerror(error.errno or 0)}). Leave it out for a free one.")


def make_chats(
    database: "Database",
    cwd: str,
    url: str,
    token: str,
    *,
    of_terminal: "Callable[[], None] | None" = None,
    frames: "AppFrames | None" = None,
) -> "Chats":
    """Make the chats with crow, with the agent at an address, or with that of the terminal."""
    from crow_cli.start_chat import CROW
    from crow_terminal.agent_connections import AgentAddress, connect

    from crow_web.chats import Chats

    agent = AgentAddress(url, url=url, token=token) if url else AgentAddress("crow", CROW)
    folder = os.path.abspath(cwd)
    if of_terminal:
        return Chats(open_terminal, folder, database, of_terminal=of_terminal, frames=frames)
    return Chats(partial(connect, agent, folder), folder, database, is_remote=bool(url), frames=frames)


async def open_terminal() -> "AgentLink":
    """Connect to the terminal, which is on standard input and output."""
    from crow_core.acp.transports import stdio
    from crow_terminal.agent_connections import AgentLink

    async def describe_end() -> str:
        return "The terminal has ended, and its page with it."

    return AgentLink(await stdio(), describe_end)
