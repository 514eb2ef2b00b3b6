"""What all tests of crow-skills share."""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
