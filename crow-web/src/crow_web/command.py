"""`crow web`: show what is stored, in a browser."""

import os
import socket
import webbrowser

import click
from crow_cli.process import fail, hide_memory
from crow_cli.storage import open_database
from crow_core.errors import StoreError


@click.command()
@click.argument("session", required=False, default="")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="The port on loopback; a free one by default.")
@click.option("--no-open", is_flag=True, help="Print the address, and open no browser.")
def web(session: str, port: int, no_open: bool) -> None:
    """Show sessions, requests, decisions and costs in a browser.

    SESSION is the beginning of a session's id, and opens that one. The address has a token that works once.
    """
    from uvicorn import Config, Server  # imported here, as are the pages: `crow --help` loads this module

    from crow_web.app import make_app
    from crow_web.gate import Gate

    place = "/"
    try:
        database = open_database(os.environ)
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
    gate = Gate(make_app(database, os.environ), number)
    address = f"http://127.0.0.1:{number}{place}?token={gate.token}"
    click.echo(address)
    if not no_open:
        webbrowser.open(address)
    config = Config(gate, log_level="warning", lifespan="off", timeout_graceful_shutdown=1, server_header=False)
    Server(config).run(sockets=[listener])
