"""Faults of real endpoints. Each takes the script of a correct server and returns the script of a faulty one.

`CHAOS` names all of them, so that a test can run with each: `ScriptedServer(CHAOS["missing ids"](script))`.
"""

import gzip
import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from crow_core.testing.script import Failure, Raw, Reply, Script, get_finish_reason, get_usage, to_deltas

Body = dict[str, Any]

ServerAnswer = Reply | Failure | Raw

Chaos = Callable[[Script], Script]
"""A fault of an endpoint."""

CHAOS: dict[str, Chaos] = {}
"""All faults, by their names."""

ReplyFault = Callable[[Reply, Body], ServerAnswer]
"""Converts a correct reply to a request into a faulty one."""


def spoil_replies(fault: ReplyFault) -> Chaos:
    """Make a fault of every reply. Answers other than a `Reply`, such as those of another fault, stay as they are."""

    def chaos(good: Script) -> Script:
        async def script(request: Body) -> ServerAnswer:
            answer = good(request)
            reply = await answer if inspect.isawaitable(answer) else answer
            return fault(reply, request) if isinstance(reply, Reply) else reply

        return script

    return chaos


def fail_once(failure: ServerAnswer) -> Chaos:
    """Make a fault that shows in the first answer only."""

    def chaos(good: Script) -> Script:
        failures = iter([failure])
        return lambda request: next(failures, None) or good(request)

    return chaos


def refuse_requests(is_refused: Callable[[Body], Any], status: int, error: Any) -> Chaos:
    """Make a fault that refuses the requests for which `is_refused` is true."""

    def chaos(good: Script) -> Script:
        return lambda request: Failure(status, error) if is_refused(request) else good(request)

    return chaos


def register(fault: ReplyFault) -> Chaos:
    """Add a fault to `CHAOS` under the name of its function."""
    chaos = CHAOS[fault.__name__.replace("_", " ")] = spoil_replies(fault)
    return chaos


# The events of a correct reply.


def to_chunks(reply: Reply, request: Body) -> list[Body]:
    """Convert a reply to events: one for each fragment, then the finish reason, then the usage if it is requested."""
    found = [to_chunk({"role": "assistant", "content": ""}), *map(to_chunk, to_deltas(reply, count_messages(request)))]
    found.append(to_chunk({}, get_finish_reason(reply)))
    options: Body = request.get("stream_options") or {}
    if options.get("include_usage"):
        found.append({"choices": [], "usage": get_usage(reply, request)})
    return found


def to_chunk(delta: Body, reason: str | None = None) -> Body:
    return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def count_messages(request: Body) -> int:
    """Return the number of messages, which makes the ids of tool calls differ from those of earlier requests."""
    return len(request.get("messages") or ())


def to_event(chunk: Body) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def to_stream(events: list[Body]) -> Raw:
    return Raw([*map(to_event, events), DONE])


def find_fragments(events: list[Body]) -> list[Body]:
    """Return the fragments of tool calls in events, to be changed in place."""
    return [part for delta in find_deltas(events) for part in delta.get("tool_calls") or ()]


def find_deltas(events: list[Body]) -> list[Body]:
    return [choice["delta"] for chunk in events for choice in chunk["choices"]]


# Tool calls.


@register
def missing_ids(reply: Reply, request: Body) -> ServerAnswer:
    """No tool call has an id."""
    events = to_chunks(reply, request)
    for part in find_fragments(events):
        part.pop("id", None)
    return to_stream(events)


@register
def empty_ids(reply: Reply, request: Body) -> ServerAnswer:
    """The id of every tool call is an empty text."""
    events = to_chunks(reply, request)
    for part in find_fragments(events):
        part["id"] = ""
    return to_stream(events)


@register
def same_ids(reply: Reply, request: Body) -> ServerAnswer:
    """The first tool call has the same id in every reply."""
    events = to_chunks(reply, request)
    for part in find_fragments(events):
        if "id" in part:
            part["id"] = f"call_{part['index']}"
    return to_stream(events)


@register
def repeated_ids(reply: Reply, request: Body) -> ServerAnswer:
    """Each fragment repeats the id and the name of its tool call."""
    events, seen = to_chunks(reply, request), dict[int, Body]()
    for part in find_fragments(events):
        first = seen.setdefault(part["index"], part)
        part["id"], part["function"]["name"] = first["id"], first["function"]["name"]
    return to_stream(events)


@register
def same_index(reply: Reply, request: Body) -> ServerAnswer:
    """All tool calls have index 0."""
    events = to_chunks(reply, request)
    for part in find_fragments(events):
        part["index"] = 0
    return to_stream(events)


@register
def missing_index(reply: Reply, request: Body) -> ServerAnswer:
    """No tool call has an index."""
    events = to_chunks(reply, request)
    for part in find_fragments(events):
        part.pop("index")
    return to_stream(events)


@register
def neither_ids_nor_index(reply: Reply, request: Body) -> ServerAnswer:
    """Tool calls follow each other without an id or an index."""
    events = to_chunks(reply, request)
    for part in find_fragments(events):
        part.pop("index")
        part.pop("id", None)
    return to_stream(events)


@register
def null_fields(reply: Reply, request: Body) -> ServerAnswer:
    """A delta has every possible key, and most are null."""
    events = to_chunks(reply, request)
    keys = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal", "function_call")
    for delta in find_deltas(events):
        delta |= {key: delta.get(key) for key in keys}
    for part in find_fragments(events):
        part["id"] = part.get("id")
        part["function"] = {"name": None, "arguments": None} | part["function"]
        part["function"]["arguments"] = part["function"]["arguments"] or None
    return to_stream([{"usage": None, "error": None, **chunk} for chunk in events])


@register
def arguments_as_an_object(reply: Reply, request: Body) -> ServerAnswer:
    """The arguments are an object instead of JSON text."""
    functions = [{"name": call["name"], "arguments": call["arguments"]} for call in reply.tool_calls]
    count = count_messages(request)
    calls = [{"index": n, "id": f"c{count}_{n}", "function": function} for n, function in enumerate(functions)]
    events = to_chunks(replace(reply, tool_calls=[], finish_reason=get_finish_reason(reply)), request)
    return to_stream([*events[:-2], *([to_chunk({"tool_calls": calls})] if calls else []), *events[-2:]])


@register
def calls_printed_as_text(reply: Reply, request: Body) -> ServerAnswer:
    """Tool calls are text, as from servers without a parser for them."""
    calls = [json.dumps({"name": call["name"], "arguments": call["arguments"]}) for call in reply.tool_calls]
    printed = "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in calls)
    return replace(reply, content=reply.content + printed, tool_calls=[])


@register
def stops_at_half_a_call(reply: Reply, request: Body) -> ServerAnswer:
    """The length limit cuts a tool call, or the text, in the middle."""
    events = to_chunks(reply, request)
    half = [chunk for chunk in events if not chunk["choices"] or not chunk["choices"][0]["finish_reason"]][:-3]
    return to_stream([*half, to_chunk({}, "length")])


# Reasoning.


@register
def reasoning_in_another_field(reply: Reply, request: Body) -> ServerAnswer:
    events = to_chunks(reply, request)
    for delta in find_deltas(events):
        if "reasoning_content" in delta:
            delta["reasoning"] = delta.pop("reasoning_content")
    return to_stream(events)


@register
def think_tags(reply: Reply, request: Body) -> ServerAnswer:
    """Reasoning is in tags inside the text."""
    thought = f"<think>\n{reply.reasoning}\n</think>\n\n" if reply.reasoning else ""
    return to_stream(to_chunks(replace(reply, reasoning="", content=thought + reply.content), request))


@register
def only_the_closing_think_tag(reply: Reply, request: Body) -> ServerAnswer:
    """The opening tag is missing, because it was a part of the prompt."""
    thought = f"{reply.reasoning}\n</think>\n\n" if reply.reasoning else ""
    return to_stream(to_chunks(replace(reply, reasoning="", content=thought + reply.content), request))


# Usage.


@register
def no_usage(reply: Reply, request: Body) -> ServerAnswer:
    return to_stream([chunk for chunk in to_chunks(reply, request) if "usage" not in chunk])


@register
def usage_on_every_chunk(reply: Reply, request: Body) -> ServerAnswer:
    tokens = get_usage(reply, request)
    return to_stream([{**chunk, "usage": tokens} for chunk in to_chunks(reply, request)])


@register
def strange_usage(reply: Reply, request: Body) -> ServerAnswer:
    """The counts have wrong types."""
    tokens: Body = {"prompt_tokens": "many", "completion_tokens": None, "prompt_tokens_details": [], "cost": {}}
    return to_stream([*to_chunks(reply, request)[:-1], {"choices": [], "usage": tokens}])


@register
def cut_prompt(reply: Reply, request: Body) -> ServerAnswer:
    """The usage counts the 100 tokens to which the server cut the prompt."""
    return replace(reply, usage={**get_usage(reply, request), "prompt_tokens": 100})


# Bytes.


def to_body(reply: Reply, request: Body) -> bytes:
    return b"".join(to_stream(to_chunks(reply, request)).chunks)


@register
def split_characters(reply: Reply, request: Body) -> ServerAnswer:
    """Each chunk is one byte, so that characters are split."""
    whole = to_body(reply, request)
    return Raw([whole[n : n + 1] for n in range(len(whole))])


@register
def all_at_once(reply: Reply, request: Body) -> ServerAnswer:
    return Raw([to_body(reply, request)])


@register
def carriage_returns(reply: Reply, request: Body) -> ServerAnswer:
    return Raw([to_body(reply, request).replace(b"\n", b"\r\n")])


@register
def no_space_after_data(reply: Reply, request: Body) -> ServerAnswer:
    return Raw([to_body(reply, request).replace(b"data: ", b"data:")])


@register
def comments_between(reply: Reply, request: Body) -> ServerAnswer:
    """Comments keep the connection alive, as from routers."""
    events = [b": still here\n\n" + to_event(chunk) for chunk in to_chunks(reply, request)]
    return Raw([b": PROCESSING\n\n", *events, DONE])


@register
def gzip_encoded(reply: Reply, request: Body) -> ServerAnswer:
    return Raw([gzip.compress(to_body(reply, request))], {"content-encoding": "gzip"})


@register
def no_done(reply: Reply, request: Body) -> ServerAnswer:
    """The stream ends without `[DONE]`."""
    return Raw([to_event(chunk) for chunk in to_chunks(reply, request)])


@register
def not_streamed(reply: Reply, request: Body) -> ServerAnswer:
    """The answer is one JSON object although a stream was requested."""
    calls = [
        {
            "id": f"c{count_messages(request)}_{n}",
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
        }
        for n, call in enumerate(reply.tool_calls)
    ]
    message = {"role": "assistant", "content": reply.content, "reasoning_content": reply.reasoning, "tool_calls": calls}
    choice = {"index": 0, "message": message, "finish_reason": get_finish_reason(reply)}
    whole = {"object": "chat.completion", "choices": [choice], "usage": get_usage(reply, request)}
    return Raw([json.dumps(whole).encode()], {"content-type": "application/json"})


@register
def slow(reply: Reply, request: Body) -> ServerAnswer:
    """Fragments come 2 ms apart."""
    return replace(reply, pace=0.002)


# Breaks and errors.


@register
def error_in_mid_stream(reply: Reply, request: Body) -> ServerAnswer:
    half = to_chunks(reply, request)[:3]
    return to_stream([*half, {"error": {"message": "the model has crashed", "type": "server_error"}}])


@register
def error_instead_of_a_stream(reply: Reply, request: Body) -> ServerAnswer:
    """The status is 200, and the only event is an error."""
    return Raw([to_event({"error": {"message": "out of memory", "type": "server_error"}})])


@register
def breaks_off_before_the_first_token(reply: Reply, request: Body) -> ServerAnswer:
    return Raw([], abort=True)


@register
def breaks_off_after_the_first_token(reply: Reply, request: Body) -> ServerAnswer:
    return Raw([to_event(chunk) for chunk in to_chunks(reply, request)[:3]], abort=True)


@register
def ends_after_the_first_token(reply: Reply, request: Body) -> ServerAnswer:
    """The response ends without a finish reason or an error."""
    return Raw([to_event(chunk) for chunk in to_chunks(reply, request)[:3]])


@register
def half_an_event(reply: Reply, request: Body) -> ServerAnswer:
    """The last event is cut in its middle."""
    return Raw([*map(to_event, to_chunks(reply, request)[:3]), b'data: {"choices": [{"del\n\n'])


@register
def events_of_another_kind(reply: Reply, request: Body) -> ServerAnswer:
    """The events are JSON of unknown forms."""
    return Raw([b'data: {"choices": "none"}\n\n', b"data: [1, 2]\n\n", b'data: {"choices": [7]}\n\n', DONE])


@register
def empty_reply(reply: Reply, request: Body) -> ServerAnswer:
    """The reply is well-formed and empty."""
    return Reply(usage=get_usage(reply, request))


@register
def empty_body(reply: Reply, request: Body) -> ServerAnswer:
    return Raw([])


@register
def web_page(reply: Reply, request: Body) -> ServerAnswer:
    """Another kind of server answers."""
    return Raw([b"<!DOCTYPE html><html><body>It works!</body></html>"], {"content-type": "text/html"})


CHAOS.update(
    {
        "429 and then well": fail_once(
            Failure(429, {"error": {"message": "Rate limit reached."}}, {"Retry-After": "0"})
        ),
        "500 and then well": fail_once(Failure(500, "Internal Server Error")),
        "502 as a web page, and then well": fail_once(
            Failure(502, "<html>Bad gateway</html>", {"content-type": "text/html", "Retry-After": "0"})
        ),
        "breaks off once": fail_once(Raw([], abort=True)),
        "429 for good": refuse_requests(lambda request: True, 429, {"error": {"message": "Rate limit reached."}}),
        "500 for good": refuse_requests(lambda request: True, 500, {"error": {"message": "CUDA error: out of memory"}}),
        "wrong key": refuse_requests(lambda request: True, 401, {"error": {"message": "Incorrect API key provided."}}),
        "unknown model": refuse_requests(
            lambda request: True, 404, {"error": {"message": "The model does not exist."}}
        ),
        "context too long": refuse_requests(
            lambda request: True, 400, {"error": {"message": "This model's maximum context length is 5 tokens."}}
        ),
        "refuses stream options": refuse_requests(
            lambda request: "stream_options" in request,
            422,
            {"detail": [{"loc": ["body", "stream_options"], "msg": "Extra inputs are not permitted"}]},
        ),
        "refuses temperature": refuse_requests(
            lambda request: "temperature" in request,
            400,
            {"error": {"message": "Unsupported value: 'temperature' does not support 0 with this model."}},
        ),
        "refuses images": refuse_requests(
            lambda request: "image_url" in json.dumps(request["messages"]),
            500,
            {
                "error": {
                    "code": 500,
                    "message": "image input is not supported - hint: you may need to provide the mmproj",
                }
            },
        ),
        "refuses schemas": refuse_requests(
            lambda request: any(
                word in json.dumps(request.get("tools")) for word in ("$ref", "anyOf", "oneOf", "allOf")
            ),
            400,
            {"error": {"message": "Unable to parse the tool schema: $ref and anyOf are not supported"}},
        ),
        "refuses a system role": refuse_requests(
            lambda request: request["messages"][0]["role"] == "system",
            500,
            {"error": {"code": 500, "message": "System role not supported"}},
        ),
        "refuses tools": refuse_requests(
            lambda request: request.get("tools"), 500, {"error": {"message": "tools param requires --jinja flag"}}
        ),
        "wants reasoning back": refuse_requests(
            lambda request: any(
                message.get("tool_calls") and not message.get("reasoning_content") for message in request["messages"]
            ),
            400,
            {"error": {"message": "The `reasoning_content` in the thinking mode must be passed back to the API."}},
        ),
    }
)
