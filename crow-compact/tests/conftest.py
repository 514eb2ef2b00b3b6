"""Fixtures for all tests of crow-compact."""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
