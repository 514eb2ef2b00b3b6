"""The probes of `crow doctor`: each asks a model for one ability and says what crow has to do about it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from crow_core.errors import ModelError
from crow_core.messages.message import Message, answer_tool_call
from crow_core.messages.passes import view
from crow_core.models.chat_model import TOOL_ADVICE
from crow_core.models.endpoint import CONNECT_TIMEOUT, create_http_client, join_url
from crow_core.models.estimate import count_min_tokens
from crow_core.models.failures import shorten_text
from crow_core.models.model_call import ModelCall
from crow_core.models.printed import find_calls_of
from crow_core.models.stream import parse_object
from crow_core.models.token_usage import count_cached_tokens, to_count
from crow_core.models.window import filter_objects, find_window
from crow_core.session.output import OutputSchema
from crow_core.text import decode_json
from msgspec import structs

from crow_cli.examined_model import ExaminedModel, parse_all_arguments, reply_text
from crow_cli.machine import Verdict


@dataclass(frozen=True)
class ProbeResult:
    """The result of one probe."""

    verdict: Verdict
    """`ok`: as usual; `partly`: different, and crow can work with it; `no`: crow cannot work with it."""
    sentence: str
    quirks: dict[str, Any] = field(default_factory=dict[str, Any])
    """Quirks to set so that crow works with this endpoint."""


def make_tool(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


WEATHER = make_tool(
    "weather",
    "The weather in a city, now.",
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)

FORECAST = make_tool(
    "forecast",
    "The weather of the coming days.",
    {
        "type": "object",
        "properties": {
            "place": {"$ref": "#/$defs/Place"},
            "days": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
        },
        "required": ["place"],
        "$defs": {
            "Place": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "country": {"type": "string"}},
                "required": ["city", "country"],
            }
        },
    },
)

SKY: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}, "certain": {"type": "boolean"}},
    "required": ["colour", "certain"],
    "additionalProperties": False,
}
REPORT: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "number"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}

RED_IMAGE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAIAAAAlC+aJAAAAS0lEQVR42u3PQQkAAAgAsetfWiP4FgYrsKZeS0BA"
    "QEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEDgsqnc8OJg6Ln3AAAAAElFTkSuQmCC"
)
"""64 by 64 pixels, all red."""

FILLER = "A crow sat on a wire above the old harbour and watched the boats come home before the rain. "


# The probes, in their order.


async def probe_address(examined: ExaminedModel) -> ProbeResult:
    """Test whether the endpoint answers, and whether it lists the model."""
    import httpx2  # imported here because it is slow to load

    try:
        async with create_http_client(examined.base_url, examined.api_key, CONNECT_TIMEOUT, examined.headers) as http:
            response = await http.get(join_url(examined.base_url, "models"))
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        return ProbeResult("no", str(examined.to_connection_error(error)))
    except UnicodeEncodeError:
        return ProbeResult("no", "The api_key or a header holds characters that no header can hold.")
    names = list_model_ids(response.content)
    if not names:
        return ProbeResult("partly", f"The endpoint answers, but does not list its models ({response.status_code}).")
    if examined.name in names or f"{examined.name}:latest" in names:
        return ProbeResult("ok", f"The endpoint answers, and lists {len(names)} models, this one among them.")
    return ProbeResult("partly", f"The endpoint answers, but lists other models: {', '.join(names[:5])}.")


def list_model_ids(listing: bytes) -> list[str]:
    """Return the ids in the body of a list of models."""
    entries = filter_objects((parse_object(listing) or {}).get("data"))
    return [entry["id"] for entry in entries if isinstance(entry.get("id"), str)]


async def probe_key_and_model(examined: ExaminedModel) -> ProbeResult:
    """Test whether the endpoint accepts the key and the model's name."""
    model_call = await examined.complete("Say hello, in one word.")
    if not reply_text(model_call):
        return ProbeResult(
            "no",
            f"The endpoint accepts the request, but the answer is empty (finish_reason {model_call.finish_reason!r}). "
            "Try again, or choose another model.",
        )
    with_key = "accepts the key" if examined.api_key else "needs no key"
    return ProbeResult(
        "ok", f"The endpoint {with_key}, knows the model, and says {shorten_text(reply_text(model_call))[:40]!r}."
    )


async def probe_streaming(examined: ExaminedModel) -> ProbeResult:
    """Test whether an answer is streamed in several events and ends with `[DONE]`."""
    model_call = await examined.complete("Count from one to ten, in words.")
    events = len(examined.events())
    if events < 3:
        return ProbeResult("partly", "Answers come in one piece; you see nothing until they are complete.")
    if b"[DONE]" not in examined.received:
        return ProbeResult(
            "partly", "Answers come in pieces, without [DONE] at their end; an answer that is cut may look complete."
        )
    return (
        ProbeResult("ok", f"Answers come in pieces ({events} events).")
        if reply_text(model_call)
        else no_reply(model_call)
    )


def no_reply(model_call: ModelCall) -> ProbeResult:
    return ProbeResult("no", f"The answer is empty (finish_reason {model_call.finish_reason!r}).")


async def probe_usage(examined: ExaminedModel) -> ProbeResult:
    """Test whether a stream reports its tokens."""
    model_call = await examined.complete("Say hello, in one word.")
    if tokens := to_count(model_call.usage.get("prompt_tokens")):
        return ProbeResult("ok", f"Tokens are counted ({tokens} for a short prompt).")
    return ProbeResult(
        "partly", "Tokens are not counted in streams: crow estimates them, and cannot notice a prompt that is cut."
    )


async def probe_instructions(examined: ExaminedModel) -> ProbeResult:
    """Test whether the model follows a system prompt."""
    system = Message(role="system", content="Whatever the user says, answer with the one word PELICAN.")
    model_call = await examined.complete([system, Message(role="user", content="How are you?")])
    if "PELICAN" in reply_text(model_call).upper():
        return ProbeResult("ok", f"Instructions are followed, as the role {examined.quirks.system_role!r}.")
    return ProbeResult(
        "partly", f"Instructions were not followed: it answered {shorten_text(reply_text(model_call))[:40]!r}."
    )


async def probe_length(examined: ExaminedModel) -> ProbeResult:
    """Test whether a reply stops at its limit of tokens and reports that."""
    model_call = await examined.complete("Count from 1 to 300, separated by commas.", max_tokens=32)
    if model_call.finish_reason == "length":
        return ProbeResult("ok", "A reply that is cut at its limit has the finish reason 'length'.")
    if "300" in reply_text(model_call):
        return ProbeResult("partly", "The limit of a reply is ignored.")
    return ProbeResult(
        "partly", f"A reply cut at its limit has the finish reason {model_call.finish_reason!r}: it looks complete."
    )


async def probe_tools(examined: ExaminedModel) -> ProbeResult:
    """Test whether the model calls a tool: in the server's own form, and if not, under a JSON schema."""
    known = examined.quirks
    examined.quirks = structs.replace(known, call_form="native")
    try:
        native = await call_weather(examined)
        if native.verdict == "ok" and known.call_form == "native":
            return native
        examined.quirks = structs.replace(known, call_form="schema" if known.call_form == "native" else known.call_form)
        described = await call_weather(examined)
    finally:
        examined.quirks = structs.replace(examined.quirks, call_form=known.call_form)
    if described.verdict != "ok" or (known.call_form == "native" and not takes_schemas(examined)):
        return native
    if known.call_form != "native":
        return ProbeResult("ok", f"Tools are called in the form {known.call_form!r} (quirk call_form).")
    sentence = f"{native.sentence} Under a JSON schema, tools are called."
    return ProbeResult("partly", sentence, {"call_form": "schema"})


def takes_schemas(examined: ExaminedModel) -> bool:
    """Return whether the endpoint took the JSON schema of the last request."""
    refused = "response_format" in examined.refused_parameters
    examined.refused_parameters.discard("response_format")
    return not refused


async def call_weather(examined: ExaminedModel) -> ProbeResult:
    """Let the model call a tool in the form that the quirks say."""
    model_call = await examined.complete("What is the weather in Paris? Call the tool.", tools=[WEATHER])
    is_native = examined.quirks.call_form == "native"
    printed = str(model_call.reply.get("crow", {}).get("printed") or "")
    if is_native:
        examined.printed = printed or (reply_text(model_call) if find_calls_of(model_call) else "")
    if not (made := parse_all_arguments(model_call)):
        return no_tool_call(model_call)
    if made[0] is None or not isinstance(made[0].get("city"), str):
        return ProbeResult(
            "partly", f"Tools are called, with arguments that do not fit: {shorten_text(str(made[0]))[:60]}."
        )
    if printed and is_native:
        return ProbeResult("partly", f"The server sends tool calls as text, and crow runs them. {TOOL_ADVICE}")
    return ProbeResult("ok", "Tools are called.")


def no_tool_call(model_call: ModelCall) -> ProbeResult:
    if find_calls_of(model_call):
        return ProbeResult("no", f"Tool calls are printed as text. {TOOL_ADVICE}")
    return ProbeResult(
        "no", f"The tool was not called; it answered {shorten_text(reply_text(model_call))[:60]!r}. {TOOL_ADVICE}"
    )


async def probe_parallel_calls(examined: ExaminedModel) -> ProbeResult:
    """Test whether the model makes several tool calls in one reply."""
    question = "What is the weather in Paris and in Oslo? Call the tool for both at once."
    model_call = await examined.complete(question, tools=[WEATHER])
    cities = {str(made["city"]) for made in parse_all_arguments(model_call) if made and "city" in made}
    if len(cities) > 1:
        return ProbeResult("ok", "Several calls come in one reply.")
    return ProbeResult("partly", "One call comes at a time.") if cities else no_tool_call(model_call)


async def probe_ids(examined: ExaminedModel) -> ProbeResult:
    """Test whether each tool call of the last reply has its own id and index."""
    begun = [
        part
        for part in list_fragments(examined.events())
        if any(f.get("name") for f in filter_objects([part.get("function")]))
    ]
    if not begun:
        return ProbeResult("partly", "There was no streamed call to look at.")
    lacks = [key for key in ("id", "index") if any(part.get(key) in (None, "") for part in begun)]
    same = [key for key in ("id", "index") if key not in lacks and len({part[key] for part in begun}) < len(begun)]
    if not lacks and not same:
        return ProbeResult("ok", "Each call has an id and an index of its own.")
    faults = [*(f"no {key}" for key in lacks), *(f"the same {key}" for key in same)]
    return ProbeResult("partly", f"Calls have {' and '.join(faults)}; crow tells them apart all the same.")


def list_fragments(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """List the fragments of tool calls in events."""
    return [part for delta in list_deltas(events) for part in filter_objects(delta.get("tool_calls"))]


def list_deltas(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    choices = [choice for event in events for choice in filter_objects(event.get("choices"))]
    return filter_objects([choice.get("delta") or choice.get("message") for choice in choices])


async def probe_reasoning(examined: ExaminedModel) -> ProbeResult:
    """Test which field of a reply has the reasoning, and whether it must be sent back with a tool's result."""
    question: Message = {"role": "user", "content": "What is the weather in Paris? Call the tool, then tell me."}
    model_call = await examined.complete([question], tools=[WEATHER])
    keys = [
        key for key in ("reasoning_content", "reasoning") if any(d.get(key) for d in list_deltas(examined.events()))
    ]
    where = (
        f"comes as {keys[0]}" if keys else "comes inside <think>" if model_call.reply.get("reasoning_content") else ""
    )
    results = [answer_tool_call(use, "Sunny, 21 °C.") for use in model_call.reply.get("tool_calls", [])]
    if not results:
        shown = f"Reasoning {where}" if where else "No reasoning is shown"
        return ProbeResult("partly", f"{shown}. No tool was called, so nothing tells whether it must be sent back.")
    after = await examined.complete(list(view([question, model_call.reply, *results])), tools=[WEATHER])
    if not reply_text(after) and not after.reply.get("tool_calls"):
        return ProbeResult("no", "After a tool's result the answer is empty.")
    changes = {"reasoning": keys[0]} if keys and examined.quirks.echo != "never" else {}
    back = "is not needed back" if examined.quirks.echo == "never" else f"goes back ({examined.quirks.echo})"
    return ProbeResult(
        "ok", f"Reasoning {where}, and {back}." if where else f"No reasoning is shown; it {back}.", changes
    )


async def probe_schemas(examined: ExaminedModel) -> ProbeResult:
    """Test whether the model follows a schema with `$ref`, `anyOf` and nested objects."""
    if await follows_schema(examined):
        return ProbeResult("ok", "Schemas with $defs and nested objects are understood.")
    if examined.quirks.schemas == "full":
        examined.quirks = structs.replace(examined.quirks, schemas="plain")
        if await follows_schema(examined):
            return ProbeResult(
                "partly", "Schemas with $defs are misunderstood; written without them, they are understood."
            )
        examined.quirks = structs.replace(examined.quirks, schemas="full")
    return ProbeResult(
        "partly",
        "Arguments of nested objects do not fit their schema; crow returns an error, for the model to correct them.",
    )


async def follows_schema(examined: ExaminedModel) -> bool:
    question = "Call the tool for the city of Oslo in Norway, for 3 days."
    made = parse_all_arguments(await examined.complete(question, tools=[FORECAST]))
    place: Any = made[0].get("place") if made and made[0] else None
    return isinstance(place, dict) and {"city", "country"} <= place.keys()  # pyright: ignore[reportUnknownMemberType]


async def probe_images(examined: ExaminedModel) -> ProbeResult:
    """Test whether the model recognises an image."""
    parts = [
        {"type": "text", "text": "Which colour is this picture? Answer in one word."},
        {"type": "image_url", "image_url": {"url": RED_IMAGE}},
    ]
    if not examined.quirks.images:
        return ProbeResult("ok", "The model is known not to take images; notes replace them.")
    model_call = await examined.complete([Message(role="user", content=parts)])
    if not examined.quirks.images:
        return ProbeResult("partly", "Images are refused.")
    if "red" in reply_text(model_call).lower():
        return ProbeResult("ok", "The model recognises images.")
    answer = shorten_text(reply_text(model_call))[:40]
    return ProbeResult(
        "partly", f"Images are accepted but not recognised: about a red one it answered {answer!r}.", {"images": False}
    )


async def probe_structured_output(examined: ExaminedModel) -> ProbeResult:
    """Test whether replies fit a JSON schema that is sent along, without tools and with them."""
    known = examined.quirks.structured_output
    sky = await complete_by_schema(examined, [Message(role="user", content="Which colour has a clear sky?")], SKY)
    if sky is None or not fits(sky, SKY):
        how = "are refused" if sky is None else "are not followed"
        sentence = f"JSON schemas of replies {how}; crow gets typed results by a tool."
        return ProbeResult("ok", sentence, {"structured_output": "off"} if known != "off" else {})
    question: Message = {"role": "user", "content": "What is the weather in Paris? Call the tool, then tell me."}
    called = await complete_by_schema(examined, [question], REPORT, tools=[WEATHER])
    results = [answer_tool_call(use, "Sunny, 21 °C.") for use in called.reply.get("tool_calls", [])] if called else []
    if called and results:
        messages = list(view([question, called.reply, *results]))
        report = await complete_by_schema(examined, messages, REPORT, tools=[WEATHER])
        if report and fits(report, REPORT):
            sentence = "Replies fit a JSON schema, also in requests with tools."
            return ProbeResult("ok", sentence, {"structured_output": "with_tools"})
    return ProbeResult("ok", "Replies fit a JSON schema in requests without tools.", {"structured_output": "alone"})


async def complete_by_schema(
    examined: ExaminedModel, messages: list[Message], schema: dict[str, Any], **more: Any
) -> ModelCall | None:
    """Send messages with the JSON schema of the reply; return None if the endpoint refuses that."""
    form = {"type": "json_schema", "json_schema": {"name": "result", "strict": True, "schema": schema}}
    try:
        model_call = await examined.complete(messages, response_format=form, **more)
    except ModelError:
        return None
    if "response_format" in examined.refused_parameters:
        examined.refused_parameters.discard("response_format")
        examined.notices.clear()
        return None
    return model_call


def fits(model_call: ModelCall, schema: dict[str, Any]) -> bool:
    """Return True if a reply is JSON that fits a schema."""
    try:
        OutputSchema(schema).accept(decode_json(reply_text(model_call)))
    except ValueError:
        return False
    return True


async def probe_window(examined: ExaminedModel) -> ProbeResult:
    """Ask the server for the size of the context window."""
    told, configured = await find_window(examined), examined.window
    if told and configured and told < configured:
        examined.window = told
        return ProbeResult("partly", f"{told:,} tokens fit, and not {configured:,} as the settings say.")
    if told:
        examined.window = min(told, configured or told)
        return ProbeResult("ok", f"{told:,} tokens fit, the server says.")
    if configured:
        return ProbeResult("ok", f"The server does not report how much fits; {configured:,} tokens are configured.")
    return ProbeResult("partly", "The server does not report how much fits. Set window in the model's settings.")


async def probe_long_prompt(examined: ExaminedModel) -> ProbeResult:
    """Test whether the model reads the beginning of a long prompt."""
    times = min(6000, (examined.window or 9000) // 3) // len(FILLER.split())
    prompt = f"The password is HERON.\n\n{FILLER * times}\n\nWhat is the password? Answer in one word."
    model_call = examined.long_call = await examined.complete(prompt)
    must, counted = count_min_tokens(model_call.request["messages"]), to_count(model_call.usage.get("prompt_tokens"))
    counted += cached if (cached := count_cached_tokens(model_call.usage)) > counted else 0
    if counted and counted < 0.8 * must:
        advice = "Give it a larger context (Ollama: num_ctx, llama.cpp: -c)."
        return ProbeResult(
            "no",
            f"The server counted {counted:,} tokens of a prompt of at least {must:,}: it drops the beginning. {advice}",
        )
    if "HERON" in reply_text(model_call).upper():
        return ProbeResult("ok", f"A prompt of about {counted or must:,} tokens is read from its beginning.")
    return ProbeResult(
        "partly", f"The model did not find the beginning of a prompt of about {counted or must:,} tokens."
    )


async def probe_cache(examined: ExaminedModel) -> ProbeResult:
    """Test whether repeating the long prompt uses a cache."""
    before = examined.long_call
    if before is None:
        return ProbeResult("partly", "There was no long prompt to repeat.")
    model_call = await examined.complete(before.request["messages"])
    if cached := count_cached_tokens(model_call.usage):
        return ProbeResult(
            "ok", f"{cached:,} of {to_count(model_call.usage.get('prompt_tokens')):,} tokens came from the cache."
        )
    first, second = before.first_delta - before.started, model_call.first_delta - model_call.started
    if first > 1 and second < first / 3:
        return ProbeResult("ok", f"The same prompt was answered after {second:.1f} s in place of {first:.1f} s.")
    return ProbeResult("partly", "The server does not report a cache: long sessions may be slow.")


Probe = Callable[[ExaminedModel], Awaitable[ProbeResult]]

PROBES: dict[str, Probe] = {
    "address": probe_address,
    "key and model": probe_key_and_model,
    "streaming": probe_streaming,
    "usage": probe_usage,
    "instructions": probe_instructions,
    "stop at length": probe_length,
    "tool calls": probe_tools,
    "parallel calls": probe_parallel_calls,
    "ids and index": probe_ids,
    "nested schemas": probe_schemas,
    "reasoning": probe_reasoning,
    "images": probe_images,
    "structured output": probe_structured_output,
    "window": probe_window,
    "long prompts": probe_long_prompt,
    "cache": probe_cache,
}

REQUIRED_PROBES = frozenset({"address", "key and model"})
"""The probes without which no other probe can work."""
