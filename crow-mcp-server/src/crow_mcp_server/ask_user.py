"""The tool `ask_user`: ask the user a question with choices or a form, by MCP elicitation."""

import json
from typing import Annotated, Any, Literal, NotRequired

from fastmcp import Context, FastMCP
from fastmcp.tools.base import ToolResult
from mcp.shared.exceptions import MCPError
from mcp_types import ElicitRequest, ElicitRequestFormParams, ElicitResult, InputRequiredResult, ToolAnnotations
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from crow_mcp_server.refusal import ToolRefusal
from crow_mcp_server.tool_options import ToolOptions

DESCRIPTION = """\
Ask the user, and wait for the answer. Only for what you cannot find out yourself and would be wrong to guess.
Never ask for passwords, keys or other secrets."""
ASK_IN_TEXT = "This client cannot show questions. Ask in the text of your answer instead, and end your turn."
WITHOUT_ANSWER = {
    "decline": "The user did not want to answer. Go on without it, or end your turn.",
    "cancel": "The user dismissed the question. Go on without an answer, or end your turn.",
}

Choices = Annotated[list[str], Field(description="answers to choose from; without any, the user writes one")]


class FormField(TypedDict):
    name: str
    type: NotRequired[Annotated[Literal["string", "number", "integer", "boolean"], Field(default="string")]]
    description: NotRequired[str]
    choices: NotRequired[list[str]]
    optional: NotRequired[Annotated[bool, Field(default=False)]]


class UserAnswer(TypedDict):
    action: Literal["accept", "decline", "cancel"]
    content: dict[str, Any]
    """The values by field name. A question without a form has the one field `answer`."""


def register(server: FastMCP, options: ToolOptions) -> None:
    @server.tool(
        description=DESCRIPTION,
        annotations=ToolAnnotations(
            read_only_hint=True, destructive_hint=False, idempotent_hint=False, open_world_hint=False
        ),
        meta={"crow/kind": "think"},
        output_schema=TypeAdapter(UserAnswer).json_schema(),
    )
    async def ask_user(
        context: Context,
        question: Annotated[str, Field(min_length=1)],
        choices: Choices = [],  # noqa: B006
        several: Annotated[bool, Field(description="whether more than one may be chosen")] = False,
        fields: Annotated[list[FormField], Field(description="a form to fill in, in place of choices")] = [],  # noqa: B006
    ) -> ToolResult | InputRequiredResult:
        form = make_form(fields) if fields else make_single_form(choices, several=several)
        result = await elicit(context, question, form)
        return result if isinstance(result, InputRequiredResult) else to_tool_result(result, single=not fields)


async def elicit(context: Context, message: str, form: dict[str, Any]) -> ElicitResult | InputRequiredResult:
    """Ask the user through the client.

    In protocol versions without requests from the server, return an InputRequiredResult: the client then repeats the
    tool call with the answer. Raises ToolRefusal when the client cannot ask.
    """
    capabilities = context.session.client_capabilities
    able = capabilities and capabilities.elicitation
    if not able or (able.form is None and able.url is not None):
        raise ToolRefusal(ASK_IN_TEXT)
    if context.session.protocol_version not in MODERN_PROTOCOL_VERSIONS:
        try:
            return await context.session.elicit(message, form, related_request_id=context.request_id)
        except MCPError as error:
            raise ToolRefusal(f"The user was not asked: {str(error).rstrip('.')}. {ASK_IN_TEXT}") from None
    given = (context.input_responses or {}).get("question")
    if isinstance(given, ElicitResult):
        return given
    params = ElicitRequestFormParams(message=message, requested_schema=form)
    return InputRequiredResult(input_requests={"question": ElicitRequest(params=params)})


def make_single_form(choices: list[str], *, several: bool) -> dict[str, Any]:
    """Return the JSON schema of a form with the one field `answer`."""
    values = drop_duplicates(choices)
    answer: dict[str, Any] = {"type": "string", "title": "Answer", **({"enum": values} if values else {})}
    if values and several:
        answer = {"type": "array", "title": "Answer", "items": {"type": "string", "enum": values}}
    return {"type": "object", "properties": {"answer": answer}, "required": ["answer"]}


def make_form(fields: list[FormField]) -> dict[str, Any]:
    """Return the JSON schema of the form that the model describes."""
    properties: dict[str, dict[str, Any]] = {}
    for field in fields:
        values = drop_duplicates(field.get("choices", []))
        properties[field["name"]] = {
            "type": "string" if values else field.get("type", "string"),
            **({"description": about} if (about := field.get("description")) else {}),
            **({"enum": values} if values else {}),
        }
    required = [field["name"] for field in fields if not field.get("optional")]
    return {"type": "object", "properties": properties, "required": required}


def to_tool_result(result: ElicitResult, *, single: bool) -> ToolResult:
    """Convert the user's answer to a tool result. Anything but a single string becomes JSON in the text."""
    content = dict(result.content or {})
    if result.action != "accept":
        return ToolResult(
            WITHOUT_ANSWER[result.action], structured_content=UserAnswer(action=result.action, content={})
        )
    value = content.get("answer") if single else content
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return ToolResult(text, structured_content=UserAnswer(action="accept", content=content))


def drop_duplicates(choices: list[str]) -> list[str]:
    """Return the choices in order, without duplicates and empty strings."""
    return list(dict.fromkeys(filter(None, choices)))
