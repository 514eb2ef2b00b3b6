"""A chat in the page: what tabs are sent, and what comes of what they send."""

import asyncio
import re
from typing import TYPE_CHECKING, Any

import pytest
from crow_core.testing import Reply, ScriptedCall, ScriptedModel
from crow_extensions.background import background
from crow_extensions.commands import commands
from crow_extensions.subagents import subagents
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

if TYPE_CHECKING:
    from conftest import Site

pytestmark = pytest.mark.anyio

NOTE = ScriptedCall(name="notes_note", arguments={"text": "a heron"})
HOSTILE = "</details><script>document.title = 'taken'</script><img src=https://evil.example/x onerror=alert(1)>"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


async def test_an_answer_streams_to_every_tab_and_finished_blocks_are_sent_once(start: Any):
    text = "# Plan\n\nFirst **this**.\n\n- one\n- two\n\n```python\nprint(1)\n\nprint(2)\n```\n\nDone."
    site: Site = await start([Reply(text, pace=0.002)])
    async with site.open() as first:
        await first.say("Plan the garden")
        id = await first.until(lambda tab: tab.values.get("@session"))
        async with site.open(id) as second:
            for tab in (first, second):
                await tab.until(lambda tab: "Done." in tab.text and tab.values["@phase"] == "ready")
                assert "<h1>Plan</h1>" in tab.html
                assert "<strong>this</strong>" in tab.html
                assert tab.blocks["tail"] == ""
            assert first.text == second.text
            assert "print(1)\n\nprint(2)\n" in first.text
            sent = [id for batch in first.received for id in batch if re.match(r"b\d", id)]
            assert len(sent) == len(set(sent))


async def test_a_question_is_a_card_in_every_tab_until_one_of_them_answers(start: Any):
    site: Site = await start([Reply("", tool_calls=[NOTE]), Reply("All is done.")], mode="ask")
    async with site.open() as first:
        await first.say("Plan the garden")
        id = await first.until(lambda tab: tab.values.get("@session"))
        async with site.open(id) as second:
            block, number = await first.see_card()
            assert await second.see_card() == (block, number)
            assert "a heron" in first.blocks[block]
            assert "autofocus" not in first.blocks[block]
            assert first.values["@name"].startswith("? ")
            await second.act("answer", question=number, choice="0", text="")
            for tab in (first, second):
                await tab.until(lambda tab: "All is done." in tab.text)
                assert 'class="card"' not in tab.html
                assert "<b>Yes</b>" in tab.blocks[block]
            await first.act("answer", question=number, choice="1", text="too late")
            await first.is_ready()
            assert "kept a heron" in first.text


async def test_a_question_is_answered_by_no_with_a_reason(start: Any):
    seen: list[str] = []

    def answer(request: dict[str, Any]) -> Reply:
        last = request["messages"][-1]
        if last["role"] == "tool":
            seen.append(str(last["content"]))
            return Reply("Then not.")
        return Reply("", tool_calls=[NOTE])

    site: Site = await start(answer, mode="ask")
    async with site.open() as tab:
        await tab.say("Plan the garden")
        block, number = await tab.see_card()
        choice = re.search(r'name="choice" value="(\d+)">\s*<button>No<', tab.blocks[block])
        assert choice
        await tab.act("answer", question=number, choice=choice[1], text="frogs rather")
        await tab.until(lambda tab: "Then not." in tab.text)
        assert "frogs rather" in seen[0]
        assert "denied" in tab.html


async def test_a_form_is_filled_in_and_what_is_wrong_is_said(start: Any):
    question = {"question": "Which bird?", "choices": ["Heron", "Crow"]}
    ask = ScriptedCall(name="ask_user", arguments=question)
    site: Site = await start([Reply("", tool_calls=[ask]), Reply("Thanks.")])
    async with site.open() as tab:
        await tab.say("Ask me")
        block, number = await tab.see_card()
        assert "Which bird?" in tab.blocks[block]
        await tab.act("form", question=number, send="accept", **{"0": "1"})
        await tab.until(lambda tab: "Thanks." in tab.text)
        assert "Crow" in str(site.crow.models["scripted"].requests[-1]["messages"][-1]["content"])


async def test_words_during_a_turn_join_it_or_wait_and_are_taken_back(start: Any):
    is_asked, go_on = asyncio.Event(), asyncio.Event()

    async def answer(request: dict[str, Any]) -> Reply:
        if len(request["messages"]) < 4:
            is_asked.set()
            await go_on.wait()
            return Reply("", tool_calls=[NOTE])
        return Reply(f"I heard {request['messages'][-1]['content']}")

    site: Site = await start(answer)
    async with site.open() as tab:
        await tab.say("Plan the garden")
        await is_asked.wait()
        await tab.say("with a pond")
        await tab.say("never mind", later="1")
        await tab.say("and then frogs", later="1")
        await tab.until(lambda tab: "frogs" in tab.blocks["queue"])
        assert "at the next step" in tab.blocks["queue"]
        await tab.act("recall", place="1")
        assert await tab.until(lambda tab: tab.values.get("@edit")) == "never mind"
        go_on.set()
        await tab.until(lambda tab: "I heard and then frogs" in tab.text)
        requests = site.crow.models["scripted"].requests
        assert "with a pond" in str(requests[1]["messages"])
        assert "with a pond" in tab.text
        assert tab.blocks["queue"] == ""


async def test_a_turn_is_stopped_and_its_question_withdrawn(start: Any):
    site: Site = await start([Reply("", tool_calls=[NOTE]), Reply("Again.")], mode="ask")
    async with site.open() as tab:
        await tab.say("Plan the garden")
        await tab.see_card()
        await tab.act("cancel")
        await tab.until(lambda tab: "Cancelled." in tab.text)
        assert 'class="card"' not in tab.html
        assert "not run" in tab.html
        await tab.say("Go on")
        await tab.until(lambda tab: "Again." in tab.text)


async def test_an_agent_goes_to_the_background_and_holds_the_session_open(start: Any):
    agent = ScriptedCall(name="agent", arguments={"description": "Look", "prompt": "Look."})
    script = [Reply(tool_calls=[agent]), Reply("I look.", hang=True), Reply("Later.")]
    site: Site = await start(script, extensions=[background, subagents])
    async with site.open() as tab:
        await tab.say("Look around")
        await tab.until(lambda tab: "To the background" in tab.blocks["state"])
        (model,) = site.crow.models.values()
        assert isinstance(model, ScriptedModel)
        while len(model.requests) < 2:  # the second one is the agent's
            await asyncio.sleep(0.01)
        await tab.act("background")
        await tab.until(lambda tab: "Later." in tab.text and "1 in the background" in tab.blocks["state"])
        await tab.is_ready()
        (chat,) = site.chats.list_chats()
        assert chat.background == 1


async def test_the_last_turn_is_undone_after_a_question(start: Any):
    site: Site = await start([Reply("The first."), Reply("The second."), Reply("The third.")])
    async with site.open() as tab:
        for word in ("first", "second"):
            await tab.say(f"Say {word}")
            await tab.until(lambda tab, word=word: f"The {word}." in tab.text and tab.values["@phase"] == "ready")
        await tab.say("/undo")
        await tab.until(lambda tab: "No file changes." in tab.html)
        await tab.act("undone", send="decline")
        await tab.until(lambda tab: "No file changes." not in tab.html)
        assert "Undo this turn" in tab.blocks["state"]
        await tab.act("undo")
        await tab.until(lambda tab: "No file changes." in tab.html)
        await tab.act("undone", send="accept")
        await tab.until(lambda tab: "The last turn was undone." in tab.text)
        assert "The first." in tab.text
        assert "The second." not in tab.text
        await tab.say("Say third")
        await tab.until(lambda tab: "The third." in tab.text)
    messages = str(site.crow.models["scripted"].requests[-1]["messages"])
    assert "Say first" in messages
    assert "Say second" not in messages


async def test_a_mode_is_chosen_before_the_first_prompt(start: Any):
    site: Site = await start([Reply("Hello.")], mode="ask")
    async with site.open() as tab:
        await tab.act("open")
        await tab.until(lambda tab: "Plan" in tab.blocks["options"])
        await tab.act("option", option="", value="plan")
        await tab.until(lambda tab: re.search(r'value="plan" selected', tab.blocks["options"]))
        (session,) = site.crow.sessions.values()
        assert session.options.to_modes().current_mode_id == "plan"


async def test_files_and_commands_are_completed(start: Any):
    site: Site = await start([])
    (site.folder / "heron pond.txt").write_text("")
    async with site.open() as tab:
        await tab.act("complete", text="look at @her")
        menu = await tab.until(lambda tab: tab.values.get("@menu"))
        assert 'data-insert="@&#34;heron pond.txt&#34;"' in menu
        assert 'data-replaces="4"' in menu


async def test_resources_of_a_server_are_completed_by_the_agent(start: Any):
    site: Site = await start([Reply("Hello.")])
    async with site.open() as tab:
        await tab.say("hello")
        await tab.is_ready()
        await tab.act("complete", text="look at @notes:")
        await tab.until(lambda tab: 'data-insert="note://all"' in tab.values.get("@menu", ""))


async def test_an_image_goes_with_the_prompt(start: Any):
    site: Site = await start([Reply("A pixel.")])
    async with site.open() as tab:
        evil = "data:image/svg+xml;base64,PHN2Zz4="
        await tab.say("What is this?", images=[f"data:image/png;base64,{PIXEL}", evil, 'x" onerror="alert(1)'])
        await tab.until(lambda tab: "A pixel." in tab.text)
        assert tab.html.count("<img") == 1
        (request,) = site.crow.models["scripted"].requests
        assert str(request["messages"][-1]["content"]).count(PIXEL) == 1


async def test_nothing_of_hostile_texts_becomes_markup(start: Any):
    call = ScriptedCall(name="notes_note", arguments={"text": HOSTILE})
    replies = [
        Reply(HOSTILE, reasoning=HOSTILE, tool_calls=[call]),
        Reply(f"```{HOSTILE}\n{HOSTILE}\n```\n\n# {HOSTILE}"),
    ]
    site: Site = await start(replies, mode="ask")
    async with site.open() as tab:
        await tab.say(HOSTILE)
        block, number = await tab.see_card()
        assert "evil.example" in tab.blocks[block]
        await tab.act("answer", question=number, choice="0", text="")
        await tab.until(lambda tab: tab.values["@phase"] == "ready")
        await tab.act("complete", text=f"@{HOSTILE}".replace(" ", ""))
        await tab.until(lambda tab: "@menu" in tab.values)
        for html in (*tab.blocks.values(), tab.values["@menu"], *(str(each) for each in tab.received)):
            assert "<script" not in html
            assert "<img" not in html
            assert not re.search(r"<[^>]+\son\w+=", html)
    assert site.crow.models["scripted"].requests


async def test_a_page_that_comes_back_has_all_and_an_action_is_done_once(start: Any):
    site: Site = await start([Reply("Hello."), Reply("Again.")])
    async with site.open(page="a") as tab:
        await tab.say("Hi")
        id = await tab.until(lambda tab: tab.values.get("@session"))
        await tab.is_ready()
    async with site.open(id, page="a") as back:
        assert "Hello." in back.text
        await back.say("Hi")  # the number 1 again: it had arrived
        await back.until(lambda tab: tab.values.get("@arrived"))
        assert len(site.crow.models["scripted"].requests) == 1
        await back.say("And now?")
        await back.until(lambda tab: "Again." in tab.text)


async def test_a_page_of_a_new_session_that_comes_back_before_it_knows_the_session_sends_its_prompt_once(start: Any):
    site: Site = await start([Reply("Hello."), Reply("Again.")])
    async with site.open(page="a") as tab:
        await tab.say("Hi")
        await tab.until(lambda tab: tab.values.get("@arrived"))  # assume that neither this nor what follows has come
    async with site.open(page="a") as back:
        await back.say("Hi")
        await back.until(lambda tab: "Hello." in tab.text and tab.values["@phase"] == "ready")
        assert back.values["@session"]
    (chat,) = site.chats.list_chats()
    await chat.close()
    while site.chats.list_chats():
        await asyncio.sleep(0.02)
    async with site.open(page="a") as late:
        await late.say("Hi")
        await late.until(lambda tab: "Hello." in tab.text and tab.values.get("@arrived"))
        await late.say("And now?")
        await late.until(lambda tab: "Again." in tab.text)
    assert len(site.crow.models["scripted"].requests) == 2


async def test_a_page_that_only_shows_a_session_does_not_hold_it(start: Any):
    site: Site = await start([Reply("Hello.")])
    async with site.open() as tab:
        await tab.say("Hi")
        id = await tab.until(lambda tab: tab.values.get("@session"))
        await tab.is_ready()
    (chat,) = site.chats.list_chats()
    await chat.close()
    async with site.open(id) as shown:
        assert "Hello." in shown.text
        assert shown.values["@phase"] == "viewing"
        assert not site.crow.sessions


async def test_a_session_that_another_process_has_open_is_shown_live_and_goes_on_in_a_copy(start: Any):
    site: Site = await start([Reply("I am the terminal."), Reply("More of it.")])
    other: Site = await start([Reply("I am the copy.")])
    async with site.open() as terminal:
        await terminal.say("Hi")
        id = await terminal.until(lambda tab: tab.values.get("@session"))
        await terminal.is_ready()
        async with other.open(id) as phone:
            await phone.until(lambda tab: "I am the terminal." in tab.text)
            assert "is open in" in phone.blocks["notice"]
            await terminal.say("More")
            await phone.until(lambda tab: "More of it." in tab.text)
            await phone.act("fork")
            place = await phone.until(lambda tab: tab.values.get("@go"))
        async with other.open(place.rpartition("/")[2]) as copy:
            assert "I am the terminal." in copy.text
            await copy.say("And you?")
            await copy.until(lambda tab: "I am the copy." in tab.text)


async def test_an_agent_that_ends_in_the_middle_is_said_and_started_again(start: Any):
    site: Site = await start([Reply("I begin", hang=True), Reply("I am back.")])
    async with site.open() as tab:
        await tab.say("Plan the garden")
        await tab.until(lambda tab: "I begin" in tab.text)
        await site.links[0].transport.close()
        await tab.until(lambda tab: "The turn was stopped" in tab.text)
        await tab.say("Go on")
        await tab.until(lambda tab: "I am back." in tab.text)
        assert len(site.links) == 2
        assert tab.text.count("I begin") == 1


async def test_after_a_restart_in_the_middle_the_turn_is_found_again(start: Any):
    site: Site = await start([Reply("I begin with the pond.", hang=True)])
    async with site.open() as tab:
        await tab.say("Plan the garden")
        id = await tab.until(lambda tab: tab.values.get("@session"))
        await tab.until(lambda tab: "pond." in tab.text)
        boot = tab.values["@boot"]
        await site.chats.agent.close()  # as at the end of the server
        again: Site = await start([Reply("I go on.")])
        async with again.open(id) as back:
            assert back.values["@boot"] != boot
            await back.until(lambda tab: "I begin with the pond." in tab.text)
            await back.say("Go on")
            await back.until(lambda tab: "I go on." in tab.text)
            assert back.text.count("I begin with the pond.") == 1  # also while the new agent was starting
            assert not [batch for batch in back.received if [id for id, html in batch.items() if html is None]]


async def test_a_prompt_that_is_sent_again_after_a_restart_is_not_said_twice(start: Any):
    site: Site = await start([Reply("I begin with the pond.", hang=True)])
    async with site.open(page="phone") as tab:
        await tab.say("Plan the garden")
        id = await tab.until(lambda tab: tab.values.get("@session"))
        await tab.until(lambda tab: "pond." in tab.text)
        await site.chats.agent.close()  # before the page knew that its words had arrived
    again: Site = await start([Reply("I go on.")])
    async with again.open(id, page="phone") as back:
        await back.say("Plan the garden")
        await back.until(lambda tab: tab.values.get("@arrived") == "1")
        await back.say("Go on")
        await back.until(lambda tab: "I go on." in tab.text)
        assert back.text.count("Plan the garden") == 1
    assert str(again.crow.models["scripted"].requests).count("Plan the garden") == 1  # pyright: ignore[reportAttributeAccessIssue]


async def test_what_redo_brings_back_is_shown(start: Any):
    site: Site = await start([Reply("The heron is here.")], extensions=[commands])
    async with site.open() as tab:
        await tab.say("Where is the heron?")
        await tab.until(lambda tab: "The heron is here." in tab.text)
        await tab.is_ready()
        await tab.act("undo")
        await tab.until(lambda tab: "Undo this turn?" in tab.html)
        await tab.act("undone", send="accept")
        await tab.until(lambda tab: "was undone" in tab.text and "The heron is here." not in tab.text)
        await tab.say("/redo")
        await tab.until(lambda tab: "is here again" in tab.text and "The heron is here." in tab.text)
        await tab.is_ready()
        await tab.say("/redo")
        await tab.until(lambda tab: "Nothing" in tab.text or "nothing" in tab.text)


async def test_a_page_is_told_why_its_session_cannot_be_read(start: Any):
    site: Site = await start([])
    with pytest.raises(ConnectionClosed) as closed:
        async with site.open("0" * 32):
            pass
    assert closed.value.rcvd
    assert "0000" in closed.value.rcvd.reason


async def test_a_socket_needs_the_cookie_the_host_and_the_origin(start: Any):
    site: Site = await start([])
    address = site.url.replace("http", "ws", 1) + "/live"
    port = site.url.rpartition(":")[2]
    for cookie, origin, name in (
        ("", site.url, "127.0.0.1"),
        (site.cookie, "http://evil.example", "127.0.0.1"),
        (site.cookie, None, "127.0.0.1"),
        (site.cookie, f"http://evil.example:{port}", "evil.example"),
    ):
        own: Any = {"additional_headers": {"Cookie": cookie}, "origin": origin, "host": "127.0.0.1", "proxy": None}
        with pytest.raises(InvalidStatus) as refused:
            await connect(address.replace("127.0.0.1", name), **own)
        assert refused.value.response.status_code == 403


async def test_nonsense_of_a_page_changes_nothing(start: Any):
    site: Site = await start([Reply("Hello.")])
    async with site.open() as tab:
        for action in (
            "[]",
            "{}",
            '{"do": "answer"}',
            '{"number": 1}',
            '{"number": "x", "do": "prompt", "text": "Hi"}',
        ):
            await tab.socket.send(action)
        await tab.act("answer", question="1", choice="99", text="")
        await tab.act("recall", place="7")
        await tab.act("dance")
        await tab.say("Hi")
        await tab.until(lambda tab: "Hello." in tab.text)
