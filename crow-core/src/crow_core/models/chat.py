"""The only file that knows how a language model is asked: chat completions over server-sent events.

The HTTP client is imported where it is used: it is a third of start-up, and `initialize` is answered without it.
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
from crow_core.models.endpoint import CONNECT, endpoint, http_client, is_local
from crow_core.models.quirks import Quirks, fit, learn
from crow_core.models.stream import LOOK, PAGE, PASSING, TOO_LONG, Reader, explain, too_long

if TYPE_CHECKING:
    import httpx2
    from openai import AsyncOpenAI

Request = dict[str, Any]
"""The body of a chat-completions request; `messages` is its last key, so that what stays equal comes first."""


LINGER = 0.5
"""Seconds an endpoint may take to end a response after its last event."""

TEACHING = frozenset({400, 404, 415, 422, 500, 501})
"""With which servers refuse what a request holds."""

TOOL_FLAGS = (
    "Start llama.cpp with --jinja, vLLM with --enable-auto-tool-choice and --tool-call-parser, or choose a model made "
    "for tools."
)
"""What a server that does not know tools lacks."""

TOOLLESS = re.compile(
    r"(n[o']t|un) ?support(s|ed|ing)?( param(eter)?:?)? ['\"`]?(tools?|function)\b(?! (schema|call id))"
    r"|tools param requires|support tool use|tool choice requires",
    re.I,
)
"""How servers say that they know no tools."""

LONGEST_WAIT = 60.0
"""Seconds an endpoint may ask to wait; for more, the person decides."""

UNFIT = "A request header would hold characters that none can hold."


class Model(Protocol):
    """What the loop needs of a language model; another provider is one more class."""

    name: str
    """What the endpoint calls it."""
    window: int | None
    """Tokens that fit into one request and its reply; None when nobody said."""

    def stream(self, request: Request) -> AsyncIterator[Delta]:
        """Yield the reply in fragments; `merge` puts them back together. Raises ModelError."""
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
    """One question to a model and what came of it; `after_model` receives it."""

    model: Model
    request: Request
    purpose: str = "turn"
    """Why it was asked: a turn of the loop, a compaction, a title …"""
    id: str = field(default_factory=lambda: uuid4().hex)
    """Identifies the reply, towards the client too (ACP messageId)."""
    sent: Request = field(default_factory=dict[str, Any])
    """The body as the endpoint was sent it at last; empty where the model does not tell."""
    reply: Message = field(default_factory=lambda: Message(role="assistant"))
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict[str, Any])
    """As the provider counted; empty when it did not."""
    started: float = 0.0
    first: float = 0.0
    """When the first fragment came, in seconds of the monotonic clock, like `started` and `ended`; 0 for never."""
    ended: float = 0.0
    held: float = 0.0
    """Seconds of it in which nothing was read, because what had come was still being shown."""
    error: str = ""
    """What went wrong, as a sentence; empty when it went well."""
    broken: ModelError | None = None
    """Why the answer broke off after it had begun, if it did and may be gone on with."""

    async def listen(self, tell: Callable[[Delta], Awaitable[None]] | None = None) -> None:
        """Ask, and fold the answer into `reply`; `tell` hears each fragment. Raises ModelError.

        However it ends, `reply` holds what was told.
        """
        self.started = monotonic()
        deltas = self.model.stream(self.request)
        try:
            async for delta in deltas:
                if (body := delta.get("sent")) is not None:
                    self.sent = body
                elif "notice" not in delta:
                    self.first = self.first or monotonic()
                merge(self.reply, delta)
                self.finish_reason = delta.get("finish_reason", self.finish_reason)
                self.usage = delta.get("usage", self.usage)
                if "cached" in delta and self.usage:
                    self.usage = {"cached_tokens": delta["cached"], **self.usage}
                if tell is not None:
                    since = monotonic()
                    await tell(delta)
                    self.held += monotonic() - since
        except BaseException as error:
            self.error = str(error) or type(error).__name__
            raise
        finally:
            self.ended = monotonic()
            if isinstance(deltas, AsyncGenerator):
                await deltas.aclose()  # hangs up at once, where the rest is not wanted any more


@dataclass(kw_only=True)
class ChatModel:
    """Any OpenAI-compatible endpoint: llama.cpp, Ollama, vLLM, LM Studio, OpenRouter, OpenAI and the like."""

    name: str
    base_url: str = ""
    api_key: str = field(default="", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Added to every request: temperature, max_tokens, and what the endpoint alone knows."""
    window: int | None = None
    idle_timeout: float | None = None
    """Seconds without a byte before the endpoint counts as hung; None means 120, or 600 for a server on this
    machine, which may think long about a long prompt before its first byte."""
    attempts: int = 5
    """How often a request is sent at most when the endpoint is busy or out of reach."""
    client: "AsyncOpenAI | None" = field(default=None, repr=False)
    """A ready client of the openai SDK (AsyncAzureOpenAI too) to ask through, in place of `base_url` and `api_key`."""
    quirks: Quirks = field(default_factory=Quirks)
    """What this endpoint does differently; what it refuses clearly is added while it runs."""
    refused: set[str] = field(default_factory=set[str])
    """Parameters this endpoint refused; they are not sent again."""
    prices: Prices | None = None
    _heard: set[str] = field(default_factory=set[str], repr=False)
    """Refusals that have taught something."""
    _http: "httpx2.AsyncClient | None" = field(default=None, repr=False)

    async def stream(self, request: Request) -> AsyncGenerator[Delta]:
        """Yield the reply in deltas. Raises ModelError.

        A request that failed is sent again only before the first delta: the user would see the same text twice.
        """
        import stamina

        has_begun = False
        async for attempt in stamina.retry_context(get_retry_wait, self.attempts, timeout=None):
            body = self.body(request)
            yield {"sent": body}
            try:
                async with aclosing(self.ask(body)) as deltas:
                    async for delta in deltas:
                        has_begun = True
                        yield delta
                return
            except ModelError as error:
                if has_begun or not error.retry:
                    raise
                if attempt.num < self.attempts:
                    wait = ceil(attempt.next_wait if error.after is None else error.after)
                    yield {"notice": f"{error} Asking again {f'in {wait} s' if wait else 'now'}."}
                with attempt:  # stamina waits before the next attempt, and raises the error again after the last one
                    raise

    def body(self, request: Request) -> Request:
        """What is sent: messages last, parameters before, as this endpoint takes them."""
        body = {"model": self.name, **self.parameters, "stream": True, "stream_options": {"include_usage": True}}
        return self.fitted({**body, **request})

    def fitted(self, body: Request) -> Request:
        """A body as this endpoint takes it; fitting once more changes nothing."""
        return {key: value for key, value in fit(body, self.quirks).items() if key not in self.refused}

    async def ask(self, body: Request) -> AsyncGenerator[Delta]:
        """Ask once. Raises ModelError."""
        import httpx2

        reader = Reader(self.where, think_tags=self.quirks.think_tags)
        try:
            async with self.post(body) as chunks:
                try:
                    async for data in chunks:
                        for delta in reader.feed(data):
                            yield delta
                        if reader.done:
                            break
                except httpx2.HTTPError:
                    if not reader.finished:
                        raise
                for delta in reader.end():
                    yield delta
                with suppress(httpx2.HTTPError, TimeoutError):
                    async with timeout(LINGER):
                        async for _ in chunks:
                            pass  # a connection can be used again once its last answer has been read to the end
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise self.fault(error) from error

    @property
    def where(self) -> str:
        """The endpoint as a person would name it, without what may be secret in an address."""
        url = str(self.client.base_url) if self.client else self.base_url
        return re.sub(r"(?<=//)[^/@]*@|/*(\?.*)?$", "", url)

    @property
    def patience(self) -> float:
        """Seconds without a byte before the endpoint counts as hung."""
        return self.idle_timeout or (600.0 if is_local(self.where) else 120.0)

    @asynccontextmanager
    async def post(self, body: Request) -> AsyncGenerator[AsyncIterator[bytes]]:
        """The bytes of the endpoint's answer. Raises ModelError when it is no success, and httpx2's errors."""
        if self.client is not None:
            async with self.post_through(self.client, body) as chunks:
                yield chunks
            return
        self._http = self._http or self.connect()
        url = endpoint(self.base_url, "chat/completions")
        response = await self._http.send(self._http.build_request("POST", url, content=encode(body)), stream=True)
        try:
            if response.status_code != 200:
                raise await self.refusal(response, body)
            yield response.aiter_bytes()
        finally:
            await response.aclose()

    @asynccontextmanager
    async def post_through(self, client: "AsyncOpenAI", body: Request) -> AsyncGenerator[AsyncIterator[bytes]]:
        """The same through an SDK client: its URL, its authentication, its headers; our reader."""
        import httpx2
        import openai  # the person who handed a client in has imported it already

        ours = {key: body[key] for key in ("model", "messages", "stream")}
        rest = {key: value for key, value in body.items() if key not in ours}
        patience = httpx2.Timeout(self.patience, connect=CONNECT)
        client = client.with_options(max_retries=0, timeout=patience)
        create: Any = client.chat.completions.with_streaming_response.create
        try:
            async with create(**ours, extra_body=rest) as response:
                yield response.iter_bytes()
        except openai.APIStatusError as error:
            raise await self.refusal(error.response, body) from error
        except openai.APIConnectionError as error:
            raise self.fault(error.__cause__ or error) from error

    def connect(self) -> "httpx2.AsyncClient":
        """An HTTP client with this endpoint's key and patience. Raises ModelError."""
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        try:
            return http_client(self.base_url, self.api_key, self.patience, {**headers, **self.headers})
        except UnicodeEncodeError as error:
            raise ModelError(f"{UNFIT} Look at the api_key and the headers for {self.where}.") from error

    def fault(self, error: BaseException) -> ModelError:
        """The sentence for an endpoint that gave no answer, or not the whole."""
        import httpx2

        match error:
            case httpx2.InvalidURL() | httpx2.UnsupportedProtocol():
                example = "http://localhost:11434/v1"
                return ModelError(f"{self.where!r} is no web address. Set base_url, for example {example}.")
            case httpx2.LocalProtocolError():
                return ModelError(f"{UNFIT} Look at the api_key and the headers for {self.where}.")  # it quotes them
            case httpx2.ConnectError() if is_local(self.where):
                return ModelError(f"Nothing answers at {self.where}. Start the model server, or set OPENAI_BASE_URL.")
            case httpx2.ConnectError() | httpx2.ConnectTimeout():
                said = f"{self.where} cannot be reached ({name_of(error)}). Check base_url and the network."
            case httpx2.ReadTimeout():
                said = f"{self.where} sent nothing for {self.patience:g} s. Set idle_timeout if it needs longer."
            case _:
                said = f"{self.where} broke off ({name_of(error)}). {LOOK}"
        return ModelError(self.redacted(said), retry=True)

    async def refusal(self, response: Any, body: Request) -> ModelError:
        """The sentence for a status that is not 200, with what the server said about it."""
        status: int = response.status_code
        raw = b""
        async for data in response.aiter_bytes():
            raw += data
            if len(raw) > PAGE:
                break
        said = self.redacted(explain(raw, response.headers.get("content-type", "")))
        if status in TEACHING and (learned := self.learn(raw.decode("utf-8", "replace"), body)):
            return ModelError(f"{self.where} {learned} ({status}).", retry=True, after=0)
        if status in TEACHING and body.get("tools") and TOOLLESS.search(said):
            return ModelError(f"{self.where} takes no tools ({status}): {said}. {TOOL_FLAGS}")
        if TOO_LONG.search(said) and status not in (401, 403, 404):
            return too_long(self.where, f"{said} ({status})")
        match status:
            case 401 | 403:
                key = "the model's api_key, or OPENAI_API_KEY"
                return ModelError(f"{self.where} refused the key ({status}): {said}. Check {key}.")
            case 404:
                model = body.get("model")
                return ModelError(f"{self.where} has no model {model!r}, or base_url is wrong: {said}. Check both.")
            case 402 | 429 if status == 402 or b"insufficient_quota" in raw:
                return ModelError(f"{self.where} wants to be paid ({status}): {said}. Check your account there.")
            case _ if status in PASSING:
                after = seconds(response.headers.get("retry-after"))
                busy = "is limiting requests" if status == 429 else "has trouble"
                soon = after is None or after <= LONGEST_WAIT
                wait = "a little" if soon else f"{after:.0f} s"
                sentence = f"{self.where} {busy} ({status}): {said}. Wait {wait}, or choose another model."
                return ModelError(sentence, retry=soon, after=after)
            case 301 | 302 | 303 | 307 | 308:
                place = response.headers.get("location", "")
                return ModelError(f"{self.where} has moved ({status}) to {place}. Set base_url accordingly.")
            case _:
                advice = "Check the model's settings, or go on in a new session."
                return ModelError(f"{self.where} refused the request ({status}): {said}. {advice}")

    def learn(self, said: str, body: Request) -> str:
        """What a refusal taught, as the end of a sentence; empty when nothing. The same words teach once."""
        if self.fitted(body) != body:
            return "refused what it had just refused in another session"
        lesson = learn(said, body, self.quirks)
        if lesson is None or said in self._heard:
            return ""
        self._heard.add(said)
        self.quirks = lesson.quirks
        self.refused |= lesson.refused
        return lesson.sentence

    def redacted(self, text: str) -> str:
        """Without the keys: servers quote them, and what is told here is also remembered."""
        for key in (self.api_key, self.client.api_key if self.client else "", *self.headers.values()):
            if len(key) > 7:
                text = text.replace(key, "…")
        return text

    async def close(self) -> None:
        """Let go of the connections."""
        if self._http is not None:
            await self._http.aclose()
            self._http = None


def effective_window(model: Model) -> int | None:
    """Tokens that fit: what is configured or the server told, else what is known of the model; None for unknown.

    What a model could take says nothing about what a server on this machine gives it.
    """
    known = model.quirks.window if isinstance(model, ChatModel) and not is_local(model.where) else 0
    return model.window or known or None


def get_retry_wait(error: Exception) -> bool | float:
    """Return the seconds to wait before a failed request is sent again; True lets stamina choose them."""
    after = error.after if isinstance(error, ModelError) else None
    return True if after is None else after


def seconds(header: str | None) -> float | None:
    """A Retry-After header in seconds: a number, or a date (RFC 9110, section 10.2.3). None for anything else."""
    try:
        wait = float(header or "")
        return max(wait, 0.0) if isfinite(wait) else None
    except ValueError:
        from email.utils import parsedate_to_datetime  # milliseconds of start-up, for what is seldom needed
    try:
        return max(parsedate_to_datetime(header or "").timestamp() - time(), 0.0)
    except ValueError:
        return None


def encode(body: Request) -> bytes:
    """The body as JSON. Half a surrogate pair (of a file name that is no UTF-8, say) becomes `?`."""
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError:
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def name_of(error: BaseException) -> str:
    """An exception as a few words."""
    return str(error) or type(error).__name__
