"""Another model goes on with the turn when one has no quota left, is overloaded or is down."""

from collections.abc import Sequence

import pytest
from crow_core.acp.connection import RpcError
from crow_core.acp.schema import ConfigOptionUpdate, SelectConfigOption
from crow_core.app import Crow
from crow_core.errors import ModelError
from crow_core.testing import Reply, ScriptedModel, connect
from crow_core.testing.editor import Editor
from crow_extensions.commands import commands
from crow_extensions.fallback import fallback

pytestmark = pytest.mark.anyio

BUSY = ModelError("big.example is overloaded (529). Wait a little, or choose another model.", retry=True)
UNPAID = ModelError("big.example wants to be paid (402). Check your account there.", unavailable=True)
REFUSED = ModelError("big.example refused the request (400). Check the model's settings.")


def make_crow(big: Sequence[Reply], other: Sequence[Reply], last: Sequence[Reply] = (), wait: float = 300.0) -> Crow:
    models = {
        name: ScriptedModel(replies, name=name)
        for name, replies in zip(("big", "other", "last"), (big, other, last), strict=True)
    }
    return Crow(models).use(commands).use(fallback, chains={"big": ["other", "last"]}, wait=wait)


def get_model(editor: Editor) -> str:
    (option,) = editor.of(ConfigOptionUpdate)[-1].config_options
    assert isinstance(option, SelectConfigOption)
    return option.current_value


@pytest.mark.parametrize("failure", [BUSY, UNPAID], ids=["overloaded", "without quota"])
async def test_the_turn_goes_on_with_the_next_model_and_the_user_is_told(failure: ModelError):
    crow = make_crow([Reply(error=failure)], [Reply("I help out.")])
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        answer = await editor.prompt(session.session_id, "hello")
        (open_session,) = crow.sessions.values()
        markers = [notes for entry in open_session.log if (notes := entry.get("crow", {})).get("kind") == "fallback"]
    assert answer.stop_reason == "end_turn"
    assert editor.text == "I help out."
    assert editor.thoughts == f"{failure} other answers now.\n"
    assert get_model(editor) == "other"
    assert [(one.get("model"), one.get("instead")) for one in markers] == [("other", "big")]


async def test_a_refused_request_is_not_sent_to_another_model():
    async with connect(make_crow([Reply(error=REFUSED)], [])) as editor:
        session = await editor.new_session("/")
        with pytest.raises(RpcError, match="refused the request"):
            await editor.prompt(session.session_id, "hello")
    assert editor.thoughts == ""


async def test_the_model_that_failed_is_left_alone_and_asked_again_after_the_wait():
    patient = make_crow([Reply(error=BUSY)], [Reply("One."), Reply("Two.")])
    async with connect(patient) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "first")
        await editor.prompt(session.session_id, "second")
    assert editor.text == "One.Two."
    async with connect(make_crow([Reply(error=BUSY), Reply("I am back.")], [Reply("One.")], wait=0)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "first")
        await editor.prompt(session.session_id, "second")
    assert editor.text == "One.I am back."
    assert editor.thoughts.endswith("big is asked again.\n")
    assert get_model(editor) == "big"


async def test_a_fallback_that_fails_too_is_followed_by_the_next():
    crow = make_crow([Reply(error=UNPAID)], [Reply(error=BUSY)], [Reply("The last one helps.")])
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "hello")
    assert editor.text == "The last one helps."
    assert get_model(editor) == "last"


async def test_when_all_fail_the_turn_ends_with_the_last_error_and_the_chosen_model_is_back():
    crow = make_crow([Reply(error=UNPAID)], [Reply(error=BUSY)], [Reply(error=BUSY)])
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        with pytest.raises(RpcError, match="is overloaded"):
            await editor.prompt(session.session_id, "hello")
    assert editor.thoughts.endswith("big and its fallbacks failed.\n")
    assert get_model(editor) == "big"


async def test_another_session_begins_with_the_fallback_and_a_choice_of_the_user_is_obeyed():
    crow = make_crow([Reply(error=UNPAID), Reply("Paid again.")], [Reply("One."), Reply("Two.")])
    async with connect(crow) as editor:
        first = await editor.new_session("/")
        await editor.prompt(first.session_id, "hello")
        second = await editor.new_session("/")
        await editor.prompt(second.session_id, "hello")
        assert editor.text == "One.Two."
        await editor.prompt(second.session_id, "/model big")
        await editor.prompt(second.session_id, "hello")
    assert editor.text.endswith("Paid again.")


async def test_a_model_without_fallbacks_fails_as_ever():
    crow = Crow(ScriptedModel([Reply(error=BUSY)], name="alone")).use(fallback, chains={"big": ["other"]})
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        with pytest.raises(RpcError, match="is overloaded"):
            await editor.prompt(session.session_id, "hello")
