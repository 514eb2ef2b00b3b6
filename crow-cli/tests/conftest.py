"""Fixtures of the tests."""

from crow_testing.command_fixtures import forks as forks
from crow_testing.command_fixtures import machine as machine
from crow_testing.command_fixtures import no_local_model as no_local_model
from crow_testing.command_fixtures import open_pipe as open_pipe
from crow_testing.command_fixtures import prefork as prefork
from crow_testing.command_fixtures import prepared as prepared
from crow_testing.command_fixtures import terminal as terminal
from crow_testing.databases import postgres as postgres
from crow_testing.fixtures import anyio_backend as anyio_backend
