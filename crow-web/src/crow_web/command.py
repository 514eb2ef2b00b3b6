"""`crow web`: show what is stored, in a browser."""

import os
import socket
import webbrowser
from functools import partial

import click
from crow_cli.process import fail, hide_memory
from crow_cli.storage import open_database
from crow_core.errors import StoreError


@click.command()
@click.argument("session", required=False, default="")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="The port on loopback; a free one by default.")
@click.option("--no-open", is_flag=True, help="Print the address, and open no browser.")
@click.option("--read-only", is_flag=True, help="Only show what is stored: no chat, and nothing that changes anything.")
@click.option("--cwd", type=click.Path(exists=True, file_okay=False), default=".", help="The folder of a new session.")
@click.option("--connect", "url", metavar="URL", default="", help="Talk with an agent at a ws:// or wss:// address.")
@click.option("--token", default="", envvar="CROW_TOKEN", help="The token for --connect; $CROW_TOKEN by default.")
def web(session: str, port: int, no_open: bool, read_only: bool, cwd: str, url: str, token: str) -> None:
    """Talk with crow in a browser, and look at sessions, requests, decisions and costs.

    SESSION is the beginning of a session's id, and opens that one. The address has a token that works once.
    """
    from uvicorn import Config, Server  # imported here, as are the pages: `crow --help` loads this module

    from crow_web.app import make_app
    from crow_web.gate import Gate

    place = "/"
    try:
        database = open_database(os.environ, create=not read_only)
        with database.begin_read() as connection:
            from crow_persistence.loader import find_session

            place = f"/session/{find_session(connection, session).id}" if session else "/"
    except StoreError as error:
        fail(str(error))
    try:
        listener = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        fail(f"--port: {port} cannot be used ({os.strerror(error.errno or 0)}). Leave it out for a free one.")
    hide_memory()
    number = listener.getsockname()[1]
    chats = None
    if not read_only:
        from crow_cli.start_chat import CROW
        from crow_terminal.agent_connections import AgentAddress, connect

        from crow_web.app import make_templates
        from crow_web.chats import Chats

        agent = AgentAddress(url, url=url, token=token) if url else AgentAddress("crow", CROW)
        folder = os.path.abspath(cwd)
        chats = Chats(partial(connect, agent, folder), folder, database, make_templates(), is_remote=bool(url))
    gate = Gate(make_app(database, chats), number)
    address = f"http://127.0.0.1:{number}{place}?token={gate.token}"
    click.echo(address)
    if not no_open:
        webbrowser.open(address)
    config = Config(gate, ws="websockets-sansio", log_level="warning", timeout_graceful_shutdown=1, server_header=False)
    Server(config).run(sockets=[listener])
