"""The answers to a question for permission: what the agent offers, as rows, and the response that is sent. Pure."""

from collections.abc import Collection

from crow_core.acp.client import answer_permission
from crow_core.acp.schema import RequestPermissionRequest, RequestPermissionResponse
from msgspec import Struct

from crow_terminal.dialogs import Row


class Answer(Struct, frozen=True):
    """An answer that the agent offers."""

    id: str
    """The id of its option."""
    name: str
    allows: bool
    wants: str = ""
    """The question whose answer the user writes before choosing the option; empty for none."""
    text: str = ""
    """The text to begin with."""
    key: str = ""
    """The key of the text in `_meta.crow` of the answer."""


def make_rows(request: RequestPermissionRequest, takes: Collection[str] = ()) -> list[Row]:
    """Make the rows for all options, in the agent's order, and for what the agent takes with an answer.

    `takes` may hold `reason`, a text with a rejection, and `command`, another command to run instead.
    """
    options = request.options
    rows = [Row(one.name, "", Answer(one.option_id, one.name, allows=one.kind.startswith("allow"))) for one in options]
    once = {one.kind: one.option_id for one in reversed(options)}
    if "reason" in takes and (id := once.get("reject_once")):
        name = "Reject, and say why"
        rows.append(Row(name, "", Answer(id, name, False, "Tell the agent why, or what to do instead", "", "reason")))
    match request.tool_call.raw_input:
        case {"command": str(command)} if "command" in takes and request.tool_call.kind == "execute":
            if id := once.get("allow_once"):
                name = "Edit the command, then run it"
                rows.append(Row(name, "", Answer(id, name, True, "The command to run instead", command, "command")))
        case _:
            pass
    return rows


def make_answer(answer: Answer, text: str) -> RequestPermissionResponse:
    """Make the response to a question for permission."""
    return answer_permission(answer.id, **({answer.key: text} if answer.key and text.strip() else {}))
