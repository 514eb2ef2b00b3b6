"""Endpoints that misbehave as real ones do: each way takes the script of a good server and gives that of a bad one.

`CHAOS` names them all, so that a test can say "whatever a server does": `ScriptedServer(CHAOS["missing ids"](script))`.
"""

import gzip
import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from crow_core.testing.script import Failure, Raw, Reply, Script, deltas, finish_reason, usage

Body = dict[str, Any]

Answer = Reply | Failure | Raw

Chaos = Callable[[Script], Script]
"""A way to misbehave."""

CHAOS: dict[str, Chaos] = {}
"""Every way, by its name."""

Twist = Callable[[Reply, Body], Answer]
"""What becomes of a good reply to a request."""


def twisting(twist: Twist) -> Chaos:
    """A server that spoils each of its replies: innermost, as what is spoiled already is left as it is."""

    def chaos(good: Script) -> Script:
        async def script(request: Body) -> Answer:
            answer = good(request)
            reply = await answer if inspect.isawaitable(answer) else answer
            return twist(reply, request) if isinstance(reply, Reply) else reply

        return script

    return chaos


def once(trouble: Answer) -> Chaos:
    """A server that is in trouble the first time it is asked."""

    def chaos(good: Script) -> Script:
        troubles = iter([trouble])
        return lambda request: next(troubles, None) or good(request)

    return chaos


def refusing(refuses: Callable[[Body], Any], status: int, error: Any) -> Chaos:
    """A server that refuses requests of a kind, and says why."""

    def chaos(good: Script) -> Script:
        return lambda request: Failure(status, error) if refuses(request) else good(request)

    return chaos


def way(twist: Twist) -> Chaos:
    """Name a twist after its function."""
    chaos = CHAOS[twist.__name__.replace("_", " ")] = twisting(twist)
    return chaos


# How a good reply looks on the wire.


def chunks(reply: Reply, request: Body) -> list[Body]:
    """The events of a reply: one a fragment, then the finish, then usage where it was asked for."""
    found = [delta_chunk({"role": "assistant", "content": ""}), *map(delta_chunk, deltas(reply, turn_of(request)))]
    found.append(delta_chunk({}, finish_reason(reply)))
    options: Body = request.get("stream_options") or {}
    if options.get("include_usage"):
        found.append({"choices": [], "usage": usage(reply, request)})
    return found


def delta_chunk(delta: Body, reason: str | None = None) -> Body:
    return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def turn_of(request: Body) -> int:
    """Makes the ids of calls unlike those of earlier requests."""
    return len(request.get("messages") or ())


def event(chunk: Body) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def streamed(events: list[Body]) -> Raw:
    return Raw([*map(event, events), DONE])


def fragments(events: list[Body]) -> list[Body]:
    """The fragments of tool calls inside events, to be changed in place."""
    return [part for delta in deltas_of(events) for part in delta.get("tool_calls") or ()]


def deltas_of(events: list[Body]) -> list[Body]:
    return [choice["delta"] for chunk in events for choice in chunk["choices"]]


# Tool calls.


@way
def missing_ids(reply: Reply, request: Body) -> Answer:
    """No call has an id."""
    events = chunks(reply, request)
    for part in fragments(events):
        part.pop("id", None)
    return streamed(events)


@way
def empty_ids(reply: Reply, request: Body) -> Answer:
    """Every call's id is an empty text."""
    events = chunks(reply, request)
    for part in fragments(events):
        part["id"] = ""
    return streamed(events)


@way
def same_ids(reply: Reply, request: Body) -> Answer:
    """The first call's id is the same in every turn."""
    events = chunks(reply, request)
    for part in fragments(events):
        if "id" in part:
            part["id"] = f"call_{part['index']}"
    return streamed(events)


@way
def repeated_ids(reply: Reply, request: Body) -> Answer:
    """Each fragment carries its call's id and name anew."""
    events, seen = chunks(reply, request), dict[int, Body]()
    for part in fragments(events):
        first = seen.setdefault(part["index"], part)
        part["id"], part["function"]["name"] = first["id"], first["function"]["name"]
    return streamed(events)


@way
def same_index(reply: Reply, request: Body) -> Answer:
    """All calls have index 0."""
    events = chunks(reply, request)
    for part in fragments(events):
        part["index"] = 0
    return streamed(events)


@way
def missing_index(reply: Reply, request: Body) -> Answer:
    """No call has an index."""
    events = chunks(reply, request)
    for part in fragments(events):
        part.pop("index")
    return streamed(events)


@way
def neither_ids_nor_index(reply: Reply, request: Body) -> Answer:
    """Calls come one after the other, with nothing to tell them apart."""
    events = chunks(reply, request)
    for part in fragments(events):
        part.pop("index")
        part.pop("id", None)
    return streamed(events)


@way
def null_fields(reply: Reply, request: Body) -> Answer:
    """Every key a delta can have is there, most of them null."""
    events = chunks(reply, request)
    keys = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal", "function_call")
    for delta in deltas_of(events):
        delta |= {key: delta.get(key) for key in keys}
    for part in fragments(events):
        part["id"] = part.get("id")
        part["function"] = {"name": None, "arguments": None} | part["function"]
        part["function"]["arguments"] = part["function"]["arguments"] or None
    return streamed([{"usage": None, "error": None, **chunk} for chunk in events])


@way
def arguments_as_an_object(reply: Reply, request: Body) -> Answer:
    """Arguments are no JSON text, but the object itself."""
    whole = [
        {"index": n, "id": f"c{turn_of(request)}_{n}", "function": {"name": c["name"], "arguments": c["arguments"]}}
        for n, c in enumerate(reply.tool_calls)
    ]
    events = chunks(replace(reply, tool_calls=[], finish_reason=finish_reason(reply)), request)
    return streamed([*events[:-2], *([delta_chunk({"tool_calls": whole})] if whole else []), *events[-2:]])


@way
def calls_printed_as_text(reply: Reply, request: Body) -> Answer:
    """As servers do that were started without a parser for calls."""
    calls = [json.dumps({"name": call["name"], "arguments": call["arguments"]}) for call in reply.tool_calls]
    printed = "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in calls)
    return replace(reply, content=reply.content + printed, tool_calls=[])


@way
def stops_at_half_a_call(reply: Reply, request: Body) -> Answer:
    """The limit is reached in the middle of a call, or of the text."""
    events = chunks(reply, request)
    half = [chunk for chunk in events if not chunk["choices"] or not chunk["choices"][0]["finish_reason"]][:-3]
    return streamed([*half, delta_chunk({}, "length")])


# Reasoning.


@way
def reasoning_in_another_field(reply: Reply, request: Body) -> Answer:
    events = chunks(reply, request)
    for delta in deltas_of(events):
        if "reasoning_content" in delta:
            delta["reasoning"] = delta.pop("reasoning_content")
    return streamed(events)


@way
def think_tags(reply: Reply, request: Body) -> Answer:
    """Reasoning stands inside the text."""
    thought = f"<think>\n{reply.reasoning}\n</think>\n\n" if reply.reasoning else ""
    return streamed(chunks(replace(reply, reasoning="", content=thought + reply.content), request))


@way
def only_the_closing_think_tag(reply: Reply, request: Body) -> Answer:
    """The opening one was part of the prompt."""
    thought = f"{reply.reasoning}\n</think>\n\n" if reply.reasoning else ""
    return streamed(chunks(replace(reply, reasoning="", content=thought + reply.content), request))


# Usage.


@way
def no_usage(reply: Reply, request: Body) -> Answer:
    return streamed([chunk for chunk in chunks(reply, request) if "usage" not in chunk])


@way
def usage_on_every_chunk(reply: Reply, request: Body) -> Answer:
    tokens = usage(reply, request)
    return streamed([{**chunk, "usage": tokens} for chunk in chunks(reply, request)])


@way
def strange_usage(reply: Reply, request: Body) -> Answer:
    """Counts that are none."""
    tokens: Body = {"prompt_tokens": "many", "completion_tokens": None, "prompt_tokens_details": [], "cost": {}}
    return streamed([*chunks(reply, request)[:-1], {"choices": [], "usage": tokens}])


@way
def cut_prompt(reply: Reply, request: Body) -> Answer:
    """Answers as if nothing were, and counts what was left of the prompt."""
    return replace(reply, usage={**usage(reply, request), "prompt_tokens": 100})


# Bytes.


def body(reply: Reply, request: Body) -> bytes:
    return b"".join(streamed(chunks(reply, request)).chunks)


@way
def split_characters(reply: Reply, request: Body) -> Answer:
    """Byte by byte, so that characters fall apart."""
    whole = body(reply, request)
    return Raw([whole[n : n + 1] for n in range(len(whole))])


@way
def all_at_once(reply: Reply, request: Body) -> Answer:
    return Raw([body(reply, request)])


@way
def carriage_returns(reply: Reply, request: Body) -> Answer:
    return Raw([body(reply, request).replace(b"\n", b"\r\n")])


@way
def no_space_after_data(reply: Reply, request: Body) -> Answer:
    return Raw([body(reply, request).replace(b"data: ", b"data:")])


@way
def comments_between(reply: Reply, request: Body) -> Answer:
    """Signs of life, as routers send them."""
    return Raw([b": PROCESSING\n\n", *(b": still here\n\n" + event(chunk) for chunk in chunks(reply, request)), DONE])


@way
def gzip_encoded(reply: Reply, request: Body) -> Answer:
    return Raw([gzip.compress(body(reply, request))], {"content-encoding": "gzip"})


@way
def no_done(reply: Reply, request: Body) -> Answer:
    """The stream ends without its last word."""
    return Raw([event(chunk) for chunk in chunks(reply, request)])


@way
def not_streamed(reply: Reply, request: Body) -> Answer:
    """One JSON object, although a stream was asked for."""
    calls = [
        {
            "id": f"c{turn_of(request)}_{n}",
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
        }
        for n, call in enumerate(reply.tool_calls)
    ]
    message = {"role": "assistant", "content": reply.content, "reasoning_content": reply.reasoning, "tool_calls": calls}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason(reply)}
    whole = {"object": "chat.completion", "choices": [choice], "usage": usage(reply, request)}
    return Raw([json.dumps(whole).encode()], {"content-type": "application/json"})


@way
def slow(reply: Reply, request: Body) -> Answer:
    """A moment between fragments."""
    return replace(reply, pace=0.002)


# Breaks and errors.


@way
def error_in_mid_stream(reply: Reply, request: Body) -> Answer:
    half = chunks(reply, request)[:3]
    return streamed([*half, {"error": {"message": "the model has crashed", "type": "server_error"}}])


@way
def error_instead_of_a_stream(reply: Reply, request: Body) -> Answer:
    """Behind HTTP 200."""
    return Raw([event({"error": {"message": "out of memory", "type": "server_error"}})])


@way
def breaks_off_before_the_first_token(reply: Reply, request: Body) -> Answer:
    return Raw([], abort=True)


@way
def breaks_off_after_the_first_token(reply: Reply, request: Body) -> Answer:
    return Raw([event(chunk) for chunk in chunks(reply, request)[:3]], abort=True)


@way
def ends_after_the_first_token(reply: Reply, request: Body) -> Answer:
    """Neither a finish nor an error: the response just ends."""
    return Raw([event(chunk) for chunk in chunks(reply, request)[:3]])


@way
def half_an_event(reply: Reply, request: Body) -> Answer:
    """The last event is cut in the middle."""
    return Raw([*map(event, chunks(reply, request)[:3]), b'data: {"choices": [{"del\n\n'])


@way
def events_of_another_kind(reply: Reply, request: Body) -> Answer:
    """JSON, but of nothing that is known."""
    return Raw([b'data: {"choices": "none"}\n\n', b"data: [1, 2]\n\n", b'data: {"choices": [7]}\n\n', DONE])


@way
def empty_reply(reply: Reply, request: Body) -> Answer:
    """Nothing, in good order."""
    return Reply(usage=usage(reply, request))


@way
def empty_body(reply: Reply, request: Body) -> Answer:
    return Raw([])


@way
def web_page(reply: Reply, request: Body) -> Answer:
    """Some other server answers."""
    return Raw([b"<!DOCTYPE html><html><body>It works!</body></html>"], {"content-type": "text/html"})


CHAOS.update(
    {
        "429 and then well": once(Failure(429, {"error": {"message": "Rate limit reached."}}, {"Retry-After": "0"})),
        "500 and then well": once(Failure(500, "Internal Server Error")),
        "502 as a web page, and then well": once(
            Failure(502, "<html>Bad gateway</html>", {"content-type": "text/html", "Retry-After": "0"})
        ),
        "breaks off once": once(Raw([], abort=True)),
        "429 for good": refusing(lambda request: True, 429, {"error": {"message": "Rate limit reached."}}),
        "500 for good": refusing(lambda request: True, 500, {"error": {"message": "CUDA error: out of memory"}}),
        "wrong key": refusing(lambda request: True, 401, {"error": {"message": "Incorrect API key provided."}}),
        "unknown model": refusing(lambda request: True, 404, {"error": {"message": "The model does not exist."}}),
        "context too long": refusing(
            lambda request: True, 400, {"error": {"message": "This model's maximum context length is 5 tokens."}}
        ),
        "refuses stream options": refusing(
            lambda request: "stream_options" in request,
            422,
            {"detail": [{"loc": ["body", "stream_options"], "msg": "Extra inputs are not permitted"}]},
        ),
        "refuses temperature": refusing(
            lambda request: "temperature" in request,
            400,
            {"error": {"message": "Unsupported value: 'temperature' does not support 0 with this model."}},
        ),
        "refuses images": refusing(
            lambda request: "image_url" in json.dumps(request["messages"]),
            500,
            {
                "error": {
                    "code": 500,
                    "message": "image input is not supported - hint: you may need to provide the mmproj",
                }
            },
        ),
        "refuses schemas": refusing(
            lambda request: any(
                word in json.dumps(request.get("tools")) for word in ("$ref", "anyOf", "oneOf", "allOf")
            ),
            400,
            {"error": {"message": "Unable to parse the tool schema: $ref and anyOf are not supported"}},
        ),
        "refuses a system role": refusing(
            lambda request: request["messages"][0]["role"] == "system",
            500,
            {"error": {"code": 500, "message": "System role not supported"}},
        ),
        "refuses tools": refusing(
            lambda request: request.get("tools"), 500, {"error": {"message": "tools param requires --jinja flag"}}
        ),
        "wants reasoning back": refusing(
            lambda request: any(
                message.get("tool_calls") and not message.get("reasoning_content") for message in request["messages"]
            ),
            400,
            {"error": {"message": "The `reasoning_content` in the thinking mode must be passed back to the API."}},
        ),
    }
)
