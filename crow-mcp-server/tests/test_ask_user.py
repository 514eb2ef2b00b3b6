"""The tool `ask_user`, with clients of both protocol versions and one that cannot ask."""

from collections.abc import Callable
from typing import Any

import pytest
from crow_mcp_server import create_server
from fastmcp import Client
from fastmcp.client.elicitation import ElicitResult

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("mode", ["auto", "legacy"])]

Answer = Callable[[str, dict[str, Any]], Any]


async def ask(mode: str, answer: Answer | None, **arguments: Any) -> Any:
    """Return the result of a question whose answer the function `answer` makes from its text and form."""

    async def handle(message: str, type: object, params: Any, context: object) -> Any:
        assert answer
        return answer(message, params.requested_schema)

    async with Client(create_server(), mode=mode, elicitation_handler=handle if answer else None) as client:
        return await client.call_tool_mcp("ask_user", arguments)


async def test_user_picks_one_choice(mode: str):
    seen: list[Any] = []

    def answer(message: str, form: dict[str, Any]) -> Any:
        seen.append((message, form["properties"]["answer"]))
        return {"answer": "blue"}

    result = await ask(mode, answer, question="Which colour?", choices=["red", "blue", "red", ""])
    assert seen == [("Which colour?", {"type": "string", "title": "Answer", "enum": ["red", "blue"]})]
    assert result.content[0].text == "blue"
    assert result.structured_content == {"action": "accept", "content": {"answer": "blue"}}


async def test_user_picks_several_choices(mode: str):
    result = await ask(
        mode, lambda *_: {"answer": ["a", "c"]}, question="Which?", choices=["a", "b", "c"], several=True
    )
    assert result.content[0].text == '["a", "c"]'


async def test_question_without_choices_takes_free_text(mode: str):
    result = await ask(mode, lambda *_: {"answer": "Krähe"}, question="Its name?")
    assert result.content[0].text == "Krähe"


async def test_answers_to_a_form_are_json(mode: str):
    forms: list[dict[str, Any]] = []

    def answer(message: str, form: dict[str, Any]) -> Any:
        forms.append(form)
        return {"port": 80, "tls": True}

    fields = [
        {"name": "port", "type": "integer", "description": "to listen on"},
        {"name": "tls", "type": "boolean"},
        {"name": "size", "choices": ["small", "large"], "optional": True},
    ]
    result = await ask(mode, answer, question="How?", fields=fields)
    assert result.content[0].text == '{"port": 80, "tls": true}'
    [form] = forms
    assert form["required"] == ["port", "tls"]
    assert form["properties"]["port"] == {"type": "integer", "description": "to listen on"}
    assert form["properties"]["size"] == {"type": "string", "enum": ["small", "large"]}


@pytest.mark.parametrize(
    ("action", "says"), [("decline", "did not want to answer"), ("cancel", "dismissed the question")]
)
async def test_declined_and_cancelled_questions_are_reported_apart(mode: str, action: str, says: str):
    result = await ask(mode, lambda *_: ElicitResult(action=action), question="Which?")  # type: ignore[arg-type]
    assert not result.is_error
    assert says in result.content[0].text
    assert result.structured_content == {"action": action, "content": {}}


async def test_client_that_cannot_ask_makes_the_tool_refuse(mode: str):
    result = await ask(mode, None, question="Which?")
    assert result.is_error
    assert "Ask in the text of your answer" in result.content[0].text
