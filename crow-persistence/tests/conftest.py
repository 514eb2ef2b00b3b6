"""What all tests of crow-core share."""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
