"""Chat completions over server-sent events: build a request, send it, retry it.

The HTTP client is imported where it is used: importing it takes a third of the start-up time, and `initialize` is
answered without it.
"""

import json
import re
from asyncio import sleep, timeout
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec
from msgspec import structs

from crow_core.errors import ModelError
from crow_core.masking import AUTH_SCHEME, MIN_SECRET_LENGTH, find_secrets, mask
from crow_core.messages.message import Delta
from crow_core.models.adaptation import adapt_request
from crow_core.models.endpoint import (
    CONNECT_TIMEOUT,
    HttpPool,
    find_proxy,
    is_local,
    is_on_private_network,
    join_url,
    share_http_pool,
    to_display_url,
)
from crow_core.models.failures import (
    MAX_PAGE_BYTES,
    describe_error,
    parse_text,
    shorten_text,
    to_model_error,
)
from crow_core.models.model_call import ANSWER_KEYS, REPETITION, Model, ModelRequest, Prices
from crow_core.models.quirks import Quirks
from crow_core.models.repetition import RepetitionGuard
from crow_core.models.retries import attempt_again, be_patient, get_retry_wait
from crow_core.models.stream import LOG_ADVICE, EventStreamReader

if TYPE_CHECKING:
    import httpx2
    from openai import AsyncOpenAI

    from crow_core.models.call_forms import StepReader
    from crow_core.models.held_text import PrintedCallReader
    from crow_core.models.refusals import LearnedQuirks

MAX_READ_BYTES = 8 * 1024
"""Bytes of a response that are read before other tasks may run: compressed bytes may become far more."""

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

SMALL_WINDOW = 8_192
"""Tokens of the largest window with which a model counts as small by itself."""
SMALL_SIZE = 9_000_000_000
"""Parameters of the largest model that counts as small by itself."""

REDIRECT_STATUSES = frozenset({301, 302, 303, 307, 308})

BAD_HEADER = "A request header would hold characters that none can hold."


class ServerFacts(msgspec.Struct):
    """The answers of a server about one model; see `window.ask_server`."""

    window: int | None = None
    """Tokens that fit into one request and its reply; None if the server does not tell."""
    size: int | None = None
    """The number of the model's parameters; None if the server does not tell."""
    is_loaded: bool = False
    """True if a server on a private network says that it has the model in memory."""
    shows_progress: bool = False
    """True if the server can report how much of a prompt it has processed: it is llama.cpp."""


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
    facts: ServerFacts = field(default_factory=ServerFacts)
    """The server's answers about the model, once it was asked."""
    idle_timeout: float | None = None
    """Seconds without a byte after which a request fails. None means 120, or 3,600 on private networks, where a slow
    machine may process a long prompt for many minutes before its first byte."""
    attempts: int = 5
    """The most times that one request is sent when the endpoint is busy or cannot be reached."""
    client: "AsyncOpenAI | None" = field(default=None, repr=False)
    """A client of the openai SDK (or AsyncAzureOpenAI) to send through, in place of `base_url` and `api_key`."""
    quirks: Quirks = field(default_factory=Quirks)
    """The differences of this endpoint; a clear refusal changes them while crow runs."""
    refused_parameters: set[str] = field(default_factory=set[str])
    """Parameters that this endpoint refused; they are not sent any more."""
    prices: Prices | None = None
    transport: "httpx2.AsyncBaseTransport | None" = field(default=None, repr=False)
    """The transport to send through, in place of the network; tests replay recorded answers with it."""
    _pool: HttpPool | None = field(default=None, repr=False, compare=False)

    async def stream(self, request: ModelRequest) -> AsyncGenerator[Delta]:
        """Yield the reply in deltas. Raises ModelError.

        A failed request is sent again only if no part of the answer has come yet: otherwise the user would see the same
        text twice. Changes to the quirks after a refusal last only if a later attempt is answered.
        """
        has_begun, learning = False, LearnedInCall(self)
        try:
            async for attempt in attempt_again(get_retry_wait, self.attempts, timeout=None):
                body = self.build_body(request)
                yield {"sent": body}
                try:
                    printed = self.read_calls(request)
                    repetition = RepetitionGuard() if self.is_small else None
                    async with aclosing(self.stream_once(body)) as deltas:
                        async for arriving in deltas:
                            for delta in printed.feed(arriving):
                                has_begun = has_begun or bool(ANSWER_KEYS & delta.keys())
                                yield delta
                            if repetition and repetition.feed(arriving):
                                yield {"finish_reason": REPETITION}
                                return
                    for delta in printed.finish():
                        yield delta
                    has_begun = True  # it is complete, even if it is empty
                    return
                except ModelError as failure:
                    error = learning.learn(failure) if isinstance(failure, InstructiveRefusal) else failure
                    if not has_begun and not error.patient:
                        from crow_core.models.refused_images import find_refused_images  # as its patterns, below

                        error.images = find_refused_images(error.said, body["messages"], unexplained=error.unexplained)
                    if has_begun or not error.retry:
                        raise error from None
                    be_patient(error, attempt.num)
                    if attempt.num < self.attempts:
                        wait = ceil(attempt.next_wait if error.retry_after is None else error.retry_after)
                        yield {"notice": f"{error} Asking again {f'in {wait} s' if wait else 'now'}."}
                    with attempt:  # stamina waits before the next attempt, and raises the last one's error again
                        raise error from None
        finally:
            if not has_begun:
                learning.undo()

    @property
    def is_small(self) -> bool:
        """True if the model, or its window, is small: then its tools, its prompt and its replies are held simple."""
        if self.quirks.profile != "auto":
            return self.quirks.profile == "small"
        return 0 < (get_window(self) or 0) <= SMALL_WINDOW or 0 < (self.facts.size or 0) <= SMALL_SIZE

    def read_calls(self, request: ModelRequest) -> "PrintedCallReader | StepReader":
        """Return the reader of the calls that the reply to a request may have as text."""
        # Imported by the first request: its patterns take 4 % of the start-up time.
        from crow_core.models.held_text import PrintedCallReader

        if request.get("tools") and self.quirks.call_form == "schema":
            from crow_core.models.call_forms import StepReader

            return StepReader(request)
        return PrintedCallReader(request if self.quirks.printed_calls else {})

    def build_body(self, request: ModelRequest) -> ModelRequest:
        """Return the body to send: the parameters, then the messages, adapted to this endpoint."""
        body = {"model": self.name, **self.parameters, "stream": True, "stream_options": {"include_usage": True}}
        progress = {"return_progress": True} if self.facts.shows_progress else {}
        return self.adapt({**body, **progress, **request})

    def adapt(self, body: ModelRequest) -> ModelRequest:
        """Return a body adapted to this endpoint. Adapting it again changes nothing."""
        if body.get("tools") and self.quirks.call_form != "native":
            from crow_core.models.call_forms import write_calls  # see above

            body = write_calls(body, self.quirks.call_form)
        adapted = adapt_request(body, self.quirks)
        return {key: value for key, value in adapted.items() if key not in self.refused_parameters}

    async def stream_once(self, body: ModelRequest) -> AsyncGenerator[Delta]:
        """Send a body once and yield the reply in deltas. Raises ModelError."""
        import httpx2

        reader = EventStreamReader(self.display_url, think_tags=self.quirks.think_tags, redact=self.redact)
        broken: ModelError | None = None
        try:
            async with self.post(body) as chunks:
                try:
                    async for data in chunks:
                        for start in range(0, len(data), MAX_READ_BYTES):
                            if start:
                                await sleep(0)
                            for delta in reader.feed(data[start : start + MAX_READ_BYTES]):
                                yield delta
                        if reader.is_done:
                            break
                except httpx2.HTTPError as error:
                    broken = self.to_connection_error(error)
                for delta in reader.finish(broken):
                    yield delta
                with suppress(httpx2.HTTPError, TimeoutError):
                    async with timeout(END_TIMEOUT):
                        async for _ in chunks:
                            pass  # a connection can be reused only after its last response was read to the end
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise self.to_connection_error(error) from None  # its text may quote the key

    @property
    def url(self) -> str:
        """The base URL, with all its parts."""
        return str(self.client.base_url) if self.client else self.base_url

    @property
    def display_url(self) -> str:
        """The endpoint's URL without the parts that may be secret."""
        return to_display_url(self.url)

    @property
    def secrets(self) -> frozenset[str]:
        """The values of this endpoint's settings that must be shown and stored nowhere."""
        key, headers = self.api_key, dict(self.headers)
        if self.client is not None:
            key, defaults = self.client.api_key, self.client.default_headers
            headers |= {name: value for name, value in defaults.items() if isinstance(value, str)}
        settings = {"api_key": key, "headers": headers, "parameters": dict(self.parameters), "base_url": self.url}
        return find_secrets(settings) | find_url_credentials(self.url)

    @property
    def read_timeout(self) -> float:
        """Seconds without a byte after which a request fails."""
        return self.idle_timeout or (3600.0 if is_on_private_network(self.display_url) else 120.0)

    @asynccontextmanager
    async def post(self, body: ModelRequest) -> AsyncGenerator[AsyncIterator[bytes]]:
        """Send a body; yield the response's chunks. Raises ModelError for a status but 200, and httpx2's errors."""
        if self.client is not None:
            async with self.post_with_sdk(self.client, body) as chunks:
                yield chunks
            return
        self._pool = self._pool or self.find_pool()
        http = self._pool.client
        url = join_url(self.base_url, "chat/completions")
        response = await http.send(http.build_request("POST", url, content=encode_json(body)), stream=True)
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
            raise await self.to_refusal_error(error.response, body) from None
        except openai.APIConnectionError as error:
            raise self.to_connection_error(error.__cause__ or error) from None

    def find_pool(self) -> HttpPool:
        """Return the HTTP pool with this endpoint's key, headers and timeout. Raises ModelError."""
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        try:
            headers |= self.headers
            return share_http_pool(self.base_url, self.api_key, self.read_timeout, headers, self.transport)
        except UnicodeEncodeError:
            raise ModelError(f"{BAD_HEADER} Look at the api_key and the headers for {self.display_url}.") from None

    def to_connection_error(self, error: BaseException) -> ModelError:
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
                sentence = f"Nothing answers at {url}. Start the model server, or set OPENAI_BASE_URL."
                return ModelError(sentence, unavailable=True)
            case httpx2.ConnectError() | httpx2.ConnectTimeout() | httpx2.ProxyError():
                why, proxy = self.describe_exception(error), to_display_url(find_proxy(self.base_url))
                through = f" through the proxy {proxy}" if proxy else ""
                places = "base_url, the network, and HTTPS_PROXY or NO_PROXY" if proxy else "base_url and the network"
                text = f"{url} cannot be reached{through} ({why}). Check {places}."
            case httpx2.ReadTimeout():
                text = f"{url} sent nothing for {self.read_timeout:g} s. Set idle_timeout if it needs longer."
            case _:
                text = f"{url} broke off ({self.describe_exception(error)}). {LOG_ADVICE}"
        return ModelError(text, retry=True)

    async def to_refusal_error(self, response: Any, body: ModelRequest) -> ModelError:
        """Make the error for a status other than 200, with the server's own message and what it teaches."""
        from crow_core.models.refusals import learn_from_refusal  # its patterns take 2 % of the start-up time

        url, status, headers = self.display_url, int(response.status_code), response.headers
        raw = b""
        async for data in response.aiter_bytes():
            raw += data
            if len(raw) > MAX_PAGE_BYTES:
                break
        if status in REDIRECT_STATUSES:
            location = shorten_text(self.redact(to_display_url(headers.get("location", ""))))
            return ModelError(f"{url} has moved ({status}) to {location}. Set base_url accordingly.")
        error = parse_text(raw)
        failure = to_model_error(
            url, error, status=status, headers=headers, model=str(body.get("model")), redact=self.redact
        )
        if status not in REFUSAL_STATUSES:
            return failure
        if self.adapt(body) != body:
            sentence = f"{url} refused what it had just refused in another session ({status})."
            return ModelError(sentence, retry=True, retry_after=0)
        if learned := learn_from_refusal(raw.decode("utf-8", "replace"), body, self.quirks):
            return InstructiveRefusal(f"{url} {learned.sentence} ({status}).", learned, failure)
        said = shorten_text(self.redact(describe_error(error, status)))
        if body.get("tools") and NO_TOOLS_PATTERN.search(said):
            return ModelError(f"{url} takes no tools ({status}): {said}. {TOOL_ADVICE}")
        return failure

    def redact(self, text: str) -> str:
        """Mask the secrets in a text: servers quote them, and users and the log receive the text."""
        headers = (AUTH_SCHEME.sub("", value.strip()) for value in self.headers.values())
        secrets = self.secrets | {value for value in headers if len(value) >= MIN_SECRET_LENGTH}
        plain = unquote(text)
        return mask(plain if any(secret in plain for secret in secrets) else text, secrets)

    def describe_exception(self, error: BaseException) -> str:
        """Return an exception's text without secrets, or its class's name if it has none."""
        return shorten_text(self.redact(str(error))) or type(error).__name__

    async def close(self) -> None:
        """Close the connections, unless other models use them."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.release()


class InstructiveRefusal(ModelError):
    """A refusal from which crow learns how to send the request again."""

    def __init__(self, sentence: str, learned: "LearnedQuirks", failure: ModelError) -> None:
        super().__init__(sentence, retry=True, retry_after=0)
        self.learned = learned
        self.failure = failure
        """The error to raise if the same refusal has been learned from already."""


class LearnedInCall:
    """The changes to a model's quirks in one call, to be undone if no request is answered after them."""

    def __init__(self, model: ChatModel) -> None:
        self.model = model
        self._undo: list[tuple[dict[str, Any], frozenset[str]]] = []
        """For each change the former values of the quirks, and the parameters that are not sent any more."""
        self._complaints: set[str] = set()

    def learn(self, refusal: InstructiveRefusal) -> ModelError:
        """Change the quirks as a refusal demands, but not twice for the same one; return the error for the user."""
        model, learned = self.model, refusal.learned
        complaint = re.sub(r"\w*\d\w*", "", str(refusal.failure))  # without the ids of requests
        if complaint in self._complaints:
            return refusal.failure
        self._complaints.add(complaint)
        former = {name: getattr(model.quirks, name) for name in learned.changes}
        self._undo.append((former, learned.refused_parameters - model.refused_parameters))
        model.quirks = structs.replace(model.quirks, **learned.changes)
        model.refused_parameters |= learned.refused_parameters
        return refusal

    def undo(self) -> None:
        for former, parameters in reversed(self._undo):
            self.model.quirks = structs.replace(self.model.quirks, **former)
            self.model.refused_parameters -= parameters


def find_url_credentials(url: str) -> frozenset[str]:
    """Return the user, the password and the values of the query of a URL, also as an HTTP header has them."""
    try:
        parts = urlsplit(url)
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
    except ValueError:
        return frozenset()
    basic = b64encode(f"{user}:{password}".encode()).decode() if user or password else ""
    return find_secrets(
        {"password": password, "secret": basic, "headers": {"user": user, **dict(parse_qsl(parts.query))}}
    )


def get_window(model: Model) -> int | None:
    """Return the tokens that fit: as configured or reported by the server, else by the quirks; None if unknown.

    The quirks do not count for a server on this machine: its settings decide how much of the model's window it offers.
    """
    from_quirks = model.quirks.window if isinstance(model, ChatModel) and not is_local(model.display_url) else 0
    return model.window or from_quirks or None


def encode_json(body: ModelRequest) -> bytes:
    """Encode a body as JSON. Half a surrogate pair, as in a file name that is not UTF-8, becomes `?`."""
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError:
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
