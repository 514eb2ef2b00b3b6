"""What was said is found again by its words, on both databases alike."""

import json
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from crow_core.content import to_content
from crow_core.messages import Message, ToolUse
from crow_persistence import search, trees
from crow_persistence.database import Database
from crow_persistence.entries import encode, kind_of, plain
from crow_persistence.search import CLOSE, OPEN, Hit
from crow_persistence.search_tool import DEFINITION, mcp_server, server
from crow_persistence.tables import messages, sessions
from fastmcp import Client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import insert, select, text, update


def user(said: str) -> Message:
    return {"role": "user", "content": said}


def use(tool: str, arguments: Any, id: str = "call") -> ToolUse:
    given = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": id, "type": "function", "function": {"name": tool, "arguments": given}}


def begin(database: Database, *entries: Message, cwd: str = "/project", title: str | None = None) -> int:
    """A new session with entries in it; gives its number."""
    row = {
        "id": uuid4().hex,
        "cwd": plain(cwd),
        "title": title,
        "roots": "[]",
        "options": "{}",
        "created": 1,
        "updated": 1,
    }
    with database.writing() as connection:
        number = connection.execute(insert(sessions).values(**row).returning(sessions.c.number)).scalar_one()
    say(database, number, *entries, cwd=cwd)
    return number


def say(database: Database, number: int, *entries: Message, cwd: str = "/project") -> None:
    with database.writing() as connection:
        rows: list[tuple[int, Message]] = []
        for entry in entries:
            row = {"session": number, "at": 1, "kind": kind_of(entry), "body": encode(entry)}
            id = connection.execute(insert(messages).values(**row).returning(messages.c.id)).scalar_one()
            rows.append((id, entry))
        search.index(connection, number, cwd, rows)
        connection.execute(update(sessions).where(sessions.c.number == number).values(cwd=plain(cwd), head=rows[-1][0]))


def find(database: Database, words: str, **where: Any) -> list[Hit]:
    with database.reading() as connection:
        return search.search(connection, words, **where)


def found(database: Database, words: str, **where: Any) -> list[str]:
    """The snippets, without marks."""
    return [hit.snippet.replace(OPEN, "").replace(CLOSE, "") for hit in find(database, words, **where)]


def count(database: Database) -> int:
    with database.reading() as connection:
        return search.count(connection)


def gather_statistics(database: Database) -> None:
    """As PostgreSQL does by itself after a while."""
    with database.writing() as connection:
        connection.execute(text("ANALYZE"))


def test_all_that_was_said_is_found_with_who_said_it(database: Database):
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


def test_a_message_must_hold_all_words_and_a_phrase_in_its_order(database: Database):
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
def test_a_name_is_found_however_it_is_written(database: Database, words: str, said: str):
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
def test_nothing_in_a_search_is_syntax(database: Database, words: str):
    begin(database, user("docker compose"), user(f"it says {words}!"))
    assert found(database, words) == ([] if words == "*" else [f"it says {words}!"])


def test_a_search_for_anything_at_all_is_answered(database: Database):
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
def test_a_text_is_found_by_itself(database: Database, said: str, start: int):
    said = f"{said} {uuid4().hex}"
    begin(database, user(f"before {said} behind"))
    assert len(find(database, '"' + said.replace('"', " ") + '"')) == 1
    find(database, said[start:])


def test_a_folder_or_a_session_narrows_a_search(database: Database):
    one = begin(database, user("docker in one"), cwd="/one")
    begin(database, user("docker in two"), cwd="/two")
    assert found(database, "docker", cwd="/one") == ["docker in one"]
    assert found(database, "docker", session=one) == ["docker in one"]
    assert found(database, "docker", session=one, cwd="/two") == []
    assert len(found(database, "docker")) == 2
    assert len(found(database, "docker", limit=1)) == 1
    assert found(database, "docker", limit=0) == []


def test_what_was_said_moves_with_its_session(database: Database):
    number = begin(database, user("docker at first"), cwd="/old/\udcff")
    assert found(database, "docker", cwd="/old/\udcff") == ["docker at first"]
    say(database, number, user("docker later"), cwd="/new")
    assert len(found(database, "docker", cwd="/new")) == 2
    assert found(database, "docker", cwd="/old/\udcff") == []
    assert count(database) == 2


def test_a_deleted_session_is_not_found_and_a_fork_of_it_is(database: Database):
    number = begin(database, user("docker before the fork"), {"role": "assistant", "content": "docker, too"})
    with database.writing() as connection:
        id = connection.execute(select(sessions.c.id).where(sessions.c.number == number)).scalar_one()
        trees.fork(connection, id, "fork")
        fork = connection.execute(select(sessions.c.number).where(sessions.c.id == "fork")).scalar_one()
    say(database, number, user("docker behind the fork"))
    say(database, fork, user("docker in the fork"))
    with database.writing() as connection:
        trees.delete(connection, id)
    assert found(database, "docker") == ["docker in the fork"]
    with database.writing() as connection:
        trees.delete(connection, "fork")
    assert found(database, "docker") == []
    assert count(database) == 0


def test_the_best_come_first(database: Database):
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


@pytest.mark.parametrize("walk", [0, search.WALK])
def test_of_very_many_the_newest_come_first(database: Database, monkeypatch: pytest.MonkeyPatch, walk: int):
    monkeypatch.setattr(search, "RANKED", 20)
    monkeypatch.setattr(search, "WALK", walk)
    begin(database, *(user(f"docker {n} {'docker ' * (n % 3)}".strip()) for n in range(40)), cwd="/one")
    begin(database, *(user(f"compose {n}") for n in range(200)), cwd="/one")
    begin(database, *(user(f"something {n}") for n in range(40)), cwd="/two")
    gather_statistics(database)
    # PostgreSQL looks at the newest messages first, where there is none of these.
    assert [said.split()[1] for said in found(database, "docker", limit=4)] == ["39", "38", "37", "36"]
    assert [said.split()[1] for said in found(database, "docker", limit=4, cwd="/one")] == ["39", "38", "37", "36"]
    assert found(database, "compose", limit=2, cwd="/one") == ["compose 199", "compose 198"]
    assert found(database, "compose", limit=2, cwd="/two") == []


def test_of_many_postgresql_ranks_the_newest(database: Database, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(search, "CANDIDATES", 10)
    begin(database, user("docker"), *(user(f"docker {'and so on ' * (n + 1)}") for n in range(30)))
    begin(database, *(user(f"compose {n}") for n in range(300)))
    gather_statistics(database)
    [best] = find(database, "docker", limit=1)
    assert best.row == (1 if database.file else 22)


def test_what_is_new_is_found_before_there_are_statistics(database: Database):
    begin(database, *(user(f"docker {n}") for n in range(500)))
    assert len(found(database, "docker", limit=600)) == 500


def test_a_snippet_is_the_place_where_most_of_it_stands(database: Database):
    around = "nothing of that kind " * 50
    begin(database, user(f"docker {around}\n\n docker needs its\tcompose file {around} compose"))
    [hit] = find(database, "compose docker")
    assert "⟦docker⟧ needs its ⟦compose⟧ file" in hit.snippet
    assert hit.snippet.startswith("… ")
    assert hit.snippet.endswith(" …")
    assert len(hit.snippet) < 300


def test_a_snippet_of_a_phrase_marks_all_of_it(database: Database):
    begin(database, user("see docker-compose.yml, and composers"))
    assert find(database, "docker-compose.yml")[0].snippet == "see ⟦docker-compose.yml⟧, and composers"
    assert find(database, "compos*")[0].snippet == "see docker-⟦compose⟧.yml, and ⟦composers⟧"


def test_a_snippet_is_text_that_can_be_sent(database: Database):
    begin(database, user("docker \ud800\0 compose"))
    [hit] = find(database, "docker compose")
    assert "⟦compose⟧" in hit.snippet
    assert b"\0" not in hit.snippet.encode()


def test_what_the_search_itself_was_asked_is_not_what_was_said(database: Database):
    begin(database, {"role": "assistant", "content": "", "tool_calls": [use("search_sessions", {"words": "docker"})]})
    assert found(database, "docker") == []
    assert count(database) == 1


def test_odd_arguments_of_a_tool_are_words_like_any(database: Database):
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
def test_a_damaged_row_is_found_without_a_snippet_and_can_be_forgotten(database: Database, body: str):
    number = begin(database, user("docker"), user("compose"))
    with database.writing() as connection:
        connection.execute(update(messages).where(messages.c.id == 1).values(body=body))
    assert [(hit.row, hit.snippet) for hit in find(database, "docker")] == [(1, "")]
    with database.writing() as connection:
        trees.delete(
            connection, connection.execute(select(sessions.c.id).where(sessions.c.number == number)).scalar_one()
        )
    assert found(database, "docker") == found(database, "compose") == []
    assert count(database) == 0


async def ask(database: Database, words: str, session: int = 0, **arguments: Any) -> str:
    """What the tool answers in /project."""
    with database.reading() as connection:
        id = connection.scalar(select(sessions.c.id).where(sessions.c.number == session))
    tool = server(lambda: database)
    meta = {"crow/cwd": "/project", "crow/session": id or "new"}
    result = await tool.call(search.OWN_TOOL, {"words": words, **arguments}, meta)
    await tool.close()
    assert not result.is_error
    return str(to_content(result))


@pytest.mark.anyio
async def test_an_agent_looks_up_its_own_past(database: Database):
    number = begin(
        database,
        user("docker in this folder"),
        {"role": "assistant", "content": "", "tool_calls": [use("terminal", {"command": "docker ps"})]},
    )
    begin(database, user("docker elsewhere"), cwd="/other")
    with database.reading() as connection:
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
async def test_an_agent_does_not_find_the_very_question_it_was_asked(database: Database):
    number = begin(database, user("docker before"))
    say(database, number, user("what was it about docker?"), {"role": "assistant", "content": "I look docker up."})
    assert (await ask(database, "docker", number)).endswith("user: ⟦docker⟧ before")
    assert len((await ask(database, "docker")).splitlines()) == 3


@pytest.mark.anyio
async def test_an_agent_is_told_why_it_cannot_search(tmp_path: Path):
    file = tmp_path / "crow.db"
    file.write_text("no database" * 1000)
    tool = server(lambda: Database(f"sqlite:///{file}", tmp_path))
    result = await tool.call(search.OWN_TOOL, {"words": "docker"}, {})
    await tool.close()
    assert result.is_error
    assert f"{file} is no SQLite database" in str(to_content(result))


@pytest.mark.anyio
async def test_the_tool_is_described_as_its_server_would():
    async with Client(mcp_server(lambda: pytest.fail("nothing was asked for"))) as client:
        [tool] = await client.list_tools()
    listed = tool.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert {name: listed[name] for name in DEFINITION} == DEFINITION
    assert DEFINITION["name"] == search.OWN_TOOL
