"""Doubles for the two ends of an agent, shipped so that your tests can use what ours use.

`ScriptedModel` plays a model in the same process, `ScriptedServer` plays a chat-completions endpoint over real HTTP.
`connect(crow)` gives an `Editor` in conversation with an agent, over ACP in memory. `CHAOS` holds the ways in which
endpoints misbehave: `ScriptedServer(CHAOS["missing ids"](script))`; for MCP servers that do, see `servers.py`.
"""

from typing import TYPE_CHECKING

from crow_core.testing.chaos import CHAOS, Chaos
from crow_core.testing.editor import Editor, connect
from crow_core.testing.model import ScriptedModel
from crow_core.testing.script import Failure, Raw, Reply, Script, ScriptedCall, ScriptEnded

if TYPE_CHECKING:
    from crow_core.testing.server import ScriptedServer

__all__ = [
    "CHAOS",
    "Chaos",
    "Editor",
    "Failure",
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
        from crow_core.testing.server import ScriptedServer  # brings Starlette and uvicorn: only for those who serve

        return ScriptedServer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
