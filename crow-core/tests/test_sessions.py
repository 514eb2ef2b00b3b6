"""Several sessions: turns, queues, folders, options, and closing."""

import asyncio
from pathlib import Path
from typing import Any

import crow_mcp_server
import pytest
from crow_core.acp.connection import RpcError
from crow_core.acp.schema import (
    INVALID_PARAMS,
    NOT_FOUND,
    AgentMessageChunk,
    AgentThoughtChunk,
    ClientCapabilities,
    ClientSessionCapabilities,
    CloseSessionRequest,
    ConfigOptionUpdate,
    CurrentModeUpdate,
    NoticeCapabilities,
    NoticeUpdate,
    PromptRequest,
    SelectConfigOption,
    SessionConfigOption,
    SetSessionModeRequest,
    TextBlock,
)
from crow_core.app import Crow
from crow_core.mcp.server import Server
from crow_core.messages.message import Message
from crow_core.session.session import Session
from crow_core.testing import Reply, ScriptedModel, connect
from crow_permissions.extension import permissions

pytestmark = pytest.mark.anyio


def values(options: Any) -> dict[str, str]:
    """Return the values of all options, by id."""
    listed: list[SessionConfigOption] = options
    return {option.id: option.current_value for option in listed if isinstance(option, SelectConfigOption)}


async def test_two_sessions_run_in_parallel():
    """Each turn ends only after the other has started."""
    begun = {"one": asyncio.Event(), "two": asyncio.Event()}

    async def script(request: dict[str, Any]) -> Reply:
        name = request["messages"][-1]["content"]
        begun[name].set()
        await begun["two" if name == "one" else "one"].wait()
        return Reply(f"This is {name}.")

    crow = Crow(ScriptedModel(script))
    async with connect(crow) as editor:
        ids = [(await editor.new_session("/")).session_id for _ in range(2)]
        await asyncio.gather(editor.prompt(ids[0], "one"), editor.prompt(ids[1], "two"))
        said = [session.log[-1].get("content") for session in crow.sessions.values()]
    assert said == ["This is one.", "This is two."]


async def test_prompts_to_a_busy_session_are_queued():
    release = asyncio.Event()

    async def script(request: dict[str, Any]) -> Reply:
        await release.wait()
        return Reply(f"To {request['messages'][-1]['content']}. ")

    model = ScriptedModel(script)
    async with connect(Crow(model)) as editor:
        id = (await editor.new_session("/")).session_id
        turns = [asyncio.ensure_future(editor.prompt(id, words)) for words in ("one", "two", "three")]
        await editor.set_option(id, "model", "scripted")  # once it is answered, everything before has arrived
        assert len(model.requests) == 1
        release.set()
        answers = await asyncio.gather(*turns)
    assert [answer.stop_reason for answer in answers] == ["end_turn"] * 3
    assert editor.text == "To one. To two. To three. "
    assert [message["role"] for message in model.requests[2]["messages"][1:]] == ["user", "assistant"] * 2 + ["user"]


async def test_ids_of_sessions_cannot_be_guessed():
    crow = Crow(ScriptedModel([]))
    async with connect(crow) as editor:
        ids = {(await editor.new_session("/")).session_id for _ in range(50)}
    assert len(ids) == 50
    assert all(len(id) * 4 >= 122 for id in ids)


async def test_a_closed_session_is_unknown_and_others_stay_open():
    crow = Crow(ScriptedModel([Reply("Still here.")]))
    async with connect(crow) as editor:
        closed, other = [(await editor.new_session("/")).session_id for _ in range(2)]
        await editor.request("session/close", CloseSessionRequest(session_id=closed))
        for method, params in (
            ("session/prompt", PromptRequest(session_id=closed, prompt=[TextBlock(text="hi")])),
            ("session/close", CloseSessionRequest(session_id=closed)),
            ("session/set_mode", SetSessionModeRequest(session_id=closed, mode_id="ask")),
        ):
            with pytest.raises(RpcError) as caught:
                await editor.request(method, params)
            assert caught.value.code == NOT_FOUND
            assert caught.value.data["sessionId"] == closed
            assert closed in caught.value.data["details"]
        assert (await editor.prompt(other, "hi")).stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("cwd", "roots"),
    [
        ("relative/path", []),
        ("", []),
        ("/no/such/folder", []),
        ("/etc/passwd", []),
        ("/", ["lib"]),
        ("/", ["/no/such"]),
    ],
)
async def test_an_invalid_folder_is_refused_by_name(cwd: str, roots: list[str]):
    crow = Crow(ScriptedModel([]))
    async with connect(crow) as editor:
        with pytest.raises(RpcError) as caught:
            await editor.new_session(cwd, roots=roots)
        assert caught.value.code == INVALID_PARAMS
        assert repr(roots[0] if roots else cwd) in caught.value.data["details"]
        assert crow.sessions == {}


async def test_tools_work_in_the_working_directory_and_in_additional_folders(tmp_path: Path):
    for name in ("here", "there", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(f"I am {name}.\n")
    paths = ["a.txt", str(tmp_path / "there/a.txt"), str(tmp_path / "elsewhere/a.txt")]
    uses: Any = [{"name": "file_editor", "arguments": {"command": "view", "path": path}} for path in paths]
    model = ScriptedModel([Reply(tool_calls=uses), Reply("Done.")])
    built_in = Server(
        "crow", crow_mcp_server.create_server, definitions=crow_mcp_server.tools(), built_in=True, shared=True
    )
    async with connect(Crow(model, servers=[built_in])) as editor:
        session = await editor.new_session(str(tmp_path / "here"), roots=[str(tmp_path / "there")])
        await editor.prompt(session.session_id, "look")
    here, there, elsewhere = (message["content"] for message in model.requests[1]["messages"][-3:])
    assert "I am here." in here
    assert "I am there." in there
    assert "outside of the folders" in elsewhere
    system = model.requests[0]["messages"][0]["content"]
    assert str(tmp_path / "here") in system
    assert str(tmp_path / "there") in system


async def test_every_response_has_all_options_with_their_values():
    models = {name: ScriptedModel([], name=name) for name in ("small", "large")}
    async with connect(Crow(models).use(permissions)) as editor:
        session = await editor.new_session("/")
        assert values(session.config_options) == {"model": "small", "mode": "ask"}
        answer = await editor.set_option(session.session_id, "model", "large")
        assert values(answer.config_options) == {"model": "large", "mode": "ask"}
        answer = await editor.set_option(session.session_id, "mode", "plan")
        assert values(answer.config_options) == {"model": "large", "mode": "plan"}
    assert isinstance(session.config_options, list)
    for option in session.config_options:
        assert isinstance(option, SelectConfigOption)  # no boolean options: the client does not support them
        assert option.current_value in [choice.value for choice in option.options]  # type: ignore[union-attr]


async def test_modes_and_the_mode_option_stay_equal():
    async with connect(Crow(ScriptedModel([])).use(permissions, mode="plan")) as editor:
        session = await editor.new_session("/")
        id = session.session_id
        assert session.modes
        assert session.modes.current_mode_id == "plan"
        assert [mode.id for mode in session.modes.available_modes] == ["ask", "accept-edits", "plan", "yolo"]
        await editor.set_mode(id, "yolo")
        assert values(editor.of(ConfigOptionUpdate)[-1].config_options)["mode"] == "yolo"
        answer = await editor.set_option(id, "mode", "ask")
        assert values(answer.config_options)["mode"] == "ask"
        await editor.until(lambda editor: editor.of(CurrentModeUpdate)[-1].current_mode_id == "ask")


async def test_no_modes_are_offered_without_a_mode_option():
    async with connect(Crow(ScriptedModel([]))) as editor:
        session = await editor.new_session("/")
        assert not session.modes
        with pytest.raises(RpcError) as caught:
            await editor.set_mode(session.session_id, "ask")
        assert caught.value.code == INVALID_PARAMS


@pytest.mark.parametrize(("option", "value"), [("mode", "god"), ("model", ""), ("colour", "red"), ("", "ask")])
async def test_an_unknown_option_or_value_is_refused_and_changes_nothing(option: str, value: str):
    async with connect(Crow(ScriptedModel([])).use(permissions)) as editor:
        session = await editor.new_session("/")
        with pytest.raises(RpcError) as caught:
            await editor.set_option(session.session_id, option, value)
        assert caught.value.code == INVALID_PARAMS
        assert caught.value.data["details"]
        answer = await editor.set_option(session.session_id, "model", "scripted")
        assert values(answer.config_options) == {"model": "scripted", "mode": "ask"}


async def test_a_boolean_value_for_an_option_with_choices_is_refused():
    async with connect(Crow(ScriptedModel([])).use(permissions)) as editor:
        session = await editor.new_session("/")
        params = {"sessionId": session.session_id, "configId": "mode", "type": "boolean", "value": True}
        with pytest.raises(RpcError) as caught:
            await editor.request("session/set_config_option", params)
        assert caught.value.code == INVALID_PARAMS


async def test_an_option_set_during_a_turn_holds_from_the_next_request_on():
    waiting, release = asyncio.Event(), asyncio.Event()

    async def slow(request: dict[str, Any]) -> Reply:
        waiting.set()
        await release.wait()
        return Reply("Small.")

    models = {"small": ScriptedModel(slow, name="small"), "large": ScriptedModel([Reply("Large.")], name="large")}
    async with connect(Crow(models)) as editor:
        id = (await editor.new_session("/")).session_id
        turn = asyncio.ensure_future(editor.prompt(id, "one"))
        await waiting.wait()
        answer = await editor.set_option(id, "model", "large")
        assert values(answer.config_options) == {"model": "large"}
        release.set()
        await turn
        await editor.prompt(id, "two")
    assert editor.text == "Small.Large."


async def test_options_hold_for_their_session_only():
    async with connect(Crow(ScriptedModel([])).use(permissions)) as editor:
        first, second = [(await editor.new_session("/")).session_id for _ in range(2)]
        await editor.set_mode(first, "yolo")
        assert values((await editor.set_option(second, "model", "scripted")).config_options)["mode"] == "ask"


@pytest.mark.parametrize("notices", [True, False])
async def test_a_notice_is_sent_in_a_form_that_the_client_supports(notices: bool):
    crow = Crow(ScriptedModel([Reply("Hello.")]))

    @crow.before_prompt
    async def warn(message: Message, session: Session) -> None:
        await session.notice("The attic is full.", "warning")

    knows = ClientSessionCapabilities(notices=NoticeCapabilities() if notices else None)
    async with connect(crow, capabilities=ClientCapabilities(session=knows)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "hi")
    assert [notice.title for notice in editor.of(NoticeUpdate)] == (["The attic is full."] if notices else [])
    assert len(editor.of(AgentThoughtChunk)) == (0 if notices else 1)
    ids = {chunk.message_id for chunk in [*editor.of(AgentThoughtChunk), *editor.of(AgentMessageChunk)]}
    assert len(ids) == (1 if notices else 2)


async def test_shutting_down_closes_every_session():
    crow = Crow(ScriptedModel([]))
    ended: list[str] = []
    crow.session_end(lambda session: ended.append(session.id))
    async with connect(crow) as editor:
        ids = [(await editor.new_session("/")).session_id for _ in range(3)]
    assert sorted(ended) == sorted(ids)
    assert crow.sessions == {}
