"""What all tests of crow-compact share."""

import pytest
from crow_core import app


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may be busy: the first prompt waits until the servers are up."""
    monkeypatch.setattr(app, "SERVERS_WAIT", 60)
