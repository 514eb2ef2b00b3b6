"""What all tests of crow-core share."""

import pytest
from crow_core import app, toolbox


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may be slow: what is not about waiting waits until the servers are up."""
    monkeypatch.setattr(app, "SERVERS_WAIT", 200)
    monkeypatch.setattr(toolbox, "CHANGES_WAIT", 200)
