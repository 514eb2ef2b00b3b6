"""The tool `ask_user`: the model asks the user, with choices or a form (ACP, elicitation)."""

from collections.abc import Sequence
from typing import Any

import msgspec
from crow_core.acp.decoding import convert_leniently
from crow_core.acp.schema import (
    BooleanPropertySchema,
    ElicitationPropertySchema,
    ElicitationSchema,
    IntegerPropertySchema,
    MultiSelectItems,
    MultiSelectPropertySchema,
    NumberPropertySchema,
    StringPropertySchema,
    ToolCallFields,
)
from crow_core.app import Crow
from crow_core.errors import ElicitationError
from crow_core.mcp.elicitation import can_ask
from crow_core.mcp.result import ToolResult
from crow_core.mcp.server import Server
from crow_core.mcp.tool import ToolCall
from crow_core.session.session import Session
from msgspec import UNSET, Struct, ValidationError

NAME = "ask_user"
DESCRIPTION = """\
Ask the user, and wait for the answer. Only for what you cannot find out yourself and would be wrong to guess.
Never ask for passwords, keys or other secrets."""

META: dict[str, Any] = {
    "crow/kind": "think",
    "crow/replaces": ["ask_user_question", "ask_followup_question", "ask_question", "question", "request_user_input"],
    "crow/arguments": {
        "synonyms": {
            "question": ["prompt", "message", "text", "query"],
            "choices": ["options", "answers", "follow_up", "suggestions"],
            "several": ["multi_select", "multiple", "allow_multiple"],
        }
    },
}
CHOICES: dict[str, Any] = {"type": "array", "items": {"type": "string"}, "description": "answers to choose from"}
CHOICE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"question": {"type": "string"}, "choices": {**CHOICES, "minItems": 1}},
    "required": ["question", "choices"],
}
"""The tool's input for a client that shows no forms: one of several choices."""
FORM_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "question": {"type": "string"},
        "choices": {**CHOICES, "description": "answers to choose from; without any, the user writes one"},
        "several": {"type": "boolean", "description": "whether more than one may be chosen", "default": False},
        "fields": {
            "type": "array",
            "description": "a form to fill in, in place of choices",
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "type": {"type": "string", "enum": ["string", "number", "integer", "boolean"], "default": "string"},
                    "description": {"type": "string"},
                    "choices": CHOICES,
                    "optional": {"type": "boolean", "default": False},
                },
                "required": ["name"],
            },
        },
    },
    "required": ["question"],
}
"""The tool's input for a client that shows forms."""

FIELD_TYPES = {"number": NumberPropertySchema, "integer": IntegerPropertySchema, "boolean": BooleanPropertySchema}
DECLINED = "The user did not want to answer. Go on without it, or end your turn."
DISMISSED = "The user put the question aside. Go on without an answer, or end your turn."


class QuestionField(Struct):
    """A field of a form that the model asks for."""

    name: str
    type: str = "string"
    description: str = ""
    choices: list[str] = []
    optional: bool = False


class UserQuestion(Struct):
    """The arguments of a call of `ask_user`."""

    question: str
    choices: list[str] = []
    several: bool = False
    fields: list[QuestionField] = []


def ask_user(crow: Crow) -> None:
    """Let the model ask the user. Through a client that shows no forms, it can only offer choices."""

    def make_server(schema: dict[str, Any]) -> Server:
        definition = {"name": NAME, "description": DESCRIPTION, "inputSchema": schema, "_meta": META}
        return Server("ask", definitions=[definition], handlers={NAME: answer}, built_in=True, shared=True)

    with_forms, with_choices = make_server(FORM_SCHEMA), make_server(CHOICE_SCHEMA)

    @crow.mcp_servers
    def offer(session: Session) -> Sequence[Server]:
        return [with_forms if can_ask(session.client.capabilities, "form") else with_choices]


async def answer(session: Session, tool_call: ToolCall) -> ToolResult:
    """Ask the user the question of a call, and answer the call with what they say."""
    try:
        question = convert_leniently(tool_call.arguments, UserQuestion)
        if can_ask(session.client.capabilities, "form"):
            return ToolResult.text(await ask_by_form(session, tool_call, question))
        return ToolResult.text(await ask_by_choice(session, tool_call, question))
    except (ElicitationError, ValidationError) as error:
        return ToolResult.error(f"The user was not asked: {str(error).rstrip('.')}.")


async def ask_by_form(session: Session, tool_call: ToolCall, question: UserQuestion) -> str:
    """Ask by a form; return one text as it is, and any other answer as JSON. Raises ElicitationError."""
    form = to_form(question)
    answer = await session.user.elicit(question.question, form=form, tool_call_id=tool_call.id)
    match answer.action:
        case "accept" if question.fields:
            return msgspec.json.encode(answer.content).decode()
        case "accept":
            said = answer.content["answer"]
            return said if isinstance(said, str) else msgspec.json.encode(said).decode()
        case "decline":
            return DECLINED
        case "cancel":
            return DISMISSED


def to_form(question: UserQuestion) -> ElicitationSchema:
    if question.fields:
        properties = {field.name: to_property(field) for field in question.fields}
        return ElicitationSchema(
            properties=properties, required=[field.name for field in question.fields if not field.optional]
        )
    choices = remove_duplicates(question.choices)
    answer: ElicitationPropertySchema = StringPropertySchema(title="Answer", enum=choices or UNSET)
    if choices and question.several:
        answer = MultiSelectPropertySchema(title="Answer", items=MultiSelectItems(type="string", enum=choices))
    return ElicitationSchema(properties={"answer": answer}, required=["answer"])


def to_property(field: QuestionField) -> ElicitationPropertySchema:
    if kind := FIELD_TYPES.get(field.type):
        return kind(description=field.description or UNSET)
    return StringPropertySchema(description=field.description or UNSET, enum=remove_duplicates(field.choices) or UNSET)


async def ask_by_choice(session: Session, tool_call: ToolCall, question: UserQuestion) -> str:
    """Ask through a permission request, whose options are the choices; return the chosen one.

    Raises ElicitationError if the question is not about one of several choices, EndTurn if the client answers that the
    turn is cancelled.
    """
    choices = remove_duplicates(question.choices)
    if not choices or question.several or question.fields:
        raise ElicitationError("this client can only offer choices of which one is taken")
    about = ToolCallFields(
        tool_call_id=tool_call.id,
        title=question.question,
        name=NAME,
        kind="think",
        raw_input=tool_call.arguments,
    )
    chosen = await session.user.ask_choice(about, choices)
    return DECLINED if chosen is None else choices[chosen]


def remove_duplicates(choices: Sequence[str]) -> list[str]:
    """Remove duplicates and empty choices; keep the order."""
    return list(dict.fromkeys(filter(None, choices)))
