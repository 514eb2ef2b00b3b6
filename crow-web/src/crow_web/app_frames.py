"""MCP Apps: the HTML of an MCP server, in two frames of an origin of their own.

The outer frame holds a script of crow's, which passes messages on. The inner one holds the app, in a sandbox without an
origin. Both come from another port than the page, and load nothing but what the server has declared.
"""

import re
from collections.abc import Mapping, Sequence
from secrets import token_urlsafe
from typing import Any, cast

from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

MAX_APPS = 30
"""Apps that are kept; the oldest is dropped."""
DOMAIN = re.compile(r"(?:https|wss)://(?:\*\.)?[a-z0-9-]+(?:\.[a-z0-9-]+)*(?::\d{1,5})?", re.ASCII | re.IGNORECASE)
"""An origin that an app may declare."""
OUTER = """<!doctype html><html><head><meta charset="utf-8"><title>App</title>
<style nonce="{nonce}">html, body, iframe {{ margin: 0; border: 0; width: 100%; height: 100%; display: block }}</style>
</head><body><iframe title="App" sandbox="allow-scripts" referrerpolicy="no-referrer" src="/app/{key}"></iframe>
<script nonce="{nonce}">
const inner = document.querySelector("iframe").contentWindow, pages = {pages};
addEventListener("message", (event) => {{
  if (event.source === parent && pages.includes(event.origin)) inner.postMessage(event.data, "*");
  else if (event.source === inner) parent.postMessage(event.data, "*");
}});
</script></body></html>"""
"""The outer frame. Only the page may hold it, so that `*` is the page alone."""


class AppFrames:
    """Serves the frames of apps at a port of their own."""

    def __init__(self, port: int, page_port: int, *, names: Sequence[str] = (), uses_tls: bool = False) -> None:
        """`names` are those of this machine under which it answers, in addition to loopback."""
        self.port = port
        known, scheme = ("127.0.0.1", "localhost", *names), "https" if uses_tls else "http"
        self._hosts = [f"{name}:{port}" for name in known]
        self.origins = [f"{scheme}://{host}" for host in self._hosts]
        self._pages = [f"{scheme}://{name}:{page_port}" for name in known]
        self._apps: dict[str, tuple[str, str]] = {}

    def add(self, html: str, csp: Mapping[str, Any]) -> str:
        """Keep an app with what it declares that it loads, and return the place of its outer frame: port and path."""
        key = token_urlsafe(24)
        self._apps[key] = html, make_policy(csp, [*self.origins, *self._pages])
        while len(self._apps) > MAX_APPS:
            del self._apps[next(iter(self._apps))]
        return f"{self.port}/frame/{key}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._answer(scope)(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})

    def _answer(self, scope: Scope) -> Response:
        kind, _, key = scope["path"].removeprefix("/").partition("/")
        app = self._apps.get(key)
        if scope["method"] != "GET" or Headers(scope=scope).get("host") not in self._hosts or app is None:
            return PlainTextResponse("There is no such app.", 404)
        common = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer", "cache-control": "no-store"}
        if kind == "app":
            return HTMLResponse(app[0], headers={**common, "content-security-policy": app[1]})
        nonce = token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; frame-src 'self'; "
            f"base-uri 'none'; form-action 'none'; frame-ancestors {' '.join(self._pages)}"
        )
        page = OUTER.format(nonce=nonce, key=key, pages=self._pages)
        return HTMLResponse(page, headers={**common, "content-security-policy": policy})


class ByPort:
    """Passes requests on to the frames of apps or to the page, by the port at which they arrive."""

    def __init__(self, page: Any, frames: AppFrames) -> None:
        self._page, self._frames = page, frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_frame = scope["type"] != "lifespan" and (scope.get("server") or ("", 0))[1] == self._frames.port
        await (self._frames if is_frame else self._page)(scope, receive, send)


def make_policy(csp: Mapping[str, Any], ancestors: Sequence[str]) -> str:
    """Make the Content Security Policy of an app: only declared domains, and no frames in it."""
    more = {name: " ".join(list_domains(csp, name)) for name in ("connectDomains", "resourceDomains")}
    load, connect = more["resourceDomains"], more["connectDomains"] or "'none'"
    return (
        f"sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline' {load}; "
        f"style-src 'unsafe-inline' {load}; img-src data: {load}; font-src data: {load}; media-src data: {load}; "
        f"connect-src {connect}; "
        f"frame-src 'none'; object-src 'none'; base-uri 'none'; form-action 'none'; "
        f"frame-ancestors {' '.join(ancestors)}"
    )


def list_domains(csp: Mapping[str, Any], name: str) -> Sequence[str]:
    """Return the domains under a name of `_meta.ui.csp`; anything but an origin is left out."""
    values = csp.get(name)
    if not isinstance(values, list):
        return []
    return [each for each in cast("list[Any]", values) if isinstance(each, str) and DOMAIN.fullmatch(each)]
