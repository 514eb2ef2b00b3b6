"""Fixtures of the tests: empty databases, and dumps of earlier revisions."""

import socket
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from threading import Thread, Timer

import pytest
from crow_persistence.database import Database
from crow_testing.databases import database as database
from crow_testing.databases import postgres as postgres
from crow_testing.fixtures import anyio_backend as anyio_backend
from sqlalchemy import create_engine, make_url

DATABASES = Path(__file__).parent / "databases"


@pytest.fixture
def earlier(database: Database) -> Callable[[str], None]:
    """Return a function that loads the dump of an earlier revision into the empty database."""

    def load(revision: str) -> None:
        kind = "sqlite" if database.file else "postgresql"
        dump = (DATABASES / f"{revision}.{kind}.sql").read_text()
        if database.file:
            with closing(sqlite3.connect(database.file)) as connection:
                connection.executescript(dump)
        else:
            engine = create_engine(database.url)
            with engine.begin() as connection:
                connection.connection.cursor().execute(dump)
            engine.dispose()

    return load


class Relay:
    """Passes the connections to a server on, until it is told to cut them, as if the server had stopped."""

    def __init__(self, host: str, port: int) -> None:
        self._server = host, port
        self._open: set[socket.socket] = set()
        self._kept = socket.socket()  # keeps the port while nobody listens
        self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._kept.bind(("127.0.0.1", 0))
        self.port: int = self._kept.getsockname()[1]
        self.go_on()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near = listener.accept()[0]
                self._open.add(near)
                self._open.add(far := socket.create_connection(self._server))
                if listener.fileno() < 0:  # `cut` came in between
                    self._end(near)
                    self._end(far)
                    return
                for ends in ((near, far), (far, near)):
                    Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        self._end(target)

    def _end(self, connection: socket.socket) -> None:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()

    def cut(self) -> None:
        """End all connections, and refuse new ones."""
        self._end(self._listener)
        while self._open:
            self._end(self._open.pop())

    def go_on(self) -> None:
        """Accept connections again."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        Thread(target=self._accept, args=[self._listener], daemon=True).start()

    def restart(self, seconds: float) -> None:
        """Cut the connections for some seconds."""
        self.cut()
        Timer(seconds, self.go_on).start()

    def close(self) -> None:
        """End all connections, and give the port away."""
        self.cut()
        self._kept.close()


@pytest.fixture
def relay(postgres: str) -> Iterator[tuple[Relay, str]]:
    """Yield a relay to an empty PostgreSQL database, and the database's URL through it."""
    url = make_url(postgres)
    relay = Relay(url.host or "", url.port or 5432)
    yield relay, url.set(host="127.0.0.1", port=relay.port).render_as_string(hide_password=False)
    relay.close()
