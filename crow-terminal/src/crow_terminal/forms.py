"""A form of the agent (ACP, elicitation), asked field by field. Pure."""

from collections.abc import Callable
from typing import Any

from crow_core.acp.schema import (
    BooleanPropertySchema,
    CreateElicitationRequest,
    CreateElicitationResponse,
    ElicitationSchema,
    IntegerPropertySchema,
    MultiSelectPropertySchema,
    NumberPropertySchema,
    StringPropertySchema,
)

from crow_terminal.dialogs import Dialog, ListDialog, Row, TextDialog
from crow_terminal.printable_text import escape_line

LEFT_OUT = object()
"""The value of a field that the user leaves out."""


class Form:
    """A form with the values that are filled in so far; without fields, it asks whether to visit a page."""

    def __init__(self, message: str, schema: ElicitationSchema, page: str = "") -> None:
        self.message = message
        self.page = page
        self.values: dict[str, Any] = {}
        self.schema = schema
        self._fields = [*schema.properties]

    @property
    def field(self) -> str:
        """The name of the field to fill in next; empty if all are."""
        return self._fields[0] if self._fields else ""

    def fill(self, value: Any) -> str:
        """Fill in the next field. Return what is wrong with the value; empty if it was taken."""
        name = self.field
        schema = self.schema.properties.get(name)
        if value is LEFT_OUT or value == "":
            if name in (self.schema.required or []):
                return "This field has to be filled in."
        else:
            if isinstance(schema, IntegerPropertySchema | NumberPropertySchema) and isinstance(value, str):
                try:
                    value = int(value) if isinstance(schema, IntegerPropertySchema) else float(value)
                except ValueError:
                    return "This field takes a number."
            self.values[name] = value
        del self._fields[:1]
        return ""

    def respond(self) -> CreateElicitationResponse:
        return CreateElicitationResponse(action="accept", content={} if self.page else self.values)

    def make_dialog(self, fill: Callable[[Any, float], list[Any]], decline: Callable[[float], list[Any]]) -> Dialog:
        """Make the dialog for the next field. `fill` is called with its value and the time."""
        about = [line for line in self.message.split("\n") if line.strip()]
        if self.page:
            about.append(self.page)
            rows = [Row("I have opened this page", "", True)]
            return ListDialog("A page to visit", rows, lambda row, now: fill(LEFT_OUT, now), decline, about=about)
        if not self.field:
            return ListDialog(
                "Answer", [Row("Yes", "", True)], lambda row, now: fill(LEFT_OUT, now), decline, about=about
            )
        schema: Any = self.schema.properties[self.field]
        title = escape_line(str(getattr(schema, "title", None) or self.field))
        description = getattr(schema, "description", None)
        about += [str(description)] if description else []
        default = getattr(schema, "default", None)
        rows = list_choices(schema)
        if rows is None:
            return TextDialog(title, str(default) if default else "", fill, None, decline, about)
        if self.field not in (self.schema.required or []):
            rows.append(Row("Leave out", "", LEFT_OUT))
        choice = ListDialog(title, rows, lambda row, now: fill(row.value, now), decline, about=about)
        choice.selected = next((n for n, row in enumerate(rows) if row.value == default), 0)
        if isinstance(schema, MultiSelectPropertySchema):
            choice.marked = {n for n, row in enumerate(rows) if row.value in (schema.default or [])}

            def submit(row: Row, now: float) -> list[Any]:
                chosen = [rows[n].value for n in sorted(choice.marked or ()) if rows[n].value is not LEFT_OUT]
                return fill(chosen or ([] if row.value is LEFT_OUT else [row.value]), now)

            choice.choose = submit
        return choice


def start_form(request: CreateElicitationRequest) -> Form | None:
    """Make the form of a request; None if it cannot be shown."""
    if request.mode == "url":
        return Form(request.message, ElicitationSchema(), page=escape_line(str(request.url)))
    if request.mode != "form" or not isinstance(request.requested_schema, ElicitationSchema):
        return None
    return Form(request.message, request.requested_schema)


def list_choices(schema: Any) -> list[Row] | None:
    """Return the values that a field may have, as rows; None if the user writes it."""
    match schema:
        case BooleanPropertySchema():
            return [Row("Yes", "", True), Row("No", "", False)]
        case StringPropertySchema(one_of=[*entries]) if entries:
            return [Row(one.title, str(one.description or ""), one.const) for one in entries]
        case StringPropertySchema(enum=[*values]) if values:
            return [Row(value, "", value) for value in values]
        case MultiSelectPropertySchema(items=items):
            if entries := items.any_of:
                return [Row(one.title, str(one.description or ""), one.const) for one in entries]
            return [Row(value, "", value) for value in items.enum or []]
        case _:
            return None
