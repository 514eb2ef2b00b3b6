"""The tools an agent needs every day, for files, search, the shell and the web, as an MCP server.

Importing this package reads nothing and imports nothing heavy. `tools()` tells what the server offers from a generated
file, so that a host can describe the tools before FastMCP is loaded; `create_server` loads it.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from crow_mcp_server.server import create_server

__all__ = ["create_server", "tools"]


def tools() -> "list[dict[str, Any]]":
    """What `tools/list` of our server answers, without importing FastMCP: one dict a tool, in the names of MCP."""
    import json  # not at the top: importing this package stays under a millisecond

    with open(f"{__path__[0]}/tools.json", encoding="utf-8") as file:
        return json.load(file)


def __getattr__(name: str) -> object:
    if name == "create_server":  # not at the top: it imports FastMCP, two thirds of a second
        from crow_mcp_server.server import create_server

        return create_server
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
