"""The tool `web_search`: search the web with the first configured provider that finds something."""

from functools import cache
from typing import TYPE_CHECKING, Annotated

from fastmcp import FastMCP
from fastmcp.tools.base import ToolResult
from mcp_types import ToolAnnotations
from pydantic import Field, TypeAdapter

from crow_mcp_server.refusal import ToolRefusal
from crow_mcp_server.tool_options import ToolOptions
from crow_mcp_server.web.search_results import WebSearchResults

if TYPE_CHECKING:
    from crow_mcp_server.web.search_providers import WebSearch

DESCRIPTION = """\
Search the web; gives titles, URLs and snippets. Read the pages that matter with fetch."""


def register(server: FastMCP, options: ToolOptions) -> None:
    @cache
    def get_search() -> "WebSearch":
        # not at the top: it imports HTTP, which takes long
        from crow_mcp_server.web.search_providers import WebSearch, find_providers

        return WebSearch(find_providers(options.env))

    @server.tool(
        description=DESCRIPTION,
        annotations=ToolAnnotations(
            read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=True
        ),
        meta={"crow/kind": "fetch"},
        output_schema=TypeAdapter(WebSearchResults).json_schema(),
    )
    async def web_search(query: str, count: Annotated[int, Field(ge=1, le=20)] = 8) -> ToolResult:
        if not query.strip():
            raise ToolRefusal("query is empty. Say what to search for.")
        results = await get_search().search(query.strip(), count)
        return ToolResult(format_results(results), structured_content=results)


def format_results(results: WebSearchResults) -> str:
    """Return the text for the model: the numbered results."""
    lines: list[str] = []
    for number, each in enumerate(results["results"], 1):
        about = " · ".join(filter(None, (each.get("date"), each["snippet"])))
        lines += [f"{number}. {each['title']}", f"   {each['url']}", *([f"   {about}"] if about else [])]
    return "\n".join(lines) or "Nothing was found. Try other words."
