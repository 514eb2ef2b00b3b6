"""Runs alone in a new network namespace: sends crow a socket that listens there, and the namespaces. Then it ends."""

import socket
import sys


def send_listener() -> None:
    """Send the listening socket and the user and network namespace to the socket that is standard input."""
    assert sys.platform != "win32"
    with (
        socket.socket(fileno=0) as crow,
        socket.create_server(("127.0.0.1", 0), backlog=1024) as listener,
        open("/proc/self/ns/user", "rb") as user,
        open("/proc/self/ns/net", "rb") as net,
    ):
        socket.send_fds(crow, [b"."], [listener.fileno(), user.fileno(), net.fileno()])


if __name__ == "__main__":
    send_listener()
