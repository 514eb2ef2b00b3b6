"""Measure the time in which `crow lessons` reads many messages, without a model.

uv run benchmarks/lessons.py --rows 50000

The sessions are in SQLite in a temporary folder: prompts, commands with results of some kilobytes, some corrections and
failures.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from crow_eval.lessons.lessons import make_lessons, read_sessions
from crow_persistence.database import Database
from crow_persistence.entries import pack
from crow_persistence.tables import messages, sessions
from sqlalchemy import insert

TEXTS = Path(__file__).parents[1] / "crow-eval" / "tests" / "lessons" / "corrections" / "tuned.txt"
LENGTH = 100
"""Messages in a session."""
chance = random.Random(4)
WORDS = [f"word{chance.randrange(5_000)}" for _ in range(2_000)]


def make_entries(lines: list[str]) -> list[Any]:
    """Make the messages of a session."""
    entries: list[Any] = []
    while len(entries) < LENGTH:
        kind, said = ("+", "-")[chance.random() > 0.1], " ".join(chance.choices(WORDS, k=30))
        prompt = chance.choice([line[2:] for line in lines if line[0] == kind]) if chance.random() < 0.5 else said
        entries.append({"role": "user", "content": prompt})
        for _ in range(4):
            command = f"run {chance.choice(WORDS)} {chance.choice(WORDS)}"
            id, failed = f"call_{len(entries)}", chance.random() < 0.1
            function = {"name": "terminal", "arguments": json.dumps({"command": command})}
            entries.append(
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"id": id, "type": "function", "function": function}],
                }
            )
            text = "\n".join(" ".join(chance.choices(WORDS, k=10)) for _ in range(chance.randrange(1, 60)))
            result = {
                "role": "tool",
                "tool_call_id": id,
                "content": f"{text}\nbash: {command.split()[1]}: command not found" if failed else text,
            }
            entries.append({**result, "crow": {"shown": {"exit": {"exitCode": 127}}}} if failed else result)
        entries.append({"role": "assistant", "content": said})
    for entry in entries:
        entry["crow"] = {**entry.get("crow", {}), "id": f"{chance.getrandbits(128):032x}"}
    return entries


def fill(database: Database, rows: int) -> int:
    """Insert sessions until there are so many messages; return their number."""
    lines, count = TEXTS.read_text("utf-8").splitlines(), 0
    with database.begin_write() as connection:
        for number in range(1, rows // LENGTH + 1):
            row = {"id": f"{chance.getrandbits(128):032x}", "cwd": f"/home/me/project{number % 20}", "roots": "[]"}
            connection.execute(insert(sessions), {**row, "number": number, "created": 1, "updated": 1, "options": "{}"})
            packed = [pack(entry) for entry in make_entries(lines)]
            values = [{"session": number, "at": 1, "kind": each.kind, "body": each.body} for each in packed]
            connection.execute(insert(messages), values)
            count += len(values)
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=50_000, help="messages")
    rows = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as folder:
        database = Database(f"sqlite:///{folder}/crow.db", Path(folder))
        count = fill(database, rows)
        with database.begin_read() as connection:
            began, cpu = perf_counter(), process_time()
            reading = read_sessions(connection, 0, "", ())
            lessons = make_lessons(connection, reading.signals, Path(folder), (), 20)
            seconds = perf_counter() - began
            print(f"{count:,} messages of {reading.sessions:,} sessions: {len(lessons)} lessons in {seconds:.2f} s")
            print(f"CPU time: {process_time() - cpu:.2f} s")
        database.close()


if __name__ == "__main__":
    main()
