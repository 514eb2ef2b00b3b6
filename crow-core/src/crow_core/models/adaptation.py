"""Adapt requests to the quirks of an endpoint: their parameters, messages and tool schemas."""

import re
from collections.abc import Callable
from typing import Any, cast

from crow_core.messages.message import to_parts
from crow_core.models.quirks import Body, Quirks


def adapt_request(body: Body, quirks: Quirks) -> Body:
    """Return a copy of a request's body, adapted to an endpoint."""
    adapted = dict(body)
    if quirks.max_tokens in adapted or "max_tokens" in adapted or "max_completion_tokens" in adapted:
        limit = adapted.pop("max_tokens", None) or adapted.pop("max_completion_tokens", None)
        adapted.pop("max_completion_tokens", None)
        adapted[quirks.max_tokens] = limit
    if not quirks.temperature:
        adapted.pop("temperature", None)
        adapted.pop("top_p", None)
    if not quirks.stream_usage:
        adapted.pop("stream_options", None)
    tools: list[dict[str, Any]] = adapted.get("tools") or []
    if tools and not quirks.parallel_calls:
        adapted["parallel_tool_calls"] = False
    if tools and quirks.schemas == "plain":
        adapted["tools"] = [simplify_tool(tool) for tool in tools]
    messages: list[dict[str, Any]] = adapted.pop("messages")
    for step in MESSAGE_STEPS:
        messages = step(messages, quirks)
    adapted["messages"] = messages
    return adapted


Messages = list[dict[str, Any]]


def convert_reasoning(messages: Messages, quirks: Quirks) -> Messages:
    """Move, rename or drop earlier reasoning. A message is converted alike in every request."""
    return [convert_message_reasoning(message, quirks) for message in messages]


def convert_message_reasoning(message: dict[str, Any], quirks: Quirks) -> dict[str, Any]:
    if "reasoning_content" not in message:
        return message
    bare = drop_keys(message, "reasoning_content")
    thought = message["reasoning_content"]
    match quirks.echo:
        case "always":
            return {**bare, quirks.reasoning: thought}
        case "tool_calls" if message.get("tool_calls"):
            return {**bare, quirks.reasoning: thought}
        case "tags":
            return {**bare, "content": f"<think>\n{thought}\n</think>\n\n{message.get('content') or ''}"}
        case _:
            return bare


def convert_system_role(messages: Messages, quirks: Quirks) -> Messages:
    """Give the system prompt the role that the endpoint takes."""
    if quirks.system_role == "system" or not messages or messages[0].get("role") != "system":
        return messages
    system, *rest = messages
    if quirks.system_role == "developer" or not rest or rest[0].get("role") != "user":
        role = "user" if quirks.system_role == "user" else "developer"
        return [{**system, "role": role}, *rest]
    first, *others = rest
    parts = [*to_parts(system["content"]), *to_parts(first["content"])]
    if all(part["type"] == "text" for part in parts):
        return [{**first, "content": "\n\n".join(part["text"] for part in parts)}, *others]
    return [{**first, "content": parts}, *others]


def replace_media(messages: Messages, quirks: Quirks) -> Messages:
    """Replace images and audio by notes if the model does not take them."""
    images = {} if quirks.images else {"image_url": "[an image, which this model cannot see]"}
    audio = {} if quirks.audio else {"input_audio": "[a sound, which this model cannot hear]"}
    notes = images | audio
    if not notes:
        return messages
    return [replace_parts(each, notes) if isinstance(each.get("content"), list) else each for each in messages]


def replace_parts(message: dict[str, Any], notes: dict[str, str]) -> dict[str, Any]:
    """Replace the parts of these kinds in a message by notes."""
    parts = cast("Messages", message["content"])
    if not any(part["type"] in notes for part in parts):
        return message
    replaced = [{"type": "text", "text": notes[part["type"]]} if part["type"] in notes else part for part in parts]
    return join_text_parts({**message, "content": replaced})


def convert_content(messages: Messages, quirks: Quirks) -> Messages:
    """Give all text-only content one form. Empty parts become null, because some servers refuse an empty text."""
    if quirks.content == "parts":
        return [{**message, "content": to_parts(message.get("content")) or None} for message in messages]
    return [join_text_parts(message) if isinstance(message.get("content"), list) else message for message in messages]


def join_text_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Replace a message's list of parts by one text if all of them are text."""
    if any(part["type"] != "text" for part in message["content"]):
        return message
    return {**message, "content": "\n\n".join(part["text"] for part in message["content"])}


def convert_call_ids(messages: Messages, quirks: Quirks) -> Messages:
    """Give tool call ids the form that the endpoint takes. The same id is converted alike every time."""
    if quirks.call_ids == "any":
        return messages
    return [convert_message_call_ids(message) for message in messages]


def convert_message_call_ids(message: dict[str, Any]) -> dict[str, Any]:
    changed = dict(message)
    if "tool_call_id" in changed:
        changed["tool_call_id"] = to_nine_characters(changed["tool_call_id"])
    if calls := changed.get("tool_calls"):
        changed["tool_calls"] = [{**call, "id": to_nine_characters(call["id"])} for call in calls]
    return changed


def to_nine_characters(id: str) -> str:
    """Return an id of nine letters and digits as it is, any other as a digest of that form."""
    if re.fullmatch(r"[a-zA-Z0-9]{9}", id):
        return id
    from hashlib import sha256  # few endpoints need it

    return sha256(id.encode()).hexdigest()[:9]


MESSAGE_STEPS: tuple[Callable[[Messages, Quirks], Messages], ...] = (
    convert_reasoning,
    convert_system_role,
    replace_media,
    convert_content,
    convert_call_ids,
)
"""The conversions of the messages, in order. Each changes nothing where its quirk has the default."""


def simplify_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool with a plain schema of its parameters."""
    function = tool["function"]
    parameters: dict[str, Any] = function.get("parameters") or {}
    return {**tool, "function": {**function, "parameters": SchemaSimplifier(parameters).simplify(parameters)}}


DROPPED_KEYS = frozenset(
    {"$schema", "$defs", "definitions", "$id", "title", "additionalProperties", "default", "examples"}
)
"""Keys of a schema that tell a model little and that some servers refuse."""

ANY_OBJECT: dict[str, Any] = {"type": "object", "properties": {}}
"""Replaces a reference that cannot be resolved within the limits."""


class SchemaSimplifier:
    """Rewrites a schema without references and choices. A part that exceeds the limits becomes any object."""

    MAX_DEPTH = 12
    """The most levels of references inside references."""
    MAX_REFERENCES = 200
    """The most references that are resolved in all."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self.definitions: dict[str, Any] = {}
        for key in ("$defs", "definitions"):
            if isinstance(schema.get(key), dict):
                self.definitions |= schema[key]
        self.references_left = self.MAX_REFERENCES

    def simplify(self, schema: Any, depth: int = 0) -> Any:
        """Return a schema without references and choices; `depth` counts the references around it."""
        match schema:
            case {"$ref": str(name)}:
                target = self.definitions.get(name.rpartition("/")[2])
                if not isinstance(target, dict) or depth >= self.MAX_DEPTH or self.references_left <= 0:
                    return ANY_OBJECT
                self.references_left -= 1
                return self.simplify({**target, **drop_keys(schema, "$ref")}, depth + 1)
            case {"anyOf": [*choices]} | {"oneOf": [*choices]}:
                return self.simplify({**choose_first(choices), **drop_keys(schema, "anyOf", "oneOf")}, depth)
            case {"allOf": [*together]}:
                whole: dict[str, Any] = self.simplify(drop_keys(schema, "allOf"), depth)
                for each in together:
                    whole = merge_schemas(whole, self.simplify(each, depth))
                return whole
            case {"properties": {**properties}}:
                plain = {key: self.simplify(value, depth) for key, value in properties.items()}
                return {**self.simplify(drop_keys(schema, "properties"), depth), "properties": plain}
            case {}:
                return self.simplify_keys(schema, depth)
            case _:
                return {"type": "string"}

    def simplify_keys(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        """Return a schema, which has no references or choices at its top, with the simplest keys."""
        plain = drop_keys(schema, *DROPPED_KEYS)
        for key, kind in (("properties", dict), ("required", list)):
            if key in plain and not isinstance(plain[key], kind):
                del plain[key]
        if "const" in plain:
            plain["enum"] = [plain.pop("const")]
        if isinstance(plain.get("type"), list):
            plain["type"] = next((kind for kind in plain["type"] if kind != "null" and isinstance(kind, str)), "string")
        if "items" in plain:
            plain["items"] = self.simplify(plain["items"], depth)
        if plain.get("type") == "object":
            plain.setdefault("properties", {})
        return plain


def choose_first(choices: list[Any]) -> dict[str, Any]:
    """Return the first choice that is a schema for more than null."""
    for choice in choices:
        if choice and hasattr(choice, "items") and choice != {"type": "null"}:
            return choice
    return {}


def drop_keys(schema: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in keys}


def merge_schemas(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Merge two schemas that both apply into one."""
    both = {**first, **second}
    if "properties" in both:
        both["properties"] = {**first.get("properties", {}), **second.get("properties", {})}
    if "required" in both:
        both["required"] = list(dict.fromkeys([*first.get("required", []), *second.get("required", [])]))
    return both
