"""The tool `ask_user`: the model asks the person, with choices or a form (ACP, elicitation)."""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Struct, ValidationError

from crow_core.acp.decoding import lenient
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
from crow_core.elicitation import can_ask
from crow_core.errors import ElicitationError
from crow_core.mcp.server import Server
from crow_core.mcp.tool import ToolCall, ToolResult
from crow_core.mcp.toolbox import decode_strings
from crow_core.session import Session

NAME = "ask_user"
DESCRIPTION = """\
Ask the user, and wait for the answer. Only for what you cannot find out yourself and would be wrong to guess.
Never ask for passwords, keys or other secrets."""

CHOICES: dict[str, Any] = {"type": "array", "items": {"type": "string"}, "description": "answers to choose from"}
ONE_OF_SEVERAL: dict[str, Any] = {
    "type": "object",
    "properties": {"question": {"type": "string"}, "choices": {**CHOICES, "minItems": 1}},
    "required": ["question", "choices"],
}
"""What can be asked through any client."""
ANYTHING: dict[str, Any] = {
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
"""What can be asked through a client that shows forms."""

FIELDS = {"number": NumberPropertySchema, "integer": IntegerPropertySchema, "boolean": BooleanPropertySchema}
DECLINED = "The user did not want to answer. Go on without it, or end your turn."
DISMISSED = "The user put the question aside. Go on without an answer, or end your turn."


class Field(Struct):
    """A field of a form, as the model describes it."""

    name: str
    type: str = "string"
    description: str = ""
    choices: list[str] = []
    optional: bool = False


class Question(Struct):
    """The arguments of a call."""

    question: str
    choices: list[str] = []
    several: bool = False
    fields: list[Field] = []


def ask(crow: Crow) -> None:
    """Let the model ask. Through a client that shows no forms, it may only let the person choose."""

    @crow.mcp_servers
    def offer(session: Session) -> Sequence[Server]:
        schema = ANYTHING if can_ask(session.client.capabilities, "form") else ONE_OF_SEVERAL
        definition = {"name": NAME, "description": DESCRIPTION, "inputSchema": schema, "_meta": {"crow/kind": "think"}}
        session.state["ask"] = Server("ask", None, definitions=[definition], built_in=True)
        return [session.state["ask"]]

    @crow.before_tool
    async def answer(session: Session, tool_call: ToolCall) -> ToolResult | None:
        if not tool_call.is_for(session.state["ask"]):
            return None
        try:
            asked = lenient(decode_strings(tool_call.arguments, ANYTHING), Question)
            if can_ask(session.client.capabilities, "form"):
                return ToolResult.text(await by_form(session, tool_call, asked))
            return ToolResult.text(await by_choice(session, tool_call, asked))
        except (ElicitationError, ValidationError) as error:
            return ToolResult.error(f"The user was not asked: {str(error).rstrip('.')}.")


async def by_form(session: Session, tool_call: ToolCall, asked: Question) -> str:
    """Ask by a form; gives the answer in words, or as JSON where it is more than one."""
    form = form_of(asked)
    answer = await session.user.elicit(asked.question, form=form, tool_call_id=tool_call.id)
    match answer.action:
        case "accept" if asked.fields:
            return msgspec.json.encode(answer.content).decode()
        case "accept":
            said = answer.content["answer"]
            return said if isinstance(said, str) else msgspec.json.encode(said).decode()
        case "decline":
            return DECLINED
        case "cancel":
            return DISMISSED


def form_of(asked: Question) -> ElicitationSchema:
    """What the model wants to know, as a form."""
    if asked.fields:
        properties = {field.name: property_of(field) for field in asked.fields}
        return ElicitationSchema(
            properties=properties, required=[field.name for field in asked.fields if not field.optional]
        )
    choices = distinct(asked.choices)
    answer: ElicitationPropertySchema = StringPropertySchema(title="Answer", enum=choices or UNSET)
    if choices and asked.several:
        answer = MultiSelectPropertySchema(title="Answer", items=MultiSelectItems(type="string", enum=choices))
    return ElicitationSchema(properties={"answer": answer}, required=["answer"])


def property_of(field: Field) -> ElicitationPropertySchema:
    """A field as the protocol has it."""
    if kind := FIELDS.get(field.type):
        return kind(description=field.description or UNSET)
    return StringPropertySchema(description=field.description or UNSET, enum=distinct(field.choices) or UNSET)


async def by_choice(session: Session, tool_call: ToolCall, asked: Question) -> str:
    """Ask through a client that knows only permissions: the choices stand where its answers would.

    Raises EndTurn when the client answers that the turn is cancelled.
    """
    choices = distinct(asked.choices)
    if not choices or asked.several or asked.fields:
        raise ElicitationError("this client can only offer choices of which one is taken")
    about = ToolCallFields(
        tool_call_id=tool_call.id,
        title=asked.question,
        name=NAME,
        kind="think",
        status="pending",
        raw_input=tool_call.arguments,
    )
    chosen = await session.user.ask_choice(about, choices)
    return DECLINED if chosen is None else choices[chosen]


def distinct(choices: Sequence[str]) -> list[str]:
    """Each once, in order, and none empty."""
    return list(dict.fromkeys(filter(None, choices)))
