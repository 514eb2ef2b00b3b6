"""The pages show what is stored, and nothing of it becomes markup that runs or loads."""

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Site

pytestmark = pytest.mark.anyio


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
    for words in ("I plan first.", "All is done.", "kept a heron &lt;b&gt;", "Permission: allow", "crow -r"):
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


async def test_a_session_is_saved_as_one_page_without_secrets(site: "Site"):
    answer = await site.client.get(f"/session/{site.sessions[0]}/export")
    assert "attachment" in answer.headers["content-disposition"]
    assert "All is done." in answer.text


async def test_numbers_in_addresses_that_are_none_change_nothing(site: "Site"):
    for more in ("from=x", "from=-1", "from=99999999999", "days=9e9", "from=²", "days=١"):
        assert (await site.client.get(f"/?{more}")).status_code == 200, more
        assert (await site.client.get(f"/session/{site.sessions[0]}?{more}")).status_code == 200, more
    assert (await site.client.get("/permissions?before=99999999999")).status_code == 200
