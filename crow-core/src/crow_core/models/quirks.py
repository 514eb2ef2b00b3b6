"""The differences between endpoints, and the changes that make a request fit one of them.

`quirks.toml` lists the differences of hosts and model families. A model's own settings override them. A clear refusal
of an endpoint changes them while crow runs.
"""

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any, Literal, cast
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

Body = dict[str, Any]


class Quirks(Struct, frozen=True, forbid_unknown_fields=True):
    """The differences of one endpoint; the defaults fit most endpoints."""

    reasoning: Literal["reasoning_content", "reasoning"] = "reasoning_content"
    """The key of earlier reasoning that is sent back."""
    echo: Literal["never", "tool_calls", "always", "tags"] = "never"
    """The earlier reasoning that is sent back: none, that of replies with tool calls, all of it, or all of it inside
    `<think>` tags in the text."""
    think_tags: bool = True
    """True if `<think>…</think>` in the text is reasoning."""
    max_tokens: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """The parameter that limits the length of a reply."""
    stream_usage: bool = True
    """True if the endpoint takes `stream_options.include_usage`."""
    parallel_calls: bool = True
    """True if a reply may hold several tool calls; false sends `parallel_tool_calls: false`."""
    schemas: Literal["full", "plain"] = "full"
    """The form of tool schemas; `plain` has no `$ref`, `$defs`, `anyOf`, `oneOf` and `allOf`."""
    content: Literal["text", "parts"] = "text"
    """The form of text-only content: a string, or a list of parts."""
    images: bool = True
    """True if the model takes images; if not, a note replaces each."""
    audio: bool = False
    """True if the model takes audio; if not, a note replaces each."""
    system_role: Literal["system", "developer", "user"] = "system"
    """The role of the system prompt; `user` puts it at the beginning of the first user message."""
    temperature: bool = True
    """True if the endpoint takes `temperature` and `top_p`."""
    effort: str = ""
    """The parameter for the reasoning effort, `reasoning_effort` or `reasoning.effort`; empty if there is none."""
    efforts: tuple[str, ...] = ("low", "medium", "high")
    """The values of that parameter."""
    structured_output: Literal["off", "alone", "with_tools"] = "off"
    """The requests in which a `response_format` with a JSON schema works: none, those without tools, or all."""
    call_ids: Literal["any", "nine"] = "any"
    """The form of tool call ids; `nine` means exactly nine letters and digits."""
    window: int = 0
    """Tokens that fit, for servers that do not report it; 0 if unknown."""


class QuirksRule(Struct, forbid_unknown_fields=True):
    """An entry of `quirks.toml`: quirks of every endpoint whose host and model both match."""

    quirks: dict[str, Any]
    host: str = "*"
    model: str = "*"


class QuirksFile(Struct, forbid_unknown_fields=True):
    """The content of `quirks.toml`."""

    rule: list[QuirksRule]


@cache
def load_rules() -> list[QuirksRule]:
    """Load the rules of `quirks.toml`, in which the general ones come before the particular ones."""
    text = (files("crow_core.models") / "quirks.toml").read_text("utf-8")
    return msgspec.convert(tomllib.loads(text), QuirksFile).rule


def find_quirks(base_url: str, model: str, overrides: Mapping[str, Any] | None = None) -> Quirks:
    """Return the quirks of a model at an endpoint: those of every rule that matches, then `overrides`.

    Raises msgspec.ValidationError for unknown keys or wrong values in `overrides`.
    """
    host, name = urlsplit(base_url).netloc.lower(), model.lower()
    quirks: dict[str, Any] = {}
    for rule in load_rules():
        if fnmatchcase(host, rule.host) and any(fnmatchcase(n, rule.model) for n in (name, name.rpartition("/")[2])):
            quirks |= rule.quirks
    return msgspec.convert({**quirks, **(overrides or {})}, Quirks)


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


def replace_images(messages: Messages, quirks: Quirks) -> Messages:
    """Replace images by notes if the model does not take them."""
    if quirks.images:
        return messages
    return [replace_parts(message, "image_url", "[an image, which this model cannot see]") for message in messages]


def replace_audio(messages: Messages, quirks: Quirks) -> Messages:
    """Replace audio by notes if the model does not take it."""
    if quirks.audio:
        return messages
    return [replace_parts(message, "input_audio", "[a sound, which this model cannot hear]") for message in messages]


def replace_parts(message: dict[str, Any], kind: str, note: str) -> dict[str, Any]:
    """Replace each part of a kind in a message by a note."""
    content: Any = message.get("content")
    if not isinstance(content, list) or not any(part["type"] == kind for part in cast("Messages", content)):
        return message
    parts = [{"type": "text", "text": note} if part["type"] == kind else part for part in cast("Messages", content)]
    return join_text_parts({**message, "content": parts})


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


def to_parts(content: Any) -> list[dict[str, Any]]:
    """Convert content to a list of parts."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content or [])


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
    replace_images,
    replace_audio,
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
    """Rewrites a schema without references and choices. What exceeds the limits becomes any object."""

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


class LearnedQuirks(Struct, frozen=True):
    """The quirks of an endpoint after a clear refusal."""

    sentence: str
    """The description of the change, for the user; it follows the endpoint's URL."""
    changes: dict[str, Any]
    """The new values of the quirks that change."""
    refused_parameters: frozenset[str] = frozenset()
    """The parameters that are not sent any more."""


REQUIRED_PARAMETERS = frozenset({"model", "messages", "stream", "tools"})
"""The parameters that every request needs."""

REFUSAL_PATTERN = re.compile(
    r"not (be )?(support|allow|permit|accept|implement|recogni|available|valid|known|enabled)"
    r"|n't (support|allow|accept)|unsupported|unknown|unrecogni|unexpected|extra|invalid|cannot|can't|forbidden"
    r"|only .{0,60}(supported|allowed)"
)
"""Matches messages that refuse something for good."""

UNKNOWN_PATTERN = re.compile(
    r"not (be )?(support|allow|permit|accept|recogni|available|known)|n't (support|allow|accept)|unsupported|unknown"
    r"|unrecogni|unexpected|extra|instead|use '?max_"
)
"""Matches messages that refuse a parameter itself, and not its value."""

SLIP_PATTERN = re.compile(
    r"tool_use_failed|failed_generation|(tool|function) ?calls? (validation|arguments)|(attempted|failed) to call"
    r"|(arguments|output|parameters|call|response)\b.{0,80}(did|does|do)( not|n't) (match|conform|satisfy)"
    r"|(arguments|output|parameters|call)\b.{0,40}(violat|mismatch|not (match|valid))"
    r"|(invalid|bad|wrong) (tool |function )?arguments|model('s)? (output|answer|produced|generated|called|has called)"
)
"""Matches complaints about an answer of the model, from which nothing about the endpoint is learned."""

ORDER_PATTERN = re.compile(
    r"alternat|\border\b|consecutive|sequence|(multiple|second|duplicate|(more than|only) one|optional) system"
    r"|\b(after|before|precede|preceding|follow(s|ed)?)\b|(must|should|can|only|allowed|expected).{0,40}\b(first|last|begin|start|end)"
)
"""Matches complaints about the order of messages, from which nothing about their roles is learned."""

FORMAT_PATTERN = re.compile(
    r"(image|media|mime)[ _-]?(format|type)|decod|process|download|fetch|base64|corrupt|dimension|pixel|resolution"
    r"|invalid image|image (url|data|file)s? (is|are|must|should|could|can|only)|(with|in|for).{0,10} role 'tool'"
    r"|unsupported[ _]image(?!s|[ _](input|content|part|url|modalit))"
    r"|\b(an?|the|this|that|your|one|following|provided) image\b"
)
"""Matches complaints about one image, from which nothing about the model is learned."""

AMOUNT_PATTERN = re.compile(
    r"context.{0,20}(length|window|size|limit)|maximum.{0,20}tokens|too (long|large|many|big|high|low)|exceed|range"
    r"|(must|should) be (between|in|at|less|greater|[<>])|at most [1-9]|(less|greater|more) than|positive"
)
"""Matches messages that refuse an amount, from which nothing about the endpoint is learned."""


def learn_from_refusal(text: str, body: Body, quirks: Quirks) -> LearnedQuirks | None:
    """Return the quirks that the text of a refusal demands; None if it is not clear, or demands nothing new."""
    message = extract_message(text)
    if AMOUNT_PATTERN.search(message) or SLIP_PATTERN.search(message):
        return None
    named = find_named_parameter(text, body)
    if named in ("", "response_format") and refuses_structured_output(message, body):
        sentence = "does not take response_format; it is left out from now on"
        return LearnedQuirks(sentence, {"structured_output": "off"}, frozenset({"response_format"}))
    for read_refusal, parameters in REFUSAL_READERS:
        if named and parameters and named not in parameters:
            continue
        if (change := read_refusal(message, body, quirks)) is not None:
            sentence, changes = change
            return LearnedQuirks(sentence, changes)
    for parameter in sorted(body.keys() - REQUIRED_PARAMETERS):
        if named not in ("", parameter):
            continue
        if (named or is_named_in(parameter, message)) and REFUSAL_PATTERN.search(message):
            sentence = f"does not take {parameter}; it is left out from now on"
            return LearnedQuirks(sentence, {}, frozenset({parameter}))
    return None


def extract_message(text: str) -> str:
    """Return the message in a refusal, in lower case, without the parts of the request that it quotes."""
    try:
        message = " ".join(iterate_texts(msgspec.json.decode(text)))
    except (msgspec.DecodeError, RecursionError):
        message = "" if text.lstrip().startswith("<") else text  # a web page comes from some proxy
    return message[:4000].lower()


def refuses_structured_output(message: str, body: Body) -> bool:
    """Whether a message refuses the JSON schema of a reply, or one together with tools."""
    if "response_format" not in body:
        return False
    about = r"response_?format|json[ _-]?(schema|mode|object)|response mime ?type|structured output|guided"
    return bool(re.search(about, message) and (REFUSAL_PATTERN.search(message) or "unavailable" in message))


def find_named_parameter(text: str, body: Body) -> str:
    """Return the parameter of a body that an error object names in its `param`; "" if it names none."""
    try:
        error = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return ""
    match error:
        case {"error": {"param": str(name)}} | {"param": str(name)}:
            root = re.split(r"[.\[]", name)[0]
            return root if root in body else ""
        case _:
            return ""


QUOTED_KEYS = ("input", "ctx", "failed_generation")
"""Keys of an error object that hold a part of a request, or of an answer."""


def iterate_texts(error: Any) -> Iterator[str]:
    """Yield the texts inside an error object. The keys of a `loc` are joined with dots."""
    match error:
        case str() if error.lstrip().startswith("{"):  # a router's error holds the provider's
            yield extract_message(error)
        case str():
            yield error
        case {"loc": [*path]}:
            yield ".".join(map(str, path))
            yield from iterate_texts(drop_keys(error, "loc"))
        case {}:
            for key, value in error.items():
                if key not in QUOTED_KEYS or (key != "failed_generation" and re.fullmatch(r"\w{1,16}", str(value))):
                    yield from iterate_texts(value)
        case [*errors]:
            for each in errors:
                yield from iterate_texts(each)
        case _:
            pass


def is_named_in(parameter: str, message: str) -> bool:
    """Return whether a message names a parameter. A parameter without `_` has to be marked as a name."""
    if "_" in parameter:
        return re.search(rf"\b{parameter}\b", message) is not None
    marked = r"(?<!role )(?<!role: )(['\"`.]|(param|parameters?|arguments?|fields?|property|option|keys?):? ['\"`]?)"
    return re.search(rf"{marked}{re.escape(parameter)}\b", message) is not None


QuirksChange = tuple[str, dict[str, Any]]


def learn_max_tokens(message: str, body: Body, quirks: Quirks) -> QuirksChange | None:
    other = "max_completion_tokens" if quirks.max_tokens == "max_tokens" else "max_tokens"
    if quirks.max_tokens in body and is_named_in(quirks.max_tokens, message) and UNKNOWN_PATTERN.search(message):
        return f"calls the limit of a reply {other}", {"max_tokens": other}
    return None


def learn_stream_usage(message: str, body: Body, quirks: Quirks) -> QuirksChange | None:
    named = re.search(r"stream_options|include_usage", message)
    if "stream_options" in body and quirks.stream_usage and named and REFUSAL_PATTERN.search(message):
        return "does not take stream_options; tokens are estimated from now on", {"stream_usage": False}
    return None


def learn_temperature(message: str, body: Body, quirks: Quirks) -> QuirksChange | None:
    named = any(key in body and re.search(rf"\b{key}\b", message) for key in ("temperature", "top_p"))
    if quirks.temperature and named and REFUSAL_PATTERN.search(message):
        return "does not take temperature; it is left out from now on", {"temperature": False}
    return None


def learn_system_role(message: str, body: Body, quirks: Quirks) -> QuirksChange | None:
    if ORDER_PATTERN.search(message):
        return None
    developer = (
        r"\brole\b.{0,120}\bdeveloper\b|\bdeveloper['\"`]? (role|message|instruction|prompt)|['\"`]developer['\"`]"
    )
    if quirks.system_role == "developer" and re.search(developer, message):
        return "knows no developer role; the instructions go out as system", {"system_role": "system"}
    about = r"(system|developer)['\"`]? (role|message|prompt|instruction)|role.{0,30}system|only user.{0,40}roles?"
    if quirks.system_role == "system" and re.search(about, message) and REFUSAL_PATTERN.search(message):
        return "knows no system role; the instructions go before the first prompt", {"system_role": "user"}
    return None


def learn_echo(message: str, body: Body, quirks: Quirks) -> QuirksChange | None:
    named = r"\breasoning_content\b|\breasoning\b(?![.\[]).{0,80}(passed back|message|assistant|history)"
    if not re.search(named, message) or not has_replies(body):
        return None
    if quirks.echo != "never" and REFUSAL_PATTERN.search(message):
        return "does not take earlier reasoning; it stays here", {"echo": "never"}
    if quirks.echo == "never" and re.search(r"must be|missing|required|passed back|expected", message):
        key = "reasoning_content" if "reasoning_content" in message else "reasoning"
        return "wants earlier reasoning back", {"echo": "always", "reasoning": key}
    return None


LIST_PATTERN = r"content.{0,80}(must|should|expect|valid).{0,30}(array|list|sequence)"
"""Matches messages that want content as a list of parts."""
NO_IMAGES = re.compile(r"at most 0|only .{0,20}text|text.only|no endpoints found|not a (vision|multi-?modal)|mmproj")
"""Matches messages that say without a refusal that a model takes no images."""


def learn_images(message: str, body: Body, quirks: Quirks) -> QuirksChange | None:
    if not quirks.images or not has_images(body) or FORMAT_PATTERN.search(message):
        return None
    about = (
        r"images\b|at most 0 image|image[ _-]?(input|content|url|modalit|part|block|understanding|support)|vision"
        r"|multi-?modal|mmproj"
        r"|\bmodels?\b.{0,80}\bimage\b|\bimage\b.{0,80}\bmodels?\b"
    )
    wants_text = re.search(r"content.{0,60}string", message) and not re.search(LIST_PATTERN, message)
    if wants_text or (re.search(about, message) and (REFUSAL_PATTERN.search(message) or NO_IMAGES.search(message))):
        return "cannot see images; a note stands in their place from now on", {"images": False}
    return None


def learn_content(message: str, body: Body, quirks: Quirks) -> QuirksChange | None:
    wants_list = re.search(LIST_PATTERN, message)
    wants_text = re.search(r"content.{0,80}(must|should|expect|valid).{0,30}string", message)
    if wants_list and wants_text:  # either would do: the fault is another one
        return None
    if quirks.content == "text" and wants_list:
        return "wants content as a list of parts", {"content": "parts"}
    if quirks.content == "parts" and wants_text:
        return "wants content as a string", {"content": "text"}
    return None


def learn_call_ids(message: str, body: Body, quirks: Quirks) -> QuirksChange | None:
    if quirks.call_ids == "any" and "call id" in message and "length of 9" in message:
        return "wants tool-call ids of nine characters", {"call_ids": "nine"}
    return None


def learn_schemas(message: str, body: Body, quirks: Quirks) -> QuirksChange | None:
    about = (
        r"\$ref|\$defs|\$schema|anyof|oneof|allof|additional_?properties|json.?schema|grammar|function_declarations"
        r"|(function|tool|parameters).{0,60}schema|schema.{0,60}(function|tool|parameters)|unrecognized schema"
    )
    if "response_format" in body and "response_format" in message:
        return None
    if quirks.schemas == "full" and body.get("tools") and re.search(about, message):
        which = f"schema of the tool {tool!r}" if (tool := find_tool_name(message, body)) else "tools' schemas"
        return f"cannot read the {which}; all schemas are simplified from now on", {"schemas": "plain"}
    return None


def find_tool_name(message: str, body: Body) -> str:
    """Return the name of the tool that a refusal names or numbers; "" if it does neither."""
    names: list[str] = [tool["function"]["name"] for tool in body.get("tools") or ()]
    if named := [name for name in names if re.search(rf"(?<![\w-]){re.escape(name.lower())}(?![\w-])", message)]:
        return max(named, key=len)
    number = re.search(r"(?:tools|function_declarations)[.\[](\d+)", message)
    return names[int(number[1])] if number and int(number[1]) < len(names) else ""


def has_replies(body: Body) -> bool:
    """Return whether any message is the model's."""
    return any(message.get("role") == "assistant" for message in body["messages"])


def has_images(body: Body) -> bool:
    """Return whether any message holds an image."""
    contents = [message["content"] for message in body["messages"] if isinstance(message.get("content"), list)]
    return any(part.get("type") == "image_url" for parts in contents for part in parts)


REFUSAL_READERS: tuple[tuple[Callable[[str, Body, Quirks], QuirksChange | None], tuple[str, ...]], ...] = (
    (learn_stream_usage, ("stream_options",)),
    (learn_max_tokens, ("max_tokens", "max_completion_tokens")),
    (learn_temperature, ("temperature", "top_p")),
    (learn_images, ()),
    (learn_call_ids, ()),
    (learn_system_role, ()),
    (learn_echo, ()),
    (learn_schemas, ()),
    (learn_content, ()),
)
"""The functions that read a refusal, in order, with the parameters that each is about. The first change decides."""
