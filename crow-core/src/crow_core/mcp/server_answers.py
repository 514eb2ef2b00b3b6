"""The answers of a server: what of them is used, and what its errors mean."""

from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

from crow_core.mcp.result import limit_blocks
from crow_core.text import to_line

if TYPE_CHECKING:
    from mcp_types import ElicitRequestParams

T = TypeVar("T")

LIST_FIELDS = {
    "tools/list": "tools",
    "prompts/list": "prompts",
    "resources/list": "resources",
    "resources/templates/list": "resourceTemplates",
}
"""The field of the answer that holds the items, for each request that lists something."""
BLOCK_FIELDS = {"tools/call": "content", "resources/read": "contents", "prompts/get": "messages"}
"""The field of the answer that may hold too much content, for each request."""
SKILLS_EXTENSION = "io.modelcontextprotocol/skills"
"""The extension of MCP by which servers list skills (SEP-2640)."""
APPS_EXTENSION = "io.modelcontextprotocol/ui"
"""The extension of MCP by which servers have pages for their tools (SEP-1865)."""
APP_TYPE = "text/html;profile=mcp-app"
"""The type of these pages."""
TASKS_EXTENSION = "io.modelcontextprotocol/tasks"
"""The extension of MCP by which servers run tool calls as tasks (SEP-2663)."""
METHOD_NOT_FOUND = -32601
"""The JSON-RPC error code for an unknown method."""
URL_ELICITATION_REQUIRED = -32042
"""The MCP error code of a tool call that requires the user to visit a page first."""
REASON_LIMIT = 4000
"""Characters of a server's error message that are used."""


def filter_answer(method: str, answer: dict[str, Any], version: str) -> tuple[dict[str, Any], str]:
    """Return the answer to a request without what the SDK takes long to validate, or would reject.

    Returns also what is wrong with the items of a list that were left out; "" if none was.
    """
    if (name := BLOCK_FIELDS.get(method)) and isinstance(blocks := answer.get(name), list):
        return {**answer, name: limit_blocks(cast("list[Any]", blocks))}, ""
    return drop_invalid_items(method, answer, version)


def drop_invalid_items(method: str, answer: dict[str, Any], version: str) -> tuple[dict[str, Any], str]:
    """Return the answer to a request for a list without its invalid items: the SDK would reject the whole list."""
    from mcp_types.methods import validate_server_result  # imported with FastMCP

    if (what := LIST_FIELDS.get(method)) is None or not isinstance(items := answer.get(what), list):
        return answer, ""

    def fault(items: Any) -> str:
        try:
            validate_server_result(method, version, {**answer, what: items})
        except ValueError as error:
            return describe_error(error)
        return ""

    if not fault(items) or fault([]):
        return answer, ""
    faults = [(item, fault([item])) for item in cast("list[Any]", items)]
    reasons = "; ".join(f"{find_name(item)!r}: {why}" for item, why in faults if why)
    return {**answer, what: [item for item, why in faults if not why]}, reasons


def find_name(item: Any) -> str:
    """Return the name in an invalid item of a list, or a question mark."""
    match item:
        case {"name": str(name)}:
            return name
        case _:
            return "?"


async def list_or_empty(listing: Coroutine[Any, Any, list[T]]) -> list[T]:
    """Return what a server lists, or an empty list if it does not know the request."""
    try:
        return await listing
    except Exception as error:  # the SDK's own has a code; its class is not imported here
        if getattr(error, "code", None) == METHOD_NOT_FOUND:
            return []
        raise


def find_pages(error: Exception) -> "Sequence[ElicitRequestParams]":
    """Return the pages that the user has to visit before a tool call, if `error` says so."""
    if getattr(error, "code", None) != URL_ELICITATION_REQUIRED:
        return []
    from mcp.shared.exceptions import MCPError, UrlElicitationRequiredError  # imported with FastMCP

    with suppress(ValueError):
        return UrlElicitationRequiredError.from_error(error.error).elicitations if isinstance(error, MCPError) else []
    return []


def describe_error(error: BaseException) -> str:
    """Return an exception that a server caused as the end of a sentence."""
    match error:
        case BaseExceptionGroup(exceptions=[first, *_]):
            return describe_error(first)
        case FileNotFoundError(filename=str(command)):
            return f"the command {to_line(command)!r} was not found; check its name, or give its full path"
        case Exception(__cause__=(FileNotFoundError() | ConnectionError()) as cause):  # FastMCP wraps it
            return describe_error(cause)
        case ValueError() if hasattr(error, "errors"):  # pydantic's
            faults: Any = error
            fault: dict[str, Any] = faults.errors()[0]
            place = ".".join(map(str, fault["loc"]))
            return to_line(f"what it sent does not keep to MCP ({place}: {fault['msg']})")[:REASON_LIMIT]
        case _:
            return to_line(str(error)[:REASON_LIMIT] or type(error).__name__).strip().rstrip(".")
