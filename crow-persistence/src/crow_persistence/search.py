"""Full-text search in everything users and models wrote, and in the inputs and outputs of tools.

Texts and queries are split alike: words are letters and digits, in lower case and without accents; all other characters
only separate words. So `docker-compose.yml`, `snake_case` and a path are sequences of words, and can be found whole or
in part. In Chinese, Japanese, Korean and Thai text, every character is a word.

On SQLite this is an FTS5 index without a copy of the text, ranked by its bm25. On PostgreSQL it is a narrow table of
words with a GIN index; the newest MAX_CANDIDATES matches are ranked by the same formula.

The words of an entry are computed again to remove it from the index. After an edit to `extract_words`, a migration must
build the index anew.
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
from crow_core.messages.message import Message, RawToolCall, parse_arguments
from sqlalchemy import Connection, Row, TextClause, select, text
from sqlalchemy.exc import DatabaseError

from crow_persistence.entries import StoredEntry, clean_text, decode
from crow_persistence.same_folders import find_same_folders
from crow_persistence.tables import messages, sessions

INDEXED_KINDS = ("user", "assistant", "tool")
"""Kinds of messages that are in the index."""
MAX_RANKED = 50_000
"""Number of matches up to which the best come first. If there are more, the newest come first."""
MAX_CANDIDATES = 3_000
"""Number of matches, the newest, that are ranked on PostgreSQL."""
MAX_SCAN = 20_000
"""Number of messages up to which PostgreSQL reads all of them, rather than the index, for a frequent word."""
MAX_HITS = 1_000
"""Maximum number of hits of a search."""
MAX_TEXT_LENGTH = 100_000
"""Number of characters of each text, from its beginning, that are indexed."""
MAX_TERMS = 32
"""Maximum number of terms in a query, and of words in a phrase. Further ones are ignored."""
MATCH_START, MATCH_END = "⟦", "⟧"
"""Marks around a match in a snippet."""
SNIPPET_LENGTH = 200
"""Length of a snippet, in characters."""
MERGED_PAGES = 500
"""Pages of a FTS5 index that are merged in one transaction."""
SEARCH_TOOL = "search_sessions"
"""Name of the search tool; its inputs are not indexed."""

UNSPACED = "\u0e00-\u0eff\u3005-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3\uf900-\ufaff\U00020000-\U0003ffff"
"""Characters of scripts that put few or no spaces between words, for a regular expression's set."""
WORD = re.compile(rf"[{UNSPACED}]|[^\W_{UNSPACED}]{{1,64}}")
ACCENTS = re.compile("[\u0300-\u036f]+")
QUERY_PART = re.compile(r'"([^"]*)"(\*?)|(\S+)')

LEXEMES = "array_to_tsvector(string_to_array(words, ' '))"
CREATE = {
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
COUNT_MATCHES = text(
    "SELECT count(*) FROM (SELECT 1 FROM search WHERE search MATCH :match ORDER BY rowid DESC LIMIT :most)"
)
SELECT_BEST = text("SELECT rowid FROM search WHERE search MATCH :match ORDER BY rank, rowid DESC LIMIT :limit")
SELECT_NEWEST = text("SELECT rowid FROM search WHERE search MATCH :match ORDER BY rowid DESC LIMIT :limit")
SET_PLANNER = text(
    "SELECT set_config(name, value, true) FROM (VALUES ('enable_indexscan', 'off'), ('jit', 'off'),"
    " ('max_parallel_workers_per_gather', '0'), ('plan_cache_mode', 'force_custom_plan')) AS settings (name, value)"
)
"""Settings that make PostgreSQL use the index: it underestimates the cost of making lexemes for every row."""
EXPLAIN = text(f"EXPLAIN (FORMAT JSON) SELECT FROM search WHERE {LEXEMES} @@ CAST(:query AS tsquery)")


MERGE = text(f"INSERT INTO search(search, rank) VALUES ('merge', -{MERGED_PAGES})")
COUNT_CHANGES = text("SELECT total_changes()")


@dataclass(frozen=True)
class SearchHit:
    """A message that was found."""

    session: str
    """The session's id."""
    title: str
    """The session's title; "" for none."""
    cwd: str
    """The session's folder."""
    row: int
    """The message's id in the table `messages`."""
    at: int
    """Milliseconds since 1970."""
    kind: str
    """One of INDEXED_KINDS."""
    tool: str
    """Name of the tool whose input or output the snippet is from; "" for none."""
    snippet: str
    """A line of the text, with its matches between MATCH_START and MATCH_END."""


class Term(NamedTuple):
    """Words that must follow each other in a message."""

    words: tuple[str, ...]
    is_prefix: bool
    """True if the last word matches longer words that begin with it."""


def create(connection: Connection) -> None:
    """Create the empty index."""
    for statement in CREATE[connection.dialect.name]:
        connection.execute(text(statement))


def count_indexed(connection: Connection) -> int:
    """Return the number of messages in the index. It should equal the number of messages of INDEXED_KINDS."""
    return connection.execute(COUNT[connection.dialect.name]).scalar_one()


def index_entries(connection: Connection, number: int, cwd: str, rows: Sequence[tuple[int, Message]]) -> None:
    """Add entries of the session `number`, with their rows' ids, to the index."""
    run_for_each(connection, ADD, make_documents(number, cwd, rows))


def make_documents(number: int, cwd: str, rows: Iterable[tuple[int, Message]]) -> list[dict[str, Any]]:
    """Return entries of the session `number`, with their rows' ids, as parameters of ADD."""
    return [make_document(id, entry, number, cwd) for id, entry in rows if entry.get("role") in INDEXED_KINDS]


def move_entries(connection: Connection, number: int, before: str, cwd: str) -> None:
    """Move the entries of the session `number` from one folder to another in the index. Call it before `cwd` is written
    to the session's row, and before further entries are."""
    its = select(messages.c.id, messages.c.body).where(messages.c.session == number, messages.c.kind.in_(INDEXED_KINDS))
    moving = [(id, read_entry(body)) for id, body in connection.execute(its)]
    run_for_each(connection, REMOVE, [make_document(id, entry, number, before) for id, entry in moving])
    run_for_each(connection, ADD, [make_document(id, entry, number, cwd) for id, entry in moving])


def remove_entries(connection: Connection, ids: Iterable[int]) -> None:
    """Remove messages from the index. Call it while their rows and their sessions' rows are unchanged."""
    columns = (messages.c.id, messages.c.body, sessions.c.number, sessions.c.cwd)
    waiting = iter(ids)
    while some := list(islice(waiting, 500)):
        rows = connection.execute(select(*columns).join(sessions).where(messages.c.id.in_(some)))
        run_for_each(
            connection, REMOVE, [make_document(id, read_entry(body), number, cwd) for id, body, number, cwd in rows]
        )


def merge(connection: Connection) -> bool:
    """Merge a part of a FTS5 index, which drops the words of removed messages from it. Return False if all is merged.

    FTS5 only marks removed words as such until it merges the parts of its index that hold them. Its option
    `secure-delete` makes an index that SQLite before 3.42 cannot read. https://sqlite.org/fts5.html#the_merge_command
    """
    if connection.dialect.name != "sqlite":
        return False
    before = connection.execute(COUNT_CHANGES).scalar_one()
    connection.execute(MERGE)
    return connection.execute(COUNT_CHANGES).scalar_one() - before > 1


def make_document(id: int, entry: Message, number: int, cwd: str) -> dict[str, Any]:
    """Return a message as parameters of ADD and REMOVE."""
    return {"id": id, "words": extract_words(entry), "place": " ".join(make_place(cwd, number))}


def run_for_each(
    connection: Connection, statements: Mapping[str, TextClause], documents: Sequence[dict[str, Any]]
) -> None:
    """Run a database's statement for each document."""
    if documents:
        connection.execute(statements[connection.dialect.name], documents)


def search(
    connection: Connection, words: str, *, cwd: str = "", session: int | None = None, limit: int = 20
) -> list[SearchHit]:
    """Return the messages that hold all of these words, best first; the newest first if there are more than MAX_RANKED.

    "Words in quotes" must follow each other, and `word*` matches longer words; nothing else in `words` is special.
    `cwd`, in all work trees of its repository, and `session` (its number) restrict the search. Rewound messages are
    found, those of deleted sessions are not.

    A search of a million messages takes less than 100 ms. It takes longer for prefixes of very many words (`e*`:
    seconds) and, on PostgreSQL, for phrases of frequent words that seldom occur together.
    """
    terms = list(islice(parse_query(words), MAX_TERMS))
    if not terms or limit < 1:
        return []
    find = search_sqlite if connection.dialect.name == "sqlite" else search_postgresql
    folders = [make_place(folder)[0] for folder in find_same_folders(connection, cwd)] if cwd else []
    places = [each for each in (folders, make_place(session=session)) if each]
    return load_hits(connection, find(connection, terms, places, min(limit, MAX_HITS)), terms)


def search_sqlite(
    connection: Connection, terms: Sequence[Term], places: Sequence[Sequence[str]], limit: int
) -> list[int]:
    """Return the ids of matching messages, using FTS5. Of each of `places`, a message has one of the index words."""
    said = [f'words : "{" ".join(term.words)}"{" *" if term.is_prefix else ""}' for term in terms]
    match = " AND ".join([*said, *(f"place : ({' OR '.join(map(quote, tokens))})" for tokens in places)])
    found = connection.execute(COUNT_MATCHES, {"match": match, "most": MAX_RANKED + 1}).scalar_one()
    if found <= MAX_RANKED:
        # The words of a row that was damaged before it was deleted stay in the index, and cannot be ranked.
        with suppress(DatabaseError):
            return list(connection.execute(SELECT_BEST, {"match": match, "limit": limit}).scalars())
    return list(connection.execute(SELECT_NEWEST, {"match": match, "limit": limit}).scalars())


def quote(token: str) -> str:
    """Write an index word as a string of FTS5."""
    return f'"{token}"'


def search_postgresql(
    connection: Connection, terms: Sequence[Term], places: Sequence[Sequence[str]], limit: int
) -> list[int]:
    """Return the ids of matching messages, reading from the newest back until there are enough. `places` are as in
    `search_sqlite`.

    The distance to read back is estimated from PostgreSQL's statistics, which autovacuum keeps up to date.
    """
    last: int = connection.execute(text("SELECT max(message) FROM search")).scalar_one() or 0
    queries = [" & ".join(f"'{word}'" for word in term.words) + (":*" if term.is_prefix else "") for term in terms]
    query = " & ".join([*queries, *(f"({' | '.join(map(repr, tokens))})" for tokens in places)])
    expected = estimate_rows(connection, query)
    is_common = expected > MAX_RANKED
    most = limit if is_common else MAX_CANDIDATES
    values: dict[str, Any] = {"query": query, "most": most, "limit": limit}
    found_in = [[f"strpos(line, '{token} ') > 0" for token in tokens] for tokens in places]
    holds = [f"({' OR '.join(each)})" for each in found_in]
    scores: list[str] = []
    for n, term in enumerate(terms):
        rows = estimate_rows(connection, queries[n])
        values[f"weight{n}"] = max(log((max(last - rows, 0) + 0.5) / (rows + 0.5)), 1e-6)
        values[f"term{n}"] = f" {' '.join(term.words)}{'' if term.is_prefix else ' '}"
        times = f"(octet_length(line) - octet_length(replace(line, :term{n}, '')))::float8 / octet_length(:term{n})"
        scores.append(f":weight{n} / (1 + 1.2 * (0.25 + 0.75 * length) / ({times}))")
        holds.append(f"strpos(line, :term{n}) > 0")
    order = "message DESC" if is_common else f"{' + '.join(scores)} DESC, message DESC"
    span = most * 5 // 4 * last // expected + 1
    if " & " in query:  # words occur together more often than estimated
        span = min(span, last // 8 + 1)
    with connection.begin_nested() as here:
        connection.execute(SET_PLANNER)
        while True:
            is_scan = is_common and span <= MAX_SCAN
            lookup = "" if is_scan else f"{LEXEMES} @@ CAST(:query AS tsquery) AND "
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
                here.rollback()  # restores the settings
                return [row.message for row in rows]
            span *= min(2 * most // max(found, 1), 8)


def estimate_rows(connection: Connection, query: str) -> int:
    """Return PostgreSQL's estimate of the number of rows that a tsquery matches; at least 1."""
    [plan] = connection.execute(EXPLAIN, {"query": query}).scalar_one()
    return plan["Plan"]["Plan Rows"]


def load_hits(connection: Connection, ids: Sequence[int], terms: Sequence[Term]) -> list[SearchHit]:
    """Return the hits for message ids, in the same order."""
    columns = (messages, sessions.c.id.label("of"), sessions.c.title, sessions.c.cwd)
    living = select(*columns).join(sessions).where(messages.c.id.in_(ids), sessions.c.deleted.is_(None))
    rows = {row.id: row for row in connection.execute(living)}
    return [make_hit(connection, rows[id], terms) for id in ids if id in rows]


def make_hit(connection: Connection, row: "Row[Any]", terms: Sequence[Term]) -> SearchHit:
    """Build the hit for a row."""
    entry = read_entry(row.body)
    tool, snippet = make_snippet(extract_texts(entry), terms)
    if row.kind == "tool":
        asked = (messages.c.session == row.session) & (messages.c.id < row.id) & (messages.c.kind == "assistant")
        latest = select(messages.c.body).where(asked).order_by(messages.c.id.desc()).limit(1)
        tool_calls = read_entry(connection.scalar(latest) or "").get("tool_calls") or []
        tool = next((call["function"]["name"] for call in tool_calls if call["id"] == entry.get("tool_call_id")), "")
    return SearchHit(row.of, row.title or "", row.cwd, row.id, row.at, row.kind, tool, snippet)


def parse_query(words: str) -> Iterator[Term]:
    """Parse a query into terms."""
    for piece in QUERY_PART.finditer(words):
        quoted, star, bare = piece.groups(default="")
        if found := tuple(islice(split_words(quoted or bare), MAX_TERMS)):
            yield Term(found, bool(star) or bare.endswith("*"))


def make_place(cwd: str = "", session: int | None = None) -> list[str]:
    """Return a folder and a session as index words that no text contains."""
    folder = ["/f" + sha256(clean_text(cwd).encode()).hexdigest()[:12]] if cwd else []
    return folder if session is None else [*folder, f"/s{session}"]


def extract_words(entry: Message) -> str:
    """Return all words of an entry, separated by spaces."""
    return " ".join(word for _, said in extract_texts(entry) for word in split_words(said))


def split_words(text: str) -> list[str]:
    return WORD.findall(fold(text[:MAX_TEXT_LENGTH]))


def fold(said: str) -> str:
    """Return a text in lower case and without accents."""
    if said.isascii():
        return said.lower()
    return normalize("NFC", ACCENTS.sub("", normalize("NFKD", said))).casefold()


def extract_texts(entry: Message) -> list[tuple[str, str]]:
    """Return the texts of an entry, each with the name of the tool it is an input of ("" for none)."""
    content = entry.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(str(part["text"]) for part in content if part.get("type") == "text")
    tool_calls = [call for call in entry.get("tool_calls") or () if call["function"]["name"] != SEARCH_TOOL]
    inputs = [(call["function"]["name"], "\n".join(extract_input(call))) for call in tool_calls]
    return [("", content), ("", entry.get("reasoning_content") or ""), *inputs]


def extract_input(tool_call: RawToolCall) -> Iterator[str]:
    """Yield a tool's name and the values of its arguments, without the JSON around them."""
    yield tool_call["function"]["name"]
    arguments = parse_arguments(tool_call)
    waiting: list[Any] = [tool_call["function"]["arguments"] if arguments is None else arguments]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            value = list(cast(dict[str, Any], value).values())
        if isinstance(value, list):
            waiting += cast(list[Any], value)[::-1]
        else:
            yield str(value)


def read_entry(body: str) -> Message:
    """Return the entry in a row's body; an empty one if the body is damaged."""
    try:
        return cast(Message, msgspec.convert(decode(body), StoredEntry))
    except (ValueError, RecursionError):
        return {}


def make_snippet(texts: Iterable[tuple[str, str]], terms: Sequence[Term]) -> tuple[str, str]:
    """Return the part of the texts with the most different terms, and the name of its tool."""
    pattern = re.compile("|".join(f"({to_pattern(term)})" for term in terms))
    most, best = -1, ("", "")
    for tool, said in texts:
        same = {ord(char): folded for char in set(said) if len(folded := fold(char)) == 1}
        found = list(islice(pattern.finditer(said.translate(same)), 32))
        for first in found or [None]:
            start = first.start() if first else 0
            near = [each for each in found if start <= each.start() and each.end() <= start + SNIPPET_LENGTH]
            if said and (seen := len({each.lastindex for each in near})) > most:
                most, best = seen, (tool, mark_matches(said, start, near))
    return best


def to_pattern(term: Term) -> str:
    """Return a regular expression that matches a term in a text."""
    first, last = term.words[0], term.words[-1]
    before = "" if re.match(f"[{UNSPACED}]", first) else r"(?<![^\W_])"
    after = f"[^\\W_{UNSPACED}]*" if term.is_prefix else "" if re.match(f"[{UNSPACED}]", last) else r"(?![^\W_])"
    return before + r"[\W_]*".join(term.words) + after


def mark_matches(said: str, start: int, matches: Iterable[re.Match[str]]) -> str:
    """Return the part of a text around `start`, in one line, with its matches marked."""
    begin = at = max(start - SNIPPET_LENGTH // 4, 0)
    end = begin + SNIPPET_LENGTH
    pieces = ["… " if begin > 0 else ""]
    for each in matches:
        pieces += [said[at : each.start()], MATCH_START, said[each.start() : each.end()], MATCH_END]
        at = each.end()
    return clean_text(" ".join("".join([*pieces, said[at:end], " …" if end < len(said) else ""]).split()))
