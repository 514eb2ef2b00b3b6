"""Questions to the user: forms, pages, and clients that support neither."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from crow_core.acp.client import OPTION_NAMES
from crow_core.acp.decoding import encode
from crow_core.acp.schema import (
    BooleanPropertySchema,
    ClientCapabilities,
    CreateElicitationResponse,
    ElicitationCapabilities,
    ElicitationFormCapabilities,
    ElicitationSchema,
    ElicitationUrlCapabilities,
    EnumOption,
    IntegerPropertySchema,
    MultiSelectItems,
    MultiSelectPropertySchema,
    NumberPropertySchema,
    RequestPermissionRequest,
    RequestPermissionResponse,
    StringPropertySchema,
    ToolCallUpdate,
)
from crow_core.acp.transports import memory_pair
from crow_core.agent.acp_agent import AcpAgent
from crow_core.app import Crow
from crow_core.errors import ElicitationError, EndTurn
from crow_core.mcp.elicitation import FormAnswer
from crow_core.messages.message import Message
from crow_core.session.session import Session
from crow_core.testing import Editor, Reply, ScriptedModel, connect
from crow_core.testing.script import ScriptedCall as Use
from crow_extensions.ask_user import ask_user
from crow_permissions.extension import permissions

pytestmark = pytest.mark.anyio

FORMS = ClientCapabilities(elicitation=ElicitationCapabilities(form=ElicitationFormCapabilities()))
PAGES = ClientCapabilities(elicitation=ElicitationCapabilities(url=ElicitationUrlCapabilities()))
NEITHER = ClientCapabilities(elicitation=ElicitationCapabilities())
COLOUR: dict[str, Any] = {"question": "Which colour?", "choices": ["red", "blue", "red", ""]}


def accepted(**content: Any) -> CreateElicitationResponse:
    return CreateElicitationResponse(action="accept", content=content)


def make_model(**question: Any) -> ScriptedModel:
    return ScriptedModel([Reply(tool_calls=[Use(name="ask_user", arguments=question)]), Reply("Done.")])


def get_answer(model: ScriptedModel) -> str:
    """Return the answer that the model received."""
    return model.requests[-1]["messages"][-1]["content"]


async def turn(
    model: ScriptedModel, answer: CreateElicitationResponse | None, capabilities: ClientCapabilities = FORMS
) -> Editor:
    crow = Crow(model).use(permissions).use(ask_user)
    async with connect(crow, capabilities=capabilities) as editor:
        editor.answer = answer
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    return editor


async def test_choices_become_a_form_that_names_the_tool_call():
    model = make_model(**COLOUR)
    editor = await turn(model, accepted(answer="blue"))
    (form,) = editor.forms
    assert (form.message, form.mode, form.tool_call_id) == ("Which colour?", "form", "call_1_0")
    assert form.session_id
    assert encode(form.requested_schema).decode() == (
        '{"type":"object","properties":{"answer":{"type":"string","title":"Answer","enum":["red","blue"]}},'
        '"required":["answer"]}'
    )
    assert get_answer(model) == "blue"
    assert editor.questions == []
    assert editor.of(ToolCallUpdate)[-1].status == "completed"


@pytest.mark.parametrize(
    ("question", "content", "read"),
    [
        ({"question": "Why?"}, {"answer": "Because."}, "Because."),
        ({**COLOUR, "several": True}, {"answer": ["red", "blue"]}, '["red","blue"]'),
        (
            {"question": "Who?", "fields": [{"name": "name"}, {"name": "age", "type": "integer", "optional": True}]},
            {"name": "Ada", "unasked": "x"},
            '{"name":"Ada"}',
        ),
        ({"question": "Sure?", "fields": [{"name": "sure", "type": "boolean"}]}, {"sure": False}, '{"sure":false}'),
        ({"question": "How much?", "fields": '[{"name": "n", "type": "number"}]'}, {"n": 1.5}, '{"n":1.5}'),
    ],
)
async def test_the_model_receives_the_answer_of_the_user(question: dict[str, Any], content: dict[str, Any], read: str):
    model = make_model(**question)
    await turn(model, accepted(**content))
    assert get_answer(model) == read


@pytest.mark.parametrize(("action", "words"), [("decline", "did not want"), ("cancel", "aside"), ("shrug", "aside")])
async def test_a_question_without_an_answer_is_no_tool_error(action: str, words: str):
    model = make_model(**COLOUR)
    editor = await turn(model, CreateElicitationResponse(action=action))
    assert words in get_answer(model)
    assert editor.of(ToolCallUpdate)[-1].status == "completed"


@pytest.mark.parametrize("content", [{}, {"answer": "green"}, {"answer": 7}, {"answer": ["red"]}])
async def test_an_answer_that_does_not_fit_the_form_is_an_error(content: dict[str, Any]):
    model = make_model(**COLOUR)
    editor = await turn(model, accepted(**content))
    assert get_answer(model).startswith("The user was not asked: the answer")
    assert editor.of(ToolCallUpdate)[-1].status == "failed"


@pytest.mark.parametrize(
    "question",
    [
        {"question": "What is your password?"},
        {"question": "What is the API key?"},
        {"question": "Log in", "fields": [{"name": "user"}, {"name": "password"}]},
        {"question": "Log in", "fields": [{"name": "user"}, {"name": "x", "description": "Your access token"}]},
        {"question": "Log in", "fields": [{"name": "user"}, {"name": "github_token"}]},
    ],
)
async def test_a_form_that_asks_for_a_secret_is_refused(question: dict[str, Any]):
    model = make_model(**question)
    editor = await turn(model, accepted(answer="hunter2"))
    assert editor.forms == []
    assert "must not ask for secrets" in get_answer(model)


async def test_a_question_about_secrets_is_asked():
    model = make_model(question="Where should the password be kept?", choices=["keyring", "file"])
    await turn(model, accepted(answer="file"))
    assert get_answer(model) == "file"


@pytest.mark.parametrize(
    "capabilities",
    [
        ClientCapabilities(meta=OPTION_NAMES),
        ClientCapabilities(elicitation=ElicitationCapabilities(), meta=OPTION_NAMES),
        ClientCapabilities(elicitation=PAGES.elicitation, meta=OPTION_NAMES),
    ],
)
async def test_a_client_without_forms_receives_the_question_as_a_permission_request(capabilities: ClientCapabilities):
    model = make_model(**COLOUR)
    editor = await turn(model, None, capabilities)
    (question,) = editor.questions
    assert editor.forms == []
    assert question.tool_call.title == "Which colour?"
    assert [option.name for option in question.options] == ["red", "blue", "None of these"]
    assert get_answer(model) == "red"
    (tool,) = model.requests[0]["tools"]
    assert tool["function"]["parameters"]["required"] == ["question", "choices"]


@pytest.mark.parametrize(("permit", "words"), [("reject_once", "did not want"), ("allow_once", "red")])
async def test_the_user_can_choose_none_of_the_choices(permit: str, words: str):
    model = make_model(**COLOUR)
    async with connect(Crow(model).use(ask_user), permit=permit) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    assert words in get_answer(model)


@pytest.mark.parametrize(("wanted", "said"), [("red", "red"), ("blue", "blue"), ("", "did not want")])
async def test_a_client_that_may_not_show_names_is_asked_about_one_choice_after_another(wanted: str, said: str):
    class Person(Editor):
        async def on_permission(self, question: RequestPermissionRequest) -> RequestPermissionResponse:
            self.permit = "allow_once" if wanted and wanted in str(question.tool_call.title) else "reject_once"
            return await super().on_permission(question)

    model = make_model(**COLOUR)
    ours, theirs = memory_pair()
    agent = asyncio.ensure_future(AcpAgent(theirs, Crow(model).use(ask_user)).serve())
    editor = Person(ours)
    async with editor.serving():
        await editor.initialize("editor", NEITHER)
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    await agent
    titles = ["Which colour? red? (1 of 2)", "Which colour? blue? (2 of 2)"]
    assert [question.tool_call.title for question in editor.questions] == titles[: 1 if wanted == "red" else 2]
    kinds = [[option.kind for option in question.options] for question in editor.questions]
    assert all(kind == ["allow_once", "reject_once"] for kind in kinds)
    assert said in get_answer(model)


@pytest.mark.parametrize("question", [{"question": "Why?"}, {**COLOUR, "several": True}])
async def test_a_question_that_the_client_cannot_ask_is_an_error_for_the_model(question: dict[str, Any]):
    model = make_model(**question)
    editor = await turn(model, None, NEITHER)
    assert editor.questions == []
    assert get_answer(model) == "The user was not asked: this client can only offer choices of which one is taken."


@pytest.mark.parametrize("capabilities", [FORMS, NEITHER])
async def test_cancelling_a_turn_withdraws_its_question(capabilities: ClientCapabilities):
    async with connect(Crow(make_model(**COLOUR)).use(ask_user), permit=None, capabilities=capabilities) as editor:
        session = await editor.new_session("/")
        prompting = asyncio.ensure_future(editor.prompt(session.session_id, "go"))
        await editor.until(lambda editor: editor.forms or editor.questions)
        await editor.cancel(session.session_id)
        assert (await prompting).stop_reason == "cancelled"
        assert editor.of(ToolCallUpdate)[-1].status == "failed"
    assert editor.cancelled_questions == 1


async def call_in_hook(
    ask_so: Callable[[Session], Awaitable[Any]],
    answer: CreateElicitationResponse | None,
    capabilities: ClientCapabilities,
) -> tuple[Any, Editor]:
    """Call `ask` in a hook; return what it returned or raised."""
    crow, outcome = Crow(ScriptedModel([])), list[Any]()

    @crow.before_prompt
    async def run(message: Message, session: Session) -> Message:
        try:
            outcome.append(await ask_so(session))
        except ElicitationError as error:
            outcome.append(error)
        raise EndTurn

    async with connect(crow, capabilities=capabilities) as editor:
        editor.answer = answer
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    return outcome[0], editor


async def test_the_user_is_sent_to_a_page_and_the_client_learns_when_it_is_done():
    async def log_in(session: Session) -> FormAnswer:
        answer = await session.user.elicit("Log in there.", url="https://example.org/login")
        await session.user.complete(answer.id)
        return answer

    answer, editor = await call_in_hook(log_in, CreateElicitationResponse(action="accept"), PAGES)
    (page,) = editor.forms
    assert (page.mode, page.url, page.elicitation_id) == ("url", "https://example.org/login", answer.id)
    assert answer.action == "accept"
    assert editor.completed == [answer.id]


@pytest.mark.parametrize(
    "url", ["http://example.org", "javascript:alert(1)", "file:///etc/passwd", "https", "http://["]
)
async def test_an_unsafe_page_is_not_offered(url: str):
    error, editor = await call_in_hook(lambda session: session.user.elicit("Go.", url=url), None, PAGES)
    assert isinstance(error, ElicitationError)
    assert editor.forms == []


@pytest.mark.parametrize("capabilities", [ClientCapabilities(), NEITHER, PAGES])
async def test_a_form_is_not_sent_to_a_client_without_the_capability(capabilities: ClientCapabilities):
    form = ElicitationSchema(properties={"a": BooleanPropertySchema()})
    error, editor = await call_in_hook(lambda session: session.user.elicit("?", form=form), None, capabilities)
    assert str(error) == "The client cannot show forms."
    assert editor.forms == []


FORM = ElicitationSchema(
    properties={
        "text": StringPropertySchema(min_length=2, max_length=4, pattern="^[a-z]+$"),
        "one": StringPropertySchema(one_of=[EnumOption(const="a", title="A")]),
        "mail": StringPropertySchema(format="email"),
        "day": StringPropertySchema(format="date"),
        "time": StringPropertySchema(format="date-time"),
        "link": StringPropertySchema(format="uri"),
        "count": IntegerPropertySchema(minimum=0, maximum=9),
        "share": NumberPropertySchema(minimum=0.0, maximum=1.0),
        "sure": BooleanPropertySchema(),
        "some": MultiSelectPropertySchema(items=MultiSelectItems(type="string", enum=["a", "b"]), min_items=1),
        "more": MultiSelectPropertySchema(
            items=MultiSelectItems(any_of=[EnumOption(const="a", title="A")]), max_items=1
        ),
    }
)


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("text", ["ab", "abcd"], ["a", "abcde", "AB", 7, True]),
        ("one", ["a"], ["b", ""]),
        ("mail", ["me@example.org"], ["me", "@", "a b@c"]),
        ("day", ["2026-11-21"], ["yesterday", "2026-13-01"]),
        ("time", ["2026-11-21T10:00:00Z"], ["noon"]),
        ("link", ["https://example.org"], ["example", "http://["]),
        ("count", [0, 9], [-1, 10, True, 1.5, "1"]),
        ("share", [0, 0.5, 1], [-0.1, 1.1, True, "0.5"]),
        ("sure", [True, False], [0, "yes"]),
        ("some", [["a"], ["a", "b"]], [[], ["c"], "a"]),
        ("more", [[], ["a"]], [["a", "a"], ["b"]]),
    ],
)
async def test_answers_are_checked_against_every_kind_of_field(field: str, good: list[Any], bad: list[Any]):
    for value in good:
        answer, _ = await call_in_hook(
            lambda session: session.user.elicit("?", form=FORM), accepted(**{field: value}), FORMS
        )
        assert answer == FormAnswer("accept", {field: value})
    for value in bad:
        error, _ = await call_in_hook(
            lambda session: session.user.elicit("?", form=FORM), accepted(**{field: value}), FORMS
        )
        assert str(error) == f"the answer has an unfit {field!r}"
