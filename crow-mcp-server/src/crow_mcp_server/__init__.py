"""An MCP server with an agent's everyday tools: files, search, the shell and the web.

Importing this package reads no file and imports nothing heavy. `tools()` reads the tool definitions from a generated
file, so that a host can describe the tools without loading FastMCP. `create_server` loads FastMCP.
"""

from crow_mcp_server.definitions import tools

TYPE_CHECKING = False
if TYPE_CHECKING:
    from crow_mcp_server.server import create_server

__all__ = ["create_server", "tools"]


def __getattr__(name: str) -> object:
    if name == "create_server":  # not at the top: it imports FastMCP, which takes 0.7 seconds
        from crow_mcp_server.server import create_server

        return create_server
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
