"""Full text over everything that was said: what users and models wrote, what tools were given and what they answered.

A text is taken apart in the same way when it is written down and when it is looked for: its words are letters and
digits, small and without accents, and what stands between them only separates. So `docker-compose.yml`, `snake_case`
and a path are words that follow each other, found whole or by a part of them. So is text in Chinese, Japanese, Korean
and Thai, where every character is a word.

On SQLite this is an FTS5 index without a copy of the text, ranked by its bm25. On PostgreSQL it is a narrow table of
words with a GIN index; the newest CANDIDATES matches are ranked there, by the same formula.

What is made of an entry here is also what is taken out of the index with it: a change of `words_of` needs a migration
that builds the index anew.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from math import log
from typing import Any, NamedTuple, cast
from unicodedata import normalize

import msgspec
from crow_core.messages import Message, ToolUse, parse_arguments
from sqlalchemy import Connection, Row, TextClause, select, text
from sqlalchemy.exc import DatabaseError

from crow_persistence.entries import decode, plain
from crow_persistence.tables import messages, sessions

KINDS = ("user", "assistant", "tool")
"""The kinds of messages that are in the index."""
RANKED = 50_000
"""Matches up to which the best come first; of more, the newest."""
CANDIDATES = 3_000
"""Matches that are ranked on PostgreSQL: the newest."""
WALK = 20_000
"""Messages that PostgreSQL rather reads than asks its index for a word that is in many."""
MOST = 1_000
"""Hits of a search."""
LONGEST = 100_000
"""Characters of each text that are in the index, from its beginning."""
TERMS = 32
"""Words and phrases of a query that count, the first ones; and words of a phrase."""
OPEN, CLOSE = "⟦", "⟧"
"""What stands around a match in a snippet."""
WIDTH = 200
"""Characters of a snippet."""
OWN_TOOL = "search_sessions"
"""The tool that searches here; what it looked for was not said."""

ALONE = "\u0e00-\u0eff\u3005-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3\uf900-\ufaff\U00020000-\U0003ffff"
"""Characters of the scripts that put no spaces between words, or few."""
WORD = re.compile(rf"[{ALONE}]|[^\W_{ALONE}]{{1,64}}")
ACCENTS = re.compile("[\u0300-\u036f]+")
PIECE = re.compile(r'"([^"]*)"(\*?)|(\S+)')

LEXEMES = "array_to_tsvector(string_to_array(words, ' '))"
TABLES = {
    "sqlite": (
        "CREATE VIRTUAL TABLE search USING fts5(words, place, content='', tokenize='ascii')",
        "INSERT INTO search(search, rank) VALUES ('rank', 'bm25(1.0, 0.0)')",
    ),
    "postgresql": (
        "CREATE TABLE search (message BIGINT PRIMARY KEY, words TEXT NOT NULL)",
        f"CREATE INDEX ix_search_words ON search USING gin ({LEXEMES}) WITH (gin_pending_list_limit = 256)",
    ),
}
ADD = {
    "sqlite": text("INSERT INTO search(rowid, words, place) VALUES (:id, :words, :place)"),
    "postgresql": text("INSERT INTO search(message, words) VALUES (:id, trim(:place || ' ' || :words))"),
}
REMOVE = {
    "sqlite": text(
        "INSERT INTO search(search, rowid, words, place) SELECT 'delete', id, :words, :place FROM search_docsize"
        " WHERE id = :id"
    ),
    "postgresql": text("DELETE FROM search WHERE message = :id"),
}
COUNT = {
    "sqlite": text("SELECT count(*) FROM search_docsize"),
    "postgresql": text("SELECT count(*) FROM search"),
}
MATCHES = text("SELECT count(*) FROM (SELECT 1 FROM search WHERE search MATCH :match ORDER BY rowid DESC LIMIT :most)")
BEST = text("SELECT rowid FROM search WHERE search MATCH :match ORDER BY rank, rowid DESC LIMIT :limit")
NEWEST = text("SELECT rowid FROM search WHERE search MATCH :match ORDER BY rowid DESC LIMIT :limit")
PLANS = text(
    "SELECT set_config(name, value, true) FROM (VALUES ('enable_indexscan', 'off'), ('jit', 'off'),"
    " ('max_parallel_workers_per_gather', '0'), ('plan_cache_mode', 'force_custom_plan')) AS settings (name, value)"
)
"""PostgreSQL takes it for cheap to make lexemes, and would do so for row after row rather than look into the index."""
EXPECTED = text(f"EXPLAIN (FORMAT JSON) SELECT FROM search WHERE {LEXEMES} @@ CAST(:query AS tsquery)")


@dataclass(frozen=True)
class Hit:
    """A message that was found."""

    session: str
    """The session's id."""
    title: str
    """The session's; "" for none."""
    cwd: str
    """The session's folder."""
    row: int
    """The message's id in the table `messages`."""
    at: int
    """Milliseconds since 1970."""
    kind: str
    """One of KINDS."""
    tool: str
    """The tool whose input or output the snippet is from; "" for none."""
    snippet: str
    """A line of the text, its matches between OPEN and CLOSE."""


class Term(NamedTuple):
    """What must be in a message: words that follow each other."""

    words: tuple[str, ...]
    is_begun: bool
    """Whether the last word may go on."""


def create(connection: Connection) -> None:
    """Make the index, empty."""
    for statement in TABLES[connection.dialect.name]:
        connection.execute(text(statement))


def count(connection: Connection) -> int:
    """How many messages are in the index; it should be as many as there are of KINDS."""
    return connection.execute(COUNT[connection.dialect.name]).scalar_one()


def index(connection: Connection, number: int, cwd: str, rows: Sequence[tuple[int, Message]]) -> None:
    """Take entries of the session `number` into the index, each with its row's id, in the transaction that adds them.

    To be called before `cwd` is written to the session's row: where it tells of another folder, all that the session
    has in the index moves along.
    """
    before = connection.scalar(select(sessions.c.cwd).where(sessions.c.number == number))
    if before not in (None, plain(cwd)):
        new = {id for id, _ in rows}
        its = select(messages.c.id, messages.c.body).where(messages.c.session == number, messages.c.kind.in_(KINDS))
        moving = [(id, entry_of(body)) for id, body in connection.execute(its) if id not in new]
        change(connection, REMOVE, [document(id, entry, number, before) for id, entry in moving])
        change(connection, ADD, [document(id, entry, number, cwd) for id, entry in moving])
    said = [(id, entry) for id, entry in rows if entry.get("role") in KINDS]
    change(connection, ADD, [document(id, entry, number, cwd) for id, entry in said])


def forget(connection: Connection, ids: Iterable[int]) -> None:
    """Take messages out of the index again, while their rows and their sessions' are still as they were."""
    columns = (messages.c.id, messages.c.body, sessions.c.number, sessions.c.cwd)
    waiting = iter(ids)
    while some := list(islice(waiting, 500)):
        rows = connection.execute(select(*columns).join(sessions).where(messages.c.id.in_(some)))
        change(connection, REMOVE, [document(id, entry_of(body), number, cwd) for id, body, number, cwd in rows])


def document(id: int, entry: Message, number: int, cwd: str) -> dict[str, Any]:
    """A message as the index knows it."""
    return {"id": id, "words": words_of(entry), "place": " ".join(place_of(cwd, number))}


def change(connection: Connection, how: Mapping[str, TextClause], documents: Sequence[dict[str, Any]]) -> None:
    if documents:
        connection.execute(how[connection.dialect.name], documents)


def search(
    connection: Connection, words: str, *, cwd: str = "", session: int | None = None, limit: int = 20
) -> list[Hit]:
    """The messages that hold all of these words, the best first; where more than RANKED do, the newest first.

    "Words in quotes" follow each other, and `word*` is how a word begins; nothing else in `words` has a meaning. `cwd`
    and `session` (its number) narrow the search. It finds what was rewound, and nothing of a deleted session.

    Among a million messages that takes less than 100 ms, but longer for how very many words begin (`e*`: seconds), and
    on PostgreSQL for phrases of words that are in many messages and seldom together.
    """
    terms = list(islice(terms_of(words), TERMS))
    if not terms or limit < 1:
        return []
    find = in_sqlite if connection.dialect.name == "sqlite" else in_postgresql
    return hits(connection, find(connection, terms, place_of(cwd, session), min(limit, MOST)), terms)


def in_sqlite(connection: Connection, terms: Sequence[Term], place: Sequence[str], limit: int) -> list[int]:
    """The ids of matching messages, by FTS5."""
    said = [f'words : "{" ".join(term.words)}"{" *" * term.is_begun}' for term in terms]
    match = " AND ".join([*said, *(f'place : "{token}"' for token in place)])
    found = connection.execute(MATCHES, {"match": match, "most": RANKED + 1}).scalar_one()
    if found <= RANKED:
        # Words that a row had before it was damaged and then deleted stay in the index, and cannot be ranked.
        with suppress(DatabaseError):
            return list(connection.execute(BEST, {"match": match, "limit": limit}).scalars())
    return list(connection.execute(NEWEST, {"match": match, "limit": limit}).scalars())


def in_postgresql(connection: Connection, terms: Sequence[Term], place: Sequence[str], limit: int) -> list[int]:
    """The ids of matching messages, from the newest messages on back until there are enough.

    How far that may be, PostgreSQL estimates from its statistics, which it keeps by itself (autovacuum).
    """
    last: int = connection.execute(text("SELECT max(message) FROM search")).scalar_one() or 0
    queries = [" & ".join(f"'{word}'" for word in term.words) + ":*" * term.is_begun for term in terms]
    query = " & ".join([*queries, *(f"'{token}'" for token in place)])
    expected = rows_expected(connection, query)
    is_common = expected > RANKED
    most = limit if is_common else CANDIDATES
    values: dict[str, Any] = {"query": query, "most": most, "limit": limit}
    holds = [f"strpos(line, '{token} ') > 0" for token in place]
    scores: list[str] = []
    for n, term in enumerate(terms):
        rows = rows_expected(connection, queries[n])
        values[f"weight{n}"] = max(log((max(last - rows, 0) + 0.5) / (rows + 0.5)), 1e-6)
        values[f"term{n}"] = f" {' '.join(term.words)}{' ' * (not term.is_begun)}"
        times = f"(octet_length(line) - octet_length(replace(line, :term{n}, '')))::float8 / octet_length(:term{n})"
        scores.append(f":weight{n} / (1 + 1.2 * (0.25 + 0.75 * length) / ({times}))")
        holds.append(f"strpos(line, :term{n}) > 0")
    order = "message DESC" if is_common else f"{' + '.join(scores)} DESC, message DESC"
    span = most * 5 // 4 * last // expected + 1
    if " & " in query:  # what goes together does so more often than is expected
        span = min(span, last // 8 + 1)
    with connection.begin_nested() as here:
        connection.execute(PLANS)
        while True:
            lookup = f"{LEXEMES} @@ CAST(:query AS tsquery) AND " * (not is_common or span > WALK)
            statement = f"""
                SELECT message, found FROM (
                    SELECT *, count(*) OVER () AS found, octet_length(line) / avg(octet_length(line)) OVER () AS length
                    FROM (
                        SELECT * FROM (SELECT *, words || ' ' AS line FROM search) AS lines
                        WHERE message > :after AND {lookup}{" AND ".join(holds)} ORDER BY message DESC LIMIT :most
                    ) AS newest
                ) AS measured ORDER BY {order} LIMIT :limit"""
            rows = connection.execute(text(statement), {**values, "after": last - span}).all()
            found = rows[0].found if rows else 0
            if found >= most or span >= last:
                here.rollback()  # to the settings as they were
                return [row.message for row in rows]
            span *= min(2 * most // max(found, 1), 8)


def rows_expected(connection: Connection, query: str) -> int:
    """How many rows PostgreSQL thinks a tsquery matches; at least 1."""
    [plan] = connection.execute(EXPECTED, {"query": query}).scalar_one()
    return plan["Plan"]["Plan Rows"]


def hits(connection: Connection, ids: Sequence[int], terms: Sequence[Term]) -> list[Hit]:
    """What a person is shown of messages, in the same order."""
    columns = (messages, sessions.c.id.label("of"), sessions.c.title, sessions.c.cwd)
    living = select(*columns).join(sessions).where(messages.c.id.in_(ids), sessions.c.deleted.is_(None))
    rows = {row.id: row for row in connection.execute(living)}
    return [hit(connection, rows[id], terms) for id in ids if id in rows]


def hit(connection: Connection, row: "Row[Any]", terms: Sequence[Term]) -> Hit:
    entry = entry_of(row.body)
    tool, snippet = snippet_of(texts_of(entry), terms)
    if row.kind == "tool":
        asked = (messages.c.session == row.session) & (messages.c.id < row.id) & (messages.c.kind == "assistant")
        latest = select(messages.c.body).where(asked).order_by(messages.c.id.desc()).limit(1)
        calls = entry_of(connection.scalar(latest) or "").get("tool_calls") or []
        tool = next((call["function"]["name"] for call in calls if call["id"] == entry.get("tool_call_id")), "")
    return Hit(row.of, row.title or "", row.cwd, row.id, row.at, row.kind, tool, snippet)


def terms_of(words: str) -> Iterator[Term]:
    """What a person looks for."""
    for piece in PIECE.finditer(words):
        quoted, star, bare = piece.groups(default="")
        if found := tuple(islice(words_in(quoted or bare), TERMS)):
            yield Term(found, bool(star) or bare.endswith("*"))


def place_of(cwd: str = "", session: int | None = None) -> list[str]:
    """A folder and a session as words that are in no text."""
    folder = ["/f" + sha256(plain(cwd).encode()).hexdigest()[:12]] if cwd else []
    return folder if session is None else [*folder, f"/s{session}"]


def words_of(entry: Message) -> str:
    """All words of an entry."""
    return " ".join(word for _, said in texts_of(entry) for word in words_in(said))


def words_in(said: str) -> Iterator[str]:
    return (found[0] for found in WORD.finditer(folded(said[:LONGEST])))


def folded(said: str) -> str:
    """A text without the differences that do not matter."""
    if said.isascii():
        return said.lower()
    return normalize("NFC", ACCENTS.sub("", normalize("NFKD", said))).casefold()


def texts_of(entry: Message) -> list[tuple[str, str]]:
    """What was said in an entry, and to which tool ("" for none)."""
    content = entry.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(str(part["text"]) for part in content if part.get("type") == "text")
    calls = [call for call in entry.get("tool_calls") or () if call["function"]["name"] != OWN_TOOL]
    inputs = [(call["function"]["name"], "\n".join(input_of(call))) for call in calls]
    return [("", content), ("", entry.get("reasoning_content") or ""), *inputs]


def input_of(call: ToolUse) -> Iterator[str]:
    """A tool's name, and what it was given: the values of its arguments, without the JSON around them."""
    yield call["function"]["name"]
    arguments = parse_arguments(call)
    waiting: list[Any] = [call["function"]["arguments"] if arguments is None else arguments]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            value = list(cast(dict[str, Any], value).values())
        if isinstance(value, list):
            waiting += cast(list[Any], value)[::-1]
        else:
            yield str(value)


def entry_of(body: str) -> Message:
    """The entry in a row's body, for its texts; an empty one where the row is damaged."""
    try:
        return msgspec.convert(decode(body), Message)
    except (ValueError, RecursionError):
        return {}


def snippet_of(texts: Iterable[tuple[str, str]], terms: Sequence[Term]) -> tuple[str, str]:
    """The place where most of what was looked for stands together: to which tool it was said, and a line of it."""
    pattern = re.compile("|".join(f"({spelled(term)})" for term in terms))
    most, best = -1, ("", "")
    for tool, said in texts:
        same = {ord(char): fold for char in set(said) if len(fold := folded(char)) == 1}
        found = list(islice(pattern.finditer(said.translate(same)), 32))
        for first in found or [None]:
            start = first.start() if first else 0
            near = [each for each in found if start <= each.start() and each.end() <= start + WIDTH]
            if said and (seen := len({each.lastindex for each in near})) > most:
                most, best = seen, (tool, line(said, start, near))
    return best


def spelled(term: Term) -> str:
    """A pattern for a term as it may stand in a text."""
    first, last = term.words[0], term.words[-1]
    before = "" if re.match(f"[{ALONE}]", first) else r"(?<![^\W_])"
    after = f"[^\\W_{ALONE}]*" if term.is_begun else "" if re.match(f"[{ALONE}]", last) else r"(?![^\W_])"
    return before + r"[\W_]*".join(term.words) + after


def line(said: str, start: int, found: Iterable[re.Match[str]]) -> str:
    """A part of a text, about `start`, with marks around what was found in it."""
    begin = at = max(start - WIDTH // 4, 0)
    end = begin + WIDTH
    pieces = ["… " * (begin > 0)]
    for each in found:
        pieces += [said[at : each.start()], OPEN, said[each.start() : each.end()], CLOSE]
        at = each.end()
    return plain(" ".join("".join([*pieces, said[at:end], " …" * (end < len(said))]).split()))
