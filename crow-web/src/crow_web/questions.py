"""Questions of the agent as cards: for a permission, with the answers that it offers, and forms."""

from collections.abc import Mapping, Sequence
from typing import Any

from crow_core.acp.schema import (
    BooleanPropertySchema,
    CreateElicitationRequest,
    CreateElicitationResponse,
    IntegerPropertySchema,
    MultiSelectPropertySchema,
    NumberPropertySchema,
    RequestPermissionRequest,
    ToolCall,
)
from crow_terminal.blocks import AnsweredQuestion, find_diffs
from crow_terminal.dialogs import Row
from crow_terminal.forms import LEFT_OUT, Form, list_choices, start_form
from crow_terminal.permission import Answer, make_answer
from crow_terminal.question import make_question
from msgspec import Struct

from crow_web import markup
from crow_web.log import BlockRenderer, make_diff


class PermissionCard:
    """A question for permission."""

    def __init__(self, request: RequestPermissionRequest, call: ToolCall, folder: str, takes: Sequence[str]) -> None:
        """`call` is the tool call as its updates tell it. `takes` are the additions that answers may have."""
        self.request = request
        self.question = make_question(request, call, folder, takes, lambda row, now: [])
        rows = [row for row in (*self.question.rows, *self.question.lasting) if isinstance(row.value, Answer)]
        self.answers: list[Answer] = [row.value for row in rows]
        self.diffs = [(diff.path, make_diff(diff)) for diff in find_diffs(call)]

    def render(self, renderer: BlockRenderer, id: int) -> str:
        words = [row for row in self.question.lines if row.style not in ("added", "removed", "dim", "prompt")]
        lines = list(words if self.diffs else self.question.lines)
        while lines and not lines[-1].text:
            del lines[-1]
        lasting = [answer for answer in self.answers if is_lasting(answer, self.question.lasting)]
        once = [(n, answer) for n, answer in enumerate(self.answers) if answer not in lasting]
        longer = [(n, answer) for n, answer in enumerate(self.answers) if answer in lasting]
        return renderer.render("permission", id, self.question, lines, self.diffs, once, longer)

    def respond(self, choice: int, text: str) -> tuple[Any, AnsweredQuestion] | None:
        """Return the response and the record of an answer; None if there is no such answer."""
        if not 0 <= choice < len(self.answers):
            return None
        answer = self.answers[choice]
        name = f"{answer.name}: {answer.rule}" if answer.rule else answer.name
        return make_answer(answer, text), self.question.record(name, text if answer.wants else "")


def is_lasting(answer: Answer, lasting: Sequence[Row]) -> bool:
    return any(row.value is answer for row in lasting)


class Field(Struct, frozen=True):
    """A field of a form, as HTML has it."""

    name: str
    title: str
    description: str
    kind: str
    """The type of the `input`, or `choice`, or `choices`."""
    rows: Sequence[Row]
    default: Any
    required: bool


class FormCard:
    """A form of the agent, or a page that the person is to visit."""

    def __init__(self, request: CreateElicitationRequest, form: Form) -> None:
        self.request, self.form = request, form

    def list_fields(self) -> list[Field]:
        required = self.form.schema.required or []
        return [make_field(name, schema, name in required) for name, schema in self.form.schema.properties.items()]

    def render(self, renderer: BlockRenderer, id: int) -> str:
        return renderer.render("form", id, self.form, self.list_fields(), markup.to_link(self.form.page))

    def respond(self, values: Mapping[str, Sequence[str]]) -> CreateElicitationResponse | str:
        """Return the response with the values of the fields by their numbers, or what is wrong with one."""
        form = Form(self.form.message, self.form.schema, self.form.page)
        for number, field in enumerate(self.list_fields()):
            given = values.get(str(number), [])
            if problem := form.fill(read_value(field, given)):
                return f"{field.title}: {problem}"
        return form.respond()


def make_field(name: str, schema: Any, required: bool) -> Field:
    rows = list_choices(schema) or []
    match schema:
        case IntegerPropertySchema() | NumberPropertySchema():
            kind = "number"
        case MultiSelectPropertySchema():
            kind = "choices"
        case _ if rows:
            kind = "choice"
        case _:
            kind = {"email": "email", "uri": "url", "date": "date"}.get(str(getattr(schema, "format", "")), "text")
    default = getattr(schema, "default", None) or (False if isinstance(schema, BooleanPropertySchema) else "")
    title = str(getattr(schema, "title", None) or name)
    return Field(name, title, str(getattr(schema, "description", None) or ""), kind, rows, default, required)


def read_value(field: Field, given: Sequence[str]) -> Any:
    """Return the value of a field from what a page sends: the numbers of choices, or a text."""
    if field.kind not in ("choice", "choices"):
        return given[0] if given and given[0] else LEFT_OUT
    chosen = [field.rows[int(at)].value for at in given if at.isdecimal() and int(at) < len(field.rows)]
    if field.kind == "choices":
        return chosen or LEFT_OUT
    return chosen[0] if chosen else LEFT_OUT


Card = PermissionCard | FormCard


def make_form(request: CreateElicitationRequest) -> FormCard | None:
    """Make the card of a form; None if it cannot be shown."""
    form = start_form(request)
    return FormCard(request, form) if form else None
