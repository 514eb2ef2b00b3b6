"""Steering: what the user says while a turn runs reaches the model before its next call of the same turn."""

import asyncio
from typing import Any

import pytest
from crow_core.acp.connection import RpcError
from crow_core.acp.schema import (
    INVALID_PARAMS,
    REQUEST_CANCELLED,
    AgentMessageChunk,
    TextBlock,
    ToolCallUpdate,
    UserMessageChunk,
)
from crow_core.acp.shared_methods import STEERING_METHOD, make_steering_params
from crow_core.app import Crow
from crow_core.errors import EndTurn, ModelError, StoreError
from crow_core.messages.message import Message
from crow_core.session.session import Session
from crow_core.testing import Editor, Reply, ScriptedModel, connect
from crow_core.testing.script import ScriptedCall as Use
from crow_extensions.commands import commands
from crow_extensions.goal import goal
from crow_extensions.mask_secrets import mask_secrets
from crow_extensions.steering import STEERING, steering
from crow_extensions.undo import undo
from crow_permissions.extension import permissions
from crow_testing.waiting_tool import WaitingTool

pytestmark = pytest.mark.anyio


CALLING = Reply("Calling.", tool_calls=[Use(name="demo_work", arguments={}), Use(name="demo_work", arguments={})])


PROMPT_REQUIRED = {"outcome": "promptRequired", "reason": "noRunningTurn"}


async def open_session(editor: Editor) -> str:
    return (await editor.new_session("/")).session_id


def start(work: Any) -> "asyncio.Task[Any]":
    return asyncio.ensure_future(work)


def steer(editor: Editor, session: str, *words: str) -> "asyncio.Task[Any]":
    params = make_steering_params(session, [TextBlock(text=text) for text in words])
    return start(editor.request(STEERING_METHOD, params))


def is_injected(answer: dict[str, Any]) -> bool:
    return answer["outcome"] == "injected"


async def waiting(crow: Crow, count: int = 1) -> Session:
    """Wait until the only session has as many waiting messages."""
    (session,) = crow.sessions.values()
    while len(session.state[STEERING].waiting) < count:
        await asyncio.sleep(0)
    return session


def list_messages(model: ScriptedModel, request: int = -1) -> list[tuple[str, str]]:
    """Return role and content of the messages of a request, without the system prompt."""
    return [(each["role"], each.get("content") or "") for each in model.requests[request]["messages"][1:]]


def shown(editor: Editor) -> list[str]:
    return [each.content.text for each in editor.of(UserMessageChunk) if isinstance(each.content, TextBlock)]


async def test_words_between_two_rounds_follow_the_results_of_all_tool_calls():
    work, model = WaitingTool(), ScriptedModel([CALLING, Reply("Done.")])
    crow = Crow(model, servers=[work.server]).use(steering)
    async with connect(crow) as editor:
        id = await open_session(editor)
        turn = start(editor.prompt(id, "go"))
        await work.started.wait()
        asked = [steer(editor, id, "rather"), steer(editor, id, "in blue", "please")]
        session = await waiting(crow, 2)
        assert shown(editor) == []
        work.go_on.set()
        assert (await turn).stop_reason == "end_turn"
        assert all([is_injected(await each) for each in asked])
        log = [entry for entry in session.log if entry.get("role") == "user"]
    assert list_messages(model) == [
        ("user", "go"),
        ("assistant", "Calling."),
        ("tool", "worked"),
        ("tool", "worked"),
        ("user", "rather\n\nin blue\n\nplease"),
    ]
    assert [entry.get("content") for entry in log] == ["go", "rather", "in blue\n\nplease"]
    kinds = [type(each) for each in editor.updates]
    assert shown(editor) == ["rather", "in blue\n\nplease"]
    ids = [entry.get("crow", {})["id"] for entry in log[1:]]
    assert [each.message_id for each in editor.of(UserMessageChunk)] == ids
    last_result = max(n for n, kind in enumerate(kinds) if kind is ToolCallUpdate)
    last_text = max(n for n, kind in enumerate(kinds) if kind is AgentMessageChunk)
    assert last_result < kinds.index(UserMessageChunk) < last_text


async def test_a_turn_whose_last_answer_streams_goes_on_with_the_words():
    streaming, finish = asyncio.Event(), asyncio.Event()

    async def answer(request: dict[str, Any]) -> Reply:
        if len(model.requests) == 1:
            streaming.set()
            await finish.wait()
            return Reply("The end.")
        return Reply("In blue.")

    model = ScriptedModel(answer)
    crow = Crow(model).use(steering).use(goal, every_turn=True)
    async with connect(crow) as editor:
        id = await open_session(editor)
        turn = start(editor.prompt(id, "go"))
        await streaming.wait()
        asked = [steer(editor, id, "one"), steer(editor, id, "two")]
        await waiting(crow, 2)
        finish.set()
        assert (await turn).stop_reason == "end_turn"
        assert all([is_injected(await each) for each in asked])
    assert list_messages(model) == [("user", "go"), ("assistant", "The end."), ("user", "one\n\ntwo")]
    assert shown(editor) == ["one", "two"]
    assert editor.text == "The end.In blue."


async def test_words_that_arrive_before_the_first_model_call_are_in_it():
    started, go_on = asyncio.Event(), asyncio.Event()
    model = ScriptedModel([Reply("Done.")])
    crow = Crow(model).use(steering)

    @crow.before_prompt
    async def wait(message: Message, session: Session) -> None:
        if message.get("content") == "go":
            started.set()
            await go_on.wait()

    async with connect(crow) as editor:
        id = await open_session(editor)
        turn = start(editor.prompt(id, "go"))
        await started.wait()
        asked = steer(editor, id, "rather")
        await waiting(crow)
        go_on.set()
        await turn
        assert is_injected(await asked)
    assert list_messages(model) == [("user", "go\n\nrather")]


async def test_words_that_wait_when_the_turn_is_cancelled_are_not_taken_and_in_no_log():
    work, model = WaitingTool(), ScriptedModel([CALLING, Reply("Again.")])
    crow = Crow(model, servers=[work.server]).use(steering)
    async with connect(crow) as editor:
        id = await open_session(editor)
        turn = start(editor.prompt(id, "go"))
        await work.started.wait()
        asked = steer(editor, id, "rather")
        session = await waiting(crow)
        await editor.cancel(id)
        assert (await turn).stop_reason == "cancelled"
        assert await asked == PROMPT_REQUIRED
        assert "rather" not in str(session.log.entries)
        assert shown(editor) == []
        assert (await editor.prompt(id, "again")).stop_reason == "end_turn"
    assert "rather" not in str(model.requests)


async def test_a_turn_that_has_made_all_its_model_calls_does_not_take_words():
    work, model = WaitingTool(), ScriptedModel([CALLING])
    crow = Crow(model, servers=[work.server], max_requests=1).use(steering)
    async with connect(crow) as editor:
        id = await open_session(editor)
        turn = start(editor.prompt(id, "go"))
        await work.started.wait()
        asked = steer(editor, id, "rather")
        session = await waiting(crow)
        work.go_on.set()
        assert (await turn).stop_reason == "max_turn_requests"
        assert await asked == PROMPT_REQUIRED
        assert "rather" not in str(session.log.entries)


async def test_words_that_end_the_last_allowed_round_are_shown_and_stay_in_the_log():
    streaming, finish = asyncio.Event(), asyncio.Event()

    async def answer(request: dict[str, Any]) -> Reply:
        streaming.set()
        await finish.wait()
        return Reply("The end.")

    crow = Crow(ScriptedModel(answer), max_requests=1).use(steering)
    async with connect(crow) as editor:
        id = await open_session(editor)
        turn = start(editor.prompt(id, "go"))
        await streaming.wait()
        asked = steer(editor, id, "more")
        session = await waiting(crow)
        finish.set()
        assert (await turn).stop_reason == "max_turn_requests"
        assert is_injected(await asked)
        assert shown(editor) == ["more"]
        assert session.log[-1].get("content") == "more"


async def test_a_client_takes_waiting_words_back_by_cancelling_its_request():
    work, model = WaitingTool(), ScriptedModel([CALLING, Reply("Done.")])
    crow = Crow(model, servers=[work.server]).use(steering)
    async with connect(crow) as editor:
        id = await open_session(editor)
        turn = start(editor.prompt(id, "go"))
        await work.started.wait()
        asked = steer(editor, id, "rather")
        session = await waiting(crow)
        asked.cancel()
        while session.state[STEERING].waiting:
            await asyncio.sleep(0)
        work.go_on.set()
        await turn
    assert "rather" not in str(model.requests)


async def test_without_a_turn_nothing_is_taken():
    crow = Crow(ScriptedModel([Reply("Hello.")])).use(steering)
    async with connect(crow) as editor:
        id = await open_session(editor)
        assert await steer(editor, id, "rather") == PROMPT_REQUIRED
        await editor.prompt(id, "go")
        assert await steer(editor, id, "rather") == PROMPT_REQUIRED


async def test_words_without_a_turn_begin_one_for_a_client_that_does_not_send_them_itself():
    model = ScriptedModel([Reply("Hello."), Reply("In blue.")])
    crow = Crow(model).use(steering)
    async with connect(crow) as editor:
        id = await open_session(editor)
        await editor.prompt(id, "go")
        params = {"sessionId": id, "prompt": [{"type": "text", "text": "rather"}]}
        answer = await editor.request(STEERING_METHOD, params)
        assert answer["outcome"] == "startedNewTurn"
        await editor.until(lambda editor: editor.text.endswith("In blue."))
        assert [each.message_id for each in editor.of(UserMessageChunk)] == [answer["messageId"]]
        assert shown(editor) == ["rather"]
    assert list_messages(model)[-1] == ("user", "rather")


async def test_a_new_turn_that_fails_is_told():
    crow = Crow(ScriptedModel([Reply(error=ModelError("The model is asleep."))])).use(steering)
    async with connect(crow) as editor:
        id = await open_session(editor)
        params = {"sessionId": id, "prompt": [{"type": "text", "text": "go"}]}
        assert (await editor.request(STEERING_METHOD, params))["outcome"] == "startedNewTurn"
        await editor.until(lambda editor: "The model is asleep." in editor.thoughts)


async def test_words_for_a_turn_that_is_cancelled_begin_no_other():
    work, model = WaitingTool(), ScriptedModel([CALLING])
    crow = Crow(model, servers=[work.server]).use(steering)
    async with connect(crow) as editor:
        id = await open_session(editor)
        turn = start(editor.prompt(id, "go"))
        await work.started.wait()
        params = {"sessionId": id, "prompt": [{"type": "text", "text": "rather"}]}
        asked = start(editor.request(STEERING_METHOD, params))
        await waiting(crow)
        await editor.cancel(id)
        assert (await turn).stop_reason == "cancelled"
        assert await asked == {"outcome": "failed"}


async def test_words_that_are_withdrawn_too_late_are_answered_as_taken():
    streaming, finish = asyncio.Event(), asyncio.Event()

    async def answer(request: dict[str, Any]) -> Reply:
        streaming.set()
        await finish.wait()
        return Reply("The end.")

    crow = Crow(ScriptedModel(answer), max_requests=1).use(steering)

    crow.methods["_mine/ping"] = lambda session, params: {}

    @crow.message
    async def withdraw(session: Session, entry: Message) -> None:
        if entry.get("content") == "more":
            editor.connection.cancel_requests(STEERING_METHOD)
            await editor.request("_mine/ping", {"sessionId": session.id})

    async with connect(crow) as editor:
        id = await open_session(editor)
        turn = start(editor.prompt(id, "go"))
        await streaming.wait()
        asked = steer(editor, id, "more")
        await waiting(crow)
        finish.set()
        await turn
        assert is_injected(await asked)


@pytest.mark.parametrize("wish", ["later", 7, {}])
async def test_an_unknown_wish_for_idle_sessions_is_an_error(wish: Any):
    async with connect(Crow(ScriptedModel([])).use(steering)) as editor:
        params = {"sessionId": await open_session(editor), "prompt": [{"type": "text", "text": "go"}]}
        with pytest.raises(RpcError) as raised:
            await editor.request(STEERING_METHOD, {**params, "_meta": {"steering": {"idleBehavior": wish}}})
    assert raised.value.code == INVALID_PARAMS


async def test_slash_commands_and_words_that_a_hook_refuses_are_left_to_a_prompt():
    work, crow = WaitingTool(), Crow(ScriptedModel([CALLING, Reply("Done.")]))
    crow.servers.append(work.server)
    crow.use(steering).use(mask_secrets, known=["hunter2000"])

    @crow.before_prompt
    def refuse(message: Message, session: Session) -> None:
        if "forbidden" in str(message.get("content")):
            raise EndTurn("end_turn", "No.")

    async with connect(crow) as editor:
        id = await open_session(editor)
        turn = start(editor.prompt(id, "go"))
        await work.started.wait()
        refused = {"outcome": "promptRequired", "reason": "slashCommand"}
        assert await steer(editor, id, "/undo yes") == refused
        assert await steer(editor, id, "forbidden") == {"outcome": "promptRequired", "reason": "refused"}
        asked = steer(editor, id, "the password is hunter2000")
        session = await waiting(crow)
        work.go_on.set()
        await turn
        assert is_injected(await asked)
        assert "the password is" in str(session.log.entries)
        assert "hunter2000" not in str(session.log.entries)


@pytest.mark.parametrize("last_round", [False, True])
async def test_words_that_cannot_be_stored_are_not_taken(last_round: bool):
    """In the last allowed round, they enter the log at the end of the turn, and not before a model call."""
    work, model = WaitingTool(), ScriptedModel([CALLING, Reply("Done.")])
    streaming, finish = asyncio.Event(), asyncio.Event()

    async def answer(request: dict[str, Any]) -> Reply:
        streaming.set()
        await finish.wait()
        return Reply("The end.")

    crow = Crow(ScriptedModel(answer) if last_round else model, servers=[work.server])
    crow.max_requests = 1 if last_round else 10
    crow.use(steering)

    @crow.message
    def write(session: Session, entry: Message) -> None:
        if entry.get("content") == "more":
            raise StoreError("The disk is full.")

    async with connect(crow) as editor:
        id = await open_session(editor)
        turn = start(editor.prompt(id, "go"))
        await (streaming if last_round else work.started).wait()
        asked = steer(editor, id, "more")
        await waiting(crow)
        finish.set()
        work.go_on.set()
        with pytest.raises(RpcError, match="cannot be stored"):
            await turn
        assert await asked == PROMPT_REQUIRED


async def test_words_that_joined_a_turn_are_taken_back_with_it():
    work, model = WaitingTool(), ScriptedModel([CALLING, Reply("Done."), Reply("Again.")])
    crow = Crow(model, servers=[work.server]).use(commands).use(steering).use(undo)
    async with connect(crow) as editor:
        id = await open_session(editor)
        turn = start(editor.prompt(id, "go"))
        await work.started.wait()
        asked = steer(editor, id, "in blue")
        await waiting(crow)
        work.go_on.set()
        await turn
        assert is_injected(await asked)
        await editor.prompt(id, "/undo")  # a command is no turn
        points = (await editor.request("_session/rewind_points", {"sessionId": id}))["points"]
        assert [point["text"] for point in points] == ["go"]
        rewind = {"sessionId": id, "messageId": points[0]["messageId"], "mode": "both"}
        taken = await editor.request("_session/rewind", rewind)
        assert taken["conversation"] == {"rewound": True, "messagesDropped": 4}
        await editor.prompt(id, "in red")
    assert list_messages(model) == [("user", "in red")]


async def test_waiting_words_are_withdrawn_and_those_that_the_model_has_are_not():
    first, second = WaitingTool(), asyncio.Event()
    streaming = asyncio.Event()

    async def answer(request: dict[str, Any]) -> Reply:
        if len(model.requests) == 1:
            return CALLING
        streaming.set()
        await second.wait()
        return Reply("Done.")

    model = ScriptedModel(answer)
    crow = Crow(model, servers=[first.server]).use(steering)
    async with connect(crow) as editor:
        id = await open_session(editor)
        turn = start(editor.prompt(id, "go"))
        await first.started.wait()
        kept = steer(editor, id, "kept")
        session = await waiting(crow)
        first.go_on.set()
        await streaming.wait()
        asked = [steer(editor, id, "one"), steer(editor, id, "two")]
        await waiting(crow, 2)
        editor.connection.cancel_requests(STEERING_METHOD)
        for each in asked:
            with pytest.raises(RpcError) as withdrawn:
                await each
            assert withdrawn.value.code == REQUEST_CANCELLED
        second.set()
        assert (await turn).stop_reason == "end_turn"
        assert is_injected(await kept)
    users = [entry.get("content") for entry in session.log if entry.get("role") == "user"]
    assert users == ["go", "kept"]
    assert len(model.requests) == 2


async def test_words_that_a_hook_still_reads_are_withdrawn():
    work, model = WaitingTool(), ScriptedModel([CALLING, Reply("Done.")])
    crow = Crow(model, servers=[work.server]).use(steering)
    reading, finish = asyncio.Event(), asyncio.Event()

    @crow.before_prompt
    async def read(message: Message, session: Session) -> None:
        if message.get("content") == "rather":
            reading.set()
            await finish.wait()

    async with connect(crow) as editor:
        id = await open_session(editor)
        turn = start(editor.prompt(id, "go"))
        await work.started.wait()
        asked = steer(editor, id, "rather")
        await reading.wait()
        editor.connection.cancel_requests(STEERING_METHOD)
        with pytest.raises(RpcError) as withdrawn:
            await asked
        assert withdrawn.value.code == REQUEST_CANCELLED
        finish.set()
        work.go_on.set()
        await turn
    assert "rather" not in str(model.requests)


async def test_words_with_an_image_join_the_turn():
    work, model = WaitingTool(), ScriptedModel([CALLING, Reply("Done.")])
    crow = Crow(model, servers=[work.server]).use(steering)
    async with connect(crow) as editor:
        id = await open_session(editor)
        turn = start(editor.prompt(id, "go"))
        await work.started.wait()
        blocks = [
            {"type": "text", "text": "like"},
            {"type": "image", "mimeType": "image/png", "data": "iVBORw0KGgppbWc="},
        ]
        asked = start(editor.request(STEERING_METHOD, {"sessionId": id, "prompt": blocks}))
        await waiting(crow)
        work.go_on.set()
        await turn
        assert is_injected(await asked)
    kinds = [part["type"] for part in model.requests[-1]["messages"][-1]["content"]]
    assert kinds == ["text", "image_url"]
    assert [type(each.content).__name__ for each in editor.of(UserMessageChunk)] == ["TextBlock", "ImageBlock"]


async def test_words_during_a_question_for_permission_wait_for_the_answer():
    work, model = WaitingTool(), ScriptedModel([CALLING, Reply("Done.")])
    work.go_on.set()
    crow = Crow(model, servers=[work.server]).use(permissions).use(steering)
    async with connect(crow) as editor:
        answer = editor.waits["session/request_permission"] = asyncio.Event()
        id = await open_session(editor)
        turn = start(editor.prompt(id, "go"))
        await editor.until(lambda _: editor.questions)
        asked = steer(editor, id, "rather")
        await waiting(crow)
        answer.set()
        assert (await turn).stop_reason == "end_turn"
        assert is_injected(await asked)
    assert [role for role, _ in list_messages(model)] == ["user", "assistant", "tool", "tool", "user"]


@pytest.mark.parametrize("prompt", [None, "words", [], [{"type": "text", "text": " "}], [{"type": "text"}], [7]])
async def test_what_is_no_prompt_is_an_error(prompt: Any):
    async with connect(Crow(ScriptedModel([])).use(steering)) as editor:
        id = await open_session(editor)
        with pytest.raises(RpcError) as raised:
            await editor.request(STEERING_METHOD, {"sessionId": id, "prompt": prompt})
    assert raised.value.code == INVALID_PARAMS
