"""Decides which requests are answered: those of a browser that came with the token, to this address, from its pages."""

from collections.abc import Collection
from hmac import compare_digest
from secrets import token_urlsafe
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "media-src data:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types crow",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Headers of every answer: no scripts or styles but ours, nothing from another place, no frame around the page."""
WANTS_TOKEN = (
    "This page needs the address with the token that `crow web` printed. It works once: start `crow web` again."
)


class Gate:
    """Answers a request with the app if it may be answered.

    The token of the address that `crow web` prints is exchanged once for a cookie, so that it is of no use in a
    browser's history.
    """

    def __init__(
        self, app: ASGIApp, port: int, *, names: Collection[str] = (), uses_tls: bool = False, frames: str = "'none'"
    ) -> None:
        """`names` are those of this machine under which it answers, in addition to loopback. `frames` is the origin of
        frames that the pages may hold."""
        policy = "content-security-policy"
        self._headers = {**HEADERS, policy: f"{HEADERS[policy]}; frame-src {frames}"}
        self._app = app
        self._hosts = {f"{name}:{port}".lower() for name in ("127.0.0.1", "localhost", "[::1]", *names)}
        self._scheme = "https" if uses_tls else "http"
        self.token = token_urlsafe(32)
        """The token of the first address."""
        self._tokens = {self.token}
        self._cookie = f"crow-web-{port}"
        self._key = token_urlsafe(32)  # in no file: a command of the agent could read it, and answer questions

    def add_token(self) -> str:
        """Return another token, for another browser."""
        token = token_urlsafe(32)
        self._tokens.add(token)
        return token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            if self._refuse_socket(scope):
                await send({"type": "websocket.close", "code": 1008})
            else:
                await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self._headers.items():
                    headers[name] = value
            await send(message)

        await (self._refuse(scope) or self._app)(scope, receive, send_with_headers)

    def _refuse_socket(self, scope: Scope) -> bool:
        """Return whether a WebSocket is refused. Browsers send the origin of the page that opens it."""
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        is_ours = host in self._hosts and headers.get("origin", "").lower() == f"{self._scheme}://{host}"
        return not (is_ours and self._has_cookie(scope))

    def _has_cookie(self, scope: Scope) -> bool:
        return compare_digest(HTTPConnection(scope).cookies.get(self._cookie, "").encode(), self._key.encode())

    def _refuse(self, scope: Scope) -> Response | None:
        """Return the answer to a request that the app does not see, None for others."""
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        if host not in self._hosts:
            return PlainTextResponse("This server does not go by the name in your Host header.", 421)
        if (origin := headers.get("origin")) is not None and origin.lower() != f"{self._scheme}://{host}":
            return PlainTextResponse("Pages of your origin may not read this.", 403)
        if scope["method"] not in ("GET", "HEAD") and (scope["method"] != "POST" or origin is None):
            return PlainTextResponse("Only forms of these pages change something.", 405)
        if self._has_cookie(scope):
            return None
        query = parse_qsl(scope["query_string"].decode(errors="replace"))
        given = next((value for name, value in query if name == "token"), "")
        known = next((token for token in self._tokens if compare_digest(given.encode(), token.encode())), None)
        if known is None:
            return PlainTextResponse(WANTS_TOKEN, 401)
        self._tokens.remove(known)
        rest = urlencode([(name, value) for name, value in query if name != "token"])
        answer = RedirectResponse(scope["path"] + (f"?{rest}" if rest else ""), 303)
        answer.set_cookie(self._cookie, self._key, httponly=True, samesite="strict", secure=self._scheme == "https")
        return answer
