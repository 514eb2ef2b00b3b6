"""The errors that endpoints report: their words, whether they are retried, and how long crow waits before that."""

import json
from pathlib import Path
from time import time
from typing import Any

import pytest
from crow_core.errors import ModelError
from crow_core.models.failures import (
    classify_error,
    describe_error,
    find_retry_wait,
    load_failures,
    parse_duration,
    parse_retry_after,
    parse_text,
    shorten_text,
    to_model_error,
)
from crow_core.models.stream import EventStreamReader
from hypothesis import given
from hypothesis import strategies as st

RECORDINGS = Path(__file__).parents[2].parent / "shared" / "recordings"
"""Real answers of providers, which lie beside the repository where there are any."""


def read_error(stream: bytes) -> ModelError:
    """Return the error that a stream ends with."""
    reader = EventStreamReader("http://model/v1")
    try:
        list(reader.feed(stream))
        list(reader.finish())
    except ModelError as error:
        return error
    pytest.fail("the stream ends without an error")


def event(content: Any, name: str = "") -> bytes:
    """Return a server-sent event."""
    data = content if isinstance(content, str) else json.dumps(content)
    return (f"event: {name}\n" if name else "").encode() + f"data: {data}\n\n".encode()


def name_kind(error: Any, status: int = 0) -> str:
    """Return the name of an error's kind."""
    kind = classify_error(error, status)
    return next(name for name, each in load_failures()[0].items() if each is kind)


TRANSIENT: dict[str, bytes] = {
    "OpenAI": event(
        {
            "error": {
                "message": "The server had an error while processing your request. WORDS",
                "type": "server_error",
                "param": None,
                "code": None,
            }
        }
    ),
    "OpenAI, limited": event(
        {"error": {"message": "Rate limit reached. WORDS", "type": "tokens", "code": "rate_limit_exceeded"}}
    ),
    "OpenAI, Responses": event({"type": "error", "code": "server_error", "message": "WORDS", "param": None}, "error"),
    "Anthropic": event({"type": "error", "error": {"type": "overloaded_error", "message": "WORDS"}}, "error"),
    "Anthropic, api_error": event({"type": "error", "error": {"type": "api_error", "message": "WORDS"}}, "error"),
    "Anthropic, limited": event({"error": {"type": "rate_limit_error", "message": "WORDS"}}),
    "OpenRouter": event(
        {
            "id": "gen-1",
            "object": "chat.completion.chunk",
            "error": {"code": "server_error", "message": "Provider disconnected unexpectedly: WORDS"},
            "choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "error"}],
        }
    ),
    "OpenRouter, number": event({"error": {"code": 502, "message": "WORDS", "metadata": {"provider_name": "x"}}}),
    "OpenRouter, in the raw error": event(
        {
            "error": {
                "code": 400,
                "message": "Provider returned error",
                "metadata": {"raw": '{"error":{"type":"overloaded_error","message":"WORDS"}}'},
            }
        }
    ),
    "OpenRouter, in the choice": event(
        {"choices": [{"delta": {"content": ""}, "finish_reason": "error", "error": {"code": 429, "message": "WORDS"}}]}
    ),
    "Azure": event({"error": {"code": "RateLimitReached", "message": "WORDS", "details": "WORDS"}}),
    "Azure, timeout": event({"error": {"code": "Timeout", "message": "WORDS"}}),
    "Google": event({"error": {"code": 503, "message": "WORDS", "status": "UNAVAILABLE"}}),
    "Google, list": event([{"error": {"message": "WORDS", "status": "RESOURCE_EXHAUSTED"}}]),
    "Google, name only": event({"error": {"message": "WORDS", "status": "INTERNAL"}}),
    "vLLM": event({"object": "error", "message": "WORDS", "type": "InternalServerError", "param": None, "code": 500}),
    "vLLM, nested": event({"error": {"message": "WORDS", "type": "ServiceUnavailableError", "code": "503"}}),
    "vLLM, dead": event({"error": {"message": "EngineCore has died: engine core died. WORDS"}}),
    "llama.cpp": event({"error": {"code": 503, "message": "Loading model WORDS", "type": "unavailable_error"}}),
    "llama.cpp, field": b'error: {"code": 500, "message": "WORDS", "type": "server_error"}\n\n',
    "Ollama": event({"error": "an error was encountered while running the model: unexpected EOF WORDS"}),
    "Ollama, busy": event({"error": "server busy, please try again. maximum pending requests exceeded WORDS"}),
    "Groq": event({"error": {"message": "WORDS", "type": "internal_server_error"}}, "error"),
    "Groq, status_code": event({"error": {"message": "WORDS", "status_code": 503}}, "error"),
    "Groq, flex": event({"error": {"message": "WORDS", "code": 498}}, "error"),
    "Mistral": event({"object": "error", "message": "WORDS", "type": "rate_limited", "param": None, "code": "1300"}),
    "Mistral, capacity": event(
        {"object": "error", "message": "WORDS", "type": "service_tier_capacity_exceeded", "code": "3505"}
    ),
    "DeepSeek": event({"error": {"message": "Service is too busy. WORDS", "type": "unknown", "code": None}}),
    "Together": event({"error": {"message": "WORDS", "type": "server_overloaded", "code": None}}),
    "Fireworks": event({"error": {"object": "error", "type": "internal_server_error", "message": "WORDS"}}),
    "Bedrock": event({"message": "WORDS", "__type": "ThrottlingException", "code": "ThrottlingException"}),
    "Bedrock, key": event({"modelTimeoutException": {"message": "WORDS"}}),
    "Bedrock, unavailable": event({"serviceUnavailableException": {"message": "WORDS"}}, "exception"),
    "LiteLLM": event({"error": {"message": "litellm.RateLimitError: WORDS", "type": "None", "code": "429"}}),
    "LiteLLM, python": event(
        {"error": {"message": "litellm.APIConnectionError: Error code: 503 - {'error': 'WORDS'}", "type": None}}
    ),
    "Cloudflare": event(
        {"success": False, "errors": [{"code": 3040, "message": "Capacity temporarily exceeded WORDS"}]}
    ),
    "xAI": event({"code": "The service is currently unavailable", "error": "WORDS"}),
    "Zhipu": event({"error": {"code": "1302", "message": "WORDS"}}),
    "Alibaba": event({"code": "Throttling.RateQuota", "message": "WORDS", "request_id": "7"}),
    "MiniMax": event({"base_resp": {"status_code": 1002, "status_msg": "rate limit WORDS"}, "choices": None}),
    "Databricks": event({"error_code": "REQUEST_LIMIT_EXCEEDED", "message": "WORDS"}),
    "Hugging Face": event({"error": "WORDS", "error_type": "overloaded"}),
    "gRPC": event({"error": {"code": 14, "message": "WORDS", "details": []}}),
    "nested twice": event({"error": {"error": {"error": {"type": "overloaded_error", "message": "WORDS"}}}}),
    "JSON in text": event({"error": '{"error": {"message": "WORDS", "code": "503"}}'}),
    "message": event({"message": "Internal server error: WORDS"}, "error"),
    "detail": event({"detail": "The upstream timed out: WORDS"}, "error"),
    "message without a name": event({"message": "The model is overloaded: WORDS"}),
    "status": event({"status": 503, "title": "Service Unavailable", "detail": "WORDS"}, "error"),
    "status without a name": event({"status": 503, "detail": "WORDS"}),
    "text": event("upstream connect error or disconnect/reset before headers: WORDS", "error"),
    "JSON text": event('"Too many requests: WORDS"', "error"),
    "marked text": event("[ERROR] the connection was reset by the peer. WORDS"),
    "several lines": b'event: error\ndata: {"error":\ndata: {"message": "WORDS", "code": 503}}\n\n',
    "no event stream": b'{"error": {"message": "WORDS", "code": 503}}',
    "list that is no event stream": b'[{"error": {"message": "WORDS", "code": 503}}]',
    "after an answer": event({"choices": [{"delta": {"content": "Hi"}}]})
    + b'{"error": {"message": "WORDS", "code": 503}}',
}

PERMANENT: dict[str, bytes] = {
    "OpenAI": event({"error": {"message": "WORDS", "type": "invalid_request_error", "param": "x", "code": None}}),
    "OpenAI, key": event({"error": {"message": "WORDS", "type": "server_error", "code": "invalid_api_key"}}),
    "OpenAI, quota": event({"error": {"message": "WORDS", "type": "insufficient_quota", "code": "insufficient_quota"}}),
    "OpenAI, length": event({"error": {"message": "WORDS", "type": "server_error", "code": "context_length_exceeded"}}),
    "OpenAI, content": event({"error": {"message": "WORDS", "type": "server_error", "code": "content_filter"}}),
    "Anthropic": event({"type": "error", "error": {"type": "invalid_request_error", "message": "WORDS"}}, "error"),
    "Anthropic, key": event({"error": {"type": "authentication_error", "message": "WORDS"}}, "error"),
    "Anthropic, permission": event({"error": {"type": "permission_error", "message": "WORDS"}}, "error"),
    "Anthropic, credit": event({"error": {"message": "Your credit balance is too low. WORDS", "code": 500}}, "error"),
    "OpenRouter": event({"error": {"code": 403, "message": "WORDS"}, "choices": []}),
    "OpenRouter, credit": event({"error": {"code": 402, "message": "WORDS"}, "choices": []}),
    "Google": event({"error": {"message": "WORDS", "status": "INVALID_ARGUMENT"}}),
    "Google, permission": event({"error": {"message": "WORDS", "status": "PERMISSION_DENIED"}}),
    "vLLM": event({"object": "error", "message": "WORDS", "type": "BadRequestError", "code": 400}),
    "Ollama": event({"error": "WORDS"}),
    "Bedrock": event({"validationException": {"message": "WORDS"}}, "exception"),
    "Bedrock, access": event({"accessDeniedException": {"message": "WORDS"}}),
    "LiteLLM": event({"error": {"message": "litellm.AuthenticationError: WORDS", "type": "auth_error", "code": "401"}}),
    "model": event({"error": {"message": "The model `x` does not exist. WORDS"}}),
    "message": event({"message": "WORDS"}, "error"),
    "detail": event({"detail": "WORDS"}, "error"),
    "text": event("WORDS", "error"),
    "unsupported": event({"error": {"message": "WORDS", "code": 501}}),
}


@pytest.mark.parametrize("name", TRANSIENT)
def test_passing_error_in_a_stream_is_told_and_retried(name: str) -> None:
    error = read_error(TRANSIENT[name])
    assert "WORDS" in str(error)
    assert error.retry


@pytest.mark.parametrize("name", PERMANENT)
def test_lasting_error_in_a_stream_is_told_and_not_retried(name: str) -> None:
    error = read_error(PERMANENT[name])
    assert "WORDS" in str(error)
    assert not error.retry


def test_error_object_of_an_answer_that_goes_on_is_none() -> None:
    chunk = {"error": None, "choices": [{"delta": {"content": "Hi"}, "error": None}], "status": "running"}
    noise = event({"type": "ping"}) + event({"message": "in the queue"}) + event({"status": "processing", "code": "ok"})
    reader = EventStreamReader("x")
    assert list(reader.feed(noise + event(chunk))) == [{"content": "Hi"}]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *(
            (status, "trouble")
            for status in (408, 409, 425, 500, 502, 503, 504, 507, 520, 522, 524, 527, 530, 598, 599)
        ),
        *((status, "invalid") for status in (400, 405, 415, 418, 422, 424, 451, 501, 505)),
        *((429, "limited"), (529, "overloaded"), (498, "overloaded"), (401, "key"), (402, "payment"), (403, "access")),
        *((404, "model"), (413, "too_long")),
    ],
)
def test_status_decides_if_the_error_says_nothing_else(status: int, kind: str) -> None:
    assert name_kind("", status) == kind


@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        (400, {"__type": "ThrottlingException", "message": "Rate exceeded"}, "limited"),
        (400, {"error": {"message": "x", "type": "overloaded_error"}}, "overloaded"),
        (400, {"error": {"message": "x", "type": "api_error"}}, "invalid"),
        (400, {"error": {"message": "Timeouts are overloaded in this schema.", "type": "x"}}, "invalid"),
        (403, {"error": {"status": "PERMISSION_DENIED", "details": [{"reason": "RATE_LIMIT_EXCEEDED"}]}}, "limited"),
        (422, {"detail": [{"msg": "no", "input": {"code": 503, "error": "invalid_api_key"}}]}, "invalid"),
        (429, {"error": {"code": "insufficient_quota", "message": "You exceeded your current quota."}}, "payment"),
        (
            429,
            {"error": {"status": "RESOURCE_EXHAUSTED", "message": "You exceeded your current quota, see billing."}},
            "limited",
        ),
        (500, {"error": {"message": "the request exceeds the available context size", "code": 500}}, "too_long"),
        (400, {"error": {"message": "Failed", "code": "tool_use_failed", "failed_generation": "503"}}, "slip"),
        (401, {"error": {"message": "overloaded"}}, "key"),
        (401, {"error": {"message": "Country not supported"}}, "region"),
        (429, {"message": "Too many tokens, please wait before trying again."}, "limited"),
        (0, {"error": {"code": "insufficient_system_resource"}}, "overloaded"),
        (0, {"error": 'Post "http://127.0.0.1:4/completion": EOF'}, "trouble"),
    ],
)
def test_error_says_more_than_its_status(status: int, error: Any, kind: str) -> None:
    assert name_kind(error, status) == kind


KEYS: list[tuple[int, Any]] = [
    (
        400,
        {
            "code": "Client specified an invalid argument",
            "error": "Incorrect API key provided: xa***34. You can obtain an API key from https://console.x.ai.",
        },
    ),
    (
        400,
        [
            {
                "error": {
                    "code": 400,
                    "message": "API key not valid. Please pass a valid API key.",
                    "status": "INVALID_ARGUMENT",
                    "details": [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "API_KEY_INVALID"}],
                }
            }
        ],
    ),
    (
        400,
        [
            {
                "error": {
                    "code": 400,
                    "message": "API key expired. Please renew the API key.",
                    "status": "INVALID_ARGUMENT",
                }
            }
        ],
    ),
    (400, {"error": {"code": 400, "message": "Missing or invalid Authorization header."}}),
    (403, {"error": {"message": "Your API key was reported as leaked. Please use another API key.", "code": 403}}),
    (403, {"error": {"code": 403, "message": "Method doesn't allow unregistered callers (callers without identity)."}}),
    (403, {"message": "The security token included in the request is invalid."}),
    (403, {"Message": "Authentication failed: Please make sure your API Key is valid."}),
    (
        403,
        {
            "error": {
                "object": "error",
                "type": "invalid_request_error",
                "message": "The API key you provided is invalid.",
            }
        },
    ),
    (400, {"success": False, "errors": [{"code": 10000, "message": "Authentication error"}]}),
    (400, {"error": {"message": "Invalid API Key", "type": "invalid_request_error", "code": "invalid_api_key"}}),
    (500, {"error": {"message": "Invalid token", "type": "new_api_error", "code": "invalid_api_key"}}),
    (400, {"error": "Unauthorized"}),
    (400, {"error": {"message": "authorization header is missing"}}),
    (400, {"error": {"message": "Bad Request: token expired or incorrect", "code": "1000"}}),
    (406, {"error": {"message": "The provided token is invalid."}}),
    (400, {"detail": "Not authenticated"}),
    (404, {"error": {"code": "InvalidApiKey", "message": "Invalid API-key provided."}}),
    (200, {"base_resp": {"status_code": 1004, "status_msg": "login fail: Please carry the API secret key"}}),
    (401, "<html><head><title>401 Authorization Required</title></head></html>"),
]
"""Answers of vendors to a wrong key, with their statuses."""


@pytest.mark.parametrize(("status", "error"), KEYS, ids=lambda value: json.dumps(value)[:70])
def test_wrong_key_is_recognized_whatever_the_status(status: int, error: Any) -> None:
    failure = to_model_error("x", error, status=status)
    assert f"x refused the key ({status}): " in str(failure)
    assert str(failure).endswith("Check the model's api_key, or OPENAI_API_KEY.")
    assert "base_url" not in str(failure)
    assert not failure.retry


REGIONS: list[tuple[int, Any]] = [
    (
        403,
        {
            "error": {
                "code": "unsupported_country_region_territory",
                "message": "Country, region, or territory not supported",
                "type": "request_forbidden",
            }
        },
    ),
    (400, [{"error": {"code": 400, "message": "User location is not supported for the API use."}}]),
    (403, {"error": {"message": "This model is not available in your region.", "code": 403}}),
    (
        403,
        {"message": "Access to Anthropic models is not allowed from unsupported countries, regions, or territories."},
    ),
    (403, {"error": {"type": "forbidden", "message": "Requests from your country are blocked."}}),
    (451, {"error": {"message": "This service is restricted in your country."}}),
    (403, {"error": {"message": "x", "code": "region_not_supported"}}),
]


@pytest.mark.parametrize(("status", "error"), REGIONS, ids=lambda value: json.dumps(value)[:70])
def test_refusal_because_of_the_region_does_not_blame_the_key(status: int, error: Any) -> None:
    said = str(to_model_error("x", error, status=status))
    assert "x does not serve your region (" in said
    assert "key" not in said


def test_other_403_names_the_account_and_not_only_the_key() -> None:
    error = {"error": {"message": "Project `p` does not have access to this.", "type": "invalid_request_error"}}
    said = str(to_model_error("x", error, status=403))
    assert said.startswith(
        "x denied access (403): Project `p` does not have access to this. Check the model's api_key, "
    )


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, {"error": {"message": "Model Not Exist", "type": "invalid_request_error"}}),
        (400, {"error": {"message": "m-9 is not a valid model ID", "code": 400}}),
        (400, {"object": "error", "message": "Invalid model: m-9", "type": "invalid_model", "code": "1500"}),
        (400, {"error": {"message": "The model `m-9` has been decommissioned.", "code": "model_decommissioned"}}),
        (404, {"error": 'model "m-9" not found, try pulling it first'}),
    ],
)
def test_unknown_model_is_recognized_whatever_the_status(status: int, error: Any) -> None:
    said = str(to_model_error("x", error, status=status, model="m-9"))
    assert said.startswith(f"x has no model 'm-9', or base_url is wrong ({status}): ")


# The words.


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b'{"error": {"message": "No such model.\\nReally.", "code": 404}}', "No such model. Really"),
        (b'{"error": "at capacity", "code": "unavailable"}', "at capacity"),
        (b'{"error": true, "message": "at capacity"}', "at capacity"),
        (b'{"statusCode": 401, "message": "Who are you?", "error": "Unauthorized"}', "Who are you?"),
        (b'{"detail": "Unauthorized"}', "Unauthorized"),
        (b'{"detail": [{"loc": ["body", "tools", 0], "msg": "Field required"}]}', "body.tools.0: Field required"),
        (b'[{"error": {"message": "quota", "status": "X"}}]', "quota"),
        (
            b'{"error": {"message": "Provider error", "metadata": {"raw": "{\\"detail\\": \\"slow\\"}"}}}',
            "Provider error: slow",
        ),
        (
            b'{"error": {"message": "no", "metadata": {"raw": "<html><title>502</title>"}}}',
            "no: it sent a web page, '502'",
        ),
        (b'{"success": false, "errors": [{"code": 7, "message": "no"}], "messages": []}', "no"),
        (b'{"fault": {"faultstring": "no"}}', "no"),
        (b'{"error": "invalid_request", "error_description": "no"}', "no"),
        (b'{"type": "about:blank", "title": "Busy", "status": 503, "detail": "no"}', "no"),
        (b'{"error": {"code": "server_error"}}', '{"error": {"code": "server_error"}}'),
        (b"upstream  connect\nerror", "upstream connect error"),
        (b"", "it sent nothing"),
        (b'{"error": {"message": "\\u001b[31mred\\u0007"}}', "[31mred"),
        (b'{"foo": 1}', '{"foo": 1}'),
        (b"<html>", "it sent a web page instead of JSON; base_url usually ends in /v1"),
    ],
)
def test_message_of_an_error_is_found_under_any_providers_keys(body: bytes, sentence: str) -> None:
    assert shorten_text(describe_error(parse_text(body))) == sentence


def test_long_error_body_is_cut() -> None:
    assert len(shorten_text(describe_error("x" * 10_000))) == 300


PAGES = [
    (
        "<!DOCTYPE html><html><head><title>x.example | 524: A timeout occurred</title>",
        "'x.example | 524: A timeout occurred'",
    ),
    ("<html>\n<head><title>502 Bad\nGateway</title></head><h1>no</h1>", "'502 Bad Gateway'"),
    (
        "<?xml version='1.0'?><Error><Code>Slow</Code><Message>Reduce your rate.</Message></Error>",
        "'Reduce your rate.'",
    ),
    ("<html><body><h1>Overloaded</h1></body></html>", "'Overloaded'"),
    ("<p>no title", ""),
]


@pytest.mark.parametrize("status", [429, 500, 502, 520, 524, 599])
@pytest.mark.parametrize(("page", "title"), PAGES)
def test_page_of_a_proxy_is_quoted_and_does_not_blame_base_url(page: str, title: str, status: int) -> None:
    error = to_model_error("x", page, status=status)
    assert f"it sent a web page{', ' + title if title else ''}. Wait a little" in str(error)
    assert "base_url" not in str(error)
    assert error.retry


def recorded_errors() -> list[Any]:
    """Return the recorded errors as parameters; a skipped one if there are none."""
    if not RECORDINGS.is_dir():
        return [pytest.param({}, marks=pytest.mark.skip(reason=f"{RECORDINGS} is not there"))]
    names = sorted(set(json.loads((RECORDINGS / "expected.json").read_text())))
    found = {name: json.loads((RECORDINGS / name).read_text()) for name in names}
    return [pytest.param(each, id=name) for name, each in found.items() if each["kind"] == "error"]


@pytest.mark.parametrize("recording", recorded_errors())
def test_recorded_error_is_described_and_retried_if_its_status_is_one_that_passes(recording: dict[str, Any]) -> None:
    status, error = recording["status"], parse_text(recording["response_sse"])
    said = describe_error(error, status)
    assert said
    assert said[0] not in "{[", "no JSON is left"
    headers = {name.lower(): value for name, value in recording["headers"].items()}
    failure = to_model_error("x", error, status=status, headers=headers)
    assert failure.retry == (status in (429, 503))
    assert ("refused the key" in str(failure)) == (status == 401)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(["error", "message", "code", "type", "metadata", "raw", "detail", "status", "x"]), inner
            )
        ),
    )
)
def test_any_json_is_an_error_with_words(error: Any) -> None:
    assert str(to_model_error("x", error, status=400)).startswith("x ")


# The waits.


@pytest.mark.parametrize(
    ("header", "wait"),
    [("7", 7), ("0.5", 0.5), ("-1", 0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0), ("soon", None), ("", None), (None, None)],
)
def test_retry_after_is_seconds_or_a_date(header: str | None, wait: float | None) -> None:
    assert parse_retry_after(header) == wait


@pytest.mark.parametrize("header", ["nan", "inf", "1e400"])
def test_retry_after_that_is_no_finite_number_is_ignored(header: str) -> None:
    assert parse_retry_after(header) is None


@pytest.mark.parametrize(
    ("headers", "wait"),
    [
        ({"retry-after-ms": "1500", "retry-after": "60"}, 1.5),
        ({"retry-after-ms": "0", "retry-after": "1"}, 1),
        ({"retry-after-ms": "soon", "retry-after": "2"}, 2),
        ({"retry-after": "0"}, 0),
        ({"x-ratelimit-reset": "20"}, 20),
        ({"x-ratelimit-reset-requests": "120ms"}, 0.12),
        ({"x-ratelimit-reset-tokens": "6m0s", "x-ratelimit-remaining-tokens": "0"}, 360),
        (
            {
                "x-ratelimit-reset-requests": "8h",
                "x-ratelimit-remaining-requests": "1999",
                "x-ratelimit-reset-tokens": "7.66s",
                "x-ratelimit-remaining-tokens": "0",
            },
            7.66,
        ),
        ({"x-ratelimit-reset-requests": "8h", "x-ratelimit-remaining-requests": "1999"}, None),
        ({"x-ratelimit-reset": "1741305600000"}, None),
        ({"anthropic-ratelimit-tokens-reset": "2020-01-01T00:00:00Z"}, None),
        ({"x-ratelimit-reset": "later"}, None),
        ({}, None),
    ],
)
def test_wait_is_read_from_the_headers(headers: dict[str, str], wait: float | None) -> None:
    assert find_retry_wait(None, headers, limited=True) == wait


def test_reset_of_a_rate_limit_may_be_a_moment() -> None:
    for moment in (f"{time() + 30:.0f}", f"{(time() + 30) * 1000:.0f}"):
        wait = find_retry_wait(None, {"x-ratelimit-reset": moment}, limited=True)
        assert wait is not None
        assert 20 < wait < 31


def test_reset_of_a_rate_limit_does_not_count_for_another_failure() -> None:
    assert to_model_error("x", "", status=500, headers={"x-ratelimit-reset": "20"}).retry_after is None
    assert to_model_error("x", "", status=429, headers={"x-ratelimit-reset": "20"}).retry_after == 20


@pytest.mark.parametrize(
    ("error", "wait"),
    [
        ({"error": {"message": "Rate limit reached. Please try again in 20s. Visit the site."}}, 20),
        ({"error": {"message": "Please try again in 1m30.5s."}}, 90.5),
        ({"error": {"message": "Please try again in 120ms."}}, 0.12),
        ({"error": {"message": "Please retry after 17 seconds."}}, 17),
        ({"error": {"message": "Wait 2 minutes before the next request."}}, 120),
        ({"error": {"message": "x", "details": [{"@type": "RetryInfo", "retryDelay": "34s"}]}}, 34),
        ({"error": {"message": "x", "retry_after_ms": 500}}, 0.5),
        ({"message": "x", "retry_after": 5}, 5),
        ({"error": {"message": "x", "metadata": {"headers": {"Retry-After": "9"}}}}, 9),
        ({"error": {"message": "Try again. You have 3 attempts, and 5 models."}}, None),
        ({"error": {"message": "Please try again later."}}, None),
        ("", None),
    ],
)
def test_wait_is_read_from_the_words(error: Any, wait: float | None) -> None:
    assert find_retry_wait(error, {}) == wait


@pytest.mark.parametrize(
    ("text", "wait"), [("7.66", 7.66), ("2m59.56s", 179.56), ("1h", 3600), ("x", None), ("", None)]
)
def test_duration_is_parsed(text: str, wait: float | None) -> None:
    assert parse_duration(text) == wait


@given(st.text())
def test_any_text_may_be_a_header(text: str) -> None:
    find_retry_wait(text, dict.fromkeys(("retry-after", "retry-after-ms", "x-ratelimit-reset"), text), limited=True)


@pytest.mark.parametrize(
    ("said", "status", "retry"), [("true", 400, True), ("FALSE", 503, False), ("maybe", 503, True)]
)
def test_endpoint_decides_on_a_retry_if_it_says_so(said: str, status: int, retry: bool) -> None:
    assert to_model_error("x", "no", status=status, headers={"x-should-retry": said}).retry == retry
