"""Learn from an endpoint's refusal how it differs from others."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from msgspec import Struct

from crow_core.models.adaptation import drop_keys
from crow_core.models.quirks import Body, Quirks


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
    """True if a message refuses the JSON schema of a reply, or one together with tools."""
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
