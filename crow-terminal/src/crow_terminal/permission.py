"""The answers to a question for permission: what the agent offers, as rows, and the response that is sent. Pure."""

from dataclasses import dataclass
from typing import Any

from crow_core.acp.schema import CancelledOutcome, RequestPermissionRequest, RequestPermissionResponse, SelectedOutcome

from crow_terminal.dialogs import Row


@dataclass(frozen=True)
class Answer:
    """An answer that the agent offers."""

    id: str
    """The id of its option; empty to cancel."""
    name: str
    allows: bool
    wants: str = ""
    """What the user has to write for it, as a question; empty for nothing."""
    text: str = ""
    """The text to begin with."""
    key: str = ""
    """The key of the text in `_meta.crow` of the answer."""


def make_rows(request: RequestPermissionRequest) -> list[Row]:
    """Make the rows for all options, in the agent's order."""
    rows: list[Row] = []
    for option in request.options:
        allows = option.kind.startswith("allow")
        answer = Answer(option.option_id, option.name, allows)
        rows.append(Row(option.name, "", answer))
    return rows


def make_answer(answer: Answer, text: str) -> RequestPermissionResponse:
    """Make the response to a question for permission."""
    if not answer.id:
        return RequestPermissionResponse(outcome=CancelledOutcome())
    meta: Any = {"crow": {answer.key: text}} if answer.key and text else None
    outcome = SelectedOutcome(option_id=answer.id, meta=meta) if meta else SelectedOutcome(option_id=answer.id)
    return RequestPermissionResponse(outcome=outcome)
