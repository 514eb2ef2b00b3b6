"""Forms in which a model writes its tool calls as text, for servers and models whose own form does not work.

The tools are described in the system prompt in place of the parameter `tools`, with the form of a call. In the form
`schema` the server holds each reply to a JSON schema: a call of one of the tools, or an answer.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from crow_core.messages.message import Delta
from crow_core.models.adaptation import SchemaSimplifier, drop_keys
from crow_core.models.held_text import PrintedCallReader
from crow_core.models.model_call import ModelRequest
from crow_core.models.printed import get_schemas
from crow_core.text import decode_json, is_deep

Schema = dict[str, Any]

CALL = '{"name": "<tool>", "arguments": {<arguments>}}'
TEXT = "Otherwise reply with your answer as plain text."
RULES = {
    "json": f"To call a tool, reply only with JSON: {CALL}\n{TEXT}",
    "fences": f"To call a tool, reply only with:\n```json\n{CALL}\n```\n{TEXT}",
    "tools": f"To call a tool, reply only with:\n<tools>\n{CALL}\n</tools>\n{TEXT}",
    "schema": 'Each reply is one JSON object on one line. The first one decides: {"use_tool": true, "name": "<tool>", '
    '"arguments": {<arguments>}} to look at or change anything in the folder, {"use_tool": false, "answer": "<text>"} '
    f'if the task is not about the folder. After a result: {CALL}, or {{"answer": "<text>"}} when it is enough.',
}
"""The instructions to the model on writing a call, by form."""
WRAPPED = {"fences": ("```json\n", "\n```"), "tools": ("<tools>\n", "\n</tools>")}
"""The texts before and after a call, by form."""


def write_calls(body: ModelRequest, form: str) -> ModelRequest:
    """Return a body without the parameter `tools`, for a model that writes its calls as text in this form."""
    functions: list[Schema] = [tool["function"] for tool in body["tools"]]
    written = {key: value for key, value in body.items() if key not in ("tools", "tool_choice", "parallel_tool_calls")}
    if form == "schema" and "response_format" not in body:
        offered = [] if body.get("tool_choice") == "none" else functions
        written["response_format"] = make_step_format(offered, body["messages"])
    rules = "\n".join(["# Tools", "", *map(describe, functions), "", RULES[form]])
    messages = [to_text_message(message, form) for message in body["messages"]]
    if messages and messages[0].get("role") == "system" and isinstance(messages[0]["content"], str):
        messages[0] = {**messages[0], "content": f"{messages[0]['content']}\n\n{rules}"}
    else:
        messages.insert(0, {"role": "system", "content": rules})
    del written["messages"]
    return {**written, "messages": messages}


def ends_with_result(messages: list[dict[str, Any]]) -> bool:
    """Return whether the last message is a tool's result."""
    last = messages[-1] if messages else {}
    return last.get("role") == "tool" or str(last.get("content")).startswith("<tool_response>")


def describe(function: Schema) -> str:
    """Describe a tool in a line: its name, its arguments and their types, and what it is for."""
    schema: Schema = function.get("parameters") or {}
    properties: Schema = schema.get("properties") or {}
    if any(is_nested(one) for one in properties.values()):
        arguments = json.dumps(schema, ensure_ascii=False)
    else:
        required = schema.get("required") or ()
        listed = (
            f'"{key}": {one["type"]}{"" if key in required else " (optional)"}' for key, one in properties.items()
        )
        arguments = f"{{{', '.join(listed)}}}"
    return f"- {function['name']} {arguments}: {function.get('description', '').strip()}"


def is_nested(schema: Schema) -> bool:
    """Return whether a schema says more than a type."""
    return not isinstance(schema.get("type"), str) or bool({"properties", "items", "enum"} & schema.keys())


def make_step_format(functions: list[Schema], messages: list[dict[str, Any]]) -> Schema:
    """Make the `response_format` of the reply to these messages: a call of one of these tools, or an answer."""
    schema = make_step_schema(functions, decides=not ends_with_result(messages))
    return {"type": "json_schema", "json_schema": {"name": "step", "schema": schema}}


def make_step_schema(functions: list[Schema], *, decides: bool) -> Schema:
    """Make the schema of a reply: a call of one of these tools, or an answer.

    The reply to a prompt first `decides` whether it uses a tool: otherwise small models invent answers. After a result
    it does not: otherwise they go on to call tools.
    """
    choices: list[Schema] = []
    for function in functions:
        parameters: Schema = function.get("parameters") or {"type": "object"}
        arguments = SchemaSimplifier(parameters).simplify(parameters)  # references would not be found
        choices.append({"use_tool": {"const": True}, "name": {"const": function["name"]}, "arguments": arguments})
    choices.append({"use_tool": {"const": False}, "answer": {"type": "string"}})
    schemas = [to_object_schema(choice if decides else drop_keys(choice, "use_tool")) for choice in choices]
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def to_object_schema(properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def to_text_message(message: dict[str, Any], form: str) -> dict[str, Any]:
    """Return a message in which calls and their results are text."""
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.get('content')}\n</tool_response>"}
    if not (calls := message.get("tool_calls")):
        return message
    texts = [write_call(call["function"], form) for call in calls]
    return {"role": "assistant", "content": "\n".join([*filter(None, [message.get("content")]), *texts])}


def write_call(function: Mapping[str, Any], form: str) -> str:
    """Write a call in a form, with the text of its arguments as it is."""
    call = f'{{"name": {json.dumps(function["name"])}, "arguments": {function["arguments"]}}}'
    before, after = WRAPPED.get(form, ("", ""))
    return f"{before}{call}{after}"


ANSWER = re.compile(r'\s*\{\s*(?:"use_tool"\s*:\s*\w+\s*,\s*)?"answer"\s*:\s*"')
"""Matches what stands before the text of an answer."""
PIECE = re.compile(r'(?:[^"\\]|\\[^u]|\\u(?!d[89ab])[0-9a-f]{4}|\\ud[89ab][0-9a-f]{2}\\u[0-9a-f]{4})*', re.S | re.I)
"""Matches a part of a JSON string that can be decoded: nothing of it is cut in the middle of an escape."""
LENIENT = json.JSONDecoder(strict=False)


class StepReader:
    """Converts the deltas of a reply that is one JSON object: a call, or an answer, which is shown as it arrives."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._tools = get_schemas(request)
        self._other = PrintedCallReader(request)
        """Reads a reply that is not a JSON object after all."""
        self._is_other = False
        self._text = ""
        self._shown = 0
        """The characters of the answer that were passed on."""
        self._cut = False

    def feed(self, delta: Delta) -> Iterator[Delta]:
        """Yield the new part of the answer, and all other parts of the delta."""
        if self._is_other or delta.get("tool_calls") or delta.get("thought_ends"):
            self._is_other = True
            yield from self._other.feed(delta)
            return
        self._cut = self._cut or delta.get("finish_reason") in ("length", "content_filter")
        rest = delta.copy()
        self._text += rest.pop("content", "")
        if self._text.strip()[:1] not in ("", "{"):
            self._is_other = True
            yield from self._other.feed({**rest, "content": self._text})
            return
        if text := self.take_answer():
            yield {"content": text}
        if rest:
            yield rest

    def take_answer(self) -> str:
        """Return what is new of the answer."""
        if not (found := ANSWER.match(self._text)) or not (piece := PIECE.match(self._text, found.end())):
            return ""
        whole = LENIENT.decode(f'"{piece[0]}"')
        new, self._shown = whole[self._shown :], len(whole)
        return new

    def finish(self) -> Iterator[Delta]:
        """Yield the call that the reply is, or the rest of it."""
        if self._is_other:
            yield from self._other.finish()
            return
        match None if self._cut else parse_step(self._text):
            case {"name": str(name), "arguments": {**arguments}} if name in self._tools:
                function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
                yield {"tool_calls": [{"index": 0, "function": function}], "printed": self._text}
            case {"answer": str()}:
                yield {"printed": self._text}
            case _ if self._shown:  # it was cut
                pass
            case _:
                yield from self._other.feed({"content": self._text})
                yield from self._other.finish()


def parse_step(text: str) -> Any:
    """Parse a reply; None if it is not JSON, or too deep."""
    try:
        value = decode_json(text)
    except ValueError:
        return None
    return None if is_deep(value) else value
