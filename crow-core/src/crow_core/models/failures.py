"""Convert the errors that endpoints report to errors for people: their words, their kind, and whether a retry may help.

`failures.toml` lists the kinds, and the codes and words by which an error is recognized. An error is JSON under any
provider's keys, or text. It comes with an HTTP status, or inside a stream without one.
"""

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from math import isfinite
from time import time
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import msgspec
from msgspec import Struct

from crow_core.errors import ModelError
from crow_core.text import is_deep

MAX_PAGE_BYTES = 1024 * 1024
"""The most bytes that are read of a response that is not an event stream, such as an error page."""

MAX_MESSAGE_LENGTH = 300
"""The most characters of an endpoint's words that are shown."""

MAX_RETRY_WAIT = 60.0
"""The longest wait, in seconds, that an endpoint may ask for before a retry; for a longer one the call fails."""

MAX_DEPTH = 12
"""The most levels of an error object that are read."""

WRONG_URL_STATUSES = frozenset({200, 404, 405})
"""HTTP statuses with which a web page means that the address is wrong."""

NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class FailureKind(Struct, frozen=True, forbid_unknown_fields=True):
    """A kind of errors in `failures.toml`, where its keys are explained."""

    event: str
    advice: str
    retry: bool = False
    patient: bool = False
    general: bool = False


class FailureRule(Struct, forbid_unknown_fields=True):
    """A rule of `failures.toml`: the kind of errors with one of the codes or words."""

    kind: str
    codes: list[str] = []
    words: list[str] = []


class FailureFile(Struct, forbid_unknown_fields=True):
    """The content of `failures.toml`."""

    kinds: dict[str, FailureKind]
    rules: list[FailureRule]


class FailureMatcher(NamedTuple):
    """A rule whose regular expressions are compiled."""

    kind: FailureKind
    codes: re.Pattern[str]
    words: re.Pattern[str]


NEVER = "(?!)"
"""A regular expression that matches nothing."""


@cache
def load_failures() -> tuple[Mapping[str, FailureKind], list[FailureMatcher]]:
    """Load the kinds and the rules of `failures.toml`."""
    text = (files("crow_core.models") / "failures.toml").read_text("utf-8")
    table = msgspec.convert(tomllib.loads(text), FailureFile)
    return table.kinds, [
        FailureMatcher(
            table.kinds[rule.kind],
            re.compile("|".join(rule.codes) or NEVER),
            re.compile("|".join(rule.words) or NEVER, re.I),
        )
        for rule in table.rules
    ]


def to_model_error(
    url: str,
    error: Any,
    *,
    status: int = 0,
    headers: Mapping[str, str] = NO_HEADERS,
    model: str = "",
    redact: Callable[[str], str] = str,
) -> ModelError:
    """Convert an error that the endpoint at `url` reported; `status` is 0 if it came inside a stream.

    `redact` removes the secrets from the endpoint's words, before they are shortened.
    """
    kinds, _ = load_failures()
    kind = classify_error(error, status)
    said = shorten_text(redact(describe_error(error, status)))
    retry = {"true": True, "false": False}.get(headers.get("x-should-retry", "").strip().lower(), kind.retry)
    wait = find_retry_wait(error, headers, limited=kind is kinds["limited"]) if retry else None
    is_soon = wait is None or wait <= MAX_RETRY_WAIT
    event, advice = (kind.event, kind.advice)
    if not status and kind.general:
        event, advice = "reported an error", "Try again, or choose another model."
    event = event.format(model=model) + (f" ({status})" if status else "")
    advice = advice.format(wait="a little" if is_soon else f"{wait:.0f} s")
    return ModelError(
        f"{url} {event}: {said}. {advice}",
        retry=retry and is_soon,
        retry_after=wait,
        patient=kind.patient,
        too_long=kind is kinds["too_long"],
        unavailable=kind is kinds["payment"],
        unexplained=status < 500 and kind in (kinds["invalid"], kinds["unknown"]),
        said=said,
    )


def classify_error(error: Any, status: int = 0) -> FailureKind:
    kinds, matchers = load_failures()
    codes = {str(status), *find_codes(error)} - {"0"}
    message = describe_error(error, status)[: 4 * MAX_MESSAGE_LENGTH]
    for matcher in matchers:
        if any(map(matcher.codes.fullmatch, codes)) or matcher.words.search(message):
            return matcher.kind
    return kinds["unknown"]


def is_known_failure(error: Any) -> bool:
    """Return whether a rule matches an error, or an object that may be one."""
    return classify_error(error) is not load_failures()[0]["unknown"]


CODE_KEYS = frozenset(
    {"code", "type", "status", "statuscode", "errorcode", "errortype", "errorstatus", "reason", "httpcode"}
    | {"httpstatus", "httpstatuscode"}
)
"""Keys of codes in an error object, in lower case and without `_`."""
MESSAGE_KEYS = (
    *("message", "detail", "msg", "errormessage", "errormsg", "statusmsg", "errordescription", "faultstring"),
    *("description", "title", "error", "errors", "fault", "baseresp", "reason"),
)
"""Keys of the message in an error object, in the order of preference."""
QUOTES = frozenset({"input", "ctx", "request", "messages", "params", "body", "failedgeneration", "headers"})
"""Keys of the parts of an error object that quote a request or an answer."""


def normalize_key(key: str) -> str:
    """Return a key in lower case and without `_`, because providers spell one key in several ways."""
    return key.replace("_", "").lower()


def iterate_fields(error: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the normalized keys and the values at all levels of an error object, except in quotes of the request."""
    match error:
        case {} if depth < MAX_DEPTH:
            for name, value in cast(dict[str, Any], error).items():
                key = normalize_key(name)
                yield key, value
                if key not in QUOTES:
                    yield from iterate_fields(value, depth + 1)
        case [*items] if depth < MAX_DEPTH:
            for item in items[:100]:
                yield from iterate_fields(item, depth + 1)
        case str() if error.lstrip()[:1] in ("{", "["):  # a router's error holds the provider's
            if not isinstance(inner := parse_text(error), str):
                yield from iterate_fields(inner, depth + 1)
        case _:
            pass


def find_codes(error: Any) -> Iterator[str]:
    """Yield the codes, types and statuses in an error object, in snake case."""
    for key, value in iterate_fields(error):
        if key.endswith("exception"):  # the name of an error of AWS is a key
            yield to_snake_case(key.removesuffix("exception"))
        is_name = key == "error" and isinstance(value, str) and " " not in value
        if (key in CODE_KEYS or is_name) and isinstance(value, str | int | float) and len(str(value)) < 100:
            yield to_snake_case(str(int(value) if isinstance(value, float) and value.is_integer() else value))


def to_snake_case(code: str) -> str:
    """Return a code such as `RateLimitReached` or `limit.reached` in snake case."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", code)
    return re.sub(r"\W+", "_", words).strip("_").lower()


def find_error(chunk: Any) -> Any:
    """Return the error in a parsed event of a stream, or in a response with status 200; None if there is none.

    The whole object is returned if codes may be next to the message.
    """
    match chunk:
        case [{} as first, *_]:  # Google sends errors in a list
            return find_error(first)
        case {"error": error} if error:
            return drop_answer(cast(dict[str, Any], chunk))
        case {"choices": [*choices]} if choices:
            return next((error for choice in choices if (error := find_choice_error(choice))), None)
        case {"object": "error"} | {"type": "error"} | {"errors": [_, *_]} | {"success": False}:
            return chunk
        case {"base_resp": {"status_code": int(code)}} if code:  # MiniMax
            return chunk
        case {} if is_error_object(cast(dict[str, Any], chunk)):
            return chunk
        case _:
            return None


def drop_answer(chunk: dict[str, Any]) -> dict[str, Any]:
    """Return an object without the parts of an answer."""
    return {key: value for key, value in chunk.items() if key not in ("choices", "usage")}


def find_choice_error(choice: Any) -> Any:
    """Return the error in a choice of a completion; None if there is none."""
    match choice:
        case {"error": error} | {"delta": {"error": error}} | {"message": {"error": error}} if error:
            return error
        case _:
            return None


def is_error_object(chunk: dict[str, Any]) -> bool:
    """Return whether an object without an `error` key is an error: it has an error's code, and no answer."""
    fields = {normalize_key(key): value for key, value in chunk.items()}
    if any(key.endswith("exception") for key in fields):
        return True
    if fields.keys() & {"choices", "usage", "object"}:
        return False
    if any(is_error_status(fields.get(key)) for key in ("code", "status", "statuscode", "errorcode", "httpstatus")):
        return True
    codes = [fields.get(key) for key in ("code", "errorcode", "errortype")]
    named = any(isinstance(code, str) and code.lower() not in ("", "0", "200", "ok", "success") for code in codes)
    return named and any(isinstance(fields.get(key), str) for key in ("message", "msg", "detail", "errormessage"))


def is_error_status(value: Any) -> bool:
    """Return whether a value is an HTTP status of a failure, a larger code, or the word `error`."""
    if isinstance(value, str):
        return value.lower() in ("error", "failed") or (value.isdecimal() and int(value[:9]) >= 400)
    return isinstance(value, int) and value >= 400


def parse_text(text: str | bytes) -> Any:
    """Parse JSON; return text that is none, or that is very deep, without white space around it."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text.strip()
    return text.strip() if is_deep(value) else value


def describe_error(error: Any, status: int = 200) -> str:
    """Return the endpoint's own words for an error, as a part of a sentence; JSON if it has none."""
    if isinstance(error, str) and error.lstrip()[:1] == "<":
        return describe_page(error, status)
    return find_message(error) or (json.dumps(error, ensure_ascii=False) if error else "it sent nothing")


def find_message(error: Any, depth: int = 0) -> str:
    """Return the message in an error object, under any provider's key; "" if there is none."""
    match error:
        case str(text) if text.lstrip()[:1] == "<":
            return describe_page(text, 0)
        case str(text):
            inner: Any = parse_text(text) if text.lstrip()[:1] in ("{", "[") else text
            return text.strip() if isinstance(inner, str) else find_message(inner, depth + 1) or text
        case {"loc": [*path], "msg": str(text)}:
            return f"{'.'.join(map(str, path))}: {text}"
        case {} if depth < MAX_DEPTH:
            fields = {normalize_key(key): value for key, value in cast(dict[str, Any], error).items()}
            nested = fields.get("error")
            keys = ("error", *MESSAGE_KEYS) if isinstance(nested, dict | list) else MESSAGE_KEYS
            message = next((said for key in keys if (said := find_message(fields.get(key), depth + 1))), "")
            match fields.get("metadata"):
                case {"raw": raw} if raw and (said := find_message(raw, depth + 1)):  # of OpenRouter
                    return f"{message.rstrip(' .')}: {said}" if message else said
                case _:
                    pass
            inner = (value for key, value in fields.items() if key.endswith("exception"))
            return message or next((said for value in inner if (said := find_message(value, depth + 1))), "")
        case [*items] if depth < MAX_DEPTH:
            return next((said for item in items[:100] if (said := find_message(item, depth + 1))), "")
        case _:
            return ""


def describe_page(page: str, status: int) -> str:
    """Return a description of a web page, or of XML, with its title or message."""
    if status in WRONG_URL_STATUSES:
        return "it sent a web page instead of JSON; base_url usually ends in /v1"
    titles = re.findall(r"<(title|h1|message)\b[^>]*>([^<]+)", page[:MAX_PAGE_BYTES], re.I)
    title = next((text for _, text in titles if text.strip()), "")
    return f"it sent a web page, {' '.join(title.split())!r}" if title else "it sent a web page"


def shorten_text(text: str) -> str:
    """Return the beginning of a text in one line, without control characters."""
    printable = "".join(c if c.isprintable() else " " for c in text[: 100 * MAX_MESSAGE_LENGTH])
    return " ".join(printable.split())[:MAX_MESSAGE_LENGTH].rstrip(" .")


# The wait before a retry.


def find_retry_wait(error: Any, headers: Mapping[str, str], *, limited: bool = False) -> float | None:
    """Return the seconds after which the endpoint wants the request again; None if it does not say.

    The headers count more than the words of the error. The reset of a rate limit counts only if the request was refused
    because of one.
    """
    milliseconds = parse_retry_after(headers.get("retry-after-ms"))
    asked = [milliseconds / 1000] if milliseconds is not None else []
    asked += [wait for wait in [parse_retry_after(headers.get("retry-after"))] if wait is not None]
    if asked:
        return next(filter(None, asked), 0.0)
    return (find_rate_limit_reset(headers) if limited else None) or find_wait_in_error(error)


def parse_retry_after(header: str | None) -> float | None:
    """Return the seconds of a Retry-After header, a number or a date (RFC 9110, section 10.2.3); None for others."""
    try:
        wait = float(header or "")
        return max(wait, 0.0) if isfinite(wait) else None
    except ValueError:
        from email.utils import parsedate_to_datetime  # seldom needed, and the import takes milliseconds
    try:
        return max(parsedate_to_datetime(header or "").timestamp() - time(), 0.0)
    except ValueError:
        return None


def find_rate_limit_reset(headers: Mapping[str, str]) -> float | None:
    """Return the seconds until the last of the exhausted rate limits is reset; None if the headers do not say.

    Providers send `x-ratelimit-reset`, `x-ratelimit-reset-tokens`, `anthropic-ratelimit-tokens-reset` and others. A
    limit whose header `remaining` is not 0 is not exhausted.
    """
    waits: list[float] = []
    for name, value in headers.items():
        if "ratelimit" in name.lower() and "reset" in name.lower():
            remaining = headers.get(name.lower().replace("reset", "remaining"), "0")
            if remaining.strip() in ("", "0") and (wait := parse_reset(value)):
                waits.append(wait)
    return max(waits, default=None)


def parse_reset(text: str) -> float | None:
    """Return the seconds until a reset: a duration, a Unix time in seconds or milliseconds, or a date of RFC 3339."""
    wait = parse_duration(text)
    if wait is None:
        from datetime import UTC, datetime  # seldom needed

        try:
            moment = datetime.fromisoformat(text.strip())
        except ValueError:
            return None
        wait = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if wait > 1e11:
        wait /= 1000
    return max(wait - time(), 0.0) if wait > 1e8 else wait


UNIT_SECONDS = {"": 1.0, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
UNIT = r"(?:ms|us|µs|milliseconds?|s(?:ec(?:ond)?s?)?|m(?:in(?:ute)?s?)?|h(?:(?:ou)?rs?)?|d(?:ays?)?)"
DURATION = rf"(?:\d+(?:\.\d+)?\s*{UNIT}(?![a-z])\s*)+"


def parse_duration(text: str) -> float | None:
    """Return the seconds of a duration such as `7.66`, `6m0s`, `120ms` or `2 minutes`; None for another text."""
    text = text.strip().lower()[:100]
    if not re.fullmatch(rf"{DURATION}|\d{{1,15}}(\.\d+)?", text):
        return None
    total = 0.0
    for number, unit in re.findall(rf"(\d+(?:\.\d+)?)\s*({UNIT}?)", text):
        short = unit if unit in UNIT_SECONDS else "ms" if unit.startswith("milli") else unit[0]
        total += float(number) * UNIT_SECONDS[short]
    return total if isfinite(total) else None


WAIT_KEYS = frozenset({"retrydelay", "retryafter", "retryafterseconds", "retryaftersec", "retryafterms", "retryin"})
WAIT_WORDS = re.compile(rf"(?:try|retry|wait|again|available)\D{{0,24}}?\b({DURATION})", re.I)


def find_wait_in_error(error: Any) -> float | None:
    """Return the seconds after which an error says that the request may be sent again; None if it does not say."""
    for key, value in iterate_fields(error):
        match value:
            case str() | int() | float() if key in WAIT_KEYS and not isinstance(value, bool):
                wait = parse_duration(str(value))
                if wait:
                    return wait / 1000 if key.endswith("ms") else wait
            case {} if key == "headers":  # OpenRouter quotes the headers of its own limit
                inner = {str(name).lower(): str(text) for name, text in cast(dict[str, Any], value).items()}
                if wait := find_retry_wait(None, inner, limited=True):
                    return wait
            case _:
                pass
    found = WAIT_WORDS.search(describe_error(error)[: 4 * MAX_MESSAGE_LENGTH]) if error else None
    return (parse_duration(found[1]) or None) if found else None
