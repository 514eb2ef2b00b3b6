"""Fixtures of the tests."""

from crow_testing.fixtures import anyio_backend as anyio_backend
from crow_testing.fixtures import listening as listening
from crow_testing.fixtures import nowhere as nowhere
from crow_testing.fixtures import patience as patience
