"""What all tests of crow-compact share."""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
