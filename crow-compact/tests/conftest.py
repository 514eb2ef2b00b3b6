"""Fixtures for all tests of crow-compact."""

import pytest
from crow_core import app


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def servers_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first prompt wait until all servers are up, also on a busy machine."""
    monkeypatch.setattr(app, "SERVERS_WAIT", 60)
