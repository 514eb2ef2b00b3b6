"""A chat-completions endpoint over HTTP that answers as a script says."""

import asyncio
import inspect
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from crow_core.testing.script import (
    Failure,
    Raw,
    Reply,
    Script,
    ScriptedCall,
    get_finish_reason,
    get_usage,
    play_in_order,
    to_deltas,
    to_tool_calls,
)

__all__ = ["Failure", "Raw", "Reply", "Script", "ScriptedCall", "ScriptedServer"]


MODEL_LISTING: dict[str, Any] = {
    "object": "list",
    "data": [{"id": "scripted", "object": "model", "created": 0, "owned_by": "crow"}],
}


class ScriptedServer:
    """Serves a script on 127.0.0.1 inside an `async with`, in the running event loop.

    The answers of a list are used in order. The server answers HTTP 500 after the last one, and with the error's text
    when a script raises. `pages` holds the answers at other paths, or functions that return them: text is sent as it
    is, anything else as JSON.
    """

    def __init__(
        self, script: Script | Sequence[Reply | Failure | Raw], *, pages: Mapping[str, Any] | None = None
    ) -> None:
        self.url = ""
        """The base URL for a client, with `/v1`; empty before the server runs."""
        self.requests: list[dict[str, Any]] = []
        """The JSON bodies of the requests for completions, oldest first."""
        self.bodies: list[bytes] = []
        """The bytes of these bodies, as they were sent."""
        self.headers: list[dict[str, str]] = []
        """The HTTP headers of the same requests, with names in lower case."""
        self.hangups = 0
        """The number of connections that a client closed before the answer ended."""
        self._pages = {"/v1/models": MODEL_LISTING, **(pages or {})}
        self._script: Script = script if callable(script) else play_in_order(script)
        self._changed = asyncio.Condition()
        self._state = ServerState()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition()` is true; it is checked after every request and every hang-up."""
        async with self._changed:
            await self._changed.wait_for(condition)

    async def __aenter__(self) -> Self:
        routes = [
            Route("/v1/chat/completions", _Completions(self), methods=["POST"]),
            *(
                Route(path, _make_page_handler(content), methods=["GET", "POST"])
                for path, content in self._pages.items()
            ),
        ]
        config = Config(Starlette(routes=routes), ws="none", log_config=None, timeout_keep_alive=600)
        # uvicorn.Server would handle the process's signals and poll ten times a second.
        self._listener = await asyncio.get_running_loop().create_server(
            lambda: _QuietConnection(config, self._state, {}), "127.0.0.1", 0
        )
        self.url = f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        if answering := list(self._state.tasks):
            for task in answering:
                task.cancel()
            await asyncio.wait(answering)
        for connection in list(self._state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # the transports close their sockets in the next iteration of the loop
        await self._listener.wait_closed()

    async def answer(self, request: dict[str, Any]) -> Reply | Failure | Raw:
        """Return the script's answer to a request, or a failure if the script raises."""
        try:
            answer = self._script(request)
            return await answer if inspect.isawaitable(answer) else answer
        except Exception as error:  # for the client, which is tested
            return Failure(500, _to_error_body(f"{type(error).__name__}: {error}"))

    async def record_request(self, request: dict[str, Any], body: bytes, headers: Mapping[str, str]) -> int:
        """Record a request and return its number, which starts at 1."""
        async with self._changed:
            self.requests.append(request)
            self.bodies.append(body)
            self.headers.append(dict(headers))
            self._changed.notify_all()
            return len(self.requests)

    async def record_hangup(self) -> None:
        async with self._changed:
            self.hangups += 1
            self._changed.notify_all()


class _QuietConnection(H11Protocol):
    """uvicorn's HTTP/1.1 without logs: hang-ups and cut responses are expected here."""

    def __init__(self, config: Config, state: ServerState, app_state: dict[str, Any]) -> None:
        super().__init__(config, state, app_state)
        self.logger = logging.Logger(__name__, logging.CRITICAL + 1)
        self.access_log = False


class _Completions:
    """POST /v1/chat/completions, as an ASGI application that notices a hang-up while it answers."""

    def __init__(self, server: ScriptedServer) -> None:
        self.server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        body = await request.body()
        try:
            payload = json.loads(body)
        except ValueError as error:
            await JSONResponse(_to_error_body(f"The request is not JSON: {error}"), 400)(scope, receive, send)
            return
        turn = await self.server.record_request(payload, body, request.headers)
        answering = asyncio.ensure_future(self.answer(payload, turn, scope, receive, send))
        leaving = asyncio.ensure_future(_wait_for_hangup(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hung_up = answering.cancel()  # False if the answer has ended
            leaving.cancel()
            await asyncio.wait({answering, leaving})
        if hung_up:
            await self.server.record_hangup()
        else:
            answering.result()

    async def answer(self, payload: dict[str, Any], turn: int, scope: Scope, receive: Receive, send: Send) -> None:
        match await self.server.answer(payload):
            case Failure(status, str() as text, headers):
                await Response(text, status, headers, "text/plain")(scope, receive, send)
            case Failure(status, body, headers):
                await JSONResponse(body, status, headers)(scope, receive, send)
            case Raw(chunks, headers, abort, hang):
                await _send(
                    send, _iterate_chunks(chunks, hang), {"content-type": "text/event-stream", **headers}, abort
                )
            case Reply() as reply if payload.get("stream"):
                headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
                await _send(send, _encode_reply_stream(reply, payload, turn), headers, reply.error is not None)
            case Reply() as reply:
                headers = {"content-type": "application/json"}
                await _send(send, _encode_reply(reply, payload, turn), headers, reply.error is not None)


def _make_page_handler(content: Any) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        page = content() if callable(content) else content
        page = await page if inspect.isawaitable(page) else page
        return Response(page, media_type="text/plain") if isinstance(page, str) else JSONResponse(page)

    return answer


async def _wait_for_hangup(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(send: Send, body: AsyncIterator[bytes], headers: Mapping[str, str], abort: bool) -> None:
    """Send each piece when it comes. uvicorn closes the connection of a response without an end."""
    fields = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": fields})
    async for piece in body:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    if not abort:
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _iterate_chunks(chunks: Sequence[bytes], hang: bool) -> AsyncIterator[bytes]:
    for chunk in chunks:
        await asyncio.sleep(0)
        yield chunk
    if hang:
        await asyncio.Event().wait()


async def _encode_reply_stream(reply: Reply, payload: dict[str, Any], turn: int) -> AsyncIterator[bytes]:
    """Yield a reply as server-sent events, each with one `chat.completion.chunk`."""
    head = _make_head(payload, turn, "chat.completion.chunk")
    options: dict[str, Any] = payload.get("stream_options") or {}
    counted = options.get("include_usage")
    if counted:
        head["usage"] = None

    def chunk(delta: dict[str, Any], reason: str | None = None) -> bytes:
        return _to_event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})

    yield chunk({"role": "assistant", "content": ""})
    for delta in to_deltas(reply, turn):
        await asyncio.sleep(reply.pace)
        yield chunk(delta)
    if reply.error:
        return
    if reply.hang:
        await asyncio.Event().wait()
    yield chunk({}, get_finish_reason(reply))
    if counted and (tokens := get_usage(reply, payload)):
        yield _to_event({**head, "choices": [], "usage": tokens})
    yield b"data: [DONE]\n\n"


async def _encode_reply(reply: Reply, payload: dict[str, Any], turn: int) -> AsyncIterator[bytes]:
    """Yield a reply as one `chat.completion` object."""
    if reply.error:
        return
    if reply.hang:
        await asyncio.Event().wait()
    message: dict[str, Any] = {"role": "assistant", "content": reply.content or None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = to_tool_calls(reply, turn)
    choice = {"index": 0, "message": message, "finish_reason": get_finish_reason(reply)}
    completion = _make_head(payload, turn, "chat.completion") | {"choices": [choice]}
    if tokens := get_usage(reply, payload):
        completion["usage"] = tokens
    yield _to_json(completion)


def _make_head(payload: dict[str, Any], turn: int, kind: str) -> dict[str, Any]:
    model = payload.get("model", "scripted")
    return {"id": f"chatcmpl-{turn}", "object": kind, "created": int(time.time()), "model": model}


def _to_event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + _to_json(chunk) + b"\n\n"


def _to_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _to_error_body(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "scripted_server_error", "code": None}}
