"""A tool of an MCP server, and a call of it."""

import hashlib
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import msgspec
from crow_system.arguments import fit_arguments, to_key

from crow_core.acp.schema import ToolKind
from crow_core.mcp.schemas import is_small
from crow_core.mcp.server import Server
from crow_core.messages.message import RawToolCall, parse_arguments
from crow_core.messages.tool_metadata import DefinitionMeta
from crow_core.messages.tool_names import LEGAL_NAME, rename, to_legal_name
from crow_core.text import clean_lines, to_line

PROXY_TOOL = "call_tool"
"""The name of the tool that calls another tool; its arguments are {name, arguments}."""

DESCRIPTION_LIMIT = 8_000
"""Characters of a tool's description that are sent to the model."""
TITLE_LIMIT = 80
"""Characters of a tool's title that are shown to the user."""
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
"""The schema that is sent for a tool whose own schema is unknown or cannot be sent."""
UNSHOWN = "(What it takes cannot be shown: its schema is too large, or none. Its answers to wrong arguments may tell.)"

NAME_LIMIT = 200
"""Characters of the name of a call in which the name of a tool is looked for."""
WORD = re.compile(r"[\w-]")
"""Matches a character of a word; the name of a tool does not end before one."""
WRAPPING = re.compile(
    r"[^\w-]+|(functions?|function_calls?|tools?|tool_(calls?|use|code|name|sep)|calls?|default_api|api|name|begin|sep"
    r"|multi_tool_use|namespace|recipient|to|assistant|commentary|analysis|final|start|channel|message|invoke|print)"
    r"(?![\w-])",
    re.I,
)
"""Matches the next piece of what a model writes before the name of a tool: a namespace, or a token of its template."""


@dataclass(eq=False)
class Tool:
    """One tool under the name the model knows it by."""

    name: str
    server: Server | None
    """None for a tool of a stored session whose server is not connected."""
    definition: dict[str, Any]
    """The tool's entry in its server's answer to tools/list."""
    description: str | None = None
    """Takes the place of the description in `definition`."""

    @cached_property
    def schema(self) -> dict[str, Any]:
        """The tool in the shape of chat completions."""
        own = self.definition.get("description") or ""
        description = clean_lines(own if self.description is None else self.description)[:DESCRIPTION_LIMIT]
        parameters: dict[str, Any] = self.definition.get("inputSchema") or NOTHING
        tables = [parameters.get("properties", {}), parameters.get("$defs", {})]
        if not is_small(parameters) or not all(isinstance(table, dict) for table in tables):
            description, parameters = f"{description}\n\n{UNSHOWN}".strip(), NOTHING
        function: dict[str, Any] = {"name": self.name, "description": description, "parameters": parameters}
        return {"type": "function", "function": function}

    @cached_property
    def title(self) -> str:
        """The title that its server gives it for people; empty if it only repeats the name."""
        title = self.definition.get("title") or self.hints.get("title")
        if not isinstance(title, str) or title == self.definition.get("name") or (self.server and self.server.built_in):
            return ""
        return to_line(title).strip()[:TITLE_LIMIT]

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the whole definition; a tool whose definition changes counts as another tool."""
        return hashlib.sha256(msgspec.json.encode(self.definition, order="sorted")).hexdigest()

    @cached_property
    def own_meta(self) -> DefinitionMeta:
        """The `_meta` of a built-in server's definition; empty for any other, which is not believed."""
        return self.definition.get("_meta") or {} if self.server and self.server.built_in else {}

    @cached_property
    def hints(self) -> dict[str, Any]:
        """The annotations of its definition (MCP): claims of the server, not facts."""
        return self.definition.get("annotations") or {}

    @cached_property
    def destroys(self) -> bool:
        """True if a server that is not ours says that the tool may destroy something."""
        return self.hints.get("destructiveHint") is True and not (self.server and self.server.built_in)

    def kind(self, arguments: dict[str, Any]) -> ToolKind:
        """The kind of a call with these arguments.

        Only a built-in server, or one that the user's configuration trusts, is believed.
        """
        if self.server is None:
            return "other"
        if not self.server.built_in:
            reads = self.server.trust and self.hints.get("readOnlyHint") is True and not self.destroys
            return "read" if reads else "other"
        match self.own_meta.get("crow/kind", "other"):
            case str(kind):
                return kind
            case kinds:
                return kinds.get(str(arguments.get("command")), "other")

    @property
    def properties(self) -> dict[str, Any]:
        """The schemas of its arguments, by their names."""
        return self.schema["function"]["parameters"].get("properties", {})

    def fit(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Convert arguments to the names and types of the schema that the model was sent. Raises ValueError."""
        table = self.own_meta.get("crow/arguments", {}) if self.server and self.server.built_in else None
        return fit_arguments(arguments, self.schema["function"]["parameters"], table)

    def replaces(self, name: str) -> bool:
        """True if another agent has a tool of this name that does what this one does."""
        return to_key(name) in self.own_meta.get("crow/replaces", ())

    @property
    def repeats(self) -> bool:
        """True if the tool is meant to be called until its result changes: `_meta` has `crow/repeats`.

        Any server is believed here: the limit of model calls holds for its tools, too.
        """
        meta = self.definition.get("_meta")
        return isinstance(meta, dict) and cast("dict[str, Any]", meta).get("crow/repeats") is True

    def may_repeat(self, arguments: dict[str, Any]) -> bool:
        """True if a call may run a second time after its connection broke.

        Any server is believed here: one that lies harms only itself.
        """
        says_so = self.hints.get("readOnlyHint") is True or self.hints.get("idempotentHint") is True
        return says_so or self.kind(arguments) in ("read", "search", "think")


@dataclass(frozen=True, eq=False)
class ToolCall:
    """A tool call of the model, with its arguments parsed once and its tool looked up.

    Hooks, the toolbox and the conversions to ACP all receive this value.
    """

    use: RawToolCall
    """The call in the model's reply, under its tool's name; for a call of `call_tool`, the call that it asks for."""
    arguments: dict[str, Any]
    """As its tool takes them (`Tool.fit`), for hooks and the tool alike; empty where they are not a JSON object."""
    is_valid: bool = True
    """True if the text of the arguments is a JSON object."""
    kind: ToolKind = "other"
    tool_title: str = ""
    """The title that the tool's server gives it; empty if it has none."""
    tool: Tool | None = None
    """None if the session has no tool of that name."""
    fault: str = ""
    """The reason why the tool cannot take the arguments, as a sentence for the model; empty if it can."""
    original: dict[str, Any] = field(default_factory=dict[str, Any])
    """The arguments as the reply has them."""

    is_changed: bool = False
    """True if the arguments are not the model's any more."""

    def change_arguments(self, **arguments: Any) -> "ToolCall":
        """Return the call with other values of these arguments. Its `use` and `original` stay the model's."""
        return replace(self, arguments={**self.arguments, **arguments}, is_changed=True)

    @cached_property
    def id(self) -> str:
        return self.use["id"]

    @cached_property
    def name(self) -> str:
        """The name of the tool."""
        return self.use["function"]["name"]

    @cached_property
    def title(self) -> str:
        """One line that tells a person what the call does."""
        title = make_title(self.name, self.arguments)
        return f"{self.tool_title}: {title}" if self.tool_title else title

    @property
    def raw_input(self) -> Any:
        """The arguments for the client to show: parsed, or the text where it is not a JSON object."""
        return self.arguments if self.is_valid else self.use["function"]["arguments"]


def parse_tool_call(use: RawToolCall, tools: Mapping[str, Tool]) -> ToolCall:
    """Parse a tool call of a reply, look up its tool among `tools`, and convert its arguments for that."""
    use = name_raw_call(unwrap_proxy_call(name_raw_call(use, tools)), tools)
    arguments = parse_arguments(use)
    tool, fault = tools.get(use["function"]["name"]), ""
    given = arguments or {}
    stands_for = tool.own_meta.get("crow/stands_for") if tool else None
    if stands_for and (meant := tools.get(stands_for["tool"])):
        tool, use, given = meant, rename(use, meant.name), {**given, **stands_for["arguments"]}
    try:
        given = tool.fit(given) if tool else given
    except ValueError as error:
        fault = str(error)
    return ToolCall(
        use,
        given,
        is_valid=arguments is not None,
        kind=tool.kind(given) if tool else "other",
        tool_title=tool.title if tool else "",
        tool=tool,
        fault=fault,
        original=arguments or {},
    )


def name_raw_call(use: RawToolCall, tools: Mapping[str, Tool]) -> RawToolCall:
    """Return a tool call under the name of its tool; unchanged if no tool is meant by its name."""
    tool = find_tool(use["function"]["name"], tools)
    return rename(use, tool.name) if tool else use


def find_tool(name: str, tools: Mapping[str, Tool]) -> Tool | None:
    """Find the tool that a model means by a name; None if the name fits no tool, or more than one.

    A legal name is the name of a tool or means none. In another, such as `functions.grep<|channel|>commentary`,
    `github/search` or `<tool_call>grep()`, a tool's name is looked for behind the wrapping; the longest one counts. The
    name that a server gives to its tool, and the same behind the server's name, mean that tool alone.
    """
    if name in tools or LEGAL_NAME.fullmatch(name):
        return tools.get(name)
    exact: dict[str, set[Tool]] = defaultdict(set)
    legal: dict[str, set[Tool]] = defaultdict(set)
    for tool in tools.values():
        for spelling in list_spellings(tool):
            exact[spelling].add(tool)
            legal[to_legal_name(spelling)].add(tool)
    name, start = name[:NAME_LIMIT], 0
    ends = [end for end in range(len(name), 0, -1) if not WORD.match(name, end)]
    while start < len(name):
        for part in (name[start:end] for end in ends if end > start):
            is_word = WORD.match(part, len(part) - 1)
            if found := exact.get(part) or (legal.get(to_legal_name(part)) if is_word else None):
                return tools.get(part) or (found.pop() if len(found) == 1 else None)
        wrapping = WRAPPING.match(name, start)
        if wrapping is None:
            return None
        start = wrapping.end()
    return None


def list_spellings(tool: Tool) -> list[str]:
    """List the names by which a tool may be called: its own, and those made of its server's names."""
    if tool.server is None or "name" not in tool.definition:
        return [tool.name]
    server, name = tool.server.name, str(tool.definition["name"])
    spellings = [tool.name, *(f"{server}{separator}{name}" for separator in "_./:")]
    return spellings if LEGAL_NAME.fullmatch(name) else [*spellings, name]


def make_title(name: str, arguments: dict[str, Any]) -> str:
    """Make one line that tells a person what a call of the tool `name` does."""
    command, path = arguments.get("command"), arguments.get("path")
    if isinstance(path, str) and isinstance(command, str):
        return to_line(f"{command} {path}"[:200])
    if isinstance(command, str) and command.strip():
        first, *more = command.strip().splitlines()
        return to_line(f"{first[:200]} …" if more or len(first) > 200 else first)
    if isinstance(url := arguments.get("url"), str):
        return to_line(f"{name} {url}"[:200])
    detail = ", ".join(
        f"{len(cast(list[Any], value))} {key}" if isinstance(value, list) else f"{key}={str(value)[:60]}"
        for key, value in arguments.items()
    )
    return to_line(f"{name}({detail})"[:200])


def unwrap_proxy_call(call: RawToolCall) -> RawToolCall:
    """Convert a call of `call_tool` to the call that it asks for; return any other call unchanged."""
    if call["function"]["name"] != PROXY_TOOL:
        return call
    given = parse_arguments(call) or {}
    name, arguments = given.get("name"), given.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict | str):
        return call
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return {**call, "function": {"name": name, "arguments": text}}
