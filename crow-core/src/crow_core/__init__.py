"""crow's core: an agent between two protocols, ACP outside and MCP inside.

The names most programs need stand here and are loaded at first use, so that importing the package costs nothing.
"""

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from crow_core.agent import Agent
    from crow_core.app import Crow
    from crow_core.content import ToolResult
    from crow_core.messages import Message, ToolUse, merge, view
    from crow_core.model import Call, ChatModel, Model
    from crow_core.prompts import Prompt
    from crow_core.servers import Server
    from crow_core.session import Choice, Command, EndTurn, Option, Session
    from crow_core.stream import ModelError
    from crow_core.toolbox import Toolbox

__version__ = "0.1.0"

__all__ = [
    "Agent",
    "Call",
    "ChatModel",
    "Choice",
    "Command",
    "Crow",
    "EndTurn",
    "Message",
    "Model",
    "ModelError",
    "Option",
    "Prompt",
    "Server",
    "Session",
    "ToolResult",
    "ToolUse",
    "Toolbox",
    "merge",
    "view",
]

HOMES = {
    "agent": ("Agent",),
    "app": ("Crow",),
    "content": ("ToolResult",),
    "messages": ("Message", "ToolUse", "merge", "view"),
    "model": ("Call", "ChatModel", "Model"),
    "prompts": ("Prompt",),
    "session": ("Choice", "Command", "EndTurn", "Option", "Session"),
    "stream": ("ModelError",),
    "servers": ("Server",),
    "toolbox": ("Toolbox",),
}


def __getattr__(name: str) -> object:
    for module, names in HOMES.items():
        if name in names:
            return getattr(import_module(f"crow_core.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
