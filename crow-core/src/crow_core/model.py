"""The only file that knows how a language model is asked: chat completions over server-sent events.

The HTTP client is imported where it is used: it is a third of start-up, and `initialize` is answered without it.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec

from crow_core.messages import Delta, Message, merge
from crow_core.stream import ModelError, Reader, explain

if TYPE_CHECKING:
    import httpx2
    from openai import AsyncOpenAI

Request = dict[str, Any]
"""The body of a chat-completions request; `messages` is its last key, so that what stays equal comes first."""

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1", "0.0.0.0"})


class Model(Protocol):
    """What the loop needs of a language model; another provider is one more class."""

    name: str
    """What the endpoint calls it."""
    window: int | None
    """Tokens that fit into one request and its reply; None when nobody said."""

    def stream(self, request: Request) -> AsyncIterator[Delta]:
        """Yield the reply in fragments; `merge` puts them back together. Raises ModelError."""
        ...


@dataclass
class Call:
    """One question to a model and what came of it; `after_model` receives it."""

    model: Model
    request: Request
    purpose: str = "turn"
    """Why it was asked: a turn of the loop, a compaction, a title …"""
    id: str = field(default_factory=lambda: uuid4().hex)
    """Identifies the reply, towards the client too (ACP messageId)."""
    reply: Message = field(default_factory=lambda: Message(role="assistant"))
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict[str, Any])
    """As the provider counted; empty when it did not."""
    started: float = 0.0
    first: float = 0.0
    """When the first fragment came, in seconds of the monotonic clock, like `started` and `ended`; 0 for never."""
    ended: float = 0.0
    error: str = ""

    async def listen(self, tell: Callable[[Delta], Awaitable[None]] | None = None) -> None:
        """Ask, and fold the answer into `reply`; `tell` hears each fragment. Raises ModelError.

        However it ends, `reply` holds what was told.
        """
        self.started = monotonic()
        try:
            async for delta in self.model.stream(self.request):
                self.first = self.first or monotonic()
                merge(self.reply, delta)
                self.finish_reason = delta.get("finish_reason", self.finish_reason)
                self.usage = delta.get("usage", self.usage)
                if tell is not None:
                    await tell(delta)
        except BaseException as error:
            self.error = str(error) or type(error).__name__
            raise
        finally:
            self.ended = monotonic()


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
    refused: set[str] = field(default_factory=set[str])
    """Parameters this endpoint refused; they are not sent again."""
    _http: "httpx2.AsyncClient | None" = field(default=None, repr=False)

    async def stream(self, request: Request) -> AsyncGenerator[Delta]:
        """Yield the reply in fragments. Raises ModelError; sends again only while nothing has been answered yet."""
        import httpx2
        import stamina

        body = {"model": self.name, **self.parameters, "stream": True, "stream_options": {"include_usage": True}}
        body |= request
        body["messages"] = body.pop("messages")
        for parameter in self.refused:
            body.pop(parameter, None)
        reader = Reader(self.where)
        async with AsyncExitStack() as stack:
            chunks: AsyncIterator[bytes] | None = None
            async for attempt in stamina.retry_context(on=wait_for, attempts=self.attempts, timeout=300):
                with attempt:
                    try:
                        chunks = await stack.enter_async_context(self.post(body))
                    except ModelError as error:
                        if error.retry and attempt.num < self.attempts:
                            wait = attempt.next_wait if error.after is None else error.after
                            yield {"notice": f"{error} Trying again in {max(wait, 1):.0f} s."}
                        raise
            assert chunks is not None
            try:
                async for data in chunks:
                    for delta in reader.feed(data):
                        yield delta
            except httpx2.HTTPError as error:
                raise ModelError(f"{self.where} broke off in the middle of its answer ({name_of(error)}).") from error
            for delta in reader.end():
                yield delta

    @property
    def where(self) -> str:
        """The endpoint as a person would name it."""
        return str(self.client.base_url) if self.client else self.base_url

    @asynccontextmanager
    async def post(self, body: Request) -> AsyncGenerator[AsyncIterator[bytes]]:
        """The bytes of the endpoint's answer. Raises ModelError for every answer that is not a success."""
        if self.client is not None:
            async with self.post_through(self.client, body) as chunks:
                yield chunks
            return
        import httpx2

        http = self._http = self._http or self.connect()
        url = self.base_url.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
        try:
            request = http.build_request("POST", url, content=msgspec.json.encode(body))
            response = await http.send(request, stream=True)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise self.unreachable(error) from error
        try:
            if response.status_code != 200:
                raise await self.refusal(response, body)
            yield response.aiter_bytes()
        finally:
            await response.aclose()

    @asynccontextmanager
    async def post_through(self, client: "AsyncOpenAI", body: Request) -> AsyncGenerator[AsyncIterator[bytes]]:
        """The same through an SDK client: its URL, its authentication, its headers; our reader."""
        import openai  # the person who handed a client in has imported it already

        ours = {key: body[key] for key in ("model", "messages", "stream")}
        rest = {key: value for key, value in body.items() if key not in ours}
        create: Any = client.with_options(max_retries=0).chat.completions.with_streaming_response.create
        try:
            async with create(**ours, extra_body=rest) as response:
                yield response.iter_bytes()
        except openai.APIStatusError as error:
            raise await self.refusal(error.response, body) from error
        except openai.APIConnectionError as error:
            raise self.unreachable(error.__cause__ or error) from error

    def connect(self) -> "httpx2.AsyncClient":
        """An HTTP client with this endpoint's address, key and patience."""
        import ssl

        import httpx2

        local = urlsplit(self.base_url).hostname in LOOPBACK
        patience = self.idle_timeout or (600.0 if local else 120.0)
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return httpx2.AsyncClient(
            headers={"Content-Type": "application/json", "Accept": "text/event-stream", **key, **self.headers},
            timeout=httpx2.Timeout(patience, connect=10.0),
            # Reading the system's certificates takes longer than all else here; plain HTTP needs none of them, and a
            # context that trusts nobody is safe if a redirect leads elsewhere.
            verify=ssl.create_default_context()
            if self.base_url.startswith("https:")
            else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
            trust_env=not local,
        )

    def unreachable(self, error: BaseException) -> ModelError:
        """The sentence for an endpoint that gave no answer at all."""
        import httpx2

        local = urlsplit(self.where).hostname in LOOPBACK
        if isinstance(error, httpx2.ConnectError) and local:
            return ModelError(f"Nothing answers at {self.where}. Start the model server, or set OPENAI_BASE_URL.")
        if isinstance(error, httpx2.InvalidURL | httpx2.UnsupportedProtocol):
            return ModelError(f"{self.where!r} is no web address. Set base_url, for example http://localhost:11434/v1.")
        return ModelError(f"{self.where} cannot be reached ({name_of(error)}).", retry=True)

    async def refusal(self, response: Any, body: Request) -> ModelError:
        """The sentence for a status that is not 200, with what the server said about it."""
        status: int = response.status_code
        said = explain(await response.aread(), response.headers.get("content-type", ""))
        after = seconds(response.headers.get("retry-after"))
        key = "the model's api_key, or OPENAI_API_KEY"
        match status:
            case 401 | 403:
                return ModelError(f"{self.where} refused the key ({status}): {said}. Check {key}.")
            case 404:
                return ModelError(f"{self.where} knows no model {body.get('model')!r}, or base_url is wrong: {said}.")
            case 400 | 422 if "stream_options" in said and "stream_options" in body:
                self.refused.add("stream_options")
                body.pop("stream_options")
                return ModelError(f"{self.where} does not take stream_options.", retry=True, after=0)
            case 408 | 409 | 425 | 429 | 500 | 502 | 503 | 504 | 529:
                busy = "is limiting requests" if status == 429 else "has trouble"
                return ModelError(f"{self.where} {busy} ({status}): {said}.", retry=True, after=after)
            case _:
                return ModelError(f"{self.where} refused the request ({status}): {said}.")

    async def close(self) -> None:
        """Let go of the connections."""
        if self._http is not None:
            await self._http.aclose()
            self._http = None


def wait_for(error: Exception) -> bool | float:
    """Whether, or after how many seconds at least, a failed request is sent again."""
    if not isinstance(error, ModelError) or not error.retry:
        return False
    return True if error.after is None else min(error.after, 60.0)


def seconds(header: str | None) -> float | None:
    """A Retry-After header in seconds; a date counts as absent."""
    try:
        return max(float(header or ""), 0.0)
    except ValueError:
        return None


def name_of(error: BaseException) -> str:
    """An exception as a few words."""
    return str(error) or type(error).__name__
