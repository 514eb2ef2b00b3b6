"""What all tests of crow-core share."""

import socket
from collections.abc import Iterator

import pytest
from crow_core import app
from hypothesis import settings

# The machine may be busy: what is right is right also when it comes late.
settings.register_profile("patient", settings.default, deadline=None)
settings.load_profile("patient")


@pytest.fixture(autouse=True, scope="module")
def patient() -> Iterator[None]:
    """Prompts wait for servers as long as it takes to import what they need."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "SERVERS_WAIT", 60.0)
        yield


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def nowhere() -> Iterator[str]:
    """An address on this machine where nobody listens, and nobody else can."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}/v1"
