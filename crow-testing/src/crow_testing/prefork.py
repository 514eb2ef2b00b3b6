"""Runs `crow` commands in forks of a process that has imported what they import: `python prefork.py SOCKET`.

A client connects to the abstract Unix socket and sends the arguments, environment and working directory as JSON with
the three standard streams. It receives the process id, then the exit code. This process ends when its own standard
input is closed.
"""

import atexit
import gc
import json
import os
import select
import socket
import sys
from contextlib import suppress
from importlib import import_module

from crow_cli.__main__ import main

assert sys.platform != "win32"

status = 1
"""The exit code."""


@atexit.register  # before all others, so that it is called last
def end_without_clearing_modules() -> None:
    """End the process; clearing all modules would copy the memory that a fork shares, which takes longer than most
    commands take."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


for name in (
    *("crow_cli.cli", "crow_cli.run", "crow_mcp_server.server", "crow_persistence.sql_store"),
    *("fastmcp.client", "httpcore2", "jinja2.sandbox", "stamina"),
):
    import_module(name)


def requests(server: socket.socket) -> socket.socket | None:
    """Fork for each connection. Return it in the child, and None at the end."""
    children: list[int] = []
    while server in select.select([server, sys.stdin], [], [])[0]:
        connection, _ = server.accept()
        if not (child := os.fork()):
            return connection
        connection.close()
        children = [pid for pid in [*children, child] if not os.waitpid(pid, os.WNOHANG)[0]]
    for pid in children:
        os.waitpid(pid, 0)
    return None


def become(connection: socket.socket) -> None:
    """Fork the process of the command and return in it. This one waits for its end and sends the exit code."""
    data, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    if pid := os.fork():
        for stream in streams:
            os.close(stream)
        connection.send(str(pid).encode())
        _, status = os.waitpid(pid, 0)
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    connection.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.argv[1:], env, cwd = json.loads(data)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)


if __name__ == "__main__":
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind(f"\0{sys.argv[1]}")
    server.listen(64)
    gc.freeze()  # or each child would collect all that was imported when it ends
    os.write(1, b"ready\n")
    if connection := requests(server):
        server.close()
        become(connection)
        try:
            main()
            status = 0
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else int(bool(stop.code))
            raise
    else:
        status = 0
