"""The conversion of a provider's bytes to deltas, and to the message into which they are merged."""

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from crow_core.errors import ModelError
from crow_core.messages.message import Message, settle
from crow_core.models.reply import ReplyBuilder
from crow_core.models.stream import MAX_EVENT_BYTES, EventStreamReader
from hypothesis import given, settings
from hypothesis import strategies as st
from openai._streaming import SSEDecoder
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

FIELDS = ["content", "reasoning", "tool_calls", "id", "index", "function", "name", "arguments", "type", "text"]
RECORDINGS = Path(__file__).parents[2].parent / "shared" / "recordings"
"""Recorded streams, in a folder beside the checkout."""


@dataclass
class Answer:
    """The result of reading a stream."""

    message: Message = field(default_factory=lambda: Message(role="assistant"))
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict[str, Any])
    notices: list[str] = field(default_factory=list[str])
    error: str = ""

    @property
    def content(self) -> Any:
        return self.message.get("content")

    @property
    def thought(self) -> str | None:
        return self.message.get("reasoning_content")

    @property
    def calls(self) -> list[tuple[str, str, str]]:
        calls = self.message.get("tool_calls", [])
        return [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls]


def read(*pieces: bytes) -> Answer:
    """Read a stream that arrives in these pieces; the result holds an error and everything before it."""
    reader, answer, reply = EventStreamReader("http://model/v1"), Answer(), ReplyBuilder()

    def fold(deltas: Iterable[Any]) -> None:
        for delta in deltas:
            reply.add(delta)
            answer.finish_reason = delta.get("finish_reason", answer.finish_reason)
            answer.usage = delta.get("usage", answer.usage)
            answer.notices += [delta["notice"]] if "notice" in delta else []

    try:
        for piece in pieces:
            fold(reader.feed(piece))
        fold(reader.finish())
    except ModelError as error:
        answer.error = str(error)
    answer.message = settle(reply.build(), used=set())
    return answer


def read_deltas(*pieces: bytes) -> tuple[list[Any], str]:
    """Read a stream that arrives in these pieces; return its deltas, and the error behind them."""
    reader, deltas = EventStreamReader("http://model/v1"), list[Any]()
    try:
        for piece in pieces:
            deltas.extend(reader.feed(piece))
        deltas.extend(reader.finish())
    except ModelError as error:
        return deltas, str(error)
    return deltas, ""


def event(delta: Any = None, **more: Any) -> bytes:
    """Make a chunk with one choice that holds `delta` and `more`."""
    return chunk(choices=[{"index": 0, "delta": delta or {}, **more}])


def chunk(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields, ensure_ascii=False).encode() + b"\n\n"


def call(name: str | None = None, arguments: Any = None, **more: Any) -> bytes:
    """Make a chunk with one fragment of a tool call."""
    return event({"tool_calls": [{**more, "function": {"name": name, "arguments": arguments}}]})


STOP = event(finish_reason="stop") + b"data: [DONE]\n\n"
CALLS = event(finish_reason="tool_calls") + b"data: [DONE]\n\n"


def test_one_delta_may_hold_reasoning_text_and_a_tool_call() -> None:
    fragment = {"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}
    answer = read(event({"reasoning_content": "Hm.", "content": "So:", "tool_calls": [fragment]}), CALLS)

    assert answer.message == {
        "role": "assistant",
        "reasoning_content": "Hm.",
        "content": "So:",
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }
    assert answer.finish_reason == "tool_calls"


def test_reasoning_content_that_is_null_does_not_hide_the_content() -> None:
    answer = read(event({"reasoning_content": None, "content": "Hi"}), STOP)
    assert (answer.content, answer.thought) == ("Hi", None)


def test_content_that_is_null_does_not_hide_the_reasoning() -> None:
    answer = read(event({"reasoning_content": "Hm.", "content": None}), event({"content": "Hi"}), STOP)
    assert (answer.content, answer.thought) == ("Hi", "Hm.")


@pytest.mark.parametrize("spelling", ["reasoning_content", "reasoning"])
def test_reasoning_is_read_from_both_keys(spelling: str) -> None:
    answer = read(event({spelling: "Let "}), event({spelling: "me see."}), event({"content": "Yes"}), STOP)
    assert (answer.content, answer.thought) == ("Yes", "Let me see.")


def test_reasoning_under_both_keys_at_once_is_read_once() -> None:
    answer = read(event({"reasoning_content": "Hm.", "reasoning": "Hm."}), event({"content": "Yes"}), STOP)
    assert answer.thought == "Hm."


def test_content_as_a_list_of_parts_is_split_into_text_and_reasoning() -> None:
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}, {"type": "text", "text": "Yes"}]
    answer = read(event({"content": parts}), event({"content": [{"type": "text", "text": "!"}]}), STOP)
    assert (answer.content, answer.thought) == ("Yes!", "Hm.")


@pytest.mark.parametrize("content", [{"type": "text", "text": "Yes"}, ["Y", "es"], ["Yes", None, 7, {"type": "odd"}]])
def test_content_in_other_forms_is_text(content: Any) -> None:
    assert read(event({"content": content}), STOP).content == "Yes"


def test_content_as_a_list_does_not_hide_the_reasoning_beside_it() -> None:
    answer = read(event({"reasoning_content": "Hm.", "content": [{"type": "text", "text": "Yes"}]}), STOP)
    assert (answer.content, answer.thought) == ("Yes", "Hm.")


def test_refusal_is_shown_as_text() -> None:
    assert read(event({"content": None, "refusal": "I cannot."}), STOP).content == "I cannot."


def test_delta_that_is_empty_wins_over_the_whole_message_beside_it() -> None:
    last = chunk(choices=[{"delta": {}, "message": {"content": "Hi"}, "finish_reason": "stop"}])
    assert read(event({"content": "Hi"}, message={"content": "Hi"}), last).content == "Hi"


@pytest.mark.parametrize("missing", [{}, {"choices": None}, {"choices": []}], ids=["absent", "null", "empty"])
def test_usage_comes_in_the_last_chunk_without_choices(missing: dict[str, Any]) -> None:
    usage = chunk(**missing, usage={"prompt_tokens": 3})
    answer = read(event({"content": "Hi"}), event(finish_reason="stop"), usage, b"data: [DONE]\n\n")
    assert answer.usage == {"prompt_tokens": 3}


def test_last_usage_counts() -> None:
    counts = [chunk(choices=[{"delta": {"content": "x"}}], usage={"completion_tokens": n}) for n in (1, 2, 3)]
    answer = read(*counts, STOP)
    assert (answer.content, answer.usage) == ("xxx", {"completion_tokens": 3})


def test_usage_without_numbers_does_not_replace_numbers() -> None:
    last = {"prompt_tokens": None, "completion_tokens": None}
    answer = read(event({"content": "Hi"}), chunk(usage={"prompt_tokens": 3, "x": None}), chunk(usage=last), STOP)
    assert answer.usage == {"prompt_tokens": 3}


def test_usage_may_be_inside_the_choice() -> None:
    assert read(event({"content": "Hi"}, usage={"prompt_tokens": 3}), STOP).usage == {"prompt_tokens": 3}


def test_usage_may_be_in_x_groq() -> None:
    answer = read(chunk(choices=[{"delta": {"content": "Hi"}}], x_groq={"id": "r"}), chunk(x_groq={"usage": {"a": 1}}))
    assert answer.usage == {"a": 1}


def test_stream_without_usage_reports_none() -> None:
    assert read(event({"content": "Hi"}), STOP).usage == {}


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize("text", ["<think>Hm.\n</think>\n\nYes", "\n <think>Hm.\n</think>Yes", "Hm.\n</think>\n\nYes"])
def test_think_tags_are_recognized_wherever_they_are_split(text: str, size: int) -> None:
    answer = read(*(event({"content": text[at : at + size]}) for at in range(0, len(text), size)), STOP)
    assert (answer.content, answer.thought) == ("Yes", "Hm.\n")


def test_text_before_a_closing_tag_without_an_opening_one_is_reasoning() -> None:
    answer = read(event({"content": "Let me "}), event({"content": "see.</thi"}), event({"content": "nk>Yes"}), STOP)
    assert (answer.content, answer.thought) == ("Yes", "Let me see.")


def test_reasoning_without_a_closing_tag_stays_reasoning() -> None:
    answer = read(event({"content": "<think>Hm"}), event({"content": " </thin"}), STOP)
    assert (answer.content, answer.thought) == (None, "Hm </thin")


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(
    "text", ["1 < 2", "<", "<thi", "<thinker>", "a <b>c</b>", "</thinking>", "List<int", "x </think"]
)
def test_text_with_angle_brackets_stays_text(text: str, size: int) -> None:
    answer = read(*(event({"content": text[at : at + size]}) for at in range(0, len(text), size)), STOP)
    assert (answer.content, answer.thought) == (text, None)


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_text_about_think_tags_stays_text(size: int) -> None:
    text = "Models write <think> before and </think> behind."
    answer = read(*(event({"content": text[at : at + size]}) for at in range(0, len(text), size)), STOP)
    assert (answer.content, answer.thought) == (text, None)


def test_tags_are_text_if_reasoning_came_in_its_own_field() -> None:
    answer = read(event({"reasoning_content": "Hm."}), event({"content": "Use </think> to close."}), STOP)
    assert (answer.content, answer.thought) == ("Use </think> to close.", "Hm.")


def test_reasoning_between_two_pieces_of_text_does_not_reorder_them() -> None:
    answer = read(event({"content": "<"}), event({"reasoning": "Hm."}), event({"content": "b> is bold"}), STOP)
    assert (answer.content, answer.thought) == ("<b> is bold", "Hm.")


def test_second_pair_of_tags_in_a_reply_is_text() -> None:
    answer = read(event({"content": "<think>a</think>b<think>c</think>d"}), STOP)
    assert (answer.content, answer.thought) == ("b<think>c</think>d", "a")


def test_white_space_after_reasoning_is_dropped_even_before_a_second_tag() -> None:
    answer = read(event({"content": "a</think>"}), event({"content": "\n<think>"}), STOP)
    assert (answer.content, answer.thought) == ("<think>", "a")


PIECES = ["<think>", "</think>", "<", "<thi", "nk>", "</", ">", " ", "\n", "a", "bc"]


@settings(max_examples=5 * settings.default.max_examples, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=12), st.data())
def test_any_split_of_a_text_gives_the_same_reasoning_and_content(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    split = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    one, many = read(event({"content": text}), STOP), read(*(event({"content": piece}) for piece in split), STOP)
    assert many == one
    assert bare(one.thought) + bare(one.content) == bare(text), "nothing but tags and white space is lost"


def bare(text: Any) -> str:
    """Remove tags and white space."""
    return "".join(re.sub("</?think>", "", text or "").split())


def test_error_object_in_a_stream_is_an_error_that_keeps_the_reply_so_far() -> None:
    answer = read(event({"content": "Hal"}), chunk(error={"message": "CUDA out of memory.", "code": 500}), STOP)
    assert answer.content == "Hal"
    assert answer.error == (
        "http://model/v1 reported an error: CUDA out of memory. Try again, or choose another model."
    )


@pytest.mark.parametrize(
    "data",
    [
        chunk(error="overloaded"),
        chunk(object="error", message="overloaded", code=503),
        chunk(choices=[{"delta": {"content": ""}, "finish_reason": "error", "error": {"message": "overloaded"}}]),
        b'error: {"code": 503, "message": "overloaded"}\n\n',
        b'event: error\ndata: {"error": {"message": "overloaded"}}\n\n',
        b'{"error": {"message": "overloaded"}}',
    ],
    ids=["text", "object", "choice", "field", "event", "no-event"],
)
def test_error_is_recognized_in_any_form(data: bytes) -> None:
    assert "reported an error: overloaded." in read(data).error


BEFORE_ERRORS = {
    "text": (event({"content": "Hal"}), "Hal", ""),
    "part of a tag": (event({"content": "Hal"}) + event({"content": " a <"}), "Hal a <", ""),
    "reasoning": (event({"reasoning_content": "Hm"}) + event({"content": "Hal"}), "Hal", "Hm"),
    "open tag": (event({"content": "<think>Hm. </th"}), "", "Hm. </th"),
    "half a character": (b'data: {"choices": [{"delta": {"content": "Hal\\ud83d"}}]}\n\n', "Hal\ufffd", ""),
    "tool call": (event({"content": "Hal"}) + call("f", '{"a": 1}', index=0, id="a"), "Hal", ""),
}
"""The beginning of a stream, its text and its reasoning."""
ERRORS = {
    "object": chunk(error={"message": "CUDA out of memory."}),
    "beside a choice": chunk(choices=[{"index": 0, "delta": {}}], error={"message": "CUDA out of memory."}),
    "beside odd choices": chunk(choices=5, error={"message": "CUDA out of memory."}),
    "field": b'error: {"message": "CUDA out of memory."}\n\n',
    "no event": b'{"error": {"message": "CUDA out of memory."}}\n',
    "not JSON": b'data: {"choices": [{"delta": {"content": "b}}]}\n\n',
    "unknown": chunk(choices=5),
    "unknown call": event({"tool_calls": [5]}),
    "too deep": b'data: {"a": ' + b"[" * 5_000 + b"]" * 5_000 + b"}\n\n",
    "cut": b'data: {"choices": [{"delta": {"con',
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "error",
    [
        pytest.param(error, id=name, marks=pytest.mark.slow if name == "too deep" else [])  # it is 10,000 bytes long
        for name, error in ERRORS.items()
    ],
)
@pytest.mark.parametrize("before", BEFORE_ERRORS.values(), ids=BEFORE_ERRORS)
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
def test_text_before_an_error_arrives_at_any_split(
    before: tuple[bytes, str, str], error: bytes, line_end: bytes
) -> None:
    start, content, thought = before
    stream = (start + error).replace(b"\n", line_end)
    answer, whole = read(stream), read_deltas(stream)
    assert (answer.content or "", answer.thought or "") == (content, thought)
    assert answer.error
    cuts = range(1, len(stream), 1 + len(stream) // 300)
    assert all(read_deltas(stream[:at], stream[at:]) == whole for at in cuts)
    assert read_deltas(*(stream[at : at + 1] for at in range(len(stream)))) == whole


@pytest.mark.parametrize(
    ("odd", "content"),
    [
        ({"choices": [{"delta": {"content": "f"}, "error": {"message": "CUDA"}}]}, "Half"),
        ({"choices": [{"delta": {"content": "f"}}], "error": {"message": "CUDA"}}, "Half"),
        ({"choices": [{"delta": {"content": "f", "tool_calls": 1}}]}, "Half"),
    ],
)
def test_text_beside_an_error_arrives(odd: dict[str, Any], content: str) -> None:
    answer = read(event({"content": "Hal"}), chunk(**odd))
    assert answer.error
    assert answer.content == content


EVENTS = [
    *(event({"content": text}) for text in ("Hi", "<think>", "a</thi", "nk>b", " <", "é🐦")),
    *(
        b'data: {"choices": [{"delta": {"content": "' + text + b'"}}]}\n\n'
        for text in (b"\\ud83d", b"\\udc26", b"\xf0\x9f")
    ),
    event({"reasoning_content": "Hm"}),
    call("f", '{"a"', index=0, id="a"),
    call(None, ": 1}", index=0),
    event({"content": "Two"}, index=1),
    chunk(usage={"prompt_tokens": 3}),
    *(b"\xef\xbb\xbf", b"\n", b"\r", b"\r\n", b": ping\n", b"data: ping\n\n", b"data: {\n", b"data: }\n", b"junk\n"),
    event(finish_reason="stop"),
    b"data: [DONE]\n\n",
    *ERRORS.values(),
]


@settings(max_examples=5 * settings.default.max_examples, deadline=None)
@given(st.lists(st.sampled_from(EVENTS), max_size=8), st.sampled_from([b"\n", b"\r\n", b"\r"]), st.data())
def test_any_split_of_any_events_gives_the_same_deltas_and_error(
    events: list[bytes], line_end: bytes, data: st.DataObject
) -> None:
    stream = b"".join(events).replace(b"\n", line_end)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=8)))
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, None], strict=True)]
    assert read_deltas(*pieces) == read_deltas(stream)


@pytest.mark.parametrize(("code", "passing"), [(429, True), ("503", True), (400, False), (None, False)])
def test_code_of_an_error_object_decides_whether_to_retry(code: Any, passing: bool) -> None:
    with pytest.raises(ModelError) as caught:
        list(EventStreamReader("x").feed(chunk(error={"message": "no", "code": code})))
    assert caught.value.retry == passing


TOO_LONG = [
    "This model's maximum context length is 8192 tokens",
    "the request exceeds the available context size (16384 tokens), try increasing it",
    "the request exceeds the available context size. try increasing the context size or enable context shift",
    "request (20011 tokens) exceeds the available context size (16384 tokens), try increasing it",
    "The decoder prompt (length 5000) is longer than the maximum model length of 4096. Make sure that `max_mod",
    "prompt is too long: 200000 tokens > 199999 maximum",
    "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000, decrease input length or `ma",
    "The input token count (1048577) exceeds the maximum number of tokens allowed (1048576).",
    "Prompt contains 40000 tokens and 0 draft tokens, too large for model with 32768 maximum context length",
    "Please reduce the length of the messages or completion.",
    "This endpoint's maximum context length is 128000 tokens. However, you requested about 200000 tokens",
    "the model is loaded with context length of only 4096 tokens, which is not enough.",
    "The number of tokens to keep from the initial prompt is greater than the context length. Try to load the ",
    "Input is too long for requested model.",
    "This model's maximum prompt length is 131072 but the request contains 537812 tokens.",
    "too many tokens: total number of tokens in the prompt cannot exceed 4081",
    "Input validation error: `inputs` must have less than 1024 tokens. Given: 3000",
    "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
    "Your request exceeded model token limit: 262144",
    "Prompt exceeds max length",
    "context window exceeds limit",
    "prompt token count of 70000 exceeds the limit of 64000",
    "Request too large for gpt-4o in organization org on tokens per min (TPM): Limit 30000, Requested 40000. T",
    "Your input exceeds the context window of this model. Please adjust your input and try again.",
    "input length exceeds maximum context length",
    "exceed_context_size_error",
    "Range of input length should be [1, 98304]",
    "The total number of tokens in your request exceeds the model's limit",
    "context length exceeded",
]
"""Messages of servers that refuse a request as longer than their window."""
OTHERWISE = [
    "Invalid max_tokens value, the valid range of max_tokens is [1, 8192]",
    "max_tokens is too large: 100000. This model supports at most 4096 completion tokens",
    "temperature must be between 0 and 2",
    "Rate limit reached.",
    "Bad request",
    "This model does not support reasoning.",
    "tool name is too long: at most 64",
    "You exceeded your current quota, please check your plan and billing details.",
    "Rate limit exceeded: too many requests",
    "The image is too large: at most 20 MB",
    "Conversation roles must alternate user/assistant",
    "Request timed out",
    "too many concurrent requests",
    "CUDA error: out of memory",
    "Invalid 'messages[3].tool_calls[0].id': string too long. Expected a string with maximum length 40",
    "Requests rate limit exceeded",
    "Number of requests exceeds the limit of 3 per minute",
    "Your request was too fast",
    "Request limit exceeded",
    "Number of request tokens has exceeded your per-minute rate limit",
]


@pytest.mark.parametrize(("said", "too_long"), [*((said, True) for said in TOO_LONG), *((s, False) for s in OTHERWISE)])
def test_error_says_whether_the_request_was_too_long(said: str, too_long: bool) -> None:
    with pytest.raises(ModelError) as caught:
        list(EventStreamReader("x").feed(chunk(error={"message": said, "code": 500})))
    assert caught.value.too_long == too_long


def test_tool_call_that_is_cut_is_an_error() -> None:
    answer = read(call("rm", '{"path": "/ho', index=0, id="a"))
    assert answer.error.startswith("http://model/v1 broke off in the middle of its answer.")


def test_tool_call_without_a_confirmed_end_is_an_error_even_if_it_looks_complete() -> None:
    assert "broke off" in read(call("rm", '{"path": "/home"}', index=0, id="a")).error


def test_event_that_is_cut_is_an_error() -> None:
    answer = read(event({"content": "Hal"}), b'data: {"choices": [{"delta": {"con')
    assert answer.content == "Hal"
    assert "broke off" in answer.error


def test_text_without_a_confirmed_end_is_kept_with_a_notice() -> None:
    answer = read(event({"content": "Half a sen"}))
    assert (answer.content, answer.error) == ("Half a sen", "")
    assert answer.notices == ["http://model/v1 did not say that its answer is complete; it may be cut short."]


@pytest.mark.parametrize("end", [event(finish_reason="stop"), b"data: [DONE]\n\n", b"data: [DONE]"])
def test_finish_reason_or_done_alone_completes_an_answer(end: bytes) -> None:
    answer = read(event({"content": "Hi"}), call("f", "{}", index=0, id="a"), end)
    assert (answer.content, answer.calls, answer.error, answer.notices) == ("Hi", [("a", "f", "{}")], "", [])


FINISH_REASONS = {
    "length": [
        "length",
        "model_length",
        "max_tokens",
        "MAX_TOKENS",
        "max_output_tokens",
        "model_context_window_exceeded",
    ],
    "content_filter": ["content_filter", "SAFETY", "sensitive", "refusal", "RECITATION", "PROHIBITED_CONTENT"],
    "": [
        *("error", "abort", "insufficient_system_resource", "network_error", "engine_overloaded", "cancelled"),
        *("timeout", "MALFORMED_FUNCTION_CALL", "server_error", "rate_limit", "incomplete"),
    ],
    "stop": ["stop"],
    "eos_token": ["eos_token"],
    "END_TURN": ["END_TURN"],
    "function_call": ["function_call"],
    "other": ["other"],
}


@pytest.mark.parametrize(
    ("meaning", "reason"), [(m, reason) for m, known in FINISH_REASONS.items() for reason in known]
)
def test_finish_reasons_that_mean_the_same_are_read_alike(meaning: str, reason: str) -> None:
    answer = read(event({"content": "Hal"}), event(finish_reason=reason), chunk(usage={"a": 1}), b"data: [DONE]\n\n")
    assert (answer.content, answer.finish_reason, answer.usage) == ("Hal", meaning, {"a": 1})
    sentence = f"http://model/v1 broke off its answer ({reason}). Try again, or choose another model."
    assert answer.error == ("" if meaning else sentence)
    notice = "http://model/v1 ended its answer for the reason 'other'; it may be cut short."
    assert answer.notices == ([notice] if meaning == "other" else [])


@pytest.mark.parametrize("nothing", [None, "", "null", "None", False])
def test_finish_reason_that_says_nothing_is_none(nothing: Any) -> None:
    answer = read(event({"content": "H"}, finish_reason=nothing), event({"content": "i"}, finish_reason=nothing))
    assert (answer.content, answer.finish_reason, len(answer.notices)) == ("Hi", "", 1)


def test_keep_alive_comments_and_other_fields_are_skipped() -> None:
    noise = (
        b": OPENROUTER PROCESSING\n\n",
        b"event: message\nid: 7\nretry: 10\n",
        b"data:\n\ndata: ping\n\ndata: null\n\n",
    )
    assert read(noise[0], event({"content": "H"}), *noise, event({"content": "i"}), noise[0], STOP).content == "Hi"


def test_lines_may_end_in_crlf() -> None:
    answer = read((event({"content": "Hi"}) + STOP).replace(b"\n", b"\r\n"))
    assert (answer.content, answer.finish_reason) == ("Hi", "stop")


def test_data_may_come_without_a_space() -> None:
    answer = read((event({"content": "Hi"}) + STOP).replace(b"data: ", b"data:"))
    assert (answer.content, answer.notices) == ("Hi", [])


def test_events_may_come_without_blank_lines_between() -> None:
    stream = event({"content": "H"}) + event({"content": "i"}) + STOP
    assert read(stream.replace(b"\n\n", b"\n")).content == "Hi"


def test_json_of_an_event_may_span_several_data_lines() -> None:
    body = json.dumps({"choices": [{"delta": {"content": "Hi"}}]}, indent=1)
    assert read(b"".join(b"data: " + line.encode() + b"\n" for line in body.splitlines()), b"\n", STOP).content == "Hi"


def test_event_that_is_not_json_is_an_error() -> None:
    answer = read(
        event({"content": "a"}), b'data: {"choices": [{"delta": {"content": "b}}]}\n\n', event({"content": "c"})
    )
    assert answer.content == "a"
    assert "sent an event that is not JSON" in answer.error


@pytest.mark.parametrize(
    "odd",
    [
        {"choices": 5},
        {"choices": [None]},
        {"choices": {"a": 1}},
        {"choices": [{"delta": "Hi"}]},
        {"choices": [{"delta": {"tool_calls": 1}}]},
        {"choices": [{"delta": {"tool_calls": ["f"]}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": "f"}]}}]},
    ],
)
def test_event_of_an_unknown_form_is_an_error_that_quotes_it(odd: dict[str, Any]) -> None:
    """The event comes in a stream, and alone."""
    for sent in (chunk(**odd), json.dumps(odd).encode()):
        assert read(sent).error.startswith('http://model/v1 sent something unknown: {"choices": ')


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, ANY)), max_size=4), ANY)
def test_any_event_is_read_or_refused(parts: list[Any], reason: Any) -> None:
    events = [chunk(choices=[{"delta": part}]) for part in parts]
    answer = read(*events, chunk(choices=[{"delta": {}, "finish_reason": reason}]))
    assert isinstance(answer.finish_reason, str)
    for call in settle(answer.message, used=set()).get("tool_calls", []):
        assert all(isinstance(text, str) for text in (call["id"], *call["function"].values()))


def test_character_split_between_two_pieces_is_joined() -> None:
    stream = event({"content": "Zürich 🐦"}) + STOP
    for cut in range(len(stream)):
        assert read(stream[:cut], stream[cut:]).content == "Zürich 🐦"


@pytest.mark.parametrize("half", [b'"a\\ud83d"', b'"a\xf0\x9f"'], ids=["surrogate", "bytes"])
def test_half_a_character_inside_an_event_does_not_break_the_stream(half: bytes) -> None:
    answer = read(b'data: {"choices": [{"delta": {"content": ' + half + b"}}]}\n\n", event({"content": "b"}), STOP)
    assert answer.error == ""
    assert str(answer.content)[0] + str(answer.content)[-1] == "ab"
    str(answer.content).encode()


def test_web_page_with_200_is_an_error_that_says_what_to_check() -> None:
    assert read(b"<!DOCTYPE html>\n<html>Hello</html>").error == (
        "http://model/v1 did not answer as a chat-completions endpoint: it sent a web page instead of JSON; base_url "
        "usually ends in /v1. Check base_url."
    )


def test_plain_json_completion_with_200_is_read_like_a_stream() -> None:
    function = {"name": "f", "arguments": '{"a": 1}'}
    message = {"content": "<think>Hm.</think>Hi", "tool_calls": [{"id": "a", "type": "function", "function": function}]}
    completion = {"choices": [{"message": message, "finish_reason": "tool_calls"}], "usage": {"prompt_tokens": 3}}
    for body in (json.dumps(completion), json.dumps(completion, indent=2)):
        answer = read(body.encode())
        assert (answer.content, answer.thought, answer.error) == ("Hi", "Hm.", "")
        assert answer.calls == [("a", "f", '{"a": 1}')]
        assert (answer.finish_reason, answer.usage) == ("tool_calls", {"prompt_tokens": 3})


def test_other_json_with_200_is_an_error_that_quotes_it() -> None:
    assert "endpoint: Not Found. Check base_url." in read(b'{"detail": "Not Found"}').error


@pytest.mark.parametrize("data", [b"", b"\n\n", b": ping\n\n", b"data: [DONE]\n\n", event({"role": "assistant"})])
def test_empty_answer_with_200_is_an_error(data: bytes) -> None:
    assert read(data).error == (
        "http://model/v1 closed the connection without an answer. If that goes on, look into the server's log."
    )


def test_empty_reply_with_a_finish_reason_is_complete() -> None:
    answer = read(event({"role": "assistant", "content": ""}), STOP)
    assert (answer.message, answer.finish_reason, answer.error) == ({"role": "assistant"}, "stop", "")


def recorded(kind: str) -> Sequence[Any]:
    """Return the recordings of a kind as parameters; a skipped one if there are none."""
    if not RECORDINGS.is_dir():
        reason = f"{RECORDINGS} is not there: recorded streams are compared only where they are"
        return [pytest.param({}, marks=pytest.mark.skip(reason=reason))]
    expected = json.loads((RECORDINGS / "expected.json").read_text())
    found = {name: json.loads((RECORDINGS / name).read_text()) for name in sorted(expected)}
    return [pytest.param({**r, "expected": expected[n]}, id=n) for n, r in found.items() if r["kind"] == kind]


@pytest.mark.parametrize("recording", recorded("stream"))
def test_recorded_stream_is_read_like_the_openai_sdk_if_that_can_read_it(recording: dict[str, Any]) -> None:
    body: bytes = recording["response_sse"].encode()
    state = ChatCompletionStreamState()
    try:
        for event in SSEDecoder().iter_bytes(iter([body])):
            if not event.data.startswith("[DONE]"):
                state.handle_chunk(ChatCompletionChunk.model_validate_json(event.data))
        message = state.current_completion_snapshot.choices[0].message
    except (ValueError, AssertionError):
        return  # the SDK refuses this stream; the test below checks it

    reader, builder = EventStreamReader("x", think_tags=False), ReplyBuilder()
    for delta in [*reader.feed(body), *reader.finish()]:
        builder.add(delta)
    reply = settle(builder.build(), used=set())
    calls = [call["function"] for call in reply.get("tool_calls", [])]
    assert reply.get("content", "") == (message.content or "") + (message.refusal or "")
    theirs = [(call.function.name, call.function.arguments or "{}") for call in message.tool_calls or []]
    if theirs != [("llm_versionllm_version", "{}")]:  # the server repeats the name, and the SDK doubles it
        assert [(call["name"], call["arguments"]) for call in calls] == theirs


@pytest.mark.parametrize("recording", recorded("stream"))
def test_recorded_stream_is_read_like_by_an_independent_reader(recording: dict[str, Any]) -> None:
    expected = recording["expected"]
    answer = read(recording["response_sse"].encode())
    content, reasoning = expected["content"], expected["reasoning"]
    if content.startswith("<think>"):  # crow removes the tags
        reasoning, _, content = content.removeprefix("<think>").partition("</think>")
    if reasoning:  # crow drops the white space between reasoning and answer
        content = content.lstrip()
    if "I'm sorry, I can't assist" in str(answer.content):  # crow shows the text of a refusal
        content = "I'm sorry, I can't assist with that request."
    calls = [(c["id"] or "call", c["name"], c["arguments"] or "{}") for c in expected["calls"]]  # crow generates both

    assert (answer.content or "", answer.thought or "") == (content, reasoning)
    assert answer.calls == calls
    assert answer.finish_reason == (expected["finish"] or "")
    usage: dict[str, Any] = expected["usage"] or {}
    # the cached tokens of llama.cpp are not in its usage: crow adds only this key
    told = {name: count for name, count in answer.usage.items() if name != "cached_tokens" or name in usage}
    assert told == {name: count for name, count in usage.items() if count is not None}
    assert (answer.error, answer.notices) == ("", [])


@pytest.mark.parametrize("recording", recorded("stream"))
def test_recorded_stream_cut_into_single_bytes_is_read_the_same(recording: dict[str, Any]) -> None:
    stream: bytes = recording["response_sse"].encode()
    assert read(*(stream[at : at + 1] for at in range(len(stream)))) == read(stream)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("recording", recorded("stream"))
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_split_of_a_recorded_stream_gives_the_same_message(recording: dict[str, Any], data: st.DataObject) -> None:
    stream: bytes = recording["response_sse"].encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=20)))
    assert read(*(stream[start:end] for start, end in zip([0, *cuts], [*cuts, None], strict=True))) == read(stream)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("recording", recorded("stream"))
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_split_of_a_recorded_stream_with_an_error_gives_the_deltas_before_it(
    recording: dict[str, Any], data: st.DataObject
) -> None:
    lines = recording["response_sse"].encode().split(b"\n\n")
    before = b"".join(line + b"\n\n" for line in lines[: data.draw(st.integers(0, len(lines) - 1))])
    if b"[DONE]" in before:
        return
    stream = before + data.draw(st.sampled_from([*ERRORS.values()]))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=20)))
    deltas, error = read_deltas(*(stream[start:end] for start, end in zip([0, *cuts], [*cuts, None], strict=True)))
    assert (deltas, error) == read_deltas(stream)

    reader = EventStreamReader("x")
    broken = [*reader.feed(before)]
    with pytest.raises(ModelError) if not reader.has_finish_reason else nullcontext():
        broken += reader.finish(ModelError("The connection broke."))
    assert texts(deltas) == texts(broken)


def texts(deltas: Iterable[Any]) -> tuple[Any, Any]:
    """Return the text and the reasoning of these deltas."""
    builder = ReplyBuilder()
    for delta in deltas:
        builder.add(delta)
    reply = builder.build()
    return reply.get("content"), reply.get("reasoning_content")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("recording", recorded("stream"))
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_recorded_stream_that_is_cut_never_ends_in_a_partial_tool_call(
    recording: dict[str, Any], data: st.DataObject
) -> None:
    stream: bytes = recording["response_sse"].encode()
    whole = read(stream)
    answer = read(stream[: data.draw(st.integers(0, len(stream)))])
    assert answer.error or answer.notices or answer.calls == whole.calls


@pytest.mark.parametrize("piece", [b"a" * 2**20, b'data: {"a": "' + b"a" * 2**20 + b"\n"], ids=["line", "event"])
def test_event_without_an_end_is_an_error(piece: bytes) -> None:
    assert "sent an event without an end" in read(*[piece] * (MAX_EVENT_BYTES // 2**20 + 1)).error


def test_choice_with_index_0_is_read_in_whatever_order_choices_come() -> None:
    """Deltas of the other come first, between, and in the same event."""
    both = [{"index": 0, "delta": {"content": "b"}}, {"index": 2, "delta": {"content": "XX"}}]
    other = [{"index": 2, "delta": {"content": "X"}, "finish_reason": "length"}]
    stream = [chunk(choices=choices) for choices in (other, both[:1], other, both, both[::-1])]
    answer = read(*stream, chunk(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]))
    assert (answer.content, answer.finish_reason, answer.error) == ("bbb", "stop", "")


DELTAS = st.one_of(
    st.builds(lambda text: {"content": text}, st.text("ab<é\U0001f426", min_size=1, max_size=4)),
    st.builds(lambda text: {"reasoning_content": text}, st.text("xy", min_size=1, max_size=3)),
    st.builds(
        lambda index: {"tool_calls": [{"index": index, "id": f"c{index}", "function": {"name": "f", "arguments": ""}}]},
        st.integers(0, 2),
    ),
)


@settings(deadline=None)
@given(data=st.data(), answers=st.lists(st.lists(DELTAS, max_size=5), min_size=2, max_size=3))
def test_interleaved_answers_give_the_one_with_index_0(data: st.DataObject, answers: list[list[Any]]) -> None:
    """Events with one choice or several, in any order, are read like those with index 0 alone."""
    choices = [[{"index": n, "delta": delta} for delta in deltas] for n, deltas in enumerate(answers)]
    for n, own in enumerate(choices):
        own.append({"index": n, "delta": {}, "finish_reason": "stop" if n == 0 else "length"})
    alone = [chunk(choices=[choice]) for choice in choices[0]]
    mixed = list[bytes]()
    while left := [own for own in choices if own]:
        together = data.draw(st.lists(st.sampled_from(left), min_size=1, unique_by=id), label="in one event")
        mixed.append(chunk(choices=[own.pop(0) for own in together]))
    done = b"data: [DONE]\n\n"
    assert read(*mixed, done) == read(*alone, done)


@pytest.mark.parametrize("odd", [None, "0", 0.0, True, [], {"a": 1}, -1])
def test_odd_index_of_a_choice_loses_no_text(odd: Any) -> None:
    start = chunk(choices=[{"index": odd, "delta": {"role": "assistant", "content": ""}}])
    middle = b"" if odd == -1 else chunk(choices=[{"index": odd, "delta": {"content": "b"}}])
    answer = read(start, event({"content": "a"}, index=0), middle, event({"content": "c"}, index=0), STOP)
    assert (answer.content, answer.error) == ("ac" if odd == -1 else "abc", "")
    always = [chunk(choices=[{"index": odd, "delta": {"content": text}}]) for text in "abc"]
    assert read(*always, STOP).content == "abc"


def test_tool_calls_of_another_answer_are_not_run() -> None:
    fragments = [{"index": 0, "id": id, "function": {"name": "f", "arguments": "{}"}} for id in ("a", "b")]
    choices = [{"index": at, "delta": {"tool_calls": [fragment]}} for at, fragment in enumerate(fragments)]
    assert read(chunk(choices=choices[:1]), chunk(choices=choices[1:]), CALLS).calls == [("a", "f", "{}")]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_whole_completion_with_index_0_is_read(order: tuple[int, ...]) -> None:
    choices = [{"index": n, "message": {"content": f"{n}"}, "finish_reason": "stop"} for n in order]
    assert read(json.dumps({"choices": choices}).encode()).content == "0"


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_byte_order_mark_is_skipped(line_end: bytes) -> None:
    mark = "\ufeff".encode()
    stream = mark + (event({"content": "H"}) + mark + event({"content": "i"}) + STOP).replace(b"\n", line_end)
    assert (read(stream), read(stream).content) == (read(*(stream[at : at + 1] for at in range(len(stream)))), "Hi")
    whole = json.dumps({"choices": [{"message": {"content": "Hi"}, "finish_reason": "stop"}]}).encode()
    assert read(mark + whole).content == "Hi"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" * 400])
def test_number_that_json_does_not_have_does_not_break_an_event(number: str) -> None:
    odd = (
        b'data: {"created": N, "usage": {"cost": N, "prompt_tokens": 3}, "choices": [{"delta": {"content": "i"}}]}\n\n'
    )
    answer = read(event({"content": "H"}), odd.replace(b"N,", number.encode() + b","), STOP)
    assert (answer.content, answer.error, answer.usage["prompt_tokens"]) == ("Hi", "", 3)


def test_control_character_in_a_string_does_not_break_an_event() -> None:
    assert read(event({"content": "a\tb"}).replace(b"\\t", b"\t"), STOP).content == "a\tb"


@pytest.mark.parametrize("odd", [True, 7, "many", ["many"], {"prompt_tokens": True}, {"prompt_tokens": "7"}, [[]]])
@pytest.mark.parametrize("place", ["usage", "timings", "x_groq", "choice", "id", "created", "logprobs"])
def test_other_types_beside_an_answer_do_not_break_it(odd: Any, place: str) -> None:
    choice = {"index": 0, "delta": {"content": "i"}, **({"usage": odd, "logprobs": odd} if place == "choice" else {})}
    stream = chunk(choices=[choice], **{place: odd}), event(finish_reason="stop"), chunk(choices=[], **{place: odd})
    answer = read(event({"content": "H"}), *stream)
    assert (answer.content, answer.error, answer.finish_reason) == ("Hi", "", "stop")


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["choices", "usage", "timings", "x_groq", "object", "id"]), ANY))
def test_no_event_breaks_an_answer_that_is_complete(odd: dict[str, Any]) -> None:
    if odd.get("object") == "error":
        return
    answer = read(event({"content": "Hi"}), event(finish_reason="stop"), chunk(**odd), b'data: {"\n\n')
    assert (str(answer.content)[:2], answer.error) == ("Hi", "")


DEEP = b"[" * 50_000 + b"]" * 50_000


@pytest.mark.parametrize(
    "deep", [DEEP, DEEP[:50_000], b"[" * 300 + b"]" * 300, b'{"a":' * 50_000 + b"1" + b"}" * 50_000]
)
def test_deep_json_is_an_error_behind_the_text(deep: bytes) -> None:
    answer = read(event({"content": "Hi"}), b'data: {"choices": ' + deep + b"}\n\n", STOP)
    assert (answer.content, answer.error) == (
        "Hi",
        "http://model/v1 sent an event that is not JSON. If that goes on, look into the server's log.",
    )
    assert "did not answer as a chat-completions endpoint" in read(b'{"choices": ' + deep + b"}").error
    answer = read(event({"content": "Hi"}), event(finish_reason="stop"), b'data: {"usage": ' + deep + b"}\n\n", STOP)
    assert (answer.content, answer.error) == ("Hi", "")


def test_deep_arguments_of_a_call_are_kept_as_they_are() -> None:
    answer = read(call("f", '{"a": ' + DEEP.decode() + "}", index=0, id="a"), CALLS)
    assert answer.calls == [("a", "f", '{"a": ' + DEEP.decode() + "}")]


BIRD = "🐦"
HALVES = {"surrogates": (b"\\ud83d", b"\\udc26"), "bytes": (BIRD.encode()[:2], BIRD.encode()[2:])}


@pytest.mark.parametrize("halves", HALVES.values(), ids=HALVES)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'"content": "a', b'"content": "'),
        (b'"reasoning_content": "a', b'"reasoning_content": "'),
        (b'"reasoning": "a', b'"reasoning": "'),
        (b'"content": [{"type": "text", "text": "a', b'"content": [{"type": "text", "text": "'),
        (b'"tool_calls": [{"index": 0, "id": "x", "function": {"name": "f", "arguments": "a',) * 2,
    ],
    ids=["content", "reasoning_content", "reasoning", "parts", "arguments"],
)
def test_character_split_between_two_deltas_is_joined(before: bytes, after: bytes, halves: tuple[bytes, bytes]) -> None:
    def to_event(start: bytes, text: bytes) -> bytes:
        end = b"}]" if b"[{" in start else b""
        end = b'"}' + end if b"arguments" in start else b'"' + end
        return b'data: {"choices": [{"delta": {' + start + text + end + b"}}]}\n\n"

    other = event({"role": "assistant"}) + chunk(usage={"prompt_tokens": 1})
    answer = read(to_event(before, halves[0]), other, to_event(after.removesuffix(b"a"), halves[1] + b"b"), STOP)
    texts = [answer.content, answer.thought, *(arguments for _, _, arguments in answer.calls)]
    assert [text for text in texts if text] == [f"a{BIRD}b"]


@settings(deadline=None)
@given(st.text(st.sampled_from("a🐦💀é\ud83d\udc80"), max_size=8), st.data())
def test_text_cut_between_any_code_units_has_all_its_characters(text: str, data: st.DataObject) -> None:
    data_of = text.encode("utf-16-be", "surrogatepass")
    escaped = ["\\u" + data_of[at : at + 2].hex() for at in range(0, len(data_of), 2)]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(escaped)), max_size=4)))
    pieces = ["".join(escaped[start:end]) for start, end in zip([0, *cuts], [*cuts, None], strict=True)]
    events = [b'data: {"choices": [{"delta": {"content": "%s"}}]}\n\n' % piece.encode() for piece in pieces]
    expected = re.sub("[\ud800-\udfff]", "\ufffd", data_of.decode("utf-16-be", "surrogatepass"))
    assert (read(*events, STOP).content or "") == expected


def test_half_characters_in_other_fields_are_replaced() -> None:
    fragment = {"index": 0, "id": "x\ud83d", "function": {"name": "f\ud83d", "arguments": "{}"}}
    choices = [{"delta": {"tool_calls": [fragment]}, "finish_reason": "odd\ud83d"}]
    half = b"data: " + json.dumps({"choices": choices, "usage": {"\ud83d": "\ud83d"}}).encode() + b"\n\n"
    answer = read(half, b"data: [DONE]\n\n")
    assert answer.calls == [("x?", "f?", "{}")]
    assert (answer.finish_reason, answer.usage) == ("odd?", {"?": "?"})
