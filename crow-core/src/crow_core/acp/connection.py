"""A JSON-RPC 2.0 peer, agent or client: requests and notifications both ways over one transport.

Order is kept. What arrives is started in the order it arrived: `session/cancel` finds the prompt before it started, and
`request` returns after the handlers of every notification that came before its answer have started. What is sent leaves
in the order of the calls. A handler's answer is written in the same breath as the handler returns, so that what it gave
to `loop.call_soon` runs after the answer is out: how updates follow the answer to `session/new`.
"""

import asyncio
import json
import logging
import re
from codecs import utf_8_decode
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, Literal, cast

from msgspec import UNSET, DecodeError, Raw, Struct, UnsetType, ValidationError
from msgspec.json import Decoder

from crow_core.acp.decoding import decode, encode
from crow_core.acp.schema import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    PARSE_ERROR,
    PROTOCOL_METHODS,
    REQUEST_CANCELLED,
    CancelRequestNotification,
    Error,
    Method,
    RequestId,
)
from crow_core.acp.transports import MAX_MESSAGE, LineTooLong, Transport

logger = logging.getLogger(__name__)

Handler = Callable[[Any], Awaitable[Any]]
"""Takes the params struct, a dict if the method begins with `_`; returns the result, None for `{}`."""

MAX_RUNNING = 1000
"""Requests of theirs that may run at once; those beyond are refused."""

MAX_WEIGHT = 2 * MAX_MESSAGE
"""Bytes that the params of those requests may have together."""

GRACE = 10.0
"""Seconds that cancelled requests have to clean up and answer when the connection ends."""


class RpcError(Exception):
    """An error answer: a handler raises it to send it, `request` raises what came."""

    def __init__(self, code: int, message: str, data: Any = UNSET, *, details: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message  # one short line
        self.data: Any = {**(data or {}), "details": encodable(details)} if details else data
        """For programs, UNSET if there is none; clients show its `details` to people."""
        if isinstance(self.data, dict) and (said := cast(dict[str, Any], self.data).get("details")):
            self.add_note(str(said))


class ConnectionClosed(ConnectionError):
    """The other side is gone or this one has closed: nothing can be sent, no answer will come."""


class Incoming(Struct):
    """Any message; `params` and `result` stay raw until the method tells what they are."""

    jsonrpc: Literal["2.0"]
    id: RequestId | UnsetType = UNSET
    method: str | UnsetType = UNSET
    params: Raw = Raw(b"{}")
    result: Raw | UnsetType = UNSET
    error: Error | UnsetType | None = UNSET


class Remains(Struct):
    """What can be read of a message that is none: enough to tell whom it concerns."""

    id: RequestId | UnsetType = UNSET
    method: Raw | UnsetType = UNSET
    result: Raw | UnsetType = UNSET
    error: Raw | UnsetType = UNSET


INCOMING = Decoder(Incoming)
REMAINS = Decoder(Remains)
SYNTAX = Decoder(Raw)
HALF = re.compile(rb"\\u[dD][89a-fA-F]")
"""How half a surrogate pair may be written; whole ones are, too."""


class Outgoing(Struct, tag_field="jsonrpc", tag="2.0"):
    """Any message of ours."""


class Request(Outgoing):
    id: int
    method: str
    params: Any


class Notification(Outgoing):
    method: str
    params: Any


class Answer(Outgoing):
    id: RequestId
    result: Any


class Refusal(Outgoing):
    id: RequestId
    error: Error


class Connection:
    """One side of a conversation. `methods` are those it answers, `peer_methods` those it may call.

    An agent passes AGENT_METHODS and CLIENT_METHODS, a client the reverse. What has no handler is answered -32601.
    Raises KeyError if a handler's method is neither among `methods` nor begins with `_`.
    """

    def __init__(
        self,
        transport: Transport,
        methods: Mapping[str, Method],
        peer_methods: Mapping[str, Method],
        handlers: Mapping[str, Handler],
        *,
        others: Callable[[str, dict[str, Any]], Awaitable[Any]] | None = None,
    ) -> None:
        self._transport = transport
        self._peer_methods = peer_methods
        self._others = others
        """Answers requests that begin with `_` and have no handler, by method and params."""
        self._requests: dict[str, tuple[Handler, type[Any]]] = {}
        self._notifications: dict[str, tuple[Handler, type[Any]]] = {}
        for method, handler in {"$/cancel_request": self._cancel, **handlers}.items():
            self._register(method, handler, {**PROTOCOL_METHODS, **methods})
        self._ids = count(1)
        self._pending: dict[RequestId | UnsetType, asyncio.Future[Raw]] = {}
        """Requests of ours without an answer."""
        self._running: dict[RequestId, asyncio.Task[None]] = {}
        """Requests of theirs without an answer."""
        self._weight = 0
        """Bytes of the params of those."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.ending = False
        """The other side has hung up, or this one is about to."""

    async def serve(self) -> None:
        """Read until the other side hangs up or `close` is called, then `close`."""
        try:
            while True:
                try:
                    line = await self._transport.readline()
                except LineTooLong as error:
                    await self._reject(None, RpcError(INVALID_REQUEST, "Message too long", details=str(error)))
                    continue
                if not line or self.ending:
                    break
                if not line.isspace():
                    await self._receive(line)
                del line  # it may be large, and the next one may take its time
        finally:
            await self.close()

    async def request(self, method: str, params: Any) -> Any:
        """Call the other side and wait for the result, the struct that `peer_methods` says.

        Raises RpcError if it refuses or its answer cannot be read, ConnectionClosed if it is gone. If the waiting task
        is cancelled, the other side hears it (`$/cancel_request`).
        """
        if self.ending:
            raise ConnectionClosed(f"{method} was not sent: the connection has ended")
        type = Any if method.startswith("_") else self._peer_methods[method].result or Any
        id = next(self._ids)
        line = encode(Request(id, method, params)) + b"\n"
        self._pending[id] = future = asyncio.get_running_loop().create_future()
        try:
            await self._send(line)
            result = await future
        except asyncio.CancelledError:
            if id in self._pending and not self.ending:
                self._write(Notification("$/cancel_request", CancelRequestNotification(request_id=id)))
            raise
        finally:
            self._pending.pop(id, None)
        try:
            return decode(result, type)
        except (ValueError, RecursionError) as error:
            raise RpcError(INTERNAL_ERROR, f"Unreadable answer to {method}", details=str(error)) from error

    async def notify(self, method: str, params: Any) -> None:
        """Tell the other side; written at once, in the order of the calls, then waits only while it does not read.

        Raises ConnectionClosed if it is gone.
        """
        await self._send(encode(Notification(method, params)) + b"\n")

    async def close(self) -> None:
        """Cancel what runs, see its answers out, fail what waits for an answer, and hang up."""
        if self.ending:
            return
        self.ending = True
        await asyncio.sleep(0)  # what has just been read starts before it is cancelled, else it could not answer
        for id in list(self._pending):
            self._resolve(id, ConnectionClosed("the connection ended before the answer came"))
        try:
            await self._cancel_all(self._tasks - {asyncio.current_task()})
        finally:
            await self._transport.close()

    def _register(self, method: str, handler: Handler, methods: Mapping[str, Method]) -> None:
        if method.startswith("_"):
            self._requests[method] = self._notifications[method] = handler, dict
        elif methods[method].result is None:
            self._notifications[method] = handler, methods[method].params
        else:
            self._requests[method] = handler, methods[method].params

    async def _receive(self, line: bytes | bytearray) -> None:
        try:
            message = read(line)
        except (ValueError, RecursionError) as error:
            await self._receive_malformed(line, str(error))
            return
        if isinstance(message.method, str):
            if isinstance(message.id, UnsetType):
                self._receive_notification(message.method, message.params)
            else:
                await self._receive_request(message.id, message.method, message.params)
        elif isinstance(message.error, Error):
            self._resolve(message.id, RpcError(message.error.code, message.error.message, message.error.data))
        elif isinstance(message.result, Raw):
            self._resolve(message.id, message.result)
        else:
            await self._receive_malformed(line, "no method, result or error")

    def _receive_notification(self, method: str, params: Raw) -> None:
        if found := self._notifications.get(method):
            self._start(self._take(method, *found, params))

    async def _receive_request(self, id: RequestId, method: str, params: Raw) -> None:
        found = self._requests.get(method)
        if found is None and self._others and method.startswith("_"):
            found = partial(self._others, method), dict
        if found is None:
            await self._reject(id, RpcError(METHOD_NOT_FOUND, f"Method not found: {method}"))
        elif id in self._running:
            await self._reject(id, RpcError(INVALID_REQUEST, "A request with this id is still running"))
        elif len(self._running) >= MAX_RUNNING or self._weight + (weight := memoryview(params).nbytes) > MAX_WEIGHT:
            why = f"{len(self._running)} requests are running. Wait for some of their answers."
            await self._reject(id, RpcError(INVALID_REQUEST, "Too much at once", details=why))
        else:
            await self._make_room()
            if not self.ending:
                self._running[id] = task = self._start(self._answer(id, method, *found, params))
                self._weight += weight
                task.add_done_callback(lambda _: self._forget(id, weight))

    def _forget(self, id: RequestId, weight: int) -> None:
        del self._running[id]
        self._weight -= weight

    def _resolve(self, id: RequestId | UnsetType, outcome: Raw | Exception) -> None:
        future = self._pending.pop(id, None)
        if future is None or future.done():
            return
        if isinstance(outcome, Raw):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)
            future.exception()  # marks it as seen: who waited may be on the way out

    async def _receive_malformed(self, line: bytes | bytearray, why: str) -> None:
        """Refuse what is no message; if it was to be an answer, whoever waits for it learns so."""
        try:
            check_utf8(line)
            SYNTAX.decode(line)  # before a syntax error further on, a wrong type was found
        except (ValueError, RecursionError) as error:
            await self._reject(None, RpcError(PARSE_ERROR, "Parse error", details=str(error)))
            return
        try:
            remains = REMAINS.decode(line)
        except ValidationError:
            remains = Remains()
        is_answer = remains.method is UNSET and (remains.result is not UNSET or remains.error is not UNSET)
        if is_answer and remains.id in self._pending:
            self._resolve(remains.id, RpcError(INTERNAL_ERROR, "Unreadable answer", details=why))
        else:
            id = None if is_answer or isinstance(remains.id, UnsetType) else remains.id
            await self._reject(id, RpcError(INVALID_REQUEST, "Invalid request", details=why))

    async def _answer(self, id: RequestId, method: str, handler: Handler, type: type[Any], params: Raw) -> None:
        """Run one request to its one answer."""
        try:
            arguments = decode(params, type)
        except (ValueError, RecursionError) as error:
            self._refuse(id, RpcError(INVALID_PARAMS, f"Invalid params: {error}"))
            return
        del params  # it holds the whole line, and the handler may take its time
        try:
            result = await handler(arguments)
            self._write(Answer(id, {} if result is None else result))  # no await between these two
        except asyncio.CancelledError:
            self._refuse(id, RpcError(REQUEST_CANCELLED, "Request cancelled"))
        except RpcError as error:
            self._refuse(id, error)
        except ConnectionClosed as error:  # nobody is left to read this, and nothing went wrong here
            self._refuse(id, RpcError(INTERNAL_ERROR, "The other side is gone", details=str(error)))
        except Exception as error:
            logger.exception("%s failed", method)
            self._refuse(id, RpcError(INTERNAL_ERROR, "Internal error", details=str(error) or repr(error)))

    async def _take(self, method: str, handler: Handler, type: type[Any], params: Raw) -> None:
        """Run one notification, which nobody answers."""
        try:
            arguments = decode(params, type)
        except (ValueError, RecursionError) as error:
            logger.warning("%s was ignored: %s", method, one_line(str(error)))
            return
        try:
            await handler(arguments)
        except Exception:
            logger.exception("%s failed", method)

    async def _cancel(self, params: CancelRequestNotification) -> None:
        if task := self._running.get(params.request_id):
            task.cancel()

    async def _cancel_all(self, tasks: set[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=GRACE)
            if late:
                logger.warning("%d requests did not end within %s s of their cancellation", len(late), GRACE)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _write(self, message: Outgoing) -> None:
        self._transport.write(encode(message) + b"\n")

    def _refuse(self, id: RequestId, error: RpcError) -> None:
        try:
            self._write(Refusal(id, Error(code=error.code, message=one_line(error.message), data=error.data)))
        except (TypeError, ValueError):  # the data is no JSON
            self._write(Refusal(id, Error(code=error.code, message=one_line(error.message))))

    async def _reject(self, id: RequestId, error: RpcError) -> None:
        self._refuse(id, error)
        await self._make_room()

    async def _make_room(self) -> None:
        """Read on only when there is room for answers: who asks, or sends rubbish, and does not read gets to wait."""
        with suppress(OSError):
            await self._transport.drain()

    async def _send(self, line: bytes) -> None:
        self._transport.write(line)
        try:
            await self._transport.drain()
        except OSError as error:
            raise ConnectionClosed(f"the other side is gone: {error}") from error


def read(line: bytes | bytearray) -> Incoming:
    """The message in a line; half an emoji in it, as of a text that was cut, becomes `?`. Raises ValueError and
    RecursionError."""
    check_utf8(line)
    try:
        return INCOMING.decode(line)
    except DecodeError:
        if not HALF.search(line):
            raise
        return INCOMING.decode(json.dumps(json.loads(line), ensure_ascii=False).encode(errors="replace"))


def check_utf8(line: bytes | bytearray) -> None:
    """Raise UnicodeDecodeError if it is not: msgspec does not look into what it skips."""
    if line.isascii():
        return
    at, window, view = 0, 1 << 20, memoryview(line)  # decoded at once, one emoji makes four bytes of every letter
    while at < len(line):
        at += utf_8_decode(view[at : at + window], "strict", at + window >= len(line))[1]


def one_line(text: str) -> str:
    """An error's message has no newlines and is short."""
    return encodable(" ".join(text.split())[:200])


def encodable(text: str) -> str:
    """The text without lone surrogates, which come with odd file names and are no UTF-8."""
    return text.encode(errors="replace").decode()
