"""Test doubles for models, endpoints, clients and MCP servers.

`ScriptedModel` is a model in the same process, `ScriptedServer` a chat-completions endpoint over HTTP. `connect(crow)`
connects an `Editor` with an agent over ACP in memory. `MemoryStore` keeps its sessions.
"""

from typing import TYPE_CHECKING

from crow_core.testing.editor import Editor, connect
from crow_core.testing.model import ScriptedModel
from crow_core.testing.script import Failure, Raw, Reply, Script, ScriptedCall, ScriptEnded
from crow_core.testing.store import MemoryStore

if TYPE_CHECKING:
    from crow_core.testing.scripted_server import ScriptedServer

__all__ = [
    "Editor",
    "Failure",
    "MemoryStore",
    "Raw",
    "Reply",
    "Script",
    "ScriptEnded",
    "ScriptedCall",
    "ScriptedModel",
    "ScriptedServer",
    "connect",
]


def __getattr__(name: str) -> object:
    if name == "ScriptedServer":
        from crow_core.testing.scripted_server import ScriptedServer  # imports Starlette and uvicorn

        return ScriptedServer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
