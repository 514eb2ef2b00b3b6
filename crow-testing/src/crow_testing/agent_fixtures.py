"""Fixtures of agents: crow's own with a scripted model and a home of its own."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from crow_agent import Agent
from crow_core.testing import ScriptedModel
from sqlalchemy import create_engine, make_url, text

POSTGRES = os.environ.get("CROW_TEST_POSTGRES", "")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.fixture(autouse=True)
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what reads the environment of the process away from the user's files."""
    monkeypatch.setenv("CROW_HOME", str(tmp_path / "home" / "crow"))


@pytest.fixture
def make_agent(home: Path, tmp_path: Path) -> Callable[..., Agent]:
    """Make an agent whose model plays these replies, or the one that a function makes."""

    def make(*replies: Any, **options: Any) -> Agent:
        script: Any = replies[0] if replies and callable(replies[0]) else replies
        model = ScriptedModel(script)
        env = {"HOME": str(home), "CROW_HOME": str(home / "crow"), "PATH": "/usr/bin:/bin"}
        settings: dict[str, Any] = {"env": env, "cwd": tmp_path, **options}
        agent = Agent(model, **settings)
        agent.model = model  # pyright: ignore[reportAttributeAccessIssue]
        return agent

    return make


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield the URL of an empty PostgreSQL database, or "" for a file of SQLite."""
    if request.param == "sqlite":
        yield ""
        return
    if not POSTGRES:
        pytest.skip("No PostgreSQL to test with; CROW_TEST_POSTGRES names one.")
    server = create_engine(POSTGRES, isolation_level="AUTOCOMMIT")
    name = f"crow_{uuid4().hex}"
    with server.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    yield make_url(POSTGRES).set(database=name).render_as_string(hide_password=False)
    with server.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    server.dispose()
