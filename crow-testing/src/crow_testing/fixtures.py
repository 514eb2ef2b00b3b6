"""Fixtures that the tests of several packages import into their conftest."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import uvicorn
from crow_core import app
from crow_core.mcp import toolbox


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def nowhere() -> Iterator[str]:
    """An address on this machine where nobody listens, and nobody else can."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}/v1"


@asynccontextmanager
async def serve(
    app: Callable[[str], Any], *, with_sockets: bool = False, at: socket.socket | None = None
) -> AsyncGenerator[str]:
    """Serve the app that is made for its own URL, also its WebSockets `with_sockets`, at a socket or a free port."""
    with at or socket.create_server(("127.0.0.1", 0)) as at:
        url = f"http://127.0.0.1:{at.getsockname()[1]}"
        sockets = "websockets-sansio" if with_sockets else "none"
        config = uvicorn.Config(app(url), log_level="critical", ws=sockets, timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        async with AsyncExitStack() as stack:
            serving = asyncio.ensure_future(server.serve(sockets=[at]))
            stack.push_async_callback(asyncio.wait, [serving])
            stack.callback(lambda: setattr(server, "should_exit", True))
            yield url


@pytest.fixture
def listening() -> Callable[[Callable[[str], Any]], AbstractAsyncContextManager[str]]:
    """Serves an ASGI app while a block runs."""
    return serve


@pytest.fixture(autouse=True, scope="module")
def patience() -> Iterator[None]:
    """A machine may be slow: what is not about waiting waits until the servers are up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "SERVERS_WAIT", 200)
        patch.setattr(toolbox, "CHANGES_WAIT", 200)
        yield
