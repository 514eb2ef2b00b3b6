"""Python functions as tools."""

import asyncio
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar, get_args, get_origin, get_type_hints, overload

import crow_system as system
import msgspec

if TYPE_CHECKING:
    from crow_core.mcp.server import Server
    from fastmcp import FastMCP

Function: TypeAlias = Callable[..., Any]
McpServer: TypeAlias = "str | Sequence[str] | Mapping[str, Any] | FastMCP"
"""An MCP server: its URL, its command, its settings as in `[mcp.servers.NAME]`, or the server itself."""
F = TypeVar("F", bound=Function)


TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""Matches the name of a tool that every provider accepts, as `crow_core.messages.message.LEGAL_NAME` does."""


@dataclass(frozen=True)
class FunctionOptions:
    """The form in which a function is offered to the model."""

    name: str = ""
    """Its name for the model; empty for the function's own."""
    description: str = ""
    """Its description for the model; empty for the function's docstring."""
    ask: bool = False
    """True if a call needs a permission."""
    reads: bool = False
    """True if it only reads, so that it also runs in the mode `plan`, and again after a broken connection."""
    idempotent: bool = False
    """True if a second run with the same arguments changes nothing more."""
    repeats: bool = False
    """True if the tool is meant to be called until its result changes, so that equal calls are not taken for a loop."""
    timeout: float | None = None
    """Seconds that a call may take; None for no limit."""


@overload
def tool(function: F, /) -> F: ...


@overload
def tool(
    *,
    name: str = "",
    description: str = "",
    ask: bool = False,
    reads: bool = False,
    idempotent: bool = False,
    repeats: bool = False,
    timeout: float | None = None,
) -> Callable[[F], F]: ...


def tool(function: Any = None, /, **options: Any) -> Any:
    """Mark a function, async or not, as a tool; it stays a function that can be called.

    Its docstring describes it to the model, `Annotated[str, "…"]` a parameter. The options are those of
    `FunctionOptions`. Raises TypeError for a function whose parameters have no types.
    """

    def mark(function: F) -> F:
        setattr(function, "crow_tool", FunctionOptions(**options))  # noqa: B010, the type of a function has no such field
        make_definition(function)
        return function

    return mark if function is None else mark(function)


def get_options(function: Function) -> FunctionOptions:
    """Return the options that `tool` gave a function, or the defaults."""
    options: FunctionOptions | None = getattr(function, "crow_tool", None)
    return options or FunctionOptions()


def get_name(function: Function) -> str:
    """Return the name that the model knows a function by."""
    if name := get_options(function).name or getattr(function, "__name__", ""):
        return name
    raise TypeError(f"{function!r} cannot be a tool: it has no name. Write a function that calls it.")


def make_definition(function: Function) -> dict[str, Any]:
    """Describe a function as MCP's `tools/list` does. Raises TypeError."""
    options, name = get_options(function), get_name(function)
    if not TOOL_NAME.fullmatch(name):
        raise TypeError(
            f"{name!r} cannot be the name of a tool: providers take letters from a to z, digits, _ and -, at most 64. "
            "Give it another: @tool(name=…)."
        )
    return {
        "name": name,
        "description": options.description or inspect.getdoc(function) or name,
        "inputSchema": make_input_schema(function),
        "annotations": {"readOnlyHint": options.reads, "idempotentHint": options.idempotent or options.reads},
        "_meta": {"crow/kind": "read" if options.reads else "other", "crow/repeats": options.repeats},
    }


def make_input_schema(function: Function) -> dict[str, Any]:
    """Make the JSON schema of a function's parameters, without FastMCP where that is not needed. Raises TypeError."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise TypeError(
            f"{get_name(function)} cannot be a tool: the type {error.name!r} of a parameter is not known in its module."
        ) from error
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(
                f"{get_name(function)} cannot be a tool: a model passes arguments by name, not {parameter}."
            )
        if name not in hints:
            raise TypeError(f"{get_name(function)} cannot be a tool: give its parameter {name!r} a type.")
        hint = to_described(hints[name])
        fields.append((name, hint) if parameter.default is parameter.empty else (name, hint, parameter.default))
    try:
        arguments = msgspec.defstruct("Arguments", fields, kw_only=True)
        schema = msgspec.json.schema(arguments)
    except (TypeError, RuntimeError):  # a type that only pydantic knows, or FastMCP's Context
        from fastmcp.tools import Tool  # imported here because FastMCP takes long to load, and most tools need no more
        from pydantic.errors import PydanticUserError

        try:
            return Tool.from_function(function).parameters
        except PydanticUserError:
            refused = find_refused_parameter(hints)
        raise TypeError(
            f"{get_name(function)} cannot be a tool: a model cannot write {refused}. Use str, int, float, bool, list, "
            "dict, a dataclass or a pydantic model; take anything else from the surrounding code."
        ) from None
    definitions: dict[str, Any] = schema.pop("$defs")
    root: dict[str, Any] = definitions.pop("Arguments")
    del root["title"]
    return {**root, "$defs": definitions} if definitions else root


def find_refused_parameter(hints: Mapping[str, Any]) -> str:
    """Describe the first parameter whose type has no JSON schema."""
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticUserError

    for name, hint in hints.items():
        try:
            TypeAdapter(hint).json_schema()
        except PydanticUserError:
            return f"its parameter {name!r} of the type {hint.__name__ if isinstance(hint, type) else hint}"
    return "one of its parameters"


def to_described(hint: Any) -> Any:
    """Convert `Annotated[T, "text"]` to a type whose schema has the text as its description."""
    if get_origin(hint) is not Annotated:
        return hint
    base, *notes = get_args(hint)
    metas = [msgspec.Meta(description=note) if isinstance(note, str) else note for note in notes]
    for meta in metas:
        base = Annotated[base, meta]
    return base


def contain_exits(function: Function) -> Function:
    """Wrap a function so that what would end the program, or a cancellation of its own, is an error like any other."""

    @wraps(function)
    async def run_async(*args: Any, **arguments: Any) -> Any:
        try:
            return await function(*args, **arguments)
        except SystemExit as error:
            raise RuntimeError(f"it wanted to exit with {error.code!r}") from error
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise RuntimeError("what it waited for was cancelled") from error

    @wraps(function)
    def run(*args: Any, **arguments: Any) -> Any:
        try:
            return function(*args, **arguments)
        except SystemExit as error:
            raise RuntimeError(f"it wanted to exit with {error.code!r}") from error
        except (asyncio.CancelledError, CancelledError) as error:
            raise RuntimeError("what it waited for was cancelled") from error

    return run_async if inspect.iscoroutinefunction(function) else run


def make_function_server(functions: Sequence[Function]) -> "Server":
    """Make the MCP server of Python functions, in this process; FastMCP is loaded when the first is called.

    Raises TypeError for a function that cannot be a tool, ValueError for a name given twice.
    """

    def source() -> Any:
        from fastmcp import FastMCP
        from fastmcp.tools import Tool

        server = FastMCP("functions")
        for function in functions:
            options = get_options(function)
            guarded = contain_exits(function)
            server.add_tool(Tool.from_function(guarded, name=get_name(function), timeout=options.timeout))
        return server

    from crow_core.mcp.server import Server

    definitions = [make_definition(function) for function in functions]
    names = [definition["name"] for definition in definitions]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"Two tools are called {twice[0]!r}. Give one of them another name: @tool(name=…).")
    return Server("functions", source, definitions=definitions, built_in=True, shared=True)


def to_given_servers(servers: Mapping[str, McpServer]) -> dict[str, Any]:
    """Convert URLs, commands and settings of MCP servers to `ServerSettings`; other values stay. Raises ValueError."""
    from crow_core.errors import ConfigError  # these are loaded when a program has MCP servers

    from crow_agent.settings.mcp_servers import check_credentials, to_mcp_server
    from crow_agent.settings.structs import ServerSettings

    if not isinstance(servers, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError('mcp_servers is a dict: {"NAME": "command or URL"}.')
    given: dict[str, Any] = {}
    for name, server in servers.items():
        try:
            if isinstance(server, str) and server.startswith(("http://", "https://")):
                server = {"url": server}
            elif isinstance(server, str):
                server = system.split_command(server)
            if isinstance(server, Sequence):
                server = {"command": server[0], "args": [*server[1:]]}
            if isinstance(server, Mapping):
                given[name] = settings = msgspec.convert(dict(server), ServerSettings)
                to_mcp_server(name, settings)
                check_credentials(settings)
            elif hasattr(server, "list_tools"):
                given[name] = server
            else:
                raise ValueError(f"{server!r} is no command, URL, dict of settings or FastMCP object")
        except (ValueError, IndexError, ConfigError) as error:
            why = "the command is empty" if isinstance(error, IndexError) else str(error).rstrip(".")
            raise ValueError(f"The MCP server {name!r} cannot be used: {why}.") from error
    return given
