"""A chat-completions endpoint that says what a test wants, over real HTTP."""

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
    calls,
    deltas,
    finish_reason,
    in_order,
    usage,
)

__all__ = ["Failure", "Raw", "Reply", "Script", "ScriptedCall", "ScriptedServer"]


MODELS: dict[str, Any] = {
    "object": "list",
    "data": [{"id": "scripted", "object": "model", "created": 0, "owned_by": "crow"}],
}


class ScriptedServer:
    """Serves a script on 127.0.0.1 for the length of an `async with`, in the running event loop.

    A list is played in order; asked once more than it is long, the server answers HTTP 500. A script that raises
    answers HTTP 500 with the error's words. `pages` is what it says at other paths: text as it is, else JSON.
    """

    def __init__(
        self, script: Script | Sequence[Reply | Failure | Raw], *, pages: Mapping[str, Any] | None = None
    ) -> None:
        self.url = ""
        """The base URL for a client, `/v1` included; known once the server runs."""
        self.requests: list[dict[str, Any]] = []
        """The JSON body of every completion asked for, oldest first."""
        self.bodies: list[bytes] = []
        """The same as it came over the wire."""
        self.headers: list[dict[str, str]] = []
        """Their HTTP headers, names in lower case."""
        self.hangups = 0
        """How many clients went away before their answer had ended."""
        self._pages = {"/v1/models": MODELS, **(pages or {})}
        self._script: Script = script if callable(script) else in_order(script)
        self._changed = asyncio.Condition()
        self._state = ServerState()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition()` holds; it is looked at after every request and every hang-up."""
        async with self._changed:
            await self._changed.wait_for(condition)

    async def __aenter__(self) -> Self:
        routes = [
            Route("/v1/chat/completions", _Completions(self), methods=["POST"]),
            *(Route(path, _page(said), methods=["GET", "POST"]) for path, said in self._pages.items()),
        ]
        config = Config(Starlette(routes=routes), ws="none", log_config=None, timeout_keep_alive=600)
        # uvicorn.Server would take over the process's signals and look for its end ten times a second.
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
        await asyncio.sleep(0)  # the transports close their sockets in the loop's next round
        await self._listener.wait_closed()

    async def answer(self, request: dict[str, Any]) -> Reply | Failure | Raw:
        """Ask the script."""
        try:
            answer = self._script(request)
            return await answer if inspect.isawaitable(answer) else answer
        except Exception as error:  # for the client, which is the one under test
            return Failure(500, _error(f"{type(error).__name__}: {error}"))

    async def received(self, request: dict[str, Any], body: bytes, headers: Mapping[str, str]) -> int:
        """Write a request down and return its number, from 1."""
        async with self._changed:
            self.requests.append(request)
            self.bodies.append(body)
            self.headers.append(dict(headers))
            self._changed.notify_all()
            return len(self.requests)

    async def hung_up(self) -> None:
        async with self._changed:
            self.hangups += 1
            self._changed.notify_all()


class _QuietConnection(H11Protocol):
    """uvicorn's HTTP/1.1, not logging: hang-ups and responses cut short are what this server is for."""

    def __init__(self, config: Config, state: ServerState, app_state: dict[str, Any]) -> None:
        super().__init__(config, state, app_state)
        self.logger = logging.Logger(__name__, logging.CRITICAL + 1)
        self.access_log = False


class _Completions:
    """POST /v1/chat/completions, as an ASGI application: it hears the client hang up while it answers."""

    def __init__(self, server: ScriptedServer) -> None:
        self.server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        body = await request.body()
        try:
            asked = json.loads(body)
        except ValueError as error:
            await JSONResponse(_error(f"The request is not JSON: {error}"), 400)(scope, receive, send)
            return
        turn = await self.server.received(asked, body, request.headers)
        answering = asyncio.ensure_future(self.answer(asked, turn, scope, receive, send))
        leaving = asyncio.ensure_future(_hangup(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hung_up = answering.cancel()  # False where the answer had ended
            leaving.cancel()
            await asyncio.wait({answering, leaving})
        if hung_up:
            await self.server.hung_up()
        else:
            answering.result()

    async def answer(self, asked: dict[str, Any], turn: int, scope: Scope, receive: Receive, send: Send) -> None:
        match await self.server.answer(asked):
            case Failure(status, str() as text, headers):
                await Response(text, status, headers, "text/plain")(scope, receive, send)
            case Failure(status, body, headers):
                await JSONResponse(body, status, headers)(scope, receive, send)
            case Raw(chunks, headers, abort, hang):
                await _send(send, _each(chunks, hang), {"content-type": "text/event-stream", **headers}, abort)
            case Reply() as reply if asked.get("stream"):
                headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
                await _send(send, _stream(reply, asked, turn), headers, reply.error is not None)
            case Reply() as reply:
                headers = {"content-type": "application/json"}
                await _send(send, _whole(reply, asked, turn), headers, reply.error is not None)


def _page(said: Any) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return Response(said, media_type="text/plain") if isinstance(said, str) else JSONResponse(said)

    return answer


async def _hangup(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(send: Send, body: AsyncIterator[bytes], headers: Mapping[str, str], abort: bool) -> None:
    """Send each piece as it comes; a response left without its end makes uvicorn close the connection."""
    fields = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": fields})
    async for piece in body:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    if not abort:
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _each(chunks: Sequence[bytes], hang: bool) -> AsyncIterator[bytes]:
    for chunk in chunks:
        await asyncio.sleep(0)
        yield chunk
    if hang:
        await asyncio.Event().wait()


async def _stream(reply: Reply, asked: dict[str, Any], turn: int) -> AsyncIterator[bytes]:
    """Server-sent events, one `chat.completion.chunk` each."""
    head = _head(asked, turn, "chat.completion.chunk")
    options: dict[str, Any] = asked.get("stream_options") or {}
    counted = options.get("include_usage")
    if counted:
        head["usage"] = None

    def chunk(delta: dict[str, Any], reason: str | None = None) -> bytes:
        return _event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})

    yield chunk({"role": "assistant", "content": ""})
    for delta in deltas(reply, turn):
        await asyncio.sleep(reply.pace)
        yield chunk(delta)
    if reply.error:
        return
    if reply.hang:
        await asyncio.Event().wait()
    yield chunk({}, finish_reason(reply))
    if counted and (tokens := usage(reply, asked)):
        yield _event({**head, "choices": [], "usage": tokens})
    yield b"data: [DONE]\n\n"


async def _whole(reply: Reply, asked: dict[str, Any], turn: int) -> AsyncIterator[bytes]:
    """One `chat.completion` object."""
    if reply.error:
        return
    if reply.hang:
        await asyncio.Event().wait()
    message: dict[str, Any] = {"role": "assistant", "content": reply.content or None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = calls(reply, turn)
    choice = {"index": 0, "message": message, "finish_reason": finish_reason(reply)}
    completion = _head(asked, turn, "chat.completion") | {"choices": [choice]}
    if tokens := usage(reply, asked):
        completion["usage"] = tokens
    yield _json(completion)


def _head(asked: dict[str, Any], turn: int, kind: str) -> dict[str, Any]:
    model = asked.get("model", "scripted")
    return {"id": f"chatcmpl-{turn}", "object": kind, "created": int(time.time()), "model": model}


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + _json(chunk) + b"\n\n"


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "scripted_server_error", "code": None}}
