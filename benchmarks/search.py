"""Measure the time of a search among many messages, the size of its index, and the time it adds to a commit.

uv run benchmarks/search.py --rows 1000000

Without --rows, there are 200,000 messages. Runs on SQLite in a temporary folder; also on PostgreSQL, in a new database,
if CROW_TEST_POSTGRES names a server: postgresql+psycopg://postgres@127.0.0.1:5432/postgres. The text is random, with
the word frequencies of a natural language, and a few words of known frequency.

Measured on SQLite with 200,000 messages, on a machine with other work: words and phrases take 1 to 64 ms, a prefix that
very many words have (`e*`) 440 to 580 ms; the index is 0.32 of the messages' JSON.
"""

import argparse
import os
import random
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from uuid import uuid4

from crow_core.messages.message import Message
from crow_persistence import search
from crow_persistence.database import Database
from crow_persistence.entries import encode
from crow_persistence.tables import messages, sessions
from sqlalchemy import create_engine, insert, make_url, text

SYLLABLES = "ka lo mi ne ra su ti vo en or ar un il es ban der con pre tion ment ing able com pro str tal ver ger man"
KNOWN = {"everywhere": 0.9, "often": 0.2, "twentieth": 0.05, "hundredth": 0.01, "thousandth": 0.001, "seldom": 0.00002}
"""Words, and the share of messages that contain them."""
LENGTH = 100
"""Number of messages in a session."""
FOLDERS = [f"/home/somebody/project{n}" for n in range(300)]

chance = random.Random(4)


def made_up_words(count: int) -> list[str]:
    words = dict.fromkeys("".join(chance.choices(SYLLABLES.split(), k=chance.randint(1, 4))) for _ in range(2 * count))
    return list(words)[:count]


WORDS = made_up_words(100_000)
RANKS = list(accumulate(1 / (n + 3) for n in range(len(WORDS))))


def some_text() -> str:
    words = chance.choices(WORDS, cum_weights=RANKS, k=min(int(chance.lognormvariate(3.4, 0.7)) + 1, 400))
    words += [word for word, share in KNOWN.items() if chance.random() < share]
    if chance.random() < 0.3:
        words.append(f"src/{chance.choice(WORDS[:3000])}/{chance.choice(WORDS[:3000])}_{chance.choice(WORDS[:300])}.py")
    if chance.random() < 0.1:
        words.append(f"{chance.getrandbits(40):010x}")
    chance.shuffle(words)
    return " ".join(words)


def some_entry(n: int) -> Message:
    """Return the n-th entry of a session: a prompt, tool calls with their results, then the reply."""
    said, notes = some_text(), {"id": f"{chance.getrandbits(128):032x}"}
    match n % 6:
        case 0:
            return {"role": "user", "content": said, "crow": notes}
        case 1 | 3:
            function: Any = {"name": "terminal", "arguments": encode({"command": said})}
            tool_calls: Any = [{"id": f"call_{n}", "type": "function", "function": function}]
            return {"role": "assistant", "content": "", "tool_calls": tool_calls, "crow": notes}
        case 2 | 4:
            return {"role": "tool", "tool_call_id": f"call_{n - 1}", "content": said, "crow": notes}
        case _:
            return {"role": "assistant", "content": said, "crow": notes}


def fill(database: Database, rows: int) -> int:
    """Insert sessions of LENGTH messages each; some folders have many. Return the size of the messages' JSON in
    bytes."""
    size, often = 0, list(accumulate(1 / (n + 1) for n in range(len(FOLDERS))))
    for number in range(1, rows // LENGTH + 1):
        cwd = chance.choices(FOLDERS, cum_weights=often)[0]
        session = {"number": number, "id": uuid4().hex, "cwd": cwd, "title": some_text()[:60], "updated": number}
        first = (number - 1) * LENGTH + 1
        entries = [(first + n, some_entry(n)) for n in range(LENGTH)]
        bodies = [
            {"id": id, "session": number, "at": id, "kind": entry.get("role"), "body": encode(entry)}
            for id, entry in entries
        ]
        size += sum(len(encode(entry).encode()) for _, entry in entries)
        with database.begin_write() as connection:
            connection.execute(insert(sessions).values(**session, roots="[]", options="{}", created=number))
            connection.execute(insert(messages), bodies)
            search.index_entries(connection, number, cwd, entries)
    return size


def sizes(database: Database) -> tuple[int, int]:
    """Return the size of the database and of its index, in bytes."""
    if database.file:
        with database.begin_read() as connection:
            pages = text("SELECT sum(length(block)) FROM search_data")
            index = connection.execute(pages).scalar_one()
        database.close()  # moves the write-ahead log into the file
        return database.file.stat().st_size, index
    with database.begin_read() as connection:
        whole = connection.execute(text("SELECT pg_database_size(current_database())")).scalar_one()
        return whole, connection.execute(text("SELECT pg_total_relation_size('search')")).scalar_one()


def milliseconds(database: Database, words: str, **where: Any) -> tuple[float, int]:
    """Return the median time of some searches without the first, and their number of hits."""
    times: list[float] = []
    hits = 0
    for _ in range(8):
        with database.begin_read() as connection:
            begun = perf_counter()
            hits = len(search.search(connection, words, **where))
            times.append((perf_counter() - begun) * 1e3)
    return median(times[1:]), hits


def commits(database: Database, rows: int) -> tuple[float, float]:
    """Return the median time to commit a message, in milliseconds: without the index, and with it."""
    times: tuple[list[float], list[float]] = [], []
    with database.begin_read() as connection:
        cwd: str = connection.execute(text("SELECT cwd FROM sessions WHERE number = 1")).scalar_one()
    for n in range(1000):
        entry, id = some_entry(n), rows + 1 + n
        row = {"id": id, "session": 1, "at": id, "kind": entry.get("role"), "body": encode(entry)}
        begun = perf_counter()
        with database.begin_write() as connection:
            connection.execute(insert(messages), row)
            if n % 2:
                search.index_entries(connection, 1, cwd, [(id, entry)])
        times[n % 2].append((perf_counter() - begun) * 1e3)
    return median(times[0]), median(times[1])


def report(database: Database, rows: int) -> None:
    begun = perf_counter()
    json = fill(database, rows)
    print(f"{rows:,} messages in {perf_counter() - begun:.0f} s")
    whole, index = sizes(database)
    print(f"{'their JSON':36} {json / 1e6:8.1f} MB")
    print(f"{'the index':36} {index / 1e6:8.1f} MB {index / json:7.2f} of the JSON")
    print(f"{'the whole database':36} {whole / 1e6:8.1f} MB {whole / json:7.2f}")
    if not database.file:
        with create_engine(database.url, isolation_level="AUTOCOMMIT").connect() as connection:
            connection.execute(text("ANALYZE"))  # as autovacuum does after a minute
    places = {"everywhere": "", "in the largest folder": FOLDERS[0], "in a small folder": FOLDERS[100]}
    print(f"{'milliseconds, and hits':36}" + "".join(f"{place:>24}" for place in places))
    several = ("twentieth hundredth", "everywhere twentieth", '"everywhere often"', "hundre*", "e*")
    for words in (*KNOWN, *several):
        found = [milliseconds(database, words, cwd=cwd) for cwd in places.values()]
        print(f"{words:36}" + "".join(f"{time:18.1f} ({hits:3})" for time, hits in found))
    without, with_it = commits(database, rows)
    print(f"{'a commit of a message':36} {with_it:8.2f} ms, {without:.2f} ms without the index\n")


@contextmanager
def database_on(server: str) -> Generator[Database]:
    """Yield a new database: on a PostgreSQL server, or in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        if not server:
            database = Database(f"sqlite:///{folder}/crow.db", Path(folder))
            yield database
            database.close()
            return
        name = f"crow_{uuid4().hex}"
        with create_engine(server, isolation_level="AUTOCOMMIT").connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
            database = Database(make_url(server).set(database=name).render_as_string(hide_password=False), Path(folder))
            try:
                yield database
            finally:
                database.close()
                connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000, help="how many messages (default: 200000)")
    rows = parser.parse_args().rows
    for name, server in (("SQLite", ""), ("PostgreSQL", os.environ.get("CROW_TEST_POSTGRES", ""))):
        if name == "SQLite" or server:
            print(name)
            with database_on(server) as database:
                report(database, rows)


if __name__ == "__main__":
    main()
