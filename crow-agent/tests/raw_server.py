"""An MCP server of 2025 without slow imports: `python raw_server.py FOLDER` notes its starts there.

It answers the calls of several sessions as they come, and says with nothing which call its questions belong to.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

TOOLS = ("pid", "die", "hold", "release", "ask", "roots", "change", "long")
held: list[Any] = []
tools = [*TOOLS]
folder = Path(sys.argv[1])
(folder / f"{os.getpid()}.pid").write_text("")
COLOURS = {"type": "string", "enum": ["red", "green", "blue", "black"]}
FORM = {"type": "object", "properties": {"colour": COLOURS}, "required": ["colour"]}


def send(**message: Any) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def answer(id: Any, text: object) -> None:
    send(id=id, result={"content": [{"type": "text", "text": str(text)}]})


def call(id: Any, name: str, arguments: dict[str, Any]) -> None:
    match name:
        case "die":
            os._exit(1)
        case "hold":  # until `release` is called
            held.append(id)
            (folder / f"held-{len(held)}").write_text("")
        case "release":
            answer(id, len(held))
            for each in held:
                answer(each, "released")
            held.clear()
        case "ask":
            message = {"mode": "form", "message": arguments["message"], "requestedSchema": FORM}
            send(id=f"for {id}", method="elicitation/create", params=message)
        case "roots":
            send(id=f"for {id}", method="roots/list")
        case "change":
            tools.append("new")
            send(method="notifications/tools/list_changed")
            answer(id, "changed")
        case "long":
            answer(id, "x" * 9_000_000)
        case _:
            answer(id, os.getpid())


for line in sys.stdin:
    message = json.loads(line)
    id, params = message.get("id"), message.get("params") or {}
    match message.get("method"):
        case "initialize":
            send(
                id=id,
                result={
                    "protocolVersion": "2025-06-18",
                    "capabilities": {"tools": {"listChanged": True}},
                    "serverInfo": {"name": "raw", "version": "1"},
                },
            )
        case "tools/list":
            send(id=id, result={"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in tools]})
        case "tools/call":
            call(id, params["name"], params.get("arguments") or {})
        case None:
            value = message.get("result", message.get("error"))
            asked = int(id.removeprefix("for ")) if id.removeprefix("for ").isdigit() else id.removeprefix("for ")
            answer(asked, json.dumps(value))
        case _ if id is not None:
            send(id=id, error={"code": -32601, "message": "Method not found"})
        case _:
            pass
