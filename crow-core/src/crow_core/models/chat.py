"""Chat completions over server-sent events: build a request, send it, retry it.

The HTTP client is imported where it is used: importing it takes a third of the start-up time, and `initialize` is
answered without it.
"""

import json
import re
from asyncio import timeout
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from math import ceil, isfinite
from time import monotonic, time
from typing import TYPE_CHECKING, Any, Protocol
from uuid import uuid4

import msgspec

from crow_core.errors import ModelError
from crow_core.messages import Delta, Message, merge
from crow_core.models.endpoint import CONNECT_TIMEOUT, create_http_client, is_local, join_url
from crow_core.models.quirks import Quirks, adapt_request, learn_from_refusal
from crow_core.models.stream import (
    LOG_ADVICE,
    MAX_PAGE_BYTES,
    TOO_LONG_PATTERN,
    TRANSIENT_STATUSES,
    EventStreamReader,
    describe_body,
    to_too_long_error,
)

if TYPE_CHECKING:
    import httpx2
    from openai import AsyncOpenAI

ModelRequest = dict[str, Any]
"""The body of a chat-completions request. `messages` is the last key, so that the unchanging part comes first."""

END_TIMEOUT = 0.5
"""Seconds to wait for the end of a response after its last event."""

REFUSAL_STATUSES = frozenset({400, 404, 415, 422, 500, 501})
"""HTTP statuses whose body may name the parameter that the server does not support."""

TOOL_ADVICE = (
    "Start llama.cpp with --jinja, vLLM with --enable-auto-tool-choice and --tool-call-parser, or choose a model made "
    "for tools."
)
"""Advice for a server that supports no tools."""

NO_TOOLS_PATTERN = re.compile(
    r"(n[o']t|un) ?support(s|ed|ing)?( param(eter)?:?)? ['\"`]?(tools?|function)\b(?! (schema|call id))"
    r"|tools param requires|support tool use|tool choice requires",
    re.I,
)
"""Matches the messages of servers that support no tools."""

MAX_RETRY_WAIT = 60.0
"""The longest wait, in seconds, that an endpoint may ask for before a retry; for a longer one the call fails."""

BAD_HEADER = "A request header would hold characters that none can hold."


class Model(Protocol):
    """A language model, as far as the loop needs it; another provider is one more class."""

    name: str
    """The model's name at the endpoint."""
    window: int | None
    """Tokens that fit into one request and its reply; None if unknown."""

    def stream(self, request: ModelRequest) -> AsyncIterator[Delta]:
        """Yield the reply in deltas, which `merge` joins to a message. Raises ModelError."""
        ...


class Prices(msgspec.Struct, frozen=True):
    """The prices of a model's tokens, each for a million tokens."""

    input: float
    output: float
    cached: float | None = None
    """The price of input tokens that the server had in its cache; None means the price of `input`."""
    currency: str = "USD"


@dataclass
class ModelCall:
    """A request to a model and its answer; `after_model` receives it."""

    model: Model
    request: ModelRequest
    purpose: str = "turn"
    """The purpose of the call: `turn` for one of the loop, else a name such as `title`."""
    id: str = field(default_factory=lambda: uuid4().hex)
    """The id of the reply, also for the client (ACP messageId)."""
    sent: ModelRequest = field(default_factory=dict[str, Any])
    """The body that was sent last; empty if the model does not report it."""
    reply: Message = field(default_factory=lambda: Message(role="assistant"))
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict[str, Any])
    """The token counts of the provider; empty if it sent none."""
    started: float = 0.0
    """The start of the call, in seconds of the monotonic clock, like `first_delta` and `ended`."""
    first_delta: float = 0.0
    """The time of the first delta; 0 if none came."""
    ended: float = 0.0
    paused: float = 0.0
    """Seconds spent in `on_delta`, in which nothing was read."""
    error: str = ""
    """The text of the error that ended the call; empty if none did."""
    interruption: ModelError | None = None
    """The error that cut off a begun answer that may be continued; None if there was none."""

    async def run(self, on_delta: Callable[[Delta], Awaitable[None]] | None = None) -> None:
        """Send the request and merge the answer into `reply`; pass each delta to `on_delta`. Raises ModelError.

        After an error or a cancel, `reply` holds everything that `on_delta` received.
        """
        self.started = monotonic()
        deltas = self.model.stream(self.request)
        try:
            async for delta in deltas:
                if (body := delta.get("sent")) is not None:
                    self.sent = body
                elif "notice" not in delta:
                    self.first_delta = self.first_delta or monotonic()
                merge(self.reply, delta)
                self.finish_reason = delta.get("finish_reason", self.finish_reason)
                self.usage = delta.get("usage", self.usage)
                if "cached" in delta and self.usage:
                    self.usage = {"cached_tokens": delta["cached"], **self.usage}
                if on_delta is not None:
                    since = monotonic()
                    await on_delta(delta)
                    self.paused += monotonic() - since
        except BaseException as error:
            self.error = str(error) or type(error).__name__
            raise
        finally:
            self.ended = monotonic()
            if isinstance(deltas, AsyncGenerator):
                await deltas.aclose()  # closes the connection at once if the answer was not read to its end


@dataclass(kw_only=True)
class ChatModel:
    """A model at an OpenAI-compatible endpoint: llama.cpp, Ollama, vLLM, LM Studio, OpenRouter, OpenAI and others."""

    name: str
    base_url: str = ""
    api_key: str = field(default="", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Parameters added to every request: `temperature`, `max_tokens` and those that only this endpoint has."""
    window: int | None = None
    idle_timeout: float | None = None
    """Seconds without a byte after which a request fails. None means 120, or 600 for a server on this machine, which
    may process a long prompt for minutes before its first byte."""
    attempts: int = 5
    """The most times that one request is sent when the endpoint is busy or cannot be reached."""
    client: "AsyncOpenAI | None" = field(default=None, repr=False)
    """A client of the openai SDK (or AsyncAzureOpenAI) to send through, in place of `base_url` and `api_key`."""
    quirks: Quirks = field(default_factory=Quirks)
    """The differences of this endpoint; a clear refusal changes them while crow runs."""
    refused_parameters: set[str] = field(default_factory=set[str])
    """Parameters that this endpoint refused; they are not sent any more."""
    prices: Prices | None = None
    _seen_refusals: set[str] = field(default_factory=set[str], repr=False)
    """The texts of refusals that changed the quirks."""
    _http: "httpx2.AsyncClient | None" = field(default=None, repr=False)

    async def stream(self, request: ModelRequest) -> AsyncGenerator[Delta]:
        """Yield the reply in deltas. Raises ModelError.

        A failed request is sent again only if no delta has come yet: otherwise the user would see the same text twice.
        """
        import stamina

        has_begun = False
        async for attempt in stamina.retry_context(get_retry_wait, self.attempts, timeout=None):
            body = self.build_body(request)
            yield {"sent": body}
            try:
                async with aclosing(self.stream_once(body)) as deltas:
                    async for delta in deltas:
                        has_begun = True
                        yield delta
                return
            except ModelError as error:
                if has_begun or not error.retry:
                    raise
                if attempt.num < self.attempts:
                    wait = ceil(attempt.next_wait if error.retry_after is None else error.retry_after)
                    yield {"notice": f"{error} Asking again {f'in {wait} s' if wait else 'now'}."}
                with attempt:  # stamina waits before the next attempt, and raises the error again after the last one
                    raise

    def build_body(self, request: ModelRequest) -> ModelRequest:
        """Return the body to send: the parameters, then the messages, adapted to this endpoint."""
        body = {"model": self.name, **self.parameters, "stream": True, "stream_options": {"include_usage": True}}
        return self.adapt({**body, **request})

    def adapt(self, body: ModelRequest) -> ModelRequest:
        """Return a body adapted to this endpoint. Adapting it again changes nothing."""
        adapted = adapt_request(body, self.quirks)
        return {key: value for key, value in adapted.items() if key not in self.refused_parameters}

    async def stream_once(self, body: ModelRequest) -> AsyncGenerator[Delta]:
        """Send a body once and yield the reply in deltas. Raises ModelError."""
        import httpx2

        reader = EventStreamReader(self.display_url, think_tags=self.quirks.think_tags)
        broken: ModelError | None = None
        try:
            async with self.post(body) as chunks:
                try:
                    async for data in chunks:
                        for delta in reader.feed(data):
                            yield delta
                        if reader.is_done:
                            break
                except httpx2.HTTPError as error:
                    broken = self.to_model_error(error)
                for delta in reader.finish(broken):
                    yield delta
                with suppress(httpx2.HTTPError, TimeoutError):
                    async with timeout(END_TIMEOUT):
                        async for _ in chunks:
                            pass  # a connection can be reused only after its last response was read to the end
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise self.to_model_error(error) from error

    @property
    def display_url(self) -> str:
        """The endpoint's URL without the parts that may be secret."""
        url = str(self.client.base_url) if self.client else self.base_url
        return re.sub(r"(?<=//)[^/@]*@|/*(\?.*)?$", "", url)

    @property
    def read_timeout(self) -> float:
        """Seconds without a byte after which a request fails."""
        return self.idle_timeout or (600.0 if is_local(self.display_url) else 120.0)

    @asynccontextmanager
    async def post(self, body: ModelRequest) -> AsyncGenerator[AsyncIterator[bytes]]:
        """Send a body; yield the response's chunks. Raises ModelError for a status but 200, and httpx2's errors."""
        if self.client is not None:
            async with self.post_with_sdk(self.client, body) as chunks:
                yield chunks
            return
        self._http = self._http or self.create_client()
        url = join_url(self.base_url, "chat/completions")
        response = await self._http.send(self._http.build_request("POST", url, content=encode_json(body)), stream=True)
        try:
            if response.status_code != 200:
                raise await self.to_refusal_error(response, body)
            yield response.aiter_bytes()
        finally:
            await response.aclose()

    @asynccontextmanager
    async def post_with_sdk(self, client: "AsyncOpenAI", body: ModelRequest) -> AsyncGenerator[AsyncIterator[bytes]]:
        """Like `post`, but through a client of the openai SDK, with its URL, its authentication and its headers."""
        import httpx2
        import openai  # whoever made the client has imported it already

        own = {key: body[key] for key in ("model", "messages", "stream")}
        rest = {key: value for key, value in body.items() if key not in own}
        limits = httpx2.Timeout(self.read_timeout, connect=CONNECT_TIMEOUT)
        client = client.with_options(max_retries=0, timeout=limits)
        create: Any = client.chat.completions.with_streaming_response.create
        try:
            async with create(**own, extra_body=rest) as response:
                yield response.iter_bytes()
        except openai.APIStatusError as error:
            raise await self.to_refusal_error(error.response, body) from error
        except openai.APIConnectionError as error:
            raise self.to_model_error(error.__cause__ or error) from error

    def create_client(self) -> "httpx2.AsyncClient":
        """Create an HTTP client with this endpoint's key, headers and timeout. Raises ModelError."""
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        try:
            return create_http_client(self.base_url, self.api_key, self.read_timeout, {**headers, **self.headers})
        except UnicodeEncodeError as error:
            raise ModelError(f"{BAD_HEADER} Look at the api_key and the headers for {self.display_url}.") from error

    def to_model_error(self, error: BaseException) -> ModelError:
        """Make the error for an endpoint that sent no answer, or only a part of one."""
        import httpx2

        url = self.display_url
        match error:
            case httpx2.InvalidURL() | httpx2.UnsupportedProtocol():
                example = "http://localhost:11434/v1"
                return ModelError(f"{url!r} is no web address. Set base_url, for example {example}.")
            case httpx2.LocalProtocolError():  # its text quotes the headers
                return ModelError(f"{BAD_HEADER} Look at the api_key and the headers for {url}.")
            case httpx2.ConnectError() if is_local(url):
                return ModelError(f"Nothing answers at {url}. Start the model server, or set OPENAI_BASE_URL.")
            case httpx2.ConnectError() | httpx2.ConnectTimeout():
                text = f"{url} cannot be reached ({describe_exception(error)}). Check base_url and the network."
            case httpx2.ReadTimeout():
                text = f"{url} sent nothing for {self.read_timeout:g} s. Set idle_timeout if it needs longer."
            case _:
                text = f"{url} broke off ({describe_exception(error)}). {LOG_ADVICE}"
        return ModelError(self.redact(text), retry=True)

    async def to_refusal_error(self, response: Any, body: ModelRequest) -> ModelError:
        """Make the error for a status other than 200, with the server's own message. Learn from it where possible."""
        url = self.display_url
        status: int = response.status_code
        raw = b""
        async for data in response.aiter_bytes():
            raw += data
            if len(raw) > MAX_PAGE_BYTES:
                break
        said = self.redact(describe_body(raw, response.headers.get("content-type", "")))
        if status in REFUSAL_STATUSES and (learned := self.learn_from_refusal(raw.decode("utf-8", "replace"), body)):
            return ModelError(f"{url} {learned} ({status}).", retry=True, retry_after=0)
        if status in REFUSAL_STATUSES and body.get("tools") and NO_TOOLS_PATTERN.search(said):
            return ModelError(f"{url} takes no tools ({status}): {said}. {TOOL_ADVICE}")
        if TOO_LONG_PATTERN.search(said) and status not in (401, 403, 404):
            return to_too_long_error(url, f"{said} ({status})")
        match status:
            case 401 | 403:
                key = "the model's api_key, or OPENAI_API_KEY"
                return ModelError(f"{url} refused the key ({status}): {said}. Check {key}.")
            case 404:
                model = body.get("model")
                return ModelError(f"{url} has no model {model!r}, or base_url is wrong: {said}. Check both.")
            case 402 | 429 if status == 402 or b"insufficient_quota" in raw:
                return ModelError(f"{url} wants to be paid ({status}): {said}. Check your account there.")
            case _ if status in TRANSIENT_STATUSES:
                after = parse_retry_after(response.headers.get("retry-after"))
                trouble = "is limiting requests" if status == 429 else "has trouble"
                is_soon = after is None or after <= MAX_RETRY_WAIT
                wait = "a little" if is_soon else f"{after:.0f} s"
                sentence = f"{url} {trouble} ({status}): {said}. Wait {wait}, or choose another model."
                return ModelError(sentence, retry=is_soon, retry_after=after)
            case 301 | 302 | 303 | 307 | 308:
                location = response.headers.get("location", "")
                return ModelError(f"{url} has moved ({status}) to {location}. Set base_url accordingly.")
            case _:
                advice = "Check the model's settings, or go on in a new session."
                return ModelError(f"{url} refused the request ({status}): {said}. {advice}")

    def learn_from_refusal(self, text: str, body: ModelRequest) -> str:
        """Change the quirks as a refusal's text demands; return what was learned as the end of a sentence.

        Return "" if nothing was learned. The same text teaches only once.
        """
        if self.adapt(body) != body:
            return "refused what it had just refused in another session"
        learned = learn_from_refusal(text, body, self.quirks)
        if learned is None or text in self._seen_refusals:
            return ""
        self._seen_refusals.add(text)
        self.quirks = learned.quirks
        self.refused_parameters |= learned.refused_parameters
        return learned.sentence

    def redact(self, text: str) -> str:
        """Replace the keys in a text: servers quote them, and users and the log receive the text."""
        for key in (self.api_key, self.client.api_key if self.client else "", *self.headers.values()):
            if len(key) > 7:
                text = text.replace(key, "…")
        return text

    async def close(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.aclose()
            self._http = None


def get_window(model: Model) -> int | None:
    """Return the tokens that fit: as configured or reported by the server, else by the quirks; None if unknown.

    The quirks do not count for a server on this machine: its settings decide how much of the model's window it offers.
    """
    from_quirks = model.quirks.window if isinstance(model, ChatModel) and not is_local(model.display_url) else 0
    return model.window or from_quirks or None


def get_retry_wait(error: Exception) -> bool | float:
    """Return the seconds to wait before a failed request is sent again; True lets stamina choose them."""
    after = error.retry_after if isinstance(error, ModelError) else None
    return True if after is None else after


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


def encode_json(body: ModelRequest) -> bytes:
    """Encode a body as JSON. Half a surrogate pair, as in a file name that is not UTF-8, becomes `?`."""
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError:
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def describe_exception(error: BaseException) -> str:
    """Return an exception's text, or its class's name if it has none."""
    return str(error) or type(error).__name__
