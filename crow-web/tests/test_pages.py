"""The pages show what is stored, and nothing of it becomes markup that runs or loads."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2
import pytest
from crow_agent.app import build
from crow_core.acp.schema import LoadSessionRequest
from crow_core.app import Crow
from crow_core.testing import Reply, ScriptedModel, ScriptedServer, connect
from crow_extensions.commands import commands
from crow_persistence.database import Database
from crow_persistence.extension import persistence
from crow_persistence.tables import calls, sessions
from crow_web.app import make_app
from crow_web.gate import Gate
from crow_web.markup import to_output
from sqlalchemy import select, update

if TYPE_CHECKING:
    from conftest import Site

pytestmark = pytest.mark.anyio
PORT = 4321


async def test_a_session_is_found_by_its_words_and_read_with_its_calls(site: "Site"):
    listed = await site.read("/")
    assert "Plan the garden" in listed
    assert "3 calls" in listed
    found = await site.read("/?q=heron")
    assert "Plan the garden" in found
    assert "<mark>heron</mark>" in found
    assert "No session fits" in await site.read("/?q=albatross")
    assert "No session fits" in await site.read("/?errors=1")
    assert "No session fits" in await site.read("/?folder=/elsewhere")
    shown = await site.read(f"/session/{site.sessions[0]}")
    for words in ("I plan first.", "All is done.", "kept a heron &lt;b&gt;", "Permission</a>: allow", "crow -r"):
        assert words in shown
    assert await site.read(f"/session/{site.sessions[0][:10]}") == shown


async def test_a_call_shows_the_request_as_it_was_sent_and_what_is_new_in_it(site: "Site"):
    calls = await site.read(f"/session/{site.sessions[0]}/calls")
    addresses = list(dict.fromkeys(re.findall(r"/call/[0-9a-f]+", calls)))
    assert len(addresses) == 3
    first, second, _ = [await site.read(address) for address in addresses]
    assert "the first of its kind" in first
    assert "byte for byte" in first
    assert "Plan the garden" in first
    common = re.search(r"The first (\d+) of (\d+) messages are those of the request before", second)
    assert common
    assert int(common[2]) - int(common[1]) == 2
    assert second.count(">new</span>") == 2
    assert "kept a heron &lt;b&gt;" in second
    assert "All is done." in second


async def test_permissions_prompts_and_charts_are_shown(site: "Site"):
    ledger = await site.read("/permissions")
    assert "yolo" in ledger
    assert "note" in ledger
    assert "No decision fits" in await site.read("/permissions?verdict=deny")
    assert site.sessions[0][:8] in await site.read(f"/permissions?session={site.sessions[0]}")
    assert "<rect" in await site.read("/charts")
    prompts = await site.read("/prompts")
    for name in set(re.findall(r'href="/prompts/([^"]+)"', prompts)):
        assert "<b>@1</b>" in await site.read(f"/prompts/{name}")


async def test_a_page_without_anything_says_what_it_will_show(database: Database, env: dict[str, str]):
    app = make_app(database, env)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://x") as client:
        for address, words in (
            ("/", "Sessions stand here once you have talked with crow"),
            ("/charts", "are drawn here once crow has answered"),
            ("/permissions", "Each tool call of crow stands here"),
            ("/prompts", "each version of a prompt stands here"),
            ("/evaluations", "crow eval run first-steps"),
            ("/workflows", "Runs of functions with @workflow stand here"),
        ):
            assert words in (await client.get(address)).text, address


async def test_hostile_texts_stay_texts_on_every_page(site: "Site"):
    pages = ["/", "/?q=Report", "/permissions", "/prompts", "/charts", "/?q=<script>", "/permissions?by=<script>"]
    pages += [f"/session/{id}{more}" for id in site.sessions for more in ("", "/calls")]
    calls = await site.read(f"/session/{site.sessions[1]}/calls")
    pages += re.findall(r"/call/[0-9a-f]+", calls)
    for page in pages:
        text = await site.read(page)
        assert len(re.findall(r"<script", text)) == 1, page  # the page's own
        assert not re.search(r"<[^>]+\son\w+=", text), page
        assert not re.search(r"<(img|iframe|object|embed|link|audio|video)[^>]*evil", text), page
        assert 'href="javascript:' not in text, page
    assert '<a href="https://evil.example/y.png"' in await site.read(f"/session/{site.sessions[1]}")


async def test_what_is_not_there_is_a_page_with_a_sentence(site: "Site"):
    for address in ("/session/feed", "/session/feed/export", "/call/feed", "/prompts/nothing"):
        answer = await site.client.get(address)
        assert answer.status_code == 404, address
        assert "There is no" in answer.text, address


async def test_a_session_is_saved_as_one_page_without_secrets_paths_and_addresses(
    database: Database, env: dict[str, str]
):
    url = database.url.render_as_string(hide_password=False)
    crow = Crow(ScriptedModel([Reply("All is done.")])).use(persistence, url=url, folder=database.folder)
    async with connect(crow) as editor:
        session = await editor.new_session(env["HOME"])
        await editor.prompt(session.session_id, "Mail /home/heron/pond.txt and pa55word-of-mine to rook@example.org")
    env = {**env, "MY_TOKEN": "pa55word-of-mine"}
    gate = Gate(make_app(database, env), PORT)
    transport, base = httpx2.ASGITransport(app=gate), f"http://127.0.0.1:{PORT}"
    async with httpx2.AsyncClient(transport=transport, base_url=base, follow_redirects=True) as client:
        answer = await client.get(f"/session/{session.session_id}/export", params={"token": gate.token})
    assert "attachment" in answer.headers["content-disposition"]
    assert "All is done." in answer.text
    for private in ("pa55word-of-mine", "/home/heron", "rook@example.org", env["HOME"]):
        assert private not in answer.text


async def test_numbers_in_addresses_that_are_none_change_nothing(site: "Site"):
    for more in ("from=x", "from=-1", "from=99999999999", "days=9e9", "from=²", "days=١"):
        assert (await site.client.get(f"/?{more}")).status_code == 200, more
        assert (await site.client.get(f"/session/{site.sessions[0]}?{more}")).status_code == 200, more
    assert (await site.client.get("/permissions?before=99999999999")).status_code == 200


async def test_a_request_is_asked_again_once_and_both_answers_are_shown(site: "Site", env: dict[str, str]):
    calls = await site.read(f"/session/{site.sessions[0]}/calls")
    last = re.findall(r"/call/([0-9a-f]+)", calls)[-1]
    form = await site.read(f"/call/{last}/ask")
    assert "system@1" in form
    assert "tokens" in form
    origin = {"origin": str(site.client.base_url).rstrip("/")}
    async with ScriptedServer([Reply("Shorter still.")]) as server:
        env |= {"OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "key"}
        for _ in range(2):  # the second is answered from the database
            answer = await site.client.post(f"/call/{last}/ask", headers=origin, data={"model": "other", "prompt": ""})
            assert answer.status_code == 200, answer.text
    (sent,) = server.requests
    assert sent["model"] == "other"
    assert [message["role"] for message in sent["messages"]][-1] == "user"
    assert "Shorter still." in answer.text
    assert "Again with the model other" in answer.text
    refused = await site.client.post(f"/call/{last}/ask", headers=origin, data={"prompt": "system@9"})
    assert refused.status_code == 409
    assert "has no version 9" in refused.text
    listed = await site.read("/")
    assert "Asked again" not in listed
    assert "/session/" in await site.read("/?agent=asked+again")


async def test_a_form_is_answered_only_from_our_pages(site: "Site"):
    for headers, status in (({}, 405), ({"origin": "http://evil.example"}, 403)):
        assert (await site.client.post("/permissions/revoke", headers=headers)).status_code == status


async def test_pages_that_only_show_answer_no_form(database: Database, env: dict[str, str]):
    app = make_app(database, env, read_only=True)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://x") as client:
        assert (await client.post("/permissions/revoke", data={"answer": "1"})).status_code == 404
        assert "Revoke" not in (await client.get("/permissions")).text


async def test_sessions_are_filtered_by_rating_agent_cost_and_date(site: "Site", database: Database):
    with database.begin_write() as connection:
        costly = select(sessions.c.number).where(sessions.c.id == site.sessions[0]).scalar_subquery()
        connection.execute(update(calls).where(calls.c.session == costly).values(cost=0.5, currency="USD"))
    plan, other = "Plan the garden", "&lt;/title&gt;"
    for query, has_plan, has_other in (
        ("cost=1", True, False),
        ("cost=1,6", False, False),
        ("rating=good", True, False),
        ("rating=bad", False, False),
        ("agent=crow", True, True),
        ("agent=sub-agents", False, False),
        ("since=2020-01-01&until=2999-01-01", True, True),
        ("until=2020-01-01", False, False),
        ("since=2999-01-01", False, False),
        ("model=scripted", True, True),
        ("model=none", False, False),
    ):
        listed = (await site.read(f"/?{query}")).partition('<section class="day"')[2]
        assert (plan in listed, other in listed) == (has_plan, has_other), query
    assert "1.50 USD spent" in await site.read("/")


async def test_escape_sequences_become_colours_and_no_markup():
    text = str(to_output("plain \x1b[1;31m<red>\x1b[0m \x1b[38;5;46mgreen\x1b[0m \x1b]8;;javascript:alert(1)\x07link"))
    assert text == 'plain <span class="a1 bold">&lt;red&gt;</span> <span class="a2">green</span> link'


async def test_a_fork_is_marked_in_both_sessions(site: "Site", database: Database):
    url = database.url.render_as_string(hide_password=False)
    crow = Crow(ScriptedModel(lambda request: Reply("Well."))).use(persistence, url=url, folder=database.folder)
    async with connect(crow.use(commands)) as editor:
        first = (await editor.new_session("/tmp")).session_id
        await editor.prompt(first, "one")
        await editor.prompt(first, "/fork")
        fork = editor.text.rpartition("Session ")[2].split()[0]
        await editor.request("session/load", LoadSessionRequest(session_id=fork, cwd="/tmp", mcp_servers=[]))
        await editor.prompt(fork, "two")
    assert f'A fork goes on from here: <a href="/session/{fork}">' in await site.read(f"/session/{first}")
    shown = await site.read(f"/session/{fork}")
    said = shown.partition('<div class="entries">')[2]
    assert f'Forked here from <a href="/session/{first}">' in said
    assert said.index("<p>one</p>") < said.index("Forked here") < said.index("<p>two</p>")


async def test_messages_that_a_rewind_dropped_are_shown_on_a_page_of_their_own(
    site: "Site", database: Database, env: dict[str, str], tmp_path: Path
):
    (tmp_path / "config.toml").write_text(f'[database]\nurl = "{database.url.render_as_string(hide_password=False)}"\n')
    (work := tmp_path / "work").mkdir()
    crow = await build(env, models={"m": ScriptedModel(lambda request: Reply("Well."))}, mode="yolo")
    async with connect(crow) as editor:
        id = (await editor.new_session(str(work))).session_id
        for words in ("the right way", "a wrong way", "/undo yes"):
            await editor.prompt(id, words)
    shown = await site.read(f"/session/{id}")
    assert f'<a href="/session/{id}/dropped">Rewound</a>' in shown
    assert "the right way" in shown
    assert "a wrong way" not in shown
    dropped = await site.read(f"/session/{id}/dropped")
    assert "<p>a wrong way</p>" in dropped
    assert "<p>the right way</p>" not in dropped
