"""Fixtures of the tests."""

from crow_testing.agent_fixtures import home as home
from crow_testing.agent_fixtures import make_agent as make_agent
from crow_testing.agent_fixtures import own_files as own_files
from crow_testing.agent_fixtures import store as store
from crow_testing.command_fixtures import forks as forks
from crow_testing.command_fixtures import machine as machine
from crow_testing.command_fixtures import prefork as prefork
from crow_testing.databases import database as database
from crow_testing.databases import postgres as postgres
from crow_testing.fixtures import anyio_backend as anyio_backend
