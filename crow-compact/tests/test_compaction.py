"""Test compaction: when it happens, what the model sees after it, and failures."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from crow_compact.compaction import CUT_SHORT, LEFT_OUT, SHRUNK
from crow_compact.extension import compact
from crow_compact.markers import find_cuts
from crow_core.acp.connection import RpcError
from crow_core.acp.schema import (
    ClientCapabilities,
    ClientSessionCapabilities,
    CompactionCapabilities,
    CompactionUpdate,
    TextBlock,
    UsageUpdate,
)
from crow_core.app import Crow
from crow_core.errors import ModelError
from crow_core.mcp.server import Server
from crow_core.messages.message import Message, marker_kind
from crow_core.messages.passes import SUMMARY_TEMPLATE
from crow_core.models.chat_model import ChatModel
from crow_core.models.token_usage import SESSION_TOTALS
from crow_core.session.prompts import Prompt
from crow_core.session.session import Session
from crow_core.testing import Editor, Failure, Reply, ScriptedModel, ScriptedServer, connect
from crow_core.testing.script import ScriptedCall as Use
from crow_extensions.commands import commands
from crow_extensions.steering import STEERING, steering
from crow_extensions.usage import LAST_REQUEST, usage
from fastmcp import FastMCP
from fastmcp.utilities.types import Image

pytestmark = pytest.mark.anyio

Request = dict[str, Any]

WINDOW = 4_000
"""The model's window in tokens; it counts four characters as one."""
LONG = "These are words that nobody needs to read. " * 40
"""About 430 tokens."""
SEES_COMPACTIONS = ClientCapabilities(session=ClientSessionCapabilities(compaction=CompactionCapabilities()))

FILES = FastMCP("files")


@FILES.tool
def look(lines: int) -> str:
    return "".join(f"line {n} of {lines}\n" for n in range(lines))


@FILES.tool
def picture() -> list[Any]:
    return ["A bird:", Image(data=b"\x89PNG\r\n\x1a\n", format="png")]


def use(name: str, **arguments: Any) -> Use:
    return {"name": name, "arguments": arguments}


def is_compaction(request: Request) -> bool:
    return "Write a summary that you will go on from" in str(request["messages"][-1]["content"])


def tokens(request: Request) -> int:
    return len(str(request["messages"])) // 4


@dataclass
class Talk:
    """An editor in a session of an app that compacts."""

    editor: Editor
    session: Session
    model: ScriptedModel

    async def say(self, text: str) -> str:
        return (await self.editor.prompt(self.session.id, text)).stop_reason

    def asked(self) -> list[Request]:
        return [request for request in self.model.requests if not is_compaction(request)]

    def summaries(self) -> list[Request]:
        return [request for request in self.model.requests if is_compaction(request)]

    def markers(self) -> list[dict[str, Any]]:
        return [entry.get("crow", {}) for entry in self.session.log if marker_kind(entry) in ("shrink", "compaction")]


@dataclass
class Speaker:
    """A script that gives `replies` in order and then "Well."; `summary` answers requests for a summary."""

    replies: list[Reply] = field(default_factory=list[Reply])
    summary: Callable[[Request], Reply] = lambda request: Reply("All went well.")
    limit: int = 1 << 30
    """Requests with more tokens are refused."""

    def __call__(self, request: Request) -> Reply:
        if tokens(request) > self.limit:
            return Reply(error=ModelError("The context length is exceeded.", too_long=True))
        if is_compaction(request):
            return self.summary(request)
        return self.replies.pop(0) if self.replies else Reply("Well.")


@asynccontextmanager
async def talking(
    speaker: Callable[[Request], Any],
    *,
    window: int | None = WINDOW,
    capabilities: ClientCapabilities | None = None,
    **options: Any,
) -> AsyncGenerator[Talk]:
    model = ScriptedModel(speaker, window=window)
    server = Server("files", lambda: FILES, shared=True)
    crow = Crow(model, servers=[server], system=Prompt("system", "You are crow."))
    crow.use(commands).use(usage).use(steering).use(compact, **options)
    async with connect(crow, capabilities=capabilities) as editor:
        await editor.new_session("/")
        (session,) = crow.sessions.values()
        yield Talk(editor, session, model)


def words(request: Request) -> list[str]:
    """Return the first 12 characters of each message in a request."""
    return [str(message["content"])[:12] for message in request["messages"]]


async def test_past_the_threshold_the_model_summarizes_and_continues_from_its_summary():
    async with talking(Speaker()) as talk:
        for turn in range(9):
            await talk.say(f"Turn {turn}. {LONG}")
        (summary,) = talk.summaries()
        (marker,) = talk.markers()
        before = talk.asked()[talk.model.requests.index(summary) - 1]
        assert summary["messages"][: len(before["messages"])] == before["messages"], "asked on the same prefix"
        assert summary["tools"] == before["tools"]
        assert talk.asked()[-1]["messages"][0] == before["messages"][0]
        first = talk.asked()[-1]["messages"][1]["content"]
        assert first.startswith("Turn 0.")
        assert SUMMARY_TEMPLATE.format("All went well.") in first
        assert marker["after"] < marker["before"] <= WINDOW
        assert len([entry for entry in talk.session.log if entry.get("role") == "user"]) == 9, "the log has everything"
        assert f"from about {marker['before']:,} to {marker['after']:,} tokens" in talk.editor.thoughts
        assert talk.session.state[SESSION_TOTALS].calls == 10, "what it cost is counted"


async def test_the_first_request_after_a_compaction_is_not_compared():
    async with talking(Speaker()) as talk:
        while not talk.markers():
            await talk.say(LONG)
        await talk.say("On!")
        assert talk.session.state[LAST_REQUEST].describe() == ""
        await talk.say("On!")
        assert "began like the one before" in talk.session.state[LAST_REQUEST].describe()


async def test_long_turn_is_cut_where_tool_calls_are_answered_and_keeps_its_prompt():
    looks = [Reply(tool_calls=[use("files_look", lines=40), use("files_look", lines=41)]) for _ in range(20)]
    async with talking(Speaker([Reply("Hello."), *looks])) as talk:
        await talk.say("The first words")
        assert await talk.say("Look at all of it") == "end_turn"
        assert len(talk.asked()) == 22
        assert talk.summaries()
        last = talk.asked()[-1]["messages"]
        assert last[1]["content"].startswith("The first words\n\nLook at all of it\n\n")
        calls = [call["id"] for message in last for call in message.get("tool_calls", [])]
        assert calls == [message["tool_call_id"] for message in last if message["role"] == "tool"]
        assert 0 < len(calls) < 40
        starts = {marker["from"] for marker in talk.markers() if marker["kind"] == "compaction"}
        roles = {entry.get("role") for entry in talk.session.log if entry.get("crow", {}).get("id") in starts}
        assert roles == {"assistant"}, "no tool result is kept without its call"


async def test_words_that_arrive_during_a_compaction_are_in_the_next_request_word_for_word():
    looks = [Reply(tool_calls=[use("files_look", lines=40)]) for _ in range(20)]
    speaker, asked = Speaker([*looks, Reply("Seen.")]), list["asyncio.Task[Any]"]()

    async def answer(request: Request) -> Reply:
        if is_compaction(request) and not asked:
            prompt = [{"type": "text", "text": "Rather in blue."}]
            asked.append(
                asyncio.ensure_future(talk.editor.request("_session/steering", {"sessionId": id, "prompt": prompt}))
            )
            while not talk.session.state[STEERING].waiting:
                await asyncio.sleep(0)
        return speaker(request)

    async with talking(answer) as talk:
        id = talk.session.id
        assert await talk.say("Look at all of it") == "end_turn"
        assert (await asked[0])["outcome"] == "injected"
        requests = talk.model.requests
        after = requests[requests.index(talk.summaries()[0]) + 1]
        then = requests[requests.index(after) + 1]
        assert [message["content"] for message in then["messages"] if message["role"] == "user"][
            -1
        ] == "Rather in blue."
        assert str(talk.session.log.entries).count("Rather in blue.") == 1


async def test_words_that_are_waiting_when_the_conversation_is_compacted_stay_word_for_word():
    looks = [Reply(tool_calls=[use("files_look", lines=40)]) for _ in range(20)]
    speaker, asked = Speaker([*looks, Reply("Seen.")]), list["asyncio.Task[Any]"]()
    words = "Rather in blue. " * 300

    async def answer(request: Request) -> Reply:
        if tokens(request) > WINDOW * 0.6 and not asked:
            prompt = [{"type": "text", "text": words}]
            asked.append(
                asyncio.ensure_future(talk.editor.request("_session/steering", {"sessionId": id, "prompt": prompt}))
            )
            while not talk.session.state[STEERING].waiting:
                await asyncio.sleep(0)
        return speaker(request)

    async with talking(answer) as talk:
        id = talk.session.id
        assert await talk.say("Look at all of it") == "end_turn"
        assert (await asked[0])["outcome"] == "injected"
        first = next(request for request in talk.asked() if "Rather in blue." in str(request))
        assert words.strip() in str(first["messages"][1:])
        assert talk.markers()


async def test_old_outputs_shrink_first_and_the_model_can_read_them_back():
    replies = [Reply(tool_calls=[use("files_look", lines=900)]), Reply("Seen.")]
    async with talking(Speaker(replies), threshold=3_200) as talk:
        await talk.say("Look")
        (call,) = [call for entry in talk.session.log for call in entry.get("tool_calls", [])]
        await talk.say("And now?")
        (marker,) = talk.markers()
        assert marker["kind"] == "shrink"
        assert not talk.summaries()
        short = talk.asked()[-1]["messages"][3]["content"]
        assert len(short) < 2_200
        assert f"read_output gives the whole of '{call['id']}'" in short
        whole = next(entry for entry in talk.session.log if entry.get("role") == "tool").get("content")

        talk.model._script = Speaker([Reply(tool_calls=[use("read_output", call=call["id"], offset=8_000)])])
        await talk.say("Read it again")
        page = talk.asked()[-1]["messages"][-1]["content"]
        text, _, where = page.rpartition("\n\n")
        assert text == str(whole)[8_000:16_000]
        assert where == f"[characters 8,000 to {8_000 + len(text):,} of {len(str(whole)):,}]" or "goes on" in where


async def test_read_output_is_offered_from_the_first_shortened_output_on_and_the_list_changes_only_once():
    replies = [Reply(tool_calls=[use("files_look", lines=900)]), Reply("Seen.")]
    async with talking(Speaker(replies), threshold=3_200) as talk:
        for words in ("Look", "And now?", "And then?", "/compact", "And last?"):
            await talk.say(words)
        offered = [[tool["function"]["name"] for tool in request["tools"]] for request in talk.asked()]
        before = ["files_look", "files_picture"]
        shortened = [bool("read_output gives" in str(request["messages"])) for request in talk.asked()]
        assert offered[0] == before
        assert sorted(offered[-1]) == [*before, "read_output"]
        assert len({str(request["tools"]) for request in talk.asked()}) == 2
        assert all("read_output" in names for names, cut in zip(offered, shortened, strict=True) if cut)
        assert any(shortened)


async def test_summary_alone_does_not_change_the_tool_list():
    async with talking(Speaker()) as talk:
        for words in (LONG, LONG, LONG, "/compact", "And last?"):
            await talk.say(words)
        assert [marker["kind"] for marker in talk.markers()] == ["compaction"]
        assert len({str(request["tools"]) for request in talk.model.requests}) == 1


@pytest.mark.parametrize(("more", "kind"), [(3, "shrink"), (8, "compaction")])
async def test_summary_is_made_only_where_shrinking_is_not_enough(more: int, kind: str):
    replies = [Reply(tool_calls=[use("files_look", lines=400)]), Reply("Seen.")]
    async with talking(Speaker(replies), window=100_000, threshold=6_000) as talk:
        await talk.say(f"Look. {LONG * 8}")
        assert not talk.markers()
        await talk.say(f"And now? {LONG * more}")
        (marker,) = talk.markers()
        assert marker["kind"] == kind
        assert marker["after"] <= 6_000
        assert (f"{marker['after']:,} tokens. {SHRUNK}" in talk.editor.thoughts) == (kind == "shrink")
        assert len(talk.summaries()) == (kind == "compaction")


def test_conversation_is_cut_only_where_every_tool_call_is_answered():
    calls: Any = [{"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}} for id in ("x", "y")]
    entries: list[Message] = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "x", "content": "X"},
        {"role": "user", "content": "Hurry"},
        {"role": "tool", "tool_call_id": "y", "content": "Y"},
        {"role": "assistant", "content": "Seen."},
    ]
    for at, entry in enumerate(entries):
        entry["crow"] = {"id": str(at)}
    assert find_cuts(entries) == [0, 1, 5]


async def test_output_with_an_image_is_read_back_with_the_image():
    replies = [Reply(tool_calls=[use("files_picture")]), Reply("A bird.")]
    async with talking(Speaker(replies)) as talk:
        await talk.say("Look")
        (call,) = [call for entry in talk.session.log for call in entry.get("tool_calls", [])]
        talk.model._script = Speaker([Reply(tool_calls=[use("read_output", call=call["id"])])])
        await talk.say("Look again")
        *_, result = [entry for entry in talk.session.log if entry.get("role") == "tool"]
        assert "image_url" in str(result.get("content"))


@pytest.mark.parametrize("arguments", [{"call": "nobody's"}, {"call": "", "offset": -1}, {"offset": 3}])
async def test_invalid_read_output_call_fails(arguments: dict[str, Any]):
    async with talking(Speaker([Reply(tool_calls=[use("read_output", **arguments)])])) as talk:
        await talk.say("Read it")
        *_, result = [entry for entry in talk.session.log if entry.get("role") == "tool"]
        assert result.get("crow", {})["failed"]


def call_a_tool(request: Request) -> Reply:
    """Call a tool wherever tools are offered."""
    look = [use("files_look", lines=1)]
    return Reply("Let me look.", tool_calls=look) if "tools" in request else Reply("All went well.")


BAD: list[tuple[Reply, str]] = [
    (Reply(""), "was empty"),
    (Reply("", tool_calls=[use("files_look", lines=1)]), "called a tool"),
    (Reply('<tool_call>\n{"name": "files_look", "arguments": {"lines": 1}}\n</tool_call>'), "called a tool"),
    (Reply("No.", finish_reason="content_filter"), "refused"),
    (Reply("", reasoning="Hm, what was said? " * 20, finish_reason="length"), "cut short"),
    (Reply("Half", finish_reason="length"), "cut short"),
    (Reply(LONG * 100), "not be shorter"),
    (Reply(error=ModelError("The server is gone.")), "The server is gone."),
]
IDS = [str(n) for n in range(len(BAD))]


@pytest.mark.parametrize(("reply", "why"), BAD, ids=IDS)
async def test_unusable_summary_leaves_the_view_unchanged_and_is_reported(reply: Reply, why: str):
    async with talking(Speaker(summary=lambda request: reply), capabilities=SEES_COMPACTIONS) as talk:
        for turn in range(7):
            assert await talk.say(f"Turn {turn}. {LONG}") == "end_turn"
        assert talk.summaries()
        assert not talk.markers()
        assert words(talk.asked()[-1])[1::2] == [f"Turn {turn}. Thes"[:12] for turn in range(7)]
        assert why in talk.editor.thoughts
        *_, last = talk.editor.of(CompactionUpdate)
        assert (last.status, why in str(last.error)) == ("failed", True)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("reply", "why"), BAD, ids=IDS)
async def test_after_three_unusable_summaries_the_oldest_turns_are_left_out_and_the_user_is_told(
    reply: Reply, why: str
):
    replies = [Reply("Yes."), Reply(tool_calls=[use("files_look", lines=9)]), Reply("Seen.")]
    async with talking(Speaker(replies, summary=lambda request: reply, limit=WINDOW)) as talk:
        await talk.say("The first words")
        turns = 0
        while not talk.markers():
            assert await talk.say(f"Turn {turns}. {LONG}") == "end_turn"
            turns += 1
        assert await talk.say("And now?") == "end_turn"
        *_, marker = talk.markers()
        assert marker["kind"] == "compaction"
        assert len(talk.summaries()) == 3
        assert why in talk.editor.thoughts
        (told,) = [line for line in talk.editor.thoughts.splitlines() if "oldest messages behind" in line]
        seen = talk.asked()[-1]["messages"]
        gone = [turn for turn in range(turns) if f"Turn {turn}." not in str(seen)]
        dropped = 1 + 2 * len(gone) + 2  # "Yes.", the turns, and the tool call of one of them
        assert told.startswith("No summary could be made. ")
        assert why in told
        assert told.endswith(
            f" The {dropped} oldest messages behind the first were left out: the model no longer sees them, but the "
            "session keeps them. Say again what it still needs."
        )
        assert " tokens. The oldest messages were left out without a summary." in talk.editor.thoughts
        assert marker["pinned"] == [], "nothing is kept twice"
        assert seen[1]["content"].startswith("The first words")
        assert LEFT_OUT in seen[1]["content"]
        assert f"Turn {turns - 1}." in str(seen)
        assert "Turn 0." not in str(seen)
        assert f"Turn {turns - 4}." in str(seen), "no more than necessary is left out"
        assert seen[1]["content"].endswith(f"Turn {len(gone)}. {LONG}"), "whole turns are left out"
        calls = [call["id"] for message in seen for call in message.get("tool_calls", [])]
        assert calls == [message["tool_call_id"] for message in seen if message["role"] == "tool"]
        assert len([entry for entry in talk.session.log if entry.get("role") == "user"]) == turns + 2


async def test_tool_call_in_place_of_a_summary_is_ignored_and_the_model_asked_again_without_tools():
    async with talking(Speaker(summary=call_a_tool)) as talk:
        while not talk.markers():
            assert await talk.say(f"What is it? {LONG}") == "end_turn"
        (marker,) = talk.markers()
        assert marker["summary"] == "All went well."
        first, second = talk.summaries()
        assert "tools" in first
        assert "tools" not in second
        assert [message["role"] for message in second["messages"]] == ["system", "user"]
        assert second["messages"][1]["content"].startswith(f"<conversation>\n\n[User]\nWhat is it? {LONG.strip()}")
        assert "\n\n[Assistant]\nWell.\n\n[User]\n" in second["messages"][1]["content"]
        assert not [entry for entry in talk.session.log if entry.get("role") == "tool"], "nothing ran"
        assert "could not" not in talk.editor.thoughts


async def test_tool_call_beside_a_summary_is_ignored():
    summary = Reply("All went well. " * 30, tool_calls=[use("files_look", lines=1)])
    async with talking(Speaker(summary=lambda request: summary)) as talk:
        while not talk.markers():
            assert await talk.say(LONG) == "end_turn"
        (marker,) = talk.markers()
        assert marker["summary"] == summary.content.strip()
        assert len(talk.summaries()) == 1


async def test_conversation_as_text_tells_who_said_what_and_which_tools_were_called():
    look = Reply("I look.", tool_calls=[use("files_look", lines=300)])
    async with talking(Speaker([look, Reply("Seen.")], summary=call_a_tool)) as talk:
        await talk.say("Look at it")
        for _ in range(3):
            await talk.say(LONG)
        await talk.say("/compact keep the word for red")
        (_, text) = (request["messages"][-1]["content"] for request in talk.summaries())
        assert text.startswith(
            "<conversation>\n\n[User]\nLook at it\n\n[Assistant]\nI look.\n\n"
            '[Assistant calls files_look]\n{"lines": 300}\n\n[Result of a tool]\nline 0 of 300\n'
        )
        assert "line 299 of 300" in text
        assert "line 150 of 300" not in text, "long outputs are shortened"
        assert "in particular:\nkeep the word for red" in text


async def test_shrunk_outputs_stay_shrunk_where_no_summary_can_be_made():
    replies = [Reply(tool_calls=[use("files_look", lines=300)]), Reply("Seen.")]
    async with talking(Speaker(replies, summary=lambda request: Reply("")), capabilities=SEES_COMPACTIONS) as talk:
        await talk.say(f"Look. {LONG * 3}")
        assert await talk.say(f"And now? {LONG * 3}") == "end_turn"
        (marker,) = talk.markers()
        assert marker["kind"] == "shrink"
        assert marker["after"] > 0.8 * WINDOW, "not enough, but better than nothing"
        assert "No summary could be made. The model's summary was empty." in talk.editor.thoughts
        assert marker["upto"], "the latest outputs stay whole"
        assert await talk.say("Go on") == "end_turn"
        assert "read_output gives the whole" in str(talk.asked()[-1]["messages"])
        *_, last = talk.editor.of(CompactionUpdate)
        assert last.status == "completed"


async def test_failed_compaction_is_not_tried_again_until_the_conversation_has_grown():
    async with talking(Speaker(summary=lambda request: Reply("")), window=WINDOW * 2) as talk:
        while not talk.summaries():
            await talk.say(LONG)
        assert len(talk.summaries()) == 2, "once with the messages, once as a text"
        for _ in range(3):
            await talk.say("And?")
        assert len(talk.summaries()) == 2
        while len(talk.summaries()) == 2:
            await talk.say(LONG)
        assert len(talk.summaries()) == 3
        assert talk.markers()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("summary", [Reply(""), Reply(LONG * 100)], ids=["empty", "too long"])
@pytest.mark.parametrize("window", [WINDOW, 100_000], ids=["known window", "unknown window"])
async def test_turn_that_does_not_fit_is_answered_although_no_summary_can_be_made(window: int, summary: Reply):
    async with talking(Speaker(summary=lambda request: summary, limit=WINDOW), window=window, threshold=0.9) as talk:
        for turn in range(6):
            await talk.say(f"Turn {turn}. {LONG}")
        assert not talk.markers()
        assert await talk.say(f"Read this. {LONG * 5}") == "end_turn"
        assert talk.editor.text == "Well." * 7
        assert len(talk.summaries()) == 3
        assert "oldest messages" in talk.editor.thoughts
        assert talk.asked()[-1]["messages"][-1]["content"].endswith(f"Read this. {LONG * 5}")


async def test_long_turn_keeps_its_prompt_although_no_summary_can_be_made():
    looks = [Reply(tool_calls=[use("files_look", lines=40)]) for _ in range(60)]
    replies = [Reply("Hello."), *looks]
    async with talking(Speaker(replies, summary=lambda request: Reply(""), limit=WINDOW)) as talk:
        await talk.say("The first words")
        assert await talk.say("Look at all of it") == "end_turn"
        assert "oldest messages" in talk.editor.thoughts
        seen = talk.asked()[-1]["messages"]
        assert seen[1]["content"].startswith("The first words\n\nLook at all of it\n\n")
        assert LEFT_OUT in seen[1]["content"]


async def test_outputs_of_the_current_turn_shrink_where_no_summary_can_be_made():
    look = Reply(tool_calls=[use("files_look", lines=2_000)])
    replies, gone = [Reply("Hello."), Reply("Well."), look, Reply("Seen.")], ModelError("The server is gone.")
    async with talking(Speaker(replies, summary=lambda request: Reply(error=gone), limit=WINDOW)) as talk:
        await talk.say("The first words")
        await talk.say(LONG)
        assert await talk.say("Look") == "end_turn"
        assert talk.editor.text == "Hello.Well.Seen."
        assert "read_output gives the whole" in str(talk.asked()[-1]["messages"][-1]["content"])
        assert [(marker["kind"], marker["upto"]) for marker in talk.markers()] == [("shrink", "")]
        assert f" tokens. {SHRUNK}" in talk.editor.thoughts
        assert await talk.say("Go on") == "end_turn"


async def test_counting_of_unusable_summaries_begins_anew_after_messages_were_left_out():
    async with talking(Speaker(summary=lambda request: Reply(""), limit=WINDOW)) as talk:
        for times in (1, 2):
            while len(left_out := [marker for marker in talk.markers() if marker["kind"] == "compaction"]) < times:
                assert await talk.say(LONG) == "end_turn"
            assert len(talk.summaries()) == 3 * times
            assert left_out[-1]["summary"] == LEFT_OUT


async def test_summary_that_is_too_long_is_not_asked_for_again_at_once():
    async with talking(Speaker(summary=lambda request: Reply(LONG * 100)), window=WINDOW * 2) as talk:
        while not talk.summaries():
            assert await talk.say(LONG) == "end_turn"
        assert len(talk.summaries()) == 1


async def test_compact_command_asks_for_an_unusable_summary_twice_at_most():
    async with talking(Speaker(summary=lambda request: Reply(""))) as talk:
        for _ in range(3):
            await talk.say(LONG)
        await talk.say("/compact")
        assert len(talk.summaries()) == 2, "once with the messages, once as a text"
        assert "Nothing was compacted. The model's summary was empty." in talk.editor.text


async def test_client_that_shows_compactions_is_told_once_why_a_command_compacts_nothing():
    async with talking(Speaker(), capabilities=SEES_COMPACTIONS) as talk:
        await talk.say("/compact")
        (_, last) = talk.editor.of(CompactionUpdate)
        assert (last.status, "There is nothing yet to sum up" in str(last.error)) == ("failed", True)
        assert talk.editor.text == ""


async def test_summary_is_not_asked_for_behind_an_unanswered_prompt():
    async with talking(Speaker(limit=WINDOW)) as talk:
        for turn in range(5):
            await talk.say(f"Turn {turn}. {LONG}")
        before = talk.asked()[-1]["messages"]
        await talk.say(f"Read this. {LONG * 6}")
        (summary,) = talk.summaries()
        assert "Read this." not in str(summary["messages"])
        assert summary["messages"][: len(before)] == before, "asked on the same prefix"
        assert [message["role"] for message in summary["messages"][-2:]] == ["assistant", "user"]
        assert summary["messages"][-1]["content"].startswith("This conversation is about to become too long")


async def test_window_that_is_much_smaller_than_it_seems_is_found_by_several_attempts():
    looks = [Reply(tool_calls=[use("files_look", lines=400)]), Reply("Seen.")]
    async with talking(Speaker(looks * 3), window=100_000) as talk:
        for turn in range(3):
            await talk.say(f"Turn {turn}. {LONG * 4}")
        talk.model._script = Speaker(limit=WINDOW)
        assert await talk.say("And now?") == "end_turn"
        assert [marker["kind"] for marker in talk.markers()] == ["shrink", "compaction"]
        assert talk.editor.text.endswith("Seen.Well.")


async def test_summary_that_was_cut_short_stands_for_what_is_left_out():
    def sum_up(request: Request) -> Reply:
        return Reply("The user wants it all in", finish_reason="length")

    async with talking(Speaker(summary=sum_up)) as talk:
        while not talk.markers():
            assert await talk.say(LONG) == "end_turn"
        await talk.say("And?")
        first = talk.asked()[-1]["messages"][1]["content"]
        assert f"The user wants it all in\n\n{CUT_SHORT}\n\n{LEFT_OUT}" in first
        assert "a larger max_tokens or window may help" in talk.editor.thoughts


async def test_earlier_summary_stays_when_later_turns_are_left_out():
    summaries = [Reply("Red is rouge.")]
    async with talking(Speaker(summary=lambda request: summaries.pop() if summaries else Reply(""))) as talk:
        for markers in (3, 5):
            while len(talk.markers()) < markers:
                assert await talk.say(LONG) == "end_turn"
            await talk.say("And?")
            first = talk.asked()[-1]["messages"][1]["content"]
            assert f"Red is rouge.\n\n{LEFT_OUT}" in first
            assert first.count(LEFT_OUT) == 1


async def test_summary_is_asked_to_be_as_short_as_max_tokens_demands():
    async with ScriptedServer(Speaker()) as server:
        model = ChatModel(name="scripted", base_url=server.url, window=WINDOW, parameters={"max_tokens": 200})
        async with connect(Crow(model).use(commands).use(compact)) as editor:
            session = await editor.new_session("/")
            for text in (LONG, LONG, LONG, "/compact"):
                await editor.prompt(session.session_id, text)
        asked = next(request for request in server.requests if is_compaction(request))
        assert "Write about 120 words at most." in asked["messages"][-1]["content"]
        await model.close()


async def test_request_refused_as_too_long_is_compacted_and_sent_again_once():
    async with talking(Speaker(limit=2_500), window=100_000) as talk:
        for turn in range(12):
            assert await talk.say(f"Turn {turn}. {LONG}") == "end_turn"
        assert talk.editor.text == "Well." * 12
        refused = [request for request in talk.asked() if tokens(request) > 2_500]
        assert len(refused) == 1, "then the limit is known"
        assert talk.markers()


async def test_request_refused_as_too_long_is_summed_up_if_no_output_can_be_shortened():
    """By its estimate, the request was short enough: a report that tool outputs were shortened would be wrong."""
    async with talking(Speaker(limit=2_500), window=100_000, threshold=90_000) as talk:
        for turn in range(7):
            assert await talk.say(f"Turn {turn}. {LONG}") == "end_turn"
        assert [marker["kind"] for marker in talk.markers()] == ["compaction"]
        assert SHRUNK not in str(talk.editor.updates)


async def test_prompt_that_does_not_fit_is_compacted_before_it_is_sent():
    async with talking(Speaker(limit=WINDOW)) as talk:
        for turn in range(5):
            await talk.say(f"Turn {turn}. {LONG}")
        assert not talk.markers()
        await talk.say(f"Read this. {LONG * 6}")
        assert talk.editor.text == "Well." * 6
        assert max(map(tokens, talk.model.requests)) <= WINDOW, "nothing was refused"
        assert len(talk.markers()) == 1
        last = talk.asked()[-1]["messages"][-1]["content"]
        assert SUMMARY_TEMPLATE.format("All went well.") in last
        assert last.endswith(f"Read this. {LONG * 6}")


async def test_prompt_that_is_too_long_by_itself_is_sent_unchanged():
    async with talking(Speaker()) as talk:
        await talk.say("Hello")
        await talk.say(LONG)
        await talk.say(LONG * 12)
        assert not any(map(is_compaction, talk.model.requests[:3])), "nothing would help, and the estimate may be wrong"


async def test_endpoint_that_refuses_a_long_request_gets_a_shorter_one():
    def answer(request: Request) -> Reply | Failure:
        if tokens(request) > 3_000:
            return Failure(400, {"error": {"message": "the request exceeds the available context size (3000 tokens)"}})
        return Speaker()(request)

    async with ScriptedServer(answer) as server:
        model = ChatModel(name="scripted", base_url=server.url, window=100_000)
        crow = Crow(model, system=Prompt("system", "You are crow.")).use(compact)
        async with connect(crow) as editor:
            session = await editor.new_session("/")
            for turn in range(9):
                answered = await editor.prompt(session.session_id, f"Turn {turn}. {LONG}")
                assert answered.stop_reason == "end_turn"
            assert editor.text == "Well." * 9
        await model.close()


async def test_request_that_stays_too_long_ends_the_turn_with_the_servers_message():
    async with talking(Speaker(limit=300)) as talk:
        await talk.say("Hello")
        with pytest.raises(RpcError, match="context length"):
            await talk.say(LONG)
        assert len(talk.model.requests) <= 3
        assert await talk.say("/compact") == "end_turn"


async def test_summary_request_that_is_too_long_is_made_in_parts():
    def sum_up(request: Request) -> Reply:
        said = "\n".join(str(message["content"]) for message in request["messages"])
        return Reply("Seen: " + " ".join(name for name in ("rouge", "bleu", "vert") if name in said))

    async with talking(Speaker(summary=sum_up), window=100_000) as talk:
        for name in ("rouge", *[""] * 5, "bleu", *[""] * 5, "vert", *[""] * 5):
            await talk.say(f"{name} {LONG}")
        talk.model._script = Speaker(summary=sum_up, limit=4_000)
        assert await talk.say("And?") == "end_turn"
        assert len([request for request in talk.summaries() if tokens(request) <= 4_000]) > 1
        (marker,) = talk.markers()
        assert marker["summary"] == "Seen: rouge bleu vert"
        assert talk.editor.text == "Well." * 19


async def test_parts_begin_with_the_earlier_summary():
    def sum_up(request: Request) -> Reply:
        said = "\n".join(str(message["content"]) for message in request["messages"])
        return Reply("Seen: " + " ".join(name for name in ("rouge", "bleu", "vert") if name in said))

    looks = [Reply(tool_calls=[use("files_look", lines=20)]) for _ in range(12)]
    async with talking(Speaker(summary=sum_up), window=6_000) as talk:
        await talk.say("Hello")
        await talk.say(f"rouge {LONG}")
        talk.model._script = Speaker(looks, summary=sum_up)
        await talk.say(f"bleu {LONG * 3}")
        await talk.say("/compact")
        for _ in range(4):
            await talk.say(f"vert {LONG}")
        talk.model._script = Speaker(summary=sum_up, limit=2_500)
        await talk.say("And?")
        assert talk.editor.text.count("Well.") == 8
        assert talk.markers()[-1]["summary"] == "Seen: rouge bleu vert"
        assert len([request for request in talk.summaries()[1:] if tokens(request) <= 2_500]) > 1


async def test_single_message_longer_than_the_window_does_not_keep_a_summary_from_being_made():
    async with talking(Speaker(), window=100_000) as talk:
        await talk.say("Hello")
        await talk.say(f"Here is a book. {LONG * 20}")
        await talk.say(LONG)
        talk.model._script = Speaker(limit=3_000)
        assert await talk.say("And?") == "end_turn"
        taken = [request for request in talk.summaries() if tokens(request) <= 3_000]
        assert any("[…]" in str(request) for request in taken), "the book is shortened"
        assert talk.markers()[-1]["summary"] == "All went well."


async def test_single_output_larger_than_the_window_is_cut_before_the_model_reads_it():
    replies = [Reply(tool_calls=[use("files_look", lines=2_000)]), Reply("Seen.")]
    async with talking(Speaker(replies, limit=WINDOW)) as talk:
        assert await talk.say("Look") == "end_turn"
        assert talk.editor.text == "Seen."
        assert "read_output gives the whole" in str(talk.asked()[-1]["messages"][-1]["content"])


async def test_cancelled_compaction_leaves_the_view_unchanged():
    asked = asyncio.Event()

    def begin(request: Request) -> Reply:
        asked.set()
        return Reply("Half", hang=True)

    async with talking(Speaker(summary=begin), capabilities=SEES_COMPACTIONS) as talk:
        for _ in range(3):
            await talk.say(LONG)
        turn = asyncio.ensure_future(talk.say("/compact"))
        await asked.wait()
        await talk.editor.cancel(talk.session.id)
        assert await turn == "cancelled"
        assert [update.status for update in talk.editor.of(CompactionUpdate)] == ["in_progress", "cancelled"]
        assert not talk.markers()
        assert await talk.say("Go on") == "end_turn"


async def test_compact_command_takes_instructions_and_answers_with_a_report():
    async with talking(Speaker()) as talk:
        for turn in range(3):
            await talk.say(f"Turn {turn}. {LONG}")
        await talk.say("/compact keep the word for {{ red }}")
        (summary,) = talk.summaries()
        assert "in particular:\nkeep the word for {{ red }}" in summary["messages"][-1]["content"]
        (marker,) = talk.markers()
        assert talk.editor.text.endswith(
            f"Compacted from about {marker['before']:,} to {marker['after']:,} tokens. "
            "Kept word for word: the first message, the last 2."
        )
        *_, used = talk.editor.of(UsageUpdate)
        assert used.used == marker["after"]
        await talk.say("/compact")
        assert talk.editor.text.endswith("There is nothing to sum up: all messages belong to the current work.")
        assert len(talk.summaries()) == 1


async def test_compact_command_in_a_new_session_does_nothing():
    async with talking(Speaker()) as talk:
        await talk.say("/compact")
        assert "Nothing was compacted. There is nothing yet to sum up" in talk.editor.text
        assert not talk.model.requests


async def test_pinned_messages_survive_word_for_word():
    replies = [Reply("Hello."), Reply(tool_calls=[use("files_look", lines=200)]), Reply("Seen: line 199.")]
    async with talking(Speaker(replies)) as talk:
        await talk.say("The first words")
        await talk.say("Never touch  the\nfile x.")
        await talk.say("/pin")
        await talk.say("/pin SEEN:")
        await talk.say("/pin of what was never said")
        assert "“Never touch the file x.”" in talk.editor.text
        assert "“Seen: line 199.”" in talk.editor.text
        assert "No message contains 'of what was never said'." in talk.editor.text
        while len(talk.summaries()) < 2:
            await talk.say(LONG)
        await talk.say("And?")
        view = talk.asked()[-1]["messages"]
        assert view[1]["content"] == "The first words\n\nNever touch  the\nfile x."
        assert "Kept word for word: the first message, 2 pinned, the last " in talk.editor.thoughts
        assert view[2]["content"] == "Seen: line 199."
        assert view[3]["content"].startswith(SUMMARY_TEMPLATE.format("All went well."))


async def test_pinned_output_does_not_shrink():
    replies = [Reply("I look.", tool_calls=[use("files_look", lines=400)]), Reply("Seen.")]
    async with talking(Speaker(replies)) as talk:
        await talk.say("Look")
        await talk.say("/pin i look")
        for _ in range(6):
            await talk.say(LONG)
        assert talk.markers()
        whole = next(entry for entry in talk.session.log if entry.get("role") == "tool").get("content")
        assert whole in [message["content"] for message in talk.asked()[-1]["messages"]]


@pytest.mark.parametrize(
    ("options", "when"),
    [
        ({"threshold": 1_300}, 3),
        ({"threshold": 0.33}, 3),
        ({"models": {"scripted": 0.33}}, 3),
        ({"threshold": 0}, None),
    ],
)
async def test_threshold_is_a_share_of_the_window_or_a_number_and_can_differ_by_model(options: Any, when: int | None):
    async with talking(Speaker(), **options) as talk:
        turns: list[int] = []
        for turn in range(1, 6):
            await talk.say(LONG)
            turns += [turn] if talk.markers() else []
        assert next(iter(turns), None) == when


async def test_tokens_are_estimated_without_usage_and_learned_from_usage():
    uncounted = Speaker([Reply("Well.", usage={}) for _ in range(40)])
    dense = Speaker([Reply("Well.", usage={"prompt_tokens": 1 + 500 * n}) for n in range(40)])
    for speaker, at_most in ((uncounted, 12), (dense, 9)):
        async with talking(speaker) as talk:
            while not talk.markers():
                await talk.say(LONG)
            assert 3 <= len(talk.asked()) <= at_most


async def test_tools_that_the_server_leaves_out_of_the_prompt_are_not_counted():
    def speak(request: Request) -> Reply:
        return Reply("Well.", usage={"prompt_tokens": tokens(request)})

    crow = Crow(ScriptedModel(speak, window=WINDOW), system=Prompt("system", "You are crow.")).use(compact)
    many = FastMCP("many")
    for number in range(60):
        many.tool(look, name=f"look_at_the_file_with_the_number_{number}", description=LONG[:600])
    crow.servers.append(Server("many", lambda: many, shared=True))
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        for turn in range(5):
            await editor.prompt(session.session_id, f"Turn {turn}. {LONG}")
        assert not editor.thoughts, "the window is not full yet"
        for turn in range(5):
            await editor.prompt(session.session_id, f"Turn {turn}. {LONG}")
        assert "Compacted from about" in editor.thoughts


async def test_client_with_the_capability_gets_updates_and_others_get_notices():
    async with talking(Speaker(), capabilities=SEES_COMPACTIONS) as talk:
        while not talk.markers():
            await talk.say(LONG)
        begun, done = talk.editor.of(CompactionUpdate)
        assert (begun.status, done.status, begun.compaction_id) == ("in_progress", "completed", done.compaction_id)
        report, summary = [block.text for block in done.summary or [] if isinstance(block, TextBlock)]
        assert report.startswith("Compacted from about")
        assert summary == "All went well."
    async with talking(Speaker()) as talk:
        while not talk.markers():
            await talk.say(LONG)
        assert not talk.editor.of(CompactionUpdate)
        assert "Compacted from about" in talk.editor.thoughts


async def test_prompt_can_be_replaced_and_its_renders_are_logged():
    async with talking(Speaker(summary=lambda request: Reply("Short."))) as talk:
        for _ in range(3):
            await talk.say(LONG)
        talk.session.prompts.templates["compaction"] = Prompt("compaction", "{{ instructions }}: in a word?")
        await talk.say("/compact red")
        assert talk.model.requests[-1]["messages"][-1]["content"] == "red: in a word?"
        (render,) = [e["crow"] for e in talk.session.log if e.get("crow", {}).get("purpose") == "compaction"]
        assert render["version"] == talk.session.prompts.templates["compaction"].version


async def test_invalid_prompt_is_reported_and_does_not_end_the_turn():
    async with talking(Speaker()) as talk:
        talk.session.prompts.templates["compaction"] = Prompt("compaction", "{{ unknown }}")
        for _ in range(8):
            assert await talk.say(LONG) == "end_turn"
        assert "The template of the prompt 'compaction' is wrong" in talk.editor.thoughts
        assert not talk.markers()


async def test_assumed_window_is_reported_as_assumed():
    async with talking(Speaker(), window=None) as talk:
        await talk.say("Hello")
        await talk.say(LONG * 90)
        assert "of 32,768 (assumed: set the model's window): making room" in talk.editor.thoughts
    async with talking(Speaker(limit=WINDOW * 10), window=None) as talk:
        with pytest.raises(RpcError, match="context length"):
            await talk.say(LONG * 100)
        assert "of 32,768 (assumed: set the model's window): making room" in talk.editor.thoughts


async def test_rewind_brings_back_what_was_compacted():
    async with talking(Speaker()) as talk:
        while not talk.markers():
            await talk.say(LONG)
        before = talk.asked()[-1]["messages"]
        asked = [entry["crow"]["id"] for entry in talk.session.log if entry.get("role") == "user"]
        talk.session.rewind(asked[-1])
        await talk.say("Again")
        assert talk.asked()[-1]["messages"][:-1] == before[:-1]
