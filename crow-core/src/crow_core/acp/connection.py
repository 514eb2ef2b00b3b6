"""A JSON-RPC 2.0 peer, for an agent or a client: requests and notifications in both directions over one transport.

Order is preserved:

- Incoming messages start in the order of their arrival, so `session/cancel` finds the prompt sent before it running.
  `request` returns after the handlers of all notifications before its answer have started.
- When the other side closes the connection, the handlers of its notifications end before anything is cancelled.
- Outgoing messages are written in the order of the calls.
- The result of a handler is written without an await after the handler returns. Callbacks that the handler scheduled
  with `loop.call_soon` run after that: this is how updates follow the answer to `session/new`.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from itertools import count
from typing import Any

from msgspec import UNSET, Raw, UnsetType, ValidationError

from crow_core.acp.decoding import decode, encode
from crow_core.acp.rpc_messages import (
    MALFORMED_DECODER,
    SYNTAX_DECODER,
    MalformedMessage,
    OutgoingError,
    OutgoingMessage,
    OutgoingNotification,
    OutgoingRequest,
    OutgoingResult,
    check_utf8,
    decode_message,
)
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
from crow_core.acp.transports import MAX_MESSAGE_BYTES, LineTooLong, Transport

logger = logging.getLogger(__name__)

Handler = Callable[[Any], Awaitable[Any]]
"""A function that takes the params struct, or a dict if the method begins with `_`. It returns the result; None stands
for `{}`."""

REASON_KEYS = ("reason", "message", "error", "description", "detail")
"""Keys of the data of an error under which agents and clients give its reason."""

ERROR_LIMIT = 1_000
"""Characters of the message of an error."""

MAX_RUNNING = 1000
"""Incoming requests that may run at once; others are refused."""

MAX_RUNNING_BYTES = 2 * MAX_MESSAGE_BYTES
"""Bytes that the params of all running incoming requests may have together."""

CANCEL_TIMEOUT = 10.0
"""Seconds for cancelled requests to clean up and answer when the connection ends."""

NOTIFICATION_TIMEOUT = 1.0
"""Seconds for the handlers of notifications to end after the other side has closed the connection."""


class RpcError(Exception):
    """An error response: a handler raises it to send it, and `request` raises the one that it received."""

    def __init__(self, code: int, message: str, data: Any = UNSET, *, details: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        """One short line."""
        self.data: Any = {**(data or {}), "details": replace_surrogates(details)} if details else data
        """Data for programs, UNSET if there is none. Its `details` are for people; the message that is sent ends with
        them."""

    @property
    def details(self) -> str:
        """The details of the data; "" if there are none."""
        match self.data:
            case {"details": str(text)}:
                return text
            case _:
                return ""

    def to_sentence(self) -> str:
        """Return the message with its details, since most clients show the message alone."""
        match self.data:
            case {"details": str(details)} if details.strip() and details not in self.message:
                return details if self.message in details else f"{self.message.rstrip('.')}: {details}"
            case _:
                return self.message

    def describe(self) -> str:
        """Return the `details` of the data, or the message with the reason that the data gives in another way."""
        match self.data:
            case {"details": str(details)} if details.strip():
                return details
            case str(reason):
                pass
            case {**data}:
                texts = (data.get(key) for key in REASON_KEYS)
                known = next((text for text in texts if isinstance(text, str) and text.strip()), "")
                reason = known or (json.dumps(data, ensure_ascii=False, default=str) if data else "")
            case _:
                reason = ""
        if not reason or reason in self.message:
            return self.message
        return reason if self.message in reason else f"{self.message.rstrip('.: ')}: {reason}"


class ConnectionClosed(ConnectionError):
    """The connection has ended: nothing can be sent, and no answer will arrive."""


EXACT_METHODS = ("fs/", "terminal/")
"""Prefixes of methods whose params are sent unchanged, because they are data: paths, contents of files, commands."""
EXACT_RESULTS = ("session/prompt",)
"""Methods whose results are sent unchanged: that of a prompt holds no text but a typed result, which is data."""


class Connection:
    """One side of a connection. `methods` are those that it answers, `peer_methods` those that it may call.

    An agent passes AGENT_METHODS and CLIENT_METHODS, a client the reverse. A request without a handler is answered with
    the error -32601. Raises KeyError if a handler's method is not in `methods` and does not begin with `_`.
    """

    def __init__(
        self,
        transport: Transport,
        methods: Mapping[str, Method],
        peer_methods: Mapping[str, Method],
        handlers: Mapping[str, Handler],
        *,
        fallback: Callable[[str, dict[str, Any]], Awaitable[Any]] | None = None,
        clean: Callable[[bytes], bytes] | None = None,
    ) -> None:
        self._transport = transport
        self._fallback = fallback
        """Answers requests whose method begins with `_` and has no handler; takes the method and the params."""
        self._clean = clean
        """Cleans outgoing JSON for display; not called for the params of `fs/` and `terminal/` methods."""
        self._requests: dict[str, tuple[Handler, type[Any]]] = {}
        self._notifications: dict[str, tuple[Handler, type[Any]]] = {}
        self.speak(methods, peer_methods, handlers)
        self._request_ids = count(1)
        self._pending: dict[RequestId | UnsetType, asyncio.Future[Raw]] = {}
        """The outgoing requests that wait for an answer."""
        self._methods: dict[int, str] = {}
        """Their methods."""
        self._running: dict[RequestId, asyncio.Task[None]] = {}
        """The incoming requests that are not answered yet."""
        self._running_bytes = 0
        """Bytes of the params of the running requests."""
        self._tasks: set[asyncio.Task[None]] = set()
        """The handlers that run, of requests and notifications."""
        self._closing: asyncio.Task[None] | None = None
        """Closes the connection after the other side has stopped to read."""
        self.is_closing = False
        """True if the connection has ended or is about to: the other side has closed it, or `close` was called."""

    def speak(
        self, methods: Mapping[str, Method], peer_methods: Mapping[str, Method], handlers: Mapping[str, Handler]
    ) -> None:
        """Use these methods and handlers from the next message on, in place of the earlier ones."""
        self._peer_methods = {**peer_methods}
        self._requests.clear()
        self._notifications.clear()
        for method, handler in {"$/cancel_request": self._cancel, **handlers}.items():
            self._register(method, handler, {**PROTOCOL_METHODS, **methods})

    async def serve(self) -> None:
        """Receive messages until the other side closes the connection or `close` is called, then close."""
        try:
            while True:
                try:
                    line = await self._transport.readline()
                except LineTooLong as error:
                    await self._send_error(None, RpcError(INVALID_REQUEST, "Message too long", details=str(error)))
                    continue
                if not line or self.is_closing:
                    break
                if not line.isspace():
                    await self._receive(line)
                del line  # free a large line while waiting for the next one
            if not self.is_closing:
                await self._finish_notifications()
        finally:
            await self.close()
            if self._closing:
                await asyncio.wait([self._closing])

    async def request(self, method: str, params: Any) -> Any:
        """Send a request and return its result, as the struct that `peer_methods` says.

        Raises RpcError if the other side answers with an error or with a result that cannot be decoded,
        ConnectionClosed if the connection ends. If the calling task is cancelled, cancel the request with
        `$/cancel_request`.
        """
        if self.is_closing:
            raise ConnectionClosed(f"{method} was not sent: the connection has ended")
        result_type = Any if method.startswith("_") else self._peer_methods[method].result or Any
        id = next(self._request_ids)
        line = self._encode(OutgoingRequest(id, method, params), exact=method.startswith(EXACT_METHODS))
        self._pending[id] = future = asyncio.get_running_loop().create_future()
        self._methods[id] = method
        try:
            await self._send(line)
            result = await future
        except asyncio.CancelledError:
            if id in self._pending and not self.is_closing:
                self._cancel_request(id)
            raise
        finally:
            self._pending.pop(id, None)
            del self._methods[id]
        try:
            return decode(result, result_type)
        except (ValueError, RecursionError) as error:
            raise RpcError(INTERNAL_ERROR, f"Unreadable answer to {method}", details=str(error)) from error

    def cancel_requests(self, method: str) -> None:
        """Ask the other side to cancel all requests of a method that wait. Each is still answered, if with an error."""
        for id, its_method in self._methods.items():
            if its_method == method and not self.is_closing:
                self._cancel_request(id)

    def _cancel_request(self, id: int) -> None:
        self._write(OutgoingNotification("$/cancel_request", CancelRequestNotification(request_id=id)))

    def notify(self, method: str, params: Any) -> Coroutine[Any, Any, None]:
        """Send a notification: write it before the first await, then wait while the other side is slow to read.

        Raises ConnectionClosed if the connection has ended.
        """
        return self._send(self._encode(OutgoingNotification(method, params)))

    async def close(self) -> None:
        """Cancel running requests, send their answers, fail requests that wait for an answer, close the transport."""
        if self.is_closing:
            return
        self.is_closing = True
        await asyncio.sleep(0)  # a task cancelled before it starts could not answer its request
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
            message = decode_message(line)
        except (ValueError, RecursionError) as error:
            await self._receive_malformed(line, str(error))
            return
        if isinstance(message.method, str):
            if not isinstance(message.id, UnsetType):
                await self._receive_request(message.id, message.method, message.params)
            elif registered := self._notifications.get(message.method):
                self._start(self._run_notification(message.method, *registered, message.params))
        elif isinstance(message.error, Error):
            self._resolve(message.id, RpcError(message.error.code, message.error.message, message.error.data))
        elif isinstance(message.result, Raw):
            self._resolve(message.id, message.result)
        else:
            await self._receive_malformed(line, "no method, result or error")

    async def _receive_request(self, id: RequestId, method: str, params: Raw) -> None:
        registered = self._requests.get(method)
        if registered is None and self._fallback and method.startswith("_"):
            registered = partial(self._fallback, method), dict
        size = memoryview(params).nbytes
        if registered is None:
            await self._send_error(id, RpcError(METHOD_NOT_FOUND, f"Method not found: {method}"))
        elif id in self._running:
            await self._send_error(id, RpcError(INVALID_REQUEST, "A request with this id is still running"))
        elif len(self._running) >= MAX_RUNNING or self._running_bytes + size > MAX_RUNNING_BYTES:
            why = f"{len(self._running)} requests are running. Wait for some of their answers."
            await self._send_error(id, RpcError(INVALID_REQUEST, "Too much at once", details=why))
        else:
            await self._drain()
            if not self.is_closing:
                self._running[id] = task = self._start(self._run_request(id, method, *registered, params))
                self._running_bytes += size
                task.add_done_callback(lambda _: self._remove_running(id, size))

    def _remove_running(self, id: RequestId, size: int) -> None:
        del self._running[id]
        self._running_bytes -= size

    def _resolve(self, id: RequestId | UnsetType, outcome: Raw | Exception) -> None:
        future = self._pending.pop(id, None)
        if future is None or future.done():
            return
        if isinstance(outcome, Raw):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)
            future.exception()  # mark it as retrieved: the waiting task may have been cancelled

    async def _receive_malformed(self, line: bytes | bytearray, why: str) -> None:
        """Answer a malformed message with an error; if it was an answer, fail the request that waits for it."""
        try:
            check_utf8(line)
            # The first decoder may have failed on a wrong type before it reached a syntax error.
            SYNTAX_DECODER.decode(line)
        except (ValueError, RecursionError) as error:
            await self._send_error(None, RpcError(PARSE_ERROR, "Parse error", details=str(error)))
            return
        try:
            remains = MALFORMED_DECODER.decode(line)
        except ValidationError:
            remains = MalformedMessage()
        is_answer = remains.method is UNSET and (remains.result is not UNSET or remains.error is not UNSET)
        if is_answer and remains.id in self._pending:
            self._resolve(remains.id, RpcError(INTERNAL_ERROR, "Unreadable answer", details=why))
        else:
            id = None if is_answer or isinstance(remains.id, UnsetType) else remains.id
            await self._send_error(id, RpcError(INVALID_REQUEST, "Invalid request", details=why))

    async def _run_request(
        self, id: RequestId, method: str, handler: Handler, params_type: type[Any], params: Raw
    ) -> None:
        """Run the handler of a request and write its result or error."""
        try:
            arguments = decode(params, params_type)
        except (ValueError, RecursionError) as error:
            self._write_error(id, RpcError(INVALID_PARAMS, f"Invalid params: {error}"))
            return
        del params  # it keeps the whole line in memory, and the handler may run long
        try:
            result = await handler(arguments)
            # No await before this: see the module's docstring.
            self._write(OutgoingResult(id, {} if result is None else result), exact=method in EXACT_RESULTS)
        except asyncio.CancelledError:
            self._write_error(id, RpcError(REQUEST_CANCELLED, "Request cancelled"))
        except RpcError as error:
            self._write_error(id, error)
        except ConnectionClosed as error:  # not an internal error, so nothing is logged
            self._write_error(id, RpcError(INTERNAL_ERROR, "Connection closed", details=str(error)))
        except Exception as error:
            logger.exception("%s failed", method)
            self._write_error(id, RpcError(INTERNAL_ERROR, "Internal error", details=str(error) or repr(error)))

    async def _run_notification(self, method: str, handler: Handler, params_type: type[Any], params: Raw) -> None:
        """Run the handler of a notification; log what goes wrong."""
        try:
            arguments = decode(params, params_type)
        except (ValueError, RecursionError) as error:
            logger.warning("%s was ignored: %s", method, to_error_line(str(error)))
            return
        try:
            await handler(arguments)
        except Exception:
            logger.exception("%s failed", method)

    async def _cancel(self, params: CancelRequestNotification) -> None:
        if task := self._running.get(params.request_id):
            task.cancel()

    async def _finish_notifications(self) -> None:
        """Wait for the handlers of notifications, so that the last updates before an agent's end are not lost."""
        notified = self._tasks - set(self._running.values())
        if notified:
            await asyncio.wait(notified, timeout=NOTIFICATION_TIMEOUT)

    async def _cancel_all(self, tasks: set[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CANCEL_TIMEOUT)
            if late:
                logger.warning("%d requests did not end within %s s of their cancellation", len(late), CANCEL_TIMEOUT)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _encode(self, message: OutgoingMessage, *, exact: bool = False) -> bytes:
        line = encode(message)
        return (line if exact or self._clean is None else self._clean(line)) + b"\n"

    def _write(self, message: OutgoingMessage, *, exact: bool = False) -> None:
        self._transport.write(self._encode(message, exact=exact))

    def _write_error(self, id: RequestId, error: RpcError) -> None:
        message = to_error_line(error.to_sentence())
        try:
            self._write(OutgoingError(id, Error(code=error.code, message=message, data=error.data)))
        except (TypeError, ValueError):  # the data cannot be encoded as JSON
            self._write(OutgoingError(id, Error(code=error.code, message=message)))

    async def _send_error(self, id: RequestId, error: RpcError) -> None:
        self._write_error(id, error)
        await self._drain()

    async def _drain(self) -> None:
        """Wait for room to write answers, so that a peer that sends without reading has to wait."""
        try:
            await self._transport.drain()
        except OSError:
            self._close_soon()

    def _close_soon(self) -> None:
        """Close the connection after the other side has stopped to read: nobody would see what still runs."""
        if not self.is_closing and self._closing is None:
            self._closing = asyncio.ensure_future(self.close())

    async def _send(self, line: bytes) -> None:
        self._transport.write(line)
        try:
            await self._transport.drain()
        except OSError as error:
            self._close_soon()
            raise ConnectionClosed(f"the other side has closed the connection: {error}") from error


def to_error_line(text: str) -> str:
    """Return at most ERROR_LIMIT characters of a text without newlines, for the message of an error."""
    return replace_surrogates(" ".join(text.split())[:ERROR_LIMIT])


def replace_surrogates(text: str) -> str:
    """Replace the lone surrogates in a text by `?`; they come from file names that are not UTF-8."""
    return text.encode(errors="replace").decode()
