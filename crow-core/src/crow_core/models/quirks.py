"""What one endpoint does differently, and how a request is made to fit it.

What is known of hosts and model families stands in `quirks.toml`; a model's own settings come after it; what an
endpoint refuses clearly is learned while it runs.
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
from msgspec import Struct, structs

Body = dict[str, Any]


class Quirks(Struct, frozen=True, forbid_unknown_fields=True):
    """One endpoint's ways; the defaults fit most."""

    reasoning: Literal["reasoning_content", "reasoning"] = "reasoning_content"
    """The key under which earlier reasoning is sent back, if it is."""
    echo: Literal["never", "tool_calls", "always", "tags"] = "never"
    """Which earlier reasoning the endpoint wants back: none, that of replies that called tools, all, or all inside
    `<think>` tags in the text."""
    think_tags: bool = True
    """Whether `<think>…</think>` in the text is reasoning."""
    max_tokens: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """What the limit of a reply is called."""
    stream_usage: bool = True
    """Whether `stream_options.include_usage` may be asked for."""
    parallel_calls: bool = True
    """False asks for one tool call at a time."""
    schemas: Literal["full", "plain"] = "full"
    """`plain`: tool schemas without `$ref`, `$defs`, `anyOf`, `oneOf` and `allOf`, for those that choke on them."""
    content: Literal["text", "parts"] = "text"
    """The form of text-only content: a string, or a list of parts."""
    images: bool = True
    """Whether the model sees; images are replaced by a note where it does not."""
    audio: bool = False
    """Whether the model hears; what is said is replaced by a note where it does not."""
    system_role: Literal["system", "developer", "user"] = "system"
    """What the system prompt is sent as; `user` puts it before the first user message."""
    temperature: bool = True
    """Whether `temperature` and `top_p` may be sent."""
    effort: str = ""
    """The parameter for how much to think, `reasoning_effort` or `reasoning.effort`; empty when there is none."""
    efforts: tuple[str, ...] = ("low", "medium", "high")
    """The values it takes."""
    call_ids: Literal["any", "nine"] = "any"
    """`nine`: tool-call ids of exactly nine letters and digits."""
    window: int = 0
    """Tokens that fit, where it is known and the server does not tell; 0 for unknown."""


class Rule(Struct, forbid_unknown_fields=True):
    """An entry of `quirks.toml`: the quirks of every endpoint whose host and model both match."""

    quirks: dict[str, Any]
    host: str = "*"
    model: str = "*"


class RuleFile(Struct, forbid_unknown_fields=True):
    rule: list[Rule]


@cache
def rules() -> list[Rule]:
    """The rules that ship with crow, the general before the particular."""
    text = (files("crow_core.models") / "quirks.toml").read_text("utf-8")
    return msgspec.convert(tomllib.loads(text), RuleFile).rule


def known(base_url: str, model: str, own: Mapping[str, Any] | None = None) -> Quirks:
    """What is known of an endpoint: every rule that matches, then the user's `own` settings.

    Raises msgspec.ValidationError for settings that are none.
    """
    host, name = urlsplit(base_url).netloc.lower(), model.lower()
    found: dict[str, Any] = {}
    for rule in rules():
        if fnmatchcase(host, rule.host) and any(fnmatchcase(n, rule.model) for n in (name, name.rpartition("/")[2])):
            found |= rule.quirks
    return msgspec.convert({**found, **(own or {})}, Quirks)


def fit(body: Body, quirks: Quirks) -> Body:
    """The body as this endpoint takes it; the one given stays as it is."""
    fitted = dict(body)
    if quirks.max_tokens in fitted or "max_tokens" in fitted or "max_completion_tokens" in fitted:
        limit = fitted.pop("max_tokens", None) or fitted.pop("max_completion_tokens", None)
        fitted.pop("max_completion_tokens", None)
        fitted[quirks.max_tokens] = limit
    if not quirks.temperature:
        fitted.pop("temperature", None)
        fitted.pop("top_p", None)
    if not quirks.stream_usage:
        fitted.pop("stream_options", None)
    tools: list[dict[str, Any]] = fitted.get("tools") or []
    if tools and not quirks.parallel_calls:
        fitted["parallel_tool_calls"] = False
    if tools and quirks.schemas == "plain":
        fitted["tools"] = [with_plain_schema(tool) for tool in tools]
    messages: list[dict[str, Any]] = fitted.pop("messages")
    for step in STEPS:
        messages = step(messages, quirks)
    fitted["messages"] = messages
    return fitted


Messages = list[dict[str, Any]]


def with_echo(messages: Messages, quirks: Quirks) -> Messages:
    """Earlier reasoning, as far as the endpoint wants it back; the same for a message at every request."""
    return [echoed(message, quirks) if "reasoning_content" in message else message for message in messages]


def echoed(message: dict[str, Any], quirks: Quirks) -> dict[str, Any]:
    bare = {key: value for key, value in message.items() if key != "reasoning_content"}
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


def with_system_role(messages: Messages, quirks: Quirks) -> Messages:
    """The system prompt under the role the endpoint knows."""
    if quirks.system_role == "system" or not messages or messages[0].get("role") != "system":
        return messages
    system, *rest = messages
    if quirks.system_role == "developer" or not rest or rest[0].get("role") != "user":
        role = "user" if quirks.system_role == "user" else "developer"
        return [{**system, "role": role}, *rest]
    first, *others = rest
    parts = [*as_parts(system["content"]), *as_parts(first["content"])]
    if all(part["type"] == "text" for part in parts):
        return [{**first, "content": "\n\n".join(part["text"] for part in parts)}, *others]
    return [{**first, "content": parts}, *others]


def without_images(messages: Messages, quirks: Quirks) -> Messages:
    """Notes in the place of images that the model cannot see."""
    if quirks.images:
        return messages
    return [noted(message, "image_url", "[an image, which this model cannot see]") for message in messages]


def without_audio(messages: Messages, quirks: Quirks) -> Messages:
    """Notes in the place of sounds that the model cannot hear."""
    if quirks.audio:
        return messages
    return [noted(message, "input_audio", "[a sound, which this model cannot hear]") for message in messages]


def noted(message: dict[str, Any], kind: str, note: str) -> dict[str, Any]:
    """A message with a note in the place of each part of a kind."""
    content: Any = message.get("content")
    if not isinstance(content, list) or not any(part["type"] == kind for part in cast("Messages", content)):
        return message
    parts = [{"type": "text", "text": note} if part["type"] == kind else part for part in cast("Messages", content)]
    return with_text({**message, "content": parts})


def with_content_form(messages: Messages, quirks: Quirks) -> Messages:
    """All text-only content in one form. Without any, parts become null: an empty text is refused by some servers."""
    if quirks.content == "parts":
        return [{**message, "content": as_parts(message.get("content")) or None} for message in messages]
    return [with_text(message) if isinstance(message.get("content"), list) else message for message in messages]


def with_text(message: dict[str, Any]) -> dict[str, Any]:
    if any(part["type"] != "text" for part in message["content"]):
        return message
    return {**message, "content": "\n\n".join(part["text"] for part in message["content"])}


def as_parts(content: Any) -> list[dict[str, Any]]:
    """Content as a list of parts."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content or [])


def with_call_ids(messages: Messages, quirks: Quirks) -> Messages:
    """Tool-call ids in the form the endpoint insists on; the same id always becomes the same."""
    if quirks.call_ids == "any":
        return messages
    return [with_nine(message) for message in messages]


def with_nine(message: dict[str, Any]) -> dict[str, Any]:
    changed = dict(message)
    if "tool_call_id" in changed:
        changed["tool_call_id"] = nine(changed["tool_call_id"])
    if calls := changed.get("tool_calls"):
        changed["tool_calls"] = [{**call, "id": nine(call["id"])} for call in calls]
    return changed


def nine(id: str) -> str:
    """Nine letters and digits for an id: itself if it is such, else a digest."""
    if re.fullmatch(r"[a-zA-Z0-9]{9}", id):
        return id
    from hashlib import sha256  # only for the few endpoints that want it

    return sha256(id.encode()).hexdigest()[:9]


STEPS: tuple[Callable[[Messages, Quirks], Messages], ...] = (
    with_echo,
    with_system_role,
    without_images,
    without_audio,
    with_content_form,
    with_call_ids,
)
"""In this order; each is pure, and does nothing where the quirk is the default."""


def with_plain_schema(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool whose parameters' schema is spelled out in the plainest words."""
    function = tool["function"]
    parameters: dict[str, Any] = function.get("parameters") or {}
    return {**tool, "function": {**function, "parameters": Spelling(parameters).plain(parameters)}}


DROPPED = frozenset({"$schema", "$defs", "definitions", "$id", "title", "additionalProperties", "default", "examples"})
"""Keys of a schema that say little to a model and trouble some servers."""

ANYTHING: dict[str, Any] = {"type": "object", "properties": {}}
"""What a reference becomes that leads nowhere, or too far."""


class Spelling:
    """Spells one schema out: no references, no choices. A schema that never ends, or explodes, ends as any object."""

    DEPTH = 12
    """Levels of references inside references."""
    REFERENCES = 200
    """How many are followed in all."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self.definitions: dict[str, Any] = {}
        for key in ("$defs", "definitions"):
            if isinstance(schema.get(key), dict):
                self.definitions |= schema[key]
        self.left = self.REFERENCES

    def plain(self, schema: Any, depth: int = 0) -> Any:
        match schema:
            case {"$ref": str(name)}:
                target = self.definitions.get(name.rpartition("/")[2])
                if not isinstance(target, dict) or depth >= self.DEPTH or self.left <= 0:
                    return ANYTHING
                self.left -= 1
                return self.plain({**target, **without(schema, "$ref")}, depth + 1)
            case {"anyOf": [*choices]} | {"oneOf": [*choices]}:
                return self.plain({**first_of(choices), **without(schema, "anyOf", "oneOf")}, depth)
            case {"allOf": [*together]}:
                whole: dict[str, Any] = self.plain(without(schema, "allOf"), depth)
                for each in together:
                    whole = joined(whole, self.plain(each, depth))
                return whole
            case {"properties": {**properties}}:
                kept = {key: self.plain(value, depth) for key, value in properties.items()}
                return {**self.plain(without(schema, "properties"), depth), "properties": kept}
            case {}:
                return self.plain_keys(schema, depth)
            case _:
                return {"type": "string"}

    def plain_keys(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        kept = without(schema, *DROPPED)
        for key, kind in (("properties", dict), ("required", list)):
            if key in kept and not isinstance(kept[key], kind):
                del kept[key]
        if "const" in kept:
            kept["enum"] = [kept.pop("const")]
        if isinstance(kept.get("type"), list):
            kept["type"] = next((kind for kind in kept["type"] if kind != "null" and isinstance(kind, str)), "string")
        if "items" in kept:
            kept["items"] = self.plain(kept["items"], depth)
        if kept.get("type") == "object":
            kept.setdefault("properties", {})
        return kept


def first_of(choices: list[Any]) -> dict[str, Any]:
    """The first choice that says something."""
    for choice in choices:
        if choice and hasattr(choice, "items") and choice != {"type": "null"}:
            return choice
    return {}


def without(schema: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in keys}


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two schemas that hold together, as one."""
    both = {**first, **second}
    if "properties" in both:
        both["properties"] = {**first.get("properties", {}), **second.get("properties", {})}
    if "required" in both:
        both["required"] = list(dict.fromkeys([*first.get("required", []), *second.get("required", [])]))
    return both


class Lesson(Struct, frozen=True):
    """What a clear refusal taught."""

    sentence: str
    """For the person, after the endpoint's name."""
    quirks: Quirks
    refused: frozenset[str] = frozenset()
    """Parameters that are not sent any more."""


NEEDED = frozenset({"model", "messages", "stream", "tools"})
"""What no request can do without."""

REFUSING = re.compile(
    r"not (be )?(support|allow|permit|accept|implement|recogni|available|valid|known|enabled)"
    r"|n't (support|allow|accept)|unsupported|unknown|unrecogni|unexpected|extra|invalid|cannot|can't|forbidden"
    r"|only .{0,60}(supported|allowed)"
)
"""In what words something is refused for good."""

MEASURE = re.compile(
    r"context.{0,20}(length|window|size|limit)|maximum.{0,20}tokens|too (long|large|many|big|high|low)|exceed|range"
    r"|(must|should) be (between|in|at|less|greater|[<>])|at most [1-9]|(less|greater|more) than"
)
"""A refusal of how much, not of what: it teaches nothing about the endpoint."""


def learn(said: str, body: Body, quirks: Quirks) -> Lesson | None:
    """What an endpoint's words of refusal teach about it; None when they are not clear, or teach nothing new."""
    words = words_of(said)
    if MEASURE.search(words):
        return None
    for teaches in LESSONS:
        if (change := teaches(words, body, quirks)) is not None:
            sentence, changes = change
            return Lesson(sentence, structs.replace(quirks, **changes))
    for parameter in sorted(body.keys() - NEEDED):
        if is_named(parameter, words) and REFUSING.search(words):
            return Lesson(f"does not take {parameter}; it is left out from now on", quirks, frozenset({parameter}))
    return None


def words_of(said: str) -> str:
    """A refusal in small letters, without what it quotes of the request: that may speak of anything."""
    try:
        found = " ".join(texts_of(msgspec.json.decode(said)))
    except (msgspec.DecodeError, RecursionError):
        found = "" if said.lstrip().startswith("<") else said  # a web page is some proxy's
    return found[:4000].lower()


def texts_of(error: Any) -> Iterator[str]:
    """The texts inside an error object; those that name a place are joined with dots."""
    match error:
        case str() if error.lstrip().startswith("{"):  # a provider's error inside a router's
            yield words_of(error)
        case str():
            yield error
        case {"loc": [*path]}:
            yield ".".join(map(str, path))
            yield from texts_of(without(error, "loc"))
        case {}:
            for key, value in error.items():
                if key != "input" or re.fullmatch(r"\w{1,16}", str(value)):
                    yield from texts_of(value)
        case [*errors]:
            for each in errors:
                yield from texts_of(each)
        case _:
            pass


def is_named(parameter: str, words: str) -> bool:
    """Whether words speak of a parameter. One that is an everyday word has to be marked as a name."""
    if "_" in parameter:
        return re.search(rf"\b{parameter}\b", words) is not None
    marked = r"(['\"`.]|(param|parameters?|arguments?|fields?|property|option|keys?):? ['\"`]?)"
    return re.search(rf"{marked}{re.escape(parameter)}\b", words) is not None


Change = tuple[str, dict[str, Any]]


def teaches_max_tokens(words: str, body: Body, quirks: Quirks) -> Change | None:
    other = "max_completion_tokens" if quirks.max_tokens == "max_tokens" else "max_tokens"
    if quirks.max_tokens in body and is_named(quirks.max_tokens, words) and REFUSING.search(words):
        return f"calls the limit of a reply {other}", {"max_tokens": other}
    return None


def teaches_stream_usage(words: str, body: Body, quirks: Quirks) -> Change | None:
    if "stream_options" in body and quirks.stream_usage and re.search(r"stream_options|include_usage", words):
        return "does not take stream_options; tokens are estimated from now on", {"stream_usage": False}
    return None


def teaches_temperature(words: str, body: Body, quirks: Quirks) -> Change | None:
    named = any(key in body and re.search(rf"\b{key}\b", words) for key in ("temperature", "top_p"))
    if quirks.temperature and named and REFUSING.search(words):
        return "does not take temperature; it is left out from now on", {"temperature": False}
    return None


def teaches_system_role(words: str, body: Body, quirks: Quirks) -> Change | None:
    if quirks.system_role == "developer" and "developer" in words:
        return "knows no developer role; the instructions go out as system", {"system_role": "system"}
    about = r"(system|developer)['\"`]? (role|message|prompt|instruction)|role.{0,30}system|only user.{0,40}roles?"
    if quirks.system_role == "system" and re.search(about, words) and REFUSING.search(words):
        return "knows no system role; the instructions go before the first words", {"system_role": "user"}
    return None


def teaches_echo(words: str, body: Body, quirks: Quirks) -> Change | None:
    if not re.search(r"\breasoning(_content)?\b", words) or not has_replies(body):
        return None
    if quirks.echo != "never" and REFUSING.search(words):
        return "does not take earlier reasoning; it stays here", {"echo": "never"}
    if quirks.echo == "never" and re.search(r"must be|missing|required|passed back|expected", words):
        key = "reasoning_content" if "reasoning_content" in words else "reasoning"
        return "wants earlier reasoning back", {"echo": "always", "reasoning": key}
    return None


def teaches_images(words: str, body: Body, quirks: Quirks) -> Change | None:
    texts_only = r"image|vision|multimodal|mmproj|content.{0,60}string"
    if quirks.images and has_images(body) and re.search(texts_only, words):
        return "cannot see images; a note stands in their place from now on", {"images": False}
    return None


def teaches_content(words: str, body: Body, quirks: Quirks) -> Change | None:
    wanted = r"content.{0,80}(must|should|expect|valid).{0,30}"
    if quirks.content == "text" and re.search(wanted + r"(array|list|sequence)", words):
        return "wants content as a list of parts", {"content": "parts"}
    if quirks.content == "parts" and re.search(wanted + "string", words):
        return "wants content as a string", {"content": "text"}
    return None


def teaches_call_ids(words: str, body: Body, quirks: Quirks) -> Change | None:
    if quirks.call_ids == "any" and "call id" in words and "length of 9" in words:
        return "wants tool-call ids of nine characters", {"call_ids": "nine"}
    return None


def teaches_schemas(words: str, body: Body, quirks: Quirks) -> Change | None:
    about = (
        r"\$ref|\$defs|\$schema|anyof|oneof|allof|additional_?properties|json.?schema|grammar|function_declarations"
        r"|(function|tool|parameters).{0,60}schema|schema.{0,60}(function|tool|parameters)|unrecognized schema"
    )
    if quirks.schemas == "full" and body.get("tools") and re.search(about, words):
        which = f"schema of the tool {tool!r}" if (tool := tool_named(words, body)) else "tools' schemas"
        return f"cannot read the {which}; all are spelled out plainly from now on", {"schemas": "plain"}
    return None


def tool_named(words: str, body: Body) -> str:
    """The tool a refusal speaks of, by its name or its number; empty when it does not say."""
    names: list[str] = [tool["function"]["name"] for tool in body.get("tools") or ()]
    if spoken := [name for name in names if re.search(rf"(?<![\w-]){re.escape(name.lower())}(?![\w-])", words)]:
        return max(spoken, key=len)
    number = re.search(r"(?:tools|function_declarations)[.\[](\d+)", words)
    return names[int(number[1])] if number and int(number[1]) < len(names) else ""


def has_replies(body: Body) -> bool:
    """Whether any message is the model's."""
    return any(message.get("role") == "assistant" for message in body["messages"])


def has_images(body: Body) -> bool:
    """Whether any message holds an image."""
    contents = [message["content"] for message in body["messages"] if isinstance(message.get("content"), list)]
    return any(part.get("type") == "image_url" for parts in contents for part in parts)


LESSONS: tuple[Callable[[str, Body, Quirks], Change | None], ...] = (
    teaches_stream_usage,
    teaches_max_tokens,
    teaches_temperature,
    teaches_images,
    teaches_call_ids,
    teaches_system_role,
    teaches_echo,
    teaches_schemas,
    teaches_content,
)
"""Each looks for one thing a refusal may be about; the first that finds it is believed, and asked again only anew."""
