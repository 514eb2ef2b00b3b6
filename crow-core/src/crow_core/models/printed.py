"""Tool calls that a reply has as text, because the server has no parser for the form that the model writes.

A reply is such a call if all of it is calls of offered tools, apart from short prose around them. The forms are those
of the models' chat templates:

- JSON, bare, in a fence or in marks: Qwen, Hermes, Granite, Mistral, Llama, Phi, Nemotron, Command R, DeepSeek, Kimi,
  LM Studio
- XML: Llama, Qwen-Coder, MiniMax, GLM
- Python: Llama, Gemma, LFM, OLMo

A call in an explanation is text: prose about calls, another code block or a heading makes the whole reply an answer.
"""

import ast
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, cast

from crow_system.arguments import parse_container
from msgspec import Struct

from crow_core.models.model_call import ModelCall
from crow_core.text import decode_json, is_deep

MAX_CALLS = 16
"""The most calls of one reply that are run: a model that prints more is in a rut."""
MAX_BEFORE, MAX_AFTER = 600, 200
"""The most characters of prose before and after the calls."""
MAX_TEXT = 1_000_000
"""Characters of the longest text in which calls are looked for."""

START = re.compile(
    r"^[ \t]*(?=[{\[<]|```|~~~)|(?<=^Action:)[ ]?(?=```)"
    r"|(?<=[.!?:])[ \t]?(?=<[|｜]tool|<\|python_tag|\[TOOL_CALLS\]|<tool_call>)",
    re.M,
)
"""Matches where calls may begin: the first line that begins like one, or a mark of a template after a sentence."""
OPEN_START = re.compile(r"(?:(?<=\n)|\A)[ \t`~]*\Z|(?<=[.!?:])[ \t]?(?:[<\[][\w|｜\]]{0,14}|`{1,3})?\Z")
"""Matches the end of a text in which calls may begin with what follows."""
FENCE = re.compile(
    r"(?:```+|~~~+)[ \t]*(?:json[c5]?|tools?|tool_calls?|tool_code|function_call|xml)?[ \t]*(?=\n|<|\Z)", re.I
)
OTHER_FENCE = re.compile(r"(?:```|~~~)[ \t]*[^\s`~<]", re.I)
MARK = re.compile(
    r"</?(?:minimax:|seed:)?(?:tools?|tool_?calls?|functions?|function_?calls?|tool_use|invoke|action)>"
    r"|<[|｜][\w▁ /]{1,40}[|｜]>"
    r"|\[/?(?:TOOL_CALLS?|END_TOOL_CALLS?|TOOL_REQUEST|END_TOOL_REQUEST|TOOL_RESULT|ARGS)\]|</s>|<end_of_turn>",
    re.I,
)
"""Matches a mark of a chat template: `<tool_call>`, `[TOOL_CALLS]`, `<|python_tag|>`, `<｜tool▁calls▁begin｜>` …"""
BETWEEN = re.compile(r"[\s,;]+")
FILLER = re.compile(r"(?:functions?|commentary|analysis|assistant|json|to)\b(?!\.)=?")
"""Matches a word that templates write between marks: the type of a call, or whom a message is for."""
NAME = re.compile(r"[A-Za-z_][\w.-]*(?::\d+)?")
NAMESPACE = re.compile(r"^(?:functions?|tools?|default_api)\.|:\d+$|\.call$")
"""Matches what some templates write around the name of a tool: `functions.read:0`."""
XML_NAME = re.compile(r'<(?:function|invoke)(?:=| name=)"?([\w.:-]+)"?[^<>]*>\s*', re.I)
XML_VALUE = re.compile(
    r'<parameter(?:=| name=)"?([\w.-]+)"?[^<>]*>\n?(.*?)\n?</parameter>\s*'
    r"(?=<parameter[= ]|</(?:function|invoke)>)",
    re.S | re.I,
)
XML_END = re.compile(r"</(?:function|invoke)>", re.I)
GLM_VALUE = re.compile(
    r"<arg_key>\s*([\w.-]+)\s*</arg_key>\s*<arg_value>\n?(.*?)\n?</arg_value>\s*(?=<arg_key>|</tool_call>|\Z)", re.S
)
BLOCK_END = re.compile(r"\n[ \t]*(?:```|~~~)|</?(?:tool|function|TOOL)|<[|｜]|\n[ \t]*\n|\Z")
"""Matches the end of a value whose own end its parser does not tell."""
PYTHON_VALUES = {"true": "True", "false": "False", "null": "None"}

ABOUT_CALLS = re.compile(
    r"\b(?:for |an? |as )?(?:examples?|instance)\b|\be\.\s?g\.|\bsuch as\b|\blooks? like\b|\blike (?:this|so)\b"
    r"|\bthis way\b|\bas follows\b|\b(?:form(?:at)?s?|syntax|schema|templates?|protocol|JSON|XML)\b"
    r"|\b(?:tool|function)[- _]?call(?:s|ing)?\b|\bcall(?:s|ing)? (?:the|a|an) (?:tool|function)s? (?:with|by|is)\b"
    r"|\b(?:the|an?|some|most|many|other) (?:\w+ )?(?:(?:model|server|assistant|client|agent|LLM|parser)s?|API)\b"
    r"|\b(?:would|could|might) (?:be|look|have|write|print|send|say|return|call|emit|get|see|receive|produce)\b"
    r"|\b(?:prints?|emits?|writes|sends)\b"
    r"|\bdocument(?:ed|ation)\b|\bBeispiel|\bz\. ?B\.|\bexempl|\bejemplo|\besempio|\bпример|例",
    re.I,
)
"""Matches prose in which a call is an example."""
STRUCTURE = re.compile(r"^[ \t]*(?:#|>|\||[-*+] |\d+[.)] |```|~~~|[{<])", re.M)
"""Matches a line of Markdown or code that the prose around a call does not have."""
RESPONSE = re.compile(r"<tool_response>.*?</tool_response>", re.S)
ASKS_FOR_CALLS = re.compile(
    r"\btool[- _]?calls?\b|\b(?:function|tool)[- _]?calling\b|\btools? (?:is|are|gets?) called\b"
    r"|\bhow\b.{0,60}\bcall(?:s|ing|ed)?\b.{0,30}\b(?:tools?|functions?)\b"
    r"|\b(?:examples?|format|syntax|JSON|looks?)\b.{0,60}\bfunction[- _]?call"
    r"|\bfunction[- _]?call.{0,60}\b(?:JSON|format)\b"
    r"|[\"'](?:arguments|parameters)[\"']\s*:|</?tool|<function|\[TOOL_CALLS|<\|",
    re.I,
)
"""Matches a prompt that is about calls, or holds one: the answer may show one that is not meant to run."""

NAME_KEYS = ("name", "tool_name", "function", "tool", "action")
ARGUMENT_KEYS = ("arguments", "parameters", "args", "input", "tool_input", "action_input")
OTHER_KEYS = frozenset({"id", "type", "index", "tool_call_id", "call_id", "use_tool"})

INCOMPLETE = "Nothing was run: {} Write the whole call again, and nothing else."


class PrintedCalls(Struct):
    """The calls in a text; if `fault` is set, none of them runs."""

    start: int
    """The start of the calls; the text before is prose."""
    calls: list[tuple[str, dict[str, Any]]]
    """The name and the arguments of each."""
    fault: str = ""
    """Why the calls cannot run, as a sentence for the model."""


class NotCalls(ValueError):
    """A text is an answer."""


def get_tools(request: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the schemas of a request's tools, by their names; none if its prompt is about tool calls itself."""
    prompts = (get_prompt(message) for message in reversed(request.get("messages", ())))
    if ASKS_FOR_CALLS.search(next(filter(None, prompts), "")):
        return {}
    return get_schemas(request)


def get_schemas(request: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the schemas of a request's tools, by their names."""
    functions = (tool["function"] for tool in request.get("tools") or ())
    return {function["name"]: function.get("parameters") or {} for function in functions}


def get_prompt(message: Mapping[str, Any]) -> str:
    """Return what the user says in a message; the results of tools in it are not the user's."""
    if message.get("role") != "user":
        return ""
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else [str(part.get("text") or "") for part in content]
    return RESPONSE.sub("", "\n".join(parts)).strip()


def find_start(text: str, at: int = 0) -> int | None:
    """Return where calls may begin in a text, from a place at the beginning of a line on."""
    return found.end() if (found := START.search(text, at)) else None


def find_printed_calls(text: str, tools: Mapping[str, dict[str, Any]]) -> PrintedCalls | None:
    """Find the calls in a reply's text; None if it is an answer. `tools` are the schemas of the arguments."""
    if not tools or len(text) > MAX_TEXT or (start := find_start(text)) is None or is_explanation(text[:start]):
        return None
    reader = CallReader(text, start, tools)
    try:
        reader.read()
    except NotCalls:
        return None
    after = text[reader.at :].strip()
    if after and (len(after) > MAX_AFTER or is_explanation(after)):
        return None
    return PrintedCalls(start, reader.calls, reader.fault) if reader.calls or reader.fault else None


def find_calls_of(model_call: ModelCall) -> PrintedCalls | None:
    """Find the calls in the text of a reply that has no other calls; None if there are none."""
    text = model_call.reply.get("content")
    if not isinstance(text, str) or model_call.reply.get("tool_calls"):
        return None
    return find_printed_calls(text, get_tools(model_call.request))


def begins_with_mark(text: str) -> bool:
    """Return whether a text begins with the mark of a call."""
    return bool(MARK.match(text) or XML_NAME.match(text))


def is_explanation(prose: str) -> bool:
    """Return whether prose next to a call is about calls, or more than a remark."""
    return len(prose.strip()) > MAX_BEFORE or bool(ABOUT_CALLS.search(prose) or STRUCTURE.search(prose))


class CallReader:
    """Reads calls from a place in a text on, up to the first thing that is none."""

    def __init__(self, text: str, at: int, tools: Mapping[str, dict[str, Any]]) -> None:
        self.text = text
        self.at = at
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.fault = ""
        self._tools = tools
        self._has_prose = bool(text[:at].strip())
        self._is_marked = False
        """True after the mark of a template: what follows is meant as a call."""

    def read(self) -> None:
        """Read all calls. Raises NotCalls."""
        while not self.fault:
            self.skip()
            if self.at >= len(self.text) or not self.read_call():
                break
        self.skip()

    def skip(self) -> None:
        """Go on after white space, marks and fences. Raises NotCalls at the fence of another language."""
        while found := BETWEEN.match(self.text, self.at) or MARK.match(self.text, self.at) or self.match_fence():
            self._is_marked = self._is_marked or found.re is MARK or "tool" in found[0].lower()
            self.at = found.end()

    def match_fence(self) -> "re.Match[str] | None":
        found = FENCE.match(self.text, self.at)
        if found is None and OTHER_FENCE.match(self.text, self.at):
            raise NotCalls
        return found

    def read_call(self) -> bool:
        """Read what stands here; return False if it is not a call. Raises NotCalls."""
        if found := XML_NAME.match(self.text, self.at):
            self._is_marked = True
            self.at = found.end()
            self.read_xml(found[1])
            return True
        if self.text[self.at] in "{[":
            return self.read_value()
        return self._is_marked and self.read_named()

    def read_xml(self, name: str) -> None:
        """Read the arguments of a call in XML, up to its end."""
        if self.text.startswith("{", self.at):
            self.add(name, self.decode())
        else:
            arguments: dict[str, Any] = {}
            while found := XML_VALUE.match(self.text, self.at):
                arguments[found[1]] = found[2]
                self.at = found.end()
            if not XML_END.match(self.text, self.at):
                self.fail("the call is incomplete.")
                return
            self.add(name, arguments)
        if found := XML_END.match(self.text, self.at):
            self.at = found.end()

    def read_named(self) -> bool:
        """Read a call whose name stands before its arguments, or one in Python."""
        start = self.at
        if not (found := NAME.match(self.text, self.pass_over(start))):
            return False
        name, at = found[0], self.pass_over(found.end())
        arguments: dict[str, Any] = {}
        if self.text.startswith("{", at):
            self.at = at
            self.add(name, self.decode())
        elif self.text.startswith("(", found.end()):
            self.at = found.start()
            self.read_python()
        elif GLM_VALUE.match(self.text, at):
            while value := GLM_VALUE.match(self.text, at):
                arguments[value[1]], at = value[2], value.end()
            self.at = at
            self.add(name, arguments)
        else:
            return False
        return True

    def pass_over(self, at: int) -> int:
        """Return the place after white space, marks, fences and words between them."""
        while found := (
            BETWEEN.match(self.text, at)
            or MARK.match(self.text, at)
            or FENCE.match(self.text, at)
            or FILLER.match(self.text, at)
        ):
            if found.re is FILLER and self.find_tool(found[0]):
                break
            at = found.end()
        return at

    def read_value(self) -> bool:
        """Read a JSON value or a list of calls in Python; return False if it has no call."""
        start = self.at
        value = self.decode()
        if (
            value is None
            and self.text.startswith("[", start)
            and NAME.match(self.text[start + 1 : start + 200].lstrip())
        ):
            self.at = start
            return self.read_python()
        if value is None:
            self.at = start
            if not self.names_tool():
                raise NotCalls
            self.fail("the call is not complete JSON.")
            return True
        found = [*iterate_calls(value, may_be_bare=self._is_marked)]
        if not found or any(call is None for call in found):
            raise NotCalls
        for call in found:
            assert call is not None
            self.add(*call)
        return True

    def read_python(self) -> bool:
        """Read calls in Python with named arguments that are literals. Raises NotCalls."""
        start, ends = self.at, [found.start() for found in BLOCK_END.finditer(self.text, self.at)][:20]
        for end in ends:
            if (calls := parse_python(self.text[start:end].strip())) is not None:
                if not calls or (not self._is_marked and any(self.find_tool(name) is None for name, _ in calls)):
                    raise NotCalls
                self.at = end
                for call in calls:
                    self.add(*call)
                return True
        if not self.names_tool():
            raise NotCalls
        self.fail("the call is incomplete, or not plain Python.")
        return True

    def decode(self) -> Any:
        """Decode the JSON value that stands here, and go on after it; None if there is none.

        Python's spelling of a value, such as quotes of one kind, is accepted up to the end of its block.
        """
        try:
            value, self.at = LENIENT.raw_decode(self.text, self.at)
        except (ValueError, RecursionError):
            pass
        else:
            return None if is_deep(value) else value
        if self.text.startswith("{{", self.at):  # Qwen2.5 copies the braces of its template
            try:
                value, end = LENIENT.raw_decode(self.text, self.at + 1)
            except (ValueError, RecursionError):
                return None
            if self.text.startswith("}", end) and not is_deep(value):
                self.at = end + 1
                return value
            return None
        end = cast("re.Match[str]", BLOCK_END.search(self.text, self.at)).start()
        value = parse_container(self.text[self.at : end].strip())
        self.at = self.at if value is None else end
        return value

    def names_tool(self) -> bool:
        """Return whether what stands here begins like a call of an offered tool."""
        head = self.text[self.at : self.at + 300]
        named = re.search(r"""["'](?:name|tool_name|function|tool)["']\s*:\s*["']([\w.-]+)["']|([\w.]+)\(""", head)
        return bool(named and self.find_tool(named[1] or named[2]))

    def find_tool(self, name: str) -> str | None:
        """Return the name of the offered tool that is meant; None if there is none."""
        bare = NAMESPACE.sub("", name)
        return next((each for each in (name, bare) if each in self._tools), None)

    def add(self, name: str, arguments: Any) -> None:
        """Add a call. Raises NotCalls for data that only looks like one."""
        if isinstance(arguments, str):
            arguments = parse_text_arguments(arguments)
        tool = self.find_tool(name)
        if tool is None:
            if not self._is_marked and (self._has_prose or '"arguments"' not in self.text):
                raise NotCalls
            offered = ", ".join([*self._tools][:20])
            self.fault = self.fault or f"Nothing was run: there is no tool {name[:100]!r}. The tools are: {offered}."
        elif not isinstance(arguments, dict):
            self.fail(f"the arguments of {tool} are not a JSON object.")
        elif missing := [key for key in self._tools[tool].get("required", ()) if key not in arguments]:
            self.fail(f"{tool} needs {' and '.join(map(repr, missing))}.")
        elif (call := (tool, cast("dict[str, Any]", arguments))) not in self.calls:
            self.calls.append(call)
            if len(self.calls) > MAX_CALLS:
                self.fault = f"Nothing was run: these are over {MAX_CALLS} calls. Make one, and wait for its result."
                self.at = len(self.text)

    def fail(self, reason: str) -> None:
        self.fault = self.fault or INCOMPLETE.format(reason)
        self.at = len(self.text)


LENIENT = json.JSONDecoder(strict=False)
"""Accepts line breaks in strings, which small models do not escape."""


def iterate_calls(value: Any, *, may_be_bare: bool) -> Iterator[tuple[str, Any] | None]:
    """Yield the name and the arguments of each call in a JSON value; None for a value that is not a call.

    `may_be_bare` is True if a call may have a name alone.
    """
    match value:
        case list():
            for each in cast("list[Any]", value):
                yield from iterate_calls(each, may_be_bare=may_be_bare)
        case {"tool_calls": [*calls]}:
            for each in calls:
                yield from iterate_calls(each, may_be_bare=may_be_bare)
        case {"function": {"name": str()} as function, **others} if others.keys() <= OTHER_KEYS:
            yield from iterate_calls(function, may_be_bare=may_be_bare)
        case {}:
            yield to_call(cast("dict[str, Any]", value), may_be_bare=may_be_bare)
        case _:
            yield None


def to_call(value: dict[str, Any], *, may_be_bare: bool) -> tuple[str, Any] | None:
    """Return the name and the arguments of one call; None if the object has other keys than a call."""
    names, arguments = ([key for key in keys if key in value] for keys in (NAME_KEYS, ARGUMENT_KEYS))
    if len(names) != 1 or len(arguments) > 1 or value.keys() - {*names, *arguments} - OTHER_KEYS:
        return None
    name = value[names[0]]
    if not isinstance(name, str) or not NAME.fullmatch(name) or not (arguments or may_be_bare):
        return None
    return name, value[arguments[0]] if arguments else {}


def parse_text_arguments(text: str) -> Any:
    """Parse arguments that are written as text, as OpenAI's API has them; None if they are not JSON."""
    try:
        return decode_json(text)
    except ValueError:
        return None


def parse_python(source: str) -> list[tuple[str, dict[str, Any]]] | None:
    """Parse `f(a=1)`, `print(f(a=1))` or `[f(a=1), g(b="x")]`; None if it is not Python, an empty list if no calls."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(source, mode="eval").body
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    nodes = tree.elts if isinstance(tree, ast.List) else [tree]
    calls: list[tuple[str, dict[str, Any]]] = []
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and len(node.args) == 1:
            node = node.args[0]
        if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
            return []
        try:
            arguments = {str(keyword.arg): to_literal(keyword.value) for keyword in node.keywords}
        except ValueError:
            return []
        calls.append((ast.unparse(node.func), arguments))
    return calls


def to_literal(node: ast.expr) -> Any:
    """Return the value of a literal, in which JSON's `true`, `false` and `null` may stand. Raises ValueError."""
    if isinstance(node, ast.Name) and node.id in PYTHON_VALUES:
        return ast.literal_eval(PYTHON_VALUES[node.id])
    value = ast.literal_eval(node)
    json.dumps(value, default=refuse)
    return value


def refuse(value: Any) -> Any:
    raise ValueError(f"{type(value).__name__} is not a value of JSON")
