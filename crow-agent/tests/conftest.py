"""Fixtures of the tests."""

from crow_testing.agent_fixtures import home as home
from crow_testing.agent_fixtures import make_agent as make_agent
from crow_testing.agent_fixtures import own_files as own_files
from crow_testing.agent_fixtures import store as store
from crow_testing.fixtures import anyio_backend as anyio_backend
from crow_testing.fixtures import listening as listening
from crow_testing.fixtures import nowhere as nowhere
from crow_testing.fixtures import patience as patience
