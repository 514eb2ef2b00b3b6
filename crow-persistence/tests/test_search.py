"""Messages are found by their words, with the same results on both databases."""

import json
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from crow_core.content import to_content
from crow_core.messages.message import Message, RawToolCall
from crow_persistence import forks, search
from crow_persistence.database import Database
from crow_persistence.entries import clean_text, encode, entry_kind
from crow_persistence.search import MATCH_END, MATCH_START, SearchHit
from crow_persistence.search_tool import DEFINITION, make_mcp_server, make_server
from crow_persistence.tables import messages, sessions
from fastmcp import Client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import insert, select, text, update


def user(said: str) -> Message:
    return {"role": "user", "content": said}


def use(tool: str, arguments: Any, id: str = "call") -> RawToolCall:
    given = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": id, "type": "function", "function": {"name": tool, "arguments": given}}


def begin(database: Database, *entries: Message, cwd: str = "/project", title: str | None = None) -> int:
    """Insert a new session with these entries. Return its number."""
    row = {
        "id": uuid4().hex,
        "cwd": clean_text(cwd),
        "title": title,
        "roots": "[]",
        "options": "{}",
        "created": 1,
        "updated": 1,
    }
    with database.begin_write() as connection:
        number = connection.execute(insert(sessions).values(**row).returning(sessions.c.number)).scalar_one()
    say(database, number, *entries, cwd=cwd)
    return number


def say(database: Database, number: int, *entries: Message, cwd: str = "/project") -> None:
    with database.begin_write() as connection:
        before = connection.execute(select(sessions.c.cwd).where(sessions.c.number == number)).scalar_one()
        if before != clean_text(cwd):
            search.move_entries(connection, number, before, clean_text(cwd))
        rows: list[tuple[int, Message]] = []
        for entry in entries:
            row = {"session": number, "at": 1, "kind": entry_kind(entry), "body": encode(entry)}
            id = connection.execute(insert(messages).values(**row).returning(messages.c.id)).scalar_one()
            rows.append((id, entry))
        search.index_entries(connection, number, cwd, rows)
        connection.execute(
            update(sessions).where(sessions.c.number == number).values(cwd=clean_text(cwd), head=rows[-1][0])
        )


def find(database: Database, words: str, **where: Any) -> list[SearchHit]:
    with database.begin_read() as connection:
        return search.search(connection, words, **where)


def found(database: Database, words: str, **where: Any) -> list[str]:
    """Return the snippets without marks."""
    return [hit.snippet.replace(MATCH_START, "").replace(MATCH_END, "") for hit in find(database, words, **where)]


def count(database: Database) -> int:
    with database.begin_read() as connection:
        return search.count_indexed(connection)


def gather_statistics(database: Database) -> None:
    """Update PostgreSQL's statistics, as autovacuum does after a while."""
    with database.begin_write() as connection:
        connection.execute(text("ANALYZE"))


def test_messages_are_found_with_their_role(database: Database):
    begin(
        database,
        user("Does the container start?"),
        {
            "role": "assistant",
            "content": "I try it.",
            "reasoning_content": "Perhaps a volume is missing.",
            "tool_calls": [use("terminal", {"command": "cd box\ndocker compose up"}), use("file_editor", {}, "other")],
        },
        {"role": "tool", "tool_call_id": "call", "content": [{"type": "text", "text": "yml: no such service"}]},
        {"crow": {"kind": "title", "title": "a container"}},
        title="Containers",
    )
    for words, kind, tool, snippet in (
        ("container", "user", "", "Does the ⟦container⟧ start?"),
        ("try", "assistant", "", "I ⟦try⟧ it."),
        ("volume", "assistant", "", "Perhaps a ⟦volume⟧ is missing."),
        ("docker", "assistant", "terminal", "terminal cd box ⟦docker⟧ compose up"),
        ("service", "tool", "terminal", "yml: no such ⟦service⟧"),
    ):
        [hit] = find(database, words)
        assert (hit.kind, hit.tool, hit.snippet) == (kind, tool, snippet)
        assert (hit.title, hit.cwd, hit.at) == ("Containers", "/project", 1)
    assert count(database) == 3


def test_hit_has_all_words_and_phrases_in_order(database: Database):
    begin(database, user("docker needs compose"), user("docker compose up"), user("composed"))
    assert found(database, "compose docker") == ["docker compose up", "docker needs compose"]
    assert found(database, '"docker compose"') == ["docker compose up"]
    assert found(database, '"compose docker"') == []
    assert found(database, 'up "docker comp"*') == ["docker compose up"]
    assert set(found(database, "compo*")) == {"docker compose up", "docker needs compose", "composed"}
    assert found(database, "compose* needs") == ["docker needs compose"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("docker-compose.yml", "see docker-compose.yml there"),
        ("compose.yml", "see docker-compose.yml there"),
        ("snake_case", "def snake_case(): ..."),
        ("case", "def snake_case(): ..."),
        ("test_search.py", "crow/tests/test_search.py:12: error"),
        ("/tests/test_se*", "crow/tests/test_search.py:12: error"),
        ("0.48", "python-foo==0.48"),
        ("HTTPServer", "class httpserver"),
        ("uber", "Über alles"),
        ("ÜBER", "u\u0308ber"),
        ("strasse", "Straße 5"),
        ("ℌello", "hello"),
        ("検索", "全文検索を試す"),
        ("ｶﾅ", "カナ"),
        ("한국", "한국어로"),
        ("ค้นหา", "การค้นหาข้อความ"),
        ("ab12" * 32, f"sha512 {'ab12' * 32} ok"),
        ("поиск", "Поиск."),
        ("😀 smile", "smile 😀"),
    ],
)
def test_name_is_found_in_every_spelling(database: Database, words: str, said: str):
    begin(database, user(said), user("and something else"))
    assert found(database, words) == [said]


@pytest.mark.parametrize(
    "words",
    [
        "docker AND compose",
        "NOT docker",
        "words:docker",
        "^docker says",
        "NEAR(docker compose)",
        "docker -x",
        "{place}",
        "*",
    ],
)
def test_query_has_no_other_syntax(database: Database, words: str):
    begin(database, user("docker compose"), user(f"it says {words}!"))
    assert found(database, words) == ([] if words == "*" else [f"it says {words}!"])


def test_any_query_is_answered(database: Database):
    begin(database, user("docker compose"))
    for words in ("", '"', '""', '"docker', "' OR 1=1 --", "a\0b", "\ud800", ":x %s %(y)s", "/s1", "\\", "&|!<->"):
        assert found(database, words) == (["docker compose"] if words == '"docker' else [])
    for piece in ("docker ", '"', '"docker" ', "x", "𠀀", "a* ", "'\\"):
        find(database, piece * (100_000 // len(piece)))
    assert found(database, "docker " * 10_000) == ["docker compose"]


@settings(
    max_examples=settings.default.max_examples * 6 // 10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.text(st.characters(exclude_categories=[]), max_size=60), st.integers(0, 20))
def test_text_is_found_by_its_own_words(database: Database, said: str, start: int):
    said = f"{said} {uuid4().hex}"
    begin(database, user(f"before {said} behind"))
    assert len(find(database, '"' + said.replace('"', " ") + '"')) == 1
    find(database, said[start:])


def test_search_can_be_limited_to_a_folder_or_a_session(database: Database):
    one = begin(database, user("docker in one"), cwd="/one")
    begin(database, user("docker in two"), cwd="/two")
    assert found(database, "docker", cwd="/one") == ["docker in one"]
    assert found(database, "docker", session=one) == ["docker in one"]
    assert found(database, "docker", session=one, cwd="/two") == []
    assert len(found(database, "docker")) == 2
    assert len(found(database, "docker", limit=1)) == 1
    assert found(database, "docker", limit=0) == []


def test_indexed_messages_move_with_their_session(database: Database):
    number = begin(database, user("docker at first"), cwd="/old/\udcff")
    assert found(database, "docker", cwd="/old/\udcff") == ["docker at first"]
    say(database, number, user("docker later"), cwd="/new")
    assert len(found(database, "docker", cwd="/new")) == 2
    assert found(database, "docker", cwd="/old/\udcff") == []
    assert count(database) == 2


def test_deleted_session_is_not_found_but_its_fork_is(database: Database):
    number = begin(database, user("docker before the fork"), {"role": "assistant", "content": "docker, too"})
    with database.begin_write() as connection:
        id = connection.execute(select(sessions.c.id).where(sessions.c.number == number)).scalar_one()
        forks.fork(connection, id, "fork")
        fork = connection.execute(select(sessions.c.number).where(sessions.c.id == "fork")).scalar_one()
    say(database, number, user("docker behind the fork"))
    say(database, fork, user("docker in the fork"))
    with database.begin_write() as connection:
        forks.delete(connection, id)
    assert found(database, "docker") == ["docker in the fork"]
    with database.begin_write() as connection:
        forks.delete(connection, "fork")
    assert found(database, "docker") == []
    assert count(database) == 0


def test_best_hits_come_first(database: Database):
    long = "and then something else happened " * 20
    begin(
        database,
        user(f"docker {long}"),
        user(f"docker docker, docker: docker. docker {long}"),
        user("docker"),
        *(user("the docker") for _ in range(3)),
        *(user(f"the {n}") for n in range(20)),
    )
    hits = found(database, "docker")
    assert hits[0] == "docker"
    assert hits[-1].startswith("docker and then")
    begin(database, user(f"the the the the the rare word and {long}"), user(f"rare, rare: the rare word and {long}"))
    gather_statistics(database)
    assert found(database, "the rare")[0].startswith("rare, rare")


@pytest.mark.parametrize("walk", [0, search.MAX_SCAN])
def test_newest_hits_come_first_when_there_are_too_many_to_rank(
    database: Database, monkeypatch: pytest.MonkeyPatch, walk: int
):
    monkeypatch.setattr(search, "MAX_RANKED", 20)
    monkeypatch.setattr(search, "MAX_SCAN", walk)
    begin(database, *(user(f"docker {n} {'docker ' * (n % 3)}".strip()) for n in range(40)), cwd="/one")
    begin(database, *(user(f"compose {n}") for n in range(200)), cwd="/one")
    begin(database, *(user(f"something {n}") for n in range(40)), cwd="/two")
    gather_statistics(database)
    # None of these is among the newest messages, which PostgreSQL reads first.
    assert [said.split()[1] for said in found(database, "docker", limit=4)] == ["39", "38", "37", "36"]
    assert [said.split()[1] for said in found(database, "docker", limit=4, cwd="/one")] == ["39", "38", "37", "36"]
    assert found(database, "compose", limit=2, cwd="/one") == ["compose 199", "compose 198"]
    assert found(database, "compose", limit=2, cwd="/two") == []


def test_postgresql_ranks_the_newest_matches(database: Database, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(search, "MAX_CANDIDATES", 10)
    begin(database, user("docker"), *(user(f"docker {'and so on ' * (n + 1)}") for n in range(30)))
    begin(database, *(user(f"compose {n}") for n in range(300)))
    gather_statistics(database)
    [best] = find(database, "docker", limit=1)
    assert best.row == (1 if database.file else 22)


def test_new_messages_are_found_without_statistics(database: Database):
    begin(database, *(user(f"docker {n}") for n in range(500)))
    assert len(found(database, "docker", limit=600)) == 500


def test_snippet_shows_the_part_with_most_terms(database: Database):
    around = "nothing of that kind " * 50
    begin(database, user(f"docker {around}\n\n docker needs its\tcompose file {around} compose"))
    [hit] = find(database, "compose docker")
    assert "⟦docker⟧ needs its ⟦compose⟧ file" in hit.snippet
    assert hit.snippet.startswith("… ")
    assert hit.snippet.endswith(" …")
    assert len(hit.snippet) < 300


def test_snippet_marks_a_whole_phrase(database: Database):
    begin(database, user("see docker-compose.yml, and composers"))
    assert find(database, "docker-compose.yml")[0].snippet == "see ⟦docker-compose.yml⟧, and composers"
    assert find(database, "compos*")[0].snippet == "see docker-⟦compose⟧.yml, and ⟦composers⟧"


def test_snippet_is_valid_text(database: Database):
    begin(database, user("docker \ud800\0 compose"))
    [hit] = find(database, "docker compose")
    assert "⟦compose⟧" in hit.snippet
    assert b"\0" not in hit.snippet.encode()


def test_inputs_of_the_search_tool_are_not_indexed(database: Database):
    begin(database, {"role": "assistant", "content": "", "tool_calls": [use("search_sessions", {"words": "docker"})]})
    assert found(database, "docker") == []
    assert count(database) == 1


def test_unusual_tool_arguments_are_indexed(database: Database):
    deep: Any = "docker"
    for _ in range(400):
        deep = [deep]
    begin(
        database,
        {"role": "assistant", "content": None, "tool_calls": [use("t", '{"command": "docker comp')]},
        {"role": "assistant", "content": "", "tool_calls": [use("t", {"a": deep, "b": [1.5, None, True]})]},
        {"role": "assistant", "content": "", "tool_calls": [use("t", '"docker" \ud800')]},
    )
    assert len(find(database, "docker")) == 3
    assert len(find(database, "1.5 t")) == 1


@pytest.mark.parametrize("body", ["{", "[]", '{"role": 5}', '{"role": "user", "content": 5}'])
def test_damaged_row_is_found_without_a_snippet_and_can_be_deleted(database: Database, body: str):
    number = begin(database, user("docker"), user("compose"))
    with database.begin_write() as connection:
        connection.execute(update(messages).where(messages.c.id == 1).values(body=body))
    assert [(hit.row, hit.snippet) for hit in find(database, "docker")] == [(1, "")]
    with database.begin_write() as connection:
        forks.delete(
            connection, connection.execute(select(sessions.c.id).where(sessions.c.number == number)).scalar_one()
        )
    assert found(database, "docker") == found(database, "compose") == []
    assert count(database) == 0


async def ask(database: Database, words: str, session: int = 0, **arguments: Any) -> str:
    """Return the tool's answer in /project."""
    with database.begin_read() as connection:
        id = connection.scalar(select(sessions.c.id).where(sessions.c.number == session))
    tool = make_server(lambda: database)
    meta = {"crow/cwd": "/project", "crow/session": id or "new"}
    result = await tool.call(search.SEARCH_TOOL, {"words": words, **arguments}, meta)
    await tool.close()
    assert not result.is_error
    return str(to_content(result))


@pytest.mark.anyio
async def test_search_tool_finds_earlier_sessions(database: Database):
    number = begin(
        database,
        user("docker in this folder"),
        {"role": "assistant", "content": "", "tool_calls": [use("terminal", {"command": "docker ps"})]},
    )
    begin(database, user("docker elsewhere"), cwd="/other")
    with database.begin_read() as connection:
        id = connection.execute(select(sessions.c.id).where(sessions.c.number == number)).scalar_one()
    answer = (await ask(database, "docker")).splitlines()
    assert [line.split(maxsplit=3)[0] for line in answer] == [id[:8]] * 2
    assert {line.split(maxsplit=3)[3] for line in answer} == {
        "user: ⟦docker⟧ in this folder",
        "assistant (terminal): terminal ⟦docker⟧ ps",
    }
    assert "user in /other: ⟦docker⟧ elsewhere" in await ask(database, "docker", everywhere=True)
    assert "Nothing in the sessions of /project" in await ask(database, "elsewhere")
    assert "Nothing in any session" in await ask(database, '"', everywhere=True)


@pytest.mark.anyio
async def test_search_tool_leaves_out_the_current_turn(database: Database):
    number = begin(database, user("docker before"))
    say(database, number, user("what was it about docker?"), {"role": "assistant", "content": "I look docker up."})
    assert (await ask(database, "docker", number)).endswith("user: ⟦docker⟧ before")
    assert len((await ask(database, "docker")).splitlines()) == 3


@pytest.mark.anyio
async def test_search_tool_reports_an_unusable_database(tmp_path: Path):
    file = tmp_path / "crow.db"
    file.write_text("no database" * 1000)
    tool = make_server(lambda: Database(f"sqlite:///{file}", tmp_path))
    result = await tool.call(search.SEARCH_TOOL, {"words": "docker"}, {})
    await tool.close()
    assert result.is_error
    assert f"{file} is no SQLite database" in str(to_content(result))


@pytest.mark.anyio
async def test_tool_definition_equals_the_generated_one():
    async with Client(make_mcp_server(lambda: pytest.fail("nothing was asked for"))) as client:
        [tool] = await client.list_tools()
    listed = tool.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert {name: listed[name] for name in DEFINITION} == DEFINITION
    assert DEFINITION["name"] == search.SEARCH_TOOL
