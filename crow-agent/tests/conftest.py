"""Agents of tests: crow's own with a scripted model and a home of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crow_agent import Agent
from crow_core.testing import ScriptedModel


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.fixture
def make_agent(home: Path, tmp_path: Path) -> Callable[..., Agent]:
    """Make an agent whose model plays these replies, or the one that a function makes."""

    def make(*replies: Any, **options: Any) -> Agent:
        model = ScriptedModel(replies[0] if replies and callable(replies[0]) else replies)
        env = {"HOME": str(home), "CROW_HOME": str(home / "crow"), "PATH": "/usr/bin:/bin"}
        agent = Agent(model, **{"env": env, "cwd": tmp_path, **options})
        agent.model = model  # pyright: ignore[reportAttributeAccessIssue]
        return agent

    return make
