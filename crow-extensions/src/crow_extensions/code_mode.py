"""Let the model call many tools of MCP servers from one Python program, instead of one by one.

Each call of the program is judged, shown and logged as a call of the model: with the hooks, rules and permissions of
its tool. The program itself has access to nothing else (`program.py`).
"""

import json
import keyword
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import count
from typing import Annotated, Any, cast

import msgspec
from crow_core.app import Crow
from crow_core.content import to_text
from crow_core.mcp.result import ToolResult
from crow_core.mcp.server import Handler, Server
from crow_core.mcp.tool import PROXY_TOOL, Tool, ToolCall
from crow_core.messages.message import RawToolCall, make_unique
from crow_core.session.session import Session
from crow_core.session_state import StateKey
from crow_core.text import to_line
from msgspec import Meta

from crow_extensions.inner_calls import use_tool
from crow_extensions.program import Interpreter, ProgramError, ProgramLimits, ProgramOutcome

NAME = "run_program"
SEARCH_TOOLS = ("tool_search", PROXY_TOOL)
"""The tools of the extension `tool_search`, which programs replace."""
SERVER = StateKey[Server]("code_mode")
SIGNATURES_LIMIT = 40_000
"""Characters of the list of functions; beyond it, the list has only their names."""
ABOUT_LIMIT = 80
"""Characters of the description of a function in that list."""
CODE_LIMIT = 100_000
"""Characters of a program."""
TYPES = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "array": "list", "object": "dict"}

DEFINITION: dict[str, Any] = {
    "name": NAME,
    "description": "Run a Python program that calls tools as functions. You get what it prints, and the value of its "
    "last line. Use one program for several calls: loop, filter and combine there, and print only what you need. "
    "Functions take keyword arguments. They return the text of the tool's result; if that is JSON, they return a "
    "dict or list. They raise RuntimeError if the tool fails. To run several at the same time: "
    "`import asyncio` and `await asyncio.gather(f(…), g(…))`; in such a program, await every function. "
    "The program has no files, no network and only small parts of the standard library (json, re, math, datetime). "
    "`print(describe_tool(name))` shows all about a function.",
    "inputSchema": {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "the program"}},
        "required": ["code"],
    },
    "_meta": {"crow/kind": "think"},
}
Positive = Annotated[int, Meta(gt=0)]
Seconds = Annotated[float, Meta(gt=0)]


def code_mode(
    crow: Crow, *, above: int = 20, seconds: Seconds = 10.0, memory: Positive = 100_000_000, calls: Positive = 100
) -> None:
    """Replace the tools of MCP servers by one tool that runs programs, if there are more than `above` of them.

    A program may compute for `seconds`, not counting its calls; use `memory` bytes; and make `calls` calls. Needs the
    package `pydantic-monty`.
    """
    if find_spec("pydantic_monty") is None:
        raise ValueError("the package pydantic-monty is missing; install crow-extensions[code-mode]")
    interpreter = Interpreter(ProgramLimits(seconds, memory, calls))

    async def run_program(session: Session, tool_call: ToolCall) -> ToolResult:
        return await run(session, tool_call, interpreter)

    @crow.mcp_servers
    def offer(session: Session) -> Sequence[Server]:
        handlers: dict[str, Handler] = {NAME: run_program}
        session.state[SERVER] = Server("code_mode", definitions=[DEFINITION], handlers=handlers, built_in=True)
        return [session.state[SERVER]]

    @crow.tools
    def replace_tools(schemas: list[dict[str, Any]], session: Session) -> list[dict[str, Any]]:
        tools = session.toolbox.tools
        functions = find_functions(tools)
        sent = {schema["function"]["name"] for schema in session.toolbox.sent or ()}
        others = [schema for schema in schemas if schema["function"]["name"] != NAME]
        if NAME not in sent and len(functions) <= above:
            return others
        hidden = {*SEARCH_TOOLS, *(tool.name for tool in functions.values())}
        kept = [schema for schema in others if schema["function"]["name"] not in hidden]
        function = tools[NAME].schema["function"]
        about = f"{function['description']}\n\nThe functions:\n{list_functions(functions)}"
        return [*kept, {"type": "function", "function": {**function, "description": about}}]

    @crow.app_end
    async def end() -> None:
        await interpreter.close()


def find_functions(tools: Mapping[str, Tool]) -> dict[str, Tool]:
    """Return the tools of MCP servers that are not built in, by the names of their functions."""
    functions: dict[str, Tool] = {}
    for tool in tools.values():
        if tool.server is not None and not tool.server.built_in:
            functions[to_function_name(tool.name, functions)] = tool
    return functions


def to_function_name(name: str, taken: Mapping[str, Any]) -> str:
    """Return the name of a tool as one that Python accepts, and no other function has."""
    legal = re.sub(r"\W", "_", name, flags=re.ASCII)
    if legal[:1].isdigit() or keyword.iskeyword(legal):
        legal = f"_{legal}"
    return make_unique(legal, {*taken})


def list_functions(functions: Mapping[str, Tool]) -> str:
    """Return the functions for the model, one in a line: with their arguments, or only names if there are too many."""
    lines = [describe_function(name, tool) for name, tool in functions.items()]
    text = "\n".join(lines)
    return text if len(text) <= SIGNATURES_LIMIT else ", ".join(functions)[:SIGNATURES_LIMIT]


def describe_function(name: str, tool: Tool) -> str:
    """Return the signature of a function, with the first words of its tool's description."""
    parameters: dict[str, Any] = tool.schema["function"]["parameters"]
    required: Any = parameters.get("required") or ()
    properties = sorted(tool.properties.items(), key=lambda item: item[0] not in required)
    arguments = ", ".join(describe_argument(key, value, key in required) for key, value in properties)
    about = to_line(" ".join(str(tool.schema["function"]["description"]).split()))[:ABOUT_LIMIT]
    return f"{name}({arguments})" + (f"  # {about}" if about else "")


def describe_argument(name: str, schema: Any, required: bool) -> str:
    """Return an argument of a signature: its name, its type, and its default if it may be left out."""
    table = cast("dict[str, Any]", schema) if isinstance(schema, dict) else {}
    kind = TYPES.get(str(table.get("type")), "")
    annotated = f"{to_line(name)}: {kind}" if kind else to_line(name)
    return annotated if required else f"{annotated} = {table.get('default')!r}"[:80]


async def run(session: Session, tool_call: ToolCall, interpreter: Interpreter) -> ToolResult:
    """Answer a call of the tool: run the program."""
    code = tool_call.arguments.get("code")
    if not isinstance(code, str) or len(code) > CODE_LIMIT:
        return ToolResult.error(f"Nothing was run. Give the program as `code`, at most {CODE_LIMIT:,} characters.")
    functions, numbers = find_functions(session.toolbox.tools), count(1)

    async def call(name: str, args: tuple[Any, ...], arguments: dict[str, Any]) -> Any:
        if name == "describe_tool":
            return describe_tool(functions, *args, **arguments)
        tool = functions[name]
        given = dict(zip(tool.properties, args, strict=False)) | arguments
        try:
            text = msgspec.json.encode(given).decode()
        except (TypeError, ValueError, OverflowError) as error:
            raise ProgramError(f"{name} was not called: its arguments are not JSON ({error})") from error
        use: RawToolCall = {
            "id": f"{tool_call.id}/{next(numbers)}",
            "type": "function",
            "function": {"name": tool.name, "arguments": text},
        }
        return to_value(await use_tool(session, tool_call.id, session.toolbox.parse(use)), tool)

    return to_result(await interpreter.run(code, {**functions, "describe_tool": None}, call))


def describe_tool(functions: Mapping[str, Tool], name: Any = "", *_: Any, **__: Any) -> str:
    """Return the description of a function and the schema of its arguments, for a program. Raises ProgramError."""
    if not isinstance(name, str) or name not in functions:
        raise ProgramError(
            f"there is no function {str(name)[:200]!r}; the functions are: {', '.join(functions)}"[:2000]
        )
    function = functions[name].schema["function"]
    return f"{function['description']}\n{json.dumps(function['parameters'])}"


def to_value(result: ToolResult, tool: Tool) -> Any:
    """Convert the result of a tool to the value that its function returns. Raises ProgramError."""
    text = "\n\n".join(map(to_text, result.content))
    if result.is_error:
        raise ProgramError(text or f"{tool.name} failed")
    if text.lstrip()[:1] in ("{", "[") or returns_scalar(tool):
        try:
            return msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError):
            pass  # a text that only begins like JSON
    return text


def returns_scalar(tool: Tool) -> bool:
    """Return whether a tool says that its result is a number or a truth value (MCP wraps it as `result`)."""
    match tool.definition.get("outputSchema"):
        case {"properties": {"result": {"type": "integer" | "number" | "boolean"}}}:
            return True
        case _:
            return False


def to_result(outcome: ProgramOutcome) -> ToolResult:
    """Convert the outcome of a program to the result of the tool call."""
    value = "" if outcome.value is None else to_shown(outcome.value)
    parts = [outcome.printed.rstrip("\n"), value, outcome.error]
    text = "\n".join(part for part in parts if part) or "The program ended. It printed nothing."
    return ToolResult.error(text) if outcome.error else ToolResult.text(text)


def to_shown(value: Any) -> str:
    """Return the value of a program's last line as text."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return repr(value)
