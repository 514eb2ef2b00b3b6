"""Two clients on one session: both are told what happens, both may prompt, and the first answer holds."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import crow_mcp_server
import pytest
from crow_core.acp.schema import NOT_FOUND
from crow_core.acp.transports import memory_pair
from crow_core.agent.acp_agent import AcpAgent
from crow_core.app import Crow
from crow_core.mcp.server import Server
from crow_core.messages.message import Delta
from crow_core.testing import MemoryStore, Reply, ScriptedModel
from crow_core.testing.script import ScriptedCall as Use
from crow_core.testing.wire import RawClient, connect_raw
from crow_extensions.steering import steering
from crow_permissions.extension import permissions
from crow_testing.version_2 import ClientV2, join_2, make_prompt
from crow_testing.waiting_tool import WaitingTool

pytestmark = pytest.mark.anyio

BUILT_IN = Server(
    "crow", crow_mcp_server.create_server, definitions=crow_mcp_server.tools(), built_in=True, shared=True
)
START: dict[str, Any] = {"type": "start"}


class SlowModel:
    """A model that says a word each time that it may."""

    name = "slow"
    window: int | None = None

    def __init__(self, words: list[str]) -> None:
        self.words, self.may, self.said = words, asyncio.Semaphore(0), 0

    async def stream(self, request: Any) -> AsyncIterator[Delta]:
        for word in self.words:
            await self.may.acquire()
            self.said += 1
            yield {"content": word}
        yield {"finish_reason": "stop"}


WORKING = Reply("Calling.", tool_calls=[Use(name="demo_work", arguments={})])


def run(line: str) -> Use:
    return Use(name="terminal", arguments={"command": line})


async def resume(client: ClientV2, session: str, replay: "dict[str, Any] | None" = START) -> dict[str, Any]:
    params: dict[str, Any] = {"sessionId": session, "cwd": "/", **({"replayFrom": replay} if replay else {})}
    return await client.ask("session/resume", params)


def show_text(client: ClientV2) -> str:
    """Return the agent's messages as a client has them: whole ones, continued by chunks."""
    texts: dict[str, str] = {}
    for update in client.updates:
        match update:
            case {"sessionUpdate": "agent_message", "messageId": id, "content": blocks}:
                texts[id] = "".join(block["text"] for block in blocks)
            case {"sessionUpdate": "agent_message_chunk", "messageId": id, "content": {"text": text}}:
                texts[id] = texts.get(id, "") + text
            case _:
                pass
    return "\n".join(texts.values())


def list_prompts(client: ClientV2) -> list[str]:
    """Return the user's messages as a client has them."""
    texts: dict[str, str] = {}
    for update in client.updates:
        match update:
            case {"sessionUpdate": "user_message", "messageId": id, "content": [{"text": text}]}:
                texts[id] = text
            case {"sessionUpdate": "user_message_chunk", "messageId": id, "content": {"text": text}}:
                assert id not in texts
                texts[id] = text
            case _:
                pass
    return [*texts.values()]


async def test_a_second_client_sees_what_was_said_and_what_is_said():
    crow = Crow(ScriptedModel([Reply("One."), Reply("Two."), Reply("Three.")]))
    async with join_2(crow) as first, join_2(crow) as second:
        session = await first.open()
        await first.prompt(session, "a")
        await resume(second, session)
        assert show_text(second) == "One."
        await first.prompt(session, "b")
        await second.until(ClientV2.ends)
        await second.prompt(session, "c")
        await first.until(lambda client: len(client.ends()) == 3)
        assert show_text(first) == show_text(second) == "One.\nTwo.\nThree."
        assert list_prompts(first) == list_prompts(second) == ["a", "b", "c"]
        assert second.states() == ["idle", "running", "idle", "running", "idle"]
        assert first.states() == ["running", "idle"] * 3
    await crow.shut_down()


async def test_a_client_that_joins_a_turn_misses_no_word_and_gets_none_twice():
    words = [f"{number} " for number in range(40)]
    for joins_after in (0, 1, 7, 39):
        model = SlowModel(words)
        crow = Crow(model)
        async with join_2(crow) as first, join_2(crow) as second:
            session = await first.open()
            await first.ask("session/prompt", make_prompt(session, "go"))
            for _ in range(joins_after):
                model.may.release()
            await first.until(lambda client, said=joins_after: len(client.of("agent_message_chunk")) == said)
            joining = asyncio.ensure_future(resume(second, session))
            for _ in words[joins_after:]:
                model.may.release()
                await asyncio.sleep(0)
            await joining
            await second.until(lambda client: "idle" in client.states())
            assert show_text(second) == show_text(first) == "".join(words)
            assert list_prompts(second) == ["go"]
        await crow.shut_down()


async def test_a_question_goes_to_both_and_is_withdrawn_when_one_has_answered():
    crow = Crow(ScriptedModel([Reply(tool_calls=[run("touch x")]), Reply("Done.")]), servers=[BUILT_IN])
    crow.use(permissions)
    async with join_2(crow) as first, join_2(crow) as second:
        session = await first.open()
        first.permit = None
        await resume(second, session)
        second.permit = "reject_once"
        assert await first.prompt(session, "go") == "end_turn"
        assert len(first.questions) == len(second.questions) == 1
        await first.until(lambda client: client.withdrawn)
        assert [call["status"] for call in first.calls().values()] == ["failed"]
        assert "requires_action" in first.states()
    await crow.shut_down()


async def test_a_client_that_joins_is_asked_the_open_question():
    crow = Crow(ScriptedModel([Reply(tool_calls=[run("touch x")]), Reply("Done.")]), servers=[BUILT_IN])
    crow.use(permissions)
    async with join_2(crow) as first:
        session = await first.open()
        first.permit = None
        await first.ask("session/prompt", make_prompt(session, "go"))
        await first.until(lambda client: client.questions)
        async with join_2(crow) as second:
            second.permit = "reject_once"
            await resume(second, session)
            await second.until(ClientV2.ends)
        await first.until(ClientV2.ends)
    await crow.shut_down()


async def test_a_turn_goes_on_without_the_client_that_began_it_and_that_comes_back_to_the_rest():
    work, model = WaitingTool(), ScriptedModel([WORKING, Reply("Done.")])
    crow = Crow(model, servers=[work.server])
    async with join_2(crow) as second:
        async with join_2(crow) as first:
            session = await first.open()
            await resume(second, session)
            prompt = await first.ask("session/prompt", make_prompt(session, "go"))
            await work.started.wait()
        async with join_2(crow) as again:
            await resume(again, session, {"type": "_message", "messageId": prompt["messageId"]})
            (call,) = again.calls().values()
            assert call["status"] == "in_progress"
            work.go_on.set()
            await again.until(ClientV2.ends)
            await second.until(ClientV2.ends)
            assert again.states() == ["running", "idle"]
            assert show_text(again) == show_text(second) == "Calling.\nDone."
            assert [call["status"] for call in again.calls().values()] == ["completed"]
    await crow.shut_down()


async def test_the_session_is_closed_when_its_last_client_has_left():
    crow = Crow(ScriptedModel([Reply("One.")]))
    async with join_2(crow) as first, join_2(crow) as second:
        session = await first.open()
        await resume(second, session)
        await first.ask("session/close", {"sessionId": session})
        assert (await first.fail("session/prompt", make_prompt(session, "a")))["code"] == NOT_FOUND
        assert await second.prompt(session, "b") == "end_turn"
        assert session in crow.sessions
        await second.ask("session/close", {"sessionId": session})
        assert session not in crow.sessions
    await crow.shut_down()


async def test_a_prompt_of_the_second_client_joins_the_turn_of_the_first():
    work, model = WaitingTool(), ScriptedModel([WORKING, Reply("Done.")])
    crow = Crow(model, servers=[work.server]).use(steering)
    async with join_2(crow) as first, join_2(crow) as second:
        session = await first.open()
        await resume(second, session)
        await first.ask("session/prompt", make_prompt(session, "go"))
        await work.started.wait()
        joining = second.send("session/prompt", make_prompt(session, "in blue"))
        await second.ask("session/list", {})
        work.go_on.set()
        await joining
        await first.until(ClientV2.ends)
        assert "in blue" in list_prompts(first)
        assert "in blue" in list_prompts(second)
    await crow.shut_down()


async def test_either_client_cancels_the_turn_and_both_see_the_call_cancelled():
    work, model = WaitingTool(), ScriptedModel([WORKING])
    crow = Crow(model, servers=[work.server])
    async with join_2(crow) as first, join_2(crow) as second:
        session = await first.open()
        await resume(second, session)
        await first.ask("session/prompt", make_prompt(session, "go"))
        await work.started.wait()
        second.notify("session/cancel", {"sessionId": session})
        for client in (first, second):
            await client.until(ClientV2.ends)
            assert client.ends()[-1]["stopReason"] == "cancelled"
            assert [call["status"] for call in client.calls().values()] == ["cancelled"]
    await crow.shut_down()


async def test_an_option_that_one_client_sets_is_told_to_the_other():
    crow = Crow(ScriptedModel([])).use(permissions)
    async with join_2(crow) as first, join_2(crow) as second:
        session = await first.open()
        await resume(second, session)
        await second.ask(
            "session/set_config_option", {"sessionId": session, "configId": "mode", "value": "plan", "type": "id"}
        )
        await first.until(lambda client: client.of("config_option_update"))
    await crow.shut_down()


async def load(wire: RawClient, session: str) -> "list[dict[str, Any]]":
    """Load a session by version 1 and return the updates of its replay."""
    before = len(wire.received)
    assert "result" in await wire.ask("session/load", {"sessionId": session, "cwd": "/", "mcpServers": []})
    return [found["params"]["update"] for found in wire.received[before:] if found.get("method") == "session/update"]


def make_app(replies: "list[Reply]", **options: Any) -> Crow:
    """Make an app that stores sessions, so that clients of version 1 can load them."""
    crow = Crow(ScriptedModel(replies), **options)
    crow.store = MemoryStore()
    return crow


def list_kinds(wire: RawClient) -> list[str]:
    """List the updates of a client of version 1: the beginnings and ends of turns, and the kinds of the others."""
    found: list[str] = []
    for message in wire.received:
        match message:
            case {"params": {"update": {"sessionUpdate": "session_info_update", "_meta": {"crow": {"turn": turn}}}}}:
                found.append(turn)
            case {"params": {"update": {"sessionUpdate": kind, "content": {"text": text}}}}:
                who = f"{kind.split('_')[0]}: "
                goes_on = found and found[-1].startswith(who) and kind == "agent_message_chunk"
                found[-1:] = [found[-1] + text] if goes_on else [*found[-1:], who + text]
            case _:
                pass
    return found


async def test_clients_of_both_versions_share_a_session():
    crow = make_app([Reply("One."), Reply("Two."), Reply("Three.")])
    async with connect_raw(crow) as wire, join_2(crow) as first:
        session = await first.open()
        await first.prompt(session, "a")
        assert [update["content"]["text"] for update in await load(wire, session)] == ["a", "One."]
        answer = await wire.ask("session/prompt", make_prompt(session, "b"))
        assert answer["result"]["stopReason"] == "end_turn"
        await first.until(lambda client: len(client.ends()) == 2)
        await first.prompt(session, "c")
        assert show_text(first) == "One.\nTwo.\nThree."
        assert list_prompts(first) == ["a", "b", "c"]
        while (kinds := list_kinds(wire))[-1:] != ["ended"]:
            await wire.receive()
        assert kinds == ["user: a", "agent: One.Two.", "began", "user: c", "agent: Three.", "ended"]


async def test_prompts_of_two_clients_of_the_first_version_have_their_turns_one_after_the_other():
    work = WaitingTool()
    crow = make_app([WORKING, Reply("Done."), Reply("Next.")], servers=[work.server])
    async with connect_raw(crow) as one, connect_raw(crow) as two, join_2(crow) as watcher:
        session = await watcher.open()
        await load(one, session)
        await load(two, session)
        one.send("a", "session/prompt", make_prompt(session, "a"))
        await work.started.wait()
        two.send("b", "session/prompt", make_prompt(session, "b"))
        await two.ask("session/list", {})
        work.go_on.set()
        while (await two.receive()).get("id") != "b":
            pass
        await watcher.until(lambda client: len(client.ends()) == 2)
        assert list_prompts(watcher) == ["a", "b"]
        assert show_text(watcher) == "Calling.\nDone.\nNext."
        texts = ["began", "user: a", "agent: Calling.Done.", "ended", "agent: Next."]
        assert list_kinds(two) == texts


async def test_words_that_begin_a_turn_instead_of_joining_one_are_shown_to_all_clients():
    crow = make_app([Reply("One."), Reply("Two.")]).use(steering)
    async with connect_raw(crow) as one, connect_raw(crow) as two, join_2(crow) as watcher:
        session = await watcher.open()
        await watcher.prompt(session, "a")
        await load(one, session)
        await load(two, session)
        answer = (await one.ask("_session/steering", make_prompt(session, "rather")))["result"]
        assert answer["outcome"] == "startedNewTurn"
        await watcher.until(lambda client: len(client.ends()) == 2)
        assert list_prompts(watcher) == ["a", "rather"]
        assert watcher.of("user_message_chunk")[-1]["messageId"] == answer["messageId"]
        for wire in (one, two):
            while (kinds := list_kinds(wire))[-1:] != ["ended"]:
                await wire.receive()
            assert kinds == ["user: a", "agent: One.", "began", "user: rather", "agent: Two.", "ended"]


async def test_a_turn_of_the_first_version_goes_on_when_its_client_has_left():
    work = WaitingTool()
    crow = make_app([WORKING, Reply("Done.")], servers=[work.server])
    async with join_2(crow) as second:
        ours, theirs = memory_pair()
        leaving = asyncio.ensure_future(AcpAgent(theirs, crow).serve())
        wire = RawClient(ours)
        session = (await wire.ask("session/new", {"cwd": "/", "mcpServers": []}))["result"]["sessionId"]
        wire.send("a", "session/prompt", make_prompt(session, "a"))
        await work.started.wait()
        await resume(second, session)
        await ours.close()
        await leaving
        work.go_on.set()
        await second.until(ClientV2.ends)
        assert second.ends()[-1]["stopReason"] == "end_turn"
        assert show_text(second) == "Calling.\nDone."
        assert [call["status"] for call in second.calls().values()] == ["completed"]
    await crow.shut_down()


async def test_a_waiting_prompt_is_cancelled_by_the_other_client_too():
    work = WaitingTool()
    crow = make_app([WORKING], servers=[work.server])
    async with connect_raw(crow) as one, join_2(crow) as second:
        session = await second.open()
        await load(one, session)
        await second.ask("session/prompt", make_prompt(session, "a"))
        await work.started.wait()
        one.send("b", "session/prompt", make_prompt(session, "b"))
        await one.ask("session/list", {})
        second.notify("session/cancel", {"sessionId": session})
        while (answer := await one.receive()).get("id") != "b":
            pass
        assert answer["result"]["stopReason"] == "cancelled"
        await second.until(ClientV2.ends)
