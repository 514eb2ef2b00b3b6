"""What all tests of crow-core share."""

import socket
from collections.abc import Iterator

import pytest
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


@pytest.fixture(autouse=True, scope="module")
def patience() -> Iterator[None]:
    """A machine may be slow: what is not about waiting waits until the servers are up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "SERVERS_WAIT", 200)
        patch.setattr(toolbox, "CHANGES_WAIT", 200)
        yield
