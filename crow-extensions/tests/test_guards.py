"""The loop guard and budgets stop a model that does not stop by itself."""

from typing import Any

import pytest
from crow_core.acp.connection import RpcError
from crow_core.acp.schema import (
    ClientCapabilities,
    ClientSessionCapabilities,
    CreateElicitationResponse,
    ElicitationCapabilities,
    ElicitationFormCapabilities,
    LoadSessionRequest,
    NoticeCapabilities,
    NoticeUpdate,
)
from crow_core.app import Crow
from crow_core.mcp.server import Server
from crow_core.messages.message import Message
from crow_core.models.chat_model import ChatModel
from crow_core.models.model_call import Prices
from crow_core.session.session import Session
from crow_core.session.store import Record
from crow_core.testing import Editor, MemoryStore, Reply, ScriptedModel, ScriptedServer, connect
from crow_core.testing.script import ScriptedCall as Use
from crow_extensions.budgets import budgets
from crow_extensions.loop_guard import loop_guard
from fastmcp import FastMCP

pytestmark = pytest.mark.anyio

FORMS = ClientCapabilities(elicitation=ElicitationCapabilities(form=ElicitationFormCapabilities()))
NOTICES = ClientCapabilities(session=ClientSessionCapabilities(notices=NoticeCapabilities()))
LOOK: Use = {"name": "box_look", "arguments": {"at": "a"}}


def box(answers: list[str] | None = None, *, name: str = "box", meta: dict[str, Any] | None = None) -> Server:
    """Make a server with a tool that returns these answers in turn, or always the same."""
    server = FastMCP(name)
    answers = answers or []

    @server.tool(meta=meta)
    def look(at: str) -> str:
        return answers.pop(0) if answers else f"empty: {at}"

    return Server(name, lambda: server, shared=True)


def results(model: ScriptedModel) -> list[str]:
    """Return the tool results in the last request to the model."""
    return [message["content"] for message in model.requests[-1]["messages"] if message["role"] == "tool"]


def make_model(*, until: int) -> ScriptedModel:
    """Make a model that makes the same tool call several times."""
    return ScriptedModel([*[Reply(tool_calls=[LOOK]) for _ in range(until)], Reply("I give up.")])


NOTED = "You have this already"


async def test_a_model_that_repeats_a_call_is_told_that_it_has_the_result():
    model = make_model(until=2)
    async with connect(Crow(model, servers=[box()]).use(loop_guard)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    first, second = results(model)
    assert first == "empty: a"
    assert second.startswith("[You have this already: you made this very call 2 times")
    assert second.endswith("Go on with the next step, or answer.\n\nempty: a")
    assert "tools" in model.requests[-1]


async def test_a_long_result_is_repeated_in_part():
    model = make_model(until=2)
    async with connect(Crow(model, servers=[box(["x" * 5_000] * 2)]).use(loop_guard)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    assert 1_000 < len(results(model)[1]) < 1_300


async def test_a_model_that_goes_on_repeating_answers_without_tools():
    model = make_model(until=3)
    async with connect(Crow(model, servers=[box()]).use(loop_guard), capabilities=NOTICES) as editor:
        session = await editor.new_session("/")
        answer = await editor.prompt(session.session_id, "go")
        assert (answer.stop_reason, editor.text) == ("end_turn", "I give up.")
    assert ["tools" in request for request in model.requests[:4]] == [True, True, True, False]
    assert "Do not call tools any more. Answer now" in str(model.requests[3]["messages"][-1]["content"])
    assert [notice.title for notice in editor.of(NoticeUpdate)] == [
        "The model repeats a call of box_look. crow asks it to answer without tools."
    ]
    assert editor.questions == []


ENDED = "crow ended the turn. The model called box_look 3 times and it gave the same each time."


async def test_a_model_that_calls_without_tools_ends_the_turn_and_no_call_runs():
    answers = [f"{number}" for number in (1, 1, 1, 2)]
    crow = Crow(make_model(until=9), servers=[box(answers)]).use(loop_guard)
    async with connect(crow, capabilities=NOTICES) as editor:
        session = await editor.new_session("/")
        answer = await editor.prompt(session.session_id, "go")
    assert answer.stop_reason == "max_turn_requests"
    assert answer.meta
    stopped = answer.meta["crow"]["stopped"]
    assert stopped["by"] == "repeated_calls"
    assert stopped["reason"].startswith(ENDED)
    assert editor.text == ""
    assert [notice.title for notice in editor.of(NoticeUpdate)][1:] == [stopped["reason"]]
    assert answers == ["2"]


async def test_a_model_that_prints_the_call_without_tools_ends_the_turn():
    printed = '{"name": "box_look", "arguments": {"at": "a"}}'
    model = ScriptedModel([*[Reply(tool_calls=[LOOK])] * 3, Reply(printed)])
    async with connect(Crow(model, servers=[box()]).use(loop_guard)) as editor:
        session = await editor.new_session("/")
        answer = await editor.prompt(session.session_id, "go")
    assert answer.stop_reason == "max_turn_requests"


POLLS = {"crow/repeats": True}


@pytest.mark.parametrize("declared", ["by its server", "by the configuration"])
async def test_calls_of_a_tool_that_polls_are_no_loop(declared: str):
    model = make_model(until=9)
    server = box(meta=POLLS if declared == "by its server" else None)
    patterns = ["box_*"] if declared == "by the configuration" else []
    async with connect(Crow(model, servers=[server]).use(loop_guard, repeats=patterns)) as editor:
        session = await editor.new_session("/")
        answer = await editor.prompt(session.session_id, "go")
    assert answer.stop_reason == "end_turn"
    assert editor.text == "I give up."
    assert editor.questions == []
    assert not any(NOTED in result for result in results(model))


async def test_a_tool_that_polls_between_equal_calls_does_not_hide_the_loop():
    poll: Use = {"name": "wait_look", "arguments": {"at": "b"}}
    model = ScriptedModel([*[Reply(tool_calls=[use]) for use in [LOOK, poll] * 5], Reply("Done.")])
    servers = [box(), box(meta=POLLS, name="wait")]
    async with connect(Crow(model, servers=servers).use(loop_guard), permit="reject_once") as editor:
        session = await editor.new_session("/")
        answer = await editor.prompt(session.session_id, "go")
    assert answer.stop_reason == "max_turn_requests"


async def test_two_alternating_calls_are_a_loop():
    other: Use = {"name": "box_look", "arguments": {"at": "b"}}
    model = ScriptedModel([*[Reply(tool_calls=[use]) for use in [LOOK, other] * 3], Reply("Done.")])
    async with connect(Crow(model, servers=[box()]).use(loop_guard)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    assert [(NOTED in result) for result in results(model)] == [False] * 3 + [True] * 3


async def test_a_changed_result_starts_the_count_again():
    model = make_model(until=5)
    async with connect(Crow(model, servers=[box(["0%", "0%", "50%", "0%", "0%"])]).use(loop_guard)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "wait for it")
    assert [(NOTED in result) for result in results(model)] == [False, True, False, False, True]
    assert editor.questions == []


async def test_results_that_all_differ_are_not_a_loop():
    model = make_model(until=9)
    answers = [f"{number}%" for number in range(9)]
    async with connect(Crow(model, servers=[box(answers)]).use(loop_guard)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "wait for it")
    assert results(model) == [f"{number}%" for number in range(9)]
    assert editor.questions == []


async def test_each_turn_starts_the_count_again():
    model = ScriptedModel([Reply(tool_calls=[LOOK]), Reply("Empty.")] * 3)
    async with connect(Crow(model, servers=[box()]).use(loop_guard)) as editor:
        session = await editor.new_session("/")
        for _ in range(3):
            await editor.prompt(session.session_id, "look")
    assert not any(NOTED in result for result in results(model))


async def spend(
    model: Any, *, permit: str = "reject_once", prompts: int = 1, **limits: Any
) -> tuple[Editor, list[str]]:
    crow = Crow(model, servers=[box()]).use(budgets, **limits)
    async with connect(crow, permit=permit) as editor:
        session = await editor.new_session("/")
        reasons = [(await editor.prompt(session.session_id, "go")).stop_reason for _ in range(prompts)]
    return editor, reasons


async def test_a_turn_ends_if_the_user_refuses_more_budget():
    model = make_model(until=9)
    editor, reasons = await spend(model, requests=3)
    assert len(model.requests) == 3
    assert reasons == ["max_turn_requests"]
    assert editor.text == "The budget is used up: 3 of 3 requests. [extensions.budgets] sets it."
    assert [message["role"] for message in model.requests[-1]["messages"]][-2:] == ["assistant", "tool"]


async def test_going_on_grants_the_same_budget_again():
    model = make_model(until=8)
    editor, reasons = await spend(model, permit="allow_once", requests=3)
    assert reasons == ["end_turn"]
    assert [question.tool_call.title for question in editor.questions] == [
        "The budget is used up: 3 of 3 requests. Go on, with as much again?",
        "The budget is used up: 6 of 6 requests. Go on, with as much again?",
    ]


async def test_a_budget_holds_for_the_session_so_the_next_prompt_asks_again():
    model = make_model(until=9)
    editor, reasons = await spend(model, prompts=3, requests=2)
    assert reasons == ["max_turn_requests"] * 3
    assert len(model.requests) == 2
    assert len(editor.questions) == 3


async def test_input_and_output_tokens_count():
    counts = {"prompt_tokens": 900, "completion_tokens": 100}
    model = ScriptedModel([Reply(tool_calls=[LOOK], usage=counts)] * 3)
    editor, _ = await spend(model, tokens=2000)
    assert "2,000 of 2,000 tokens" in editor.text


async def test_minutes_of_turns_count():
    editor, reasons = await spend(ScriptedModel([]), minutes=1e-9)
    assert reasons == ["max_turn_requests"]
    assert "minutes" in editor.text


async def test_money_counts_if_the_model_has_prices():
    usage = {"prompt_tokens": 1_000_000, "completion_tokens": 0}
    async with ScriptedServer([Reply(tool_calls=[LOOK], usage=usage)] * 2) as server:
        model = ChatModel(name="scripted", base_url=server.url, prices=Prices(input=3, output=9))
        editor, reasons = await spend(model, money=5)
    assert reasons == ["max_turn_requests"]
    assert "6 of 5 money" in editor.text


async def test_money_needs_a_model_with_prices():
    async with ScriptedServer([]) as server:
        crow = Crow(ChatModel(name="mute", base_url=server.url)).use(budgets, money=5)
        async with connect(crow) as editor:
            session = await editor.new_session("/")
            with pytest.raises(RpcError) as raised:
                await editor.prompt(session.session_id, "go")
        assert not server.requests
    assert "`money` of [extensions.budgets] needs the prices of mute." in str(raised.value.data)


async def test_a_loaded_session_knows_what_it_has_used():
    crow, log = Crow(make_model(until=9), servers=[box()]).use(budgets, requests=2), list[Message]()

    @crow.session_end
    def keep(session: Session) -> None:
        log.extend(session.log)

    async with connect(crow, permit="reject_once") as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    later = Crow(model := ScriptedModel([]), servers=[box()]).use(budgets, requests=2)
    later.store = MemoryStore(Record("s", log))
    async with connect(later, permit="reject_once") as editor:
        await editor.request("session/load", LoadSessionRequest(session_id="s", cwd="/", mcp_servers=[]))
        answer = await editor.prompt("s", "go on")
    assert answer.stop_reason == "max_turn_requests"
    assert model.requests == []


@pytest.mark.parametrize(("said", "requests"), [("Go on", 4), ("Stop", 2)])
async def test_a_client_with_forms_is_asked_by_a_form(said: str, requests: int):
    model = make_model(until=3)
    async with connect(Crow(model, servers=[box()]).use(budgets, requests=2), capabilities=FORMS) as editor:
        editor.answer = CreateElicitationResponse(action="accept", content={"answer": said})
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    assert len(model.requests) == requests
    assert editor.questions == []
    assert editor.forms[0].message.startswith("The budget is used up: 2 of 2 requests.")
