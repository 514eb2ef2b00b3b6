"""`crow acp`: the agent on standard input and output, for an editor."""

import logging
import os
import sys
from collections.abc import Awaitable, Callable, Mapping

from crow_core.acp.transports import stdio
from crow_core.agent import Agent
from crow_core.app import Crow
from crow_core.errors import ConfigError
from crow_core.models.chat import Model
from crow_core.settings.config import Home, load, variables
from crow_core.settings.discovery import takes_audio as any_takes_audio

from crow_cli.process import run_to_end

METHODS = ("_crow/search", "_crow/usage", "_crow/undo")
"""The methods beyond ACP that the app answers. They are announced before the app is made."""


def serve(model: str = "", *, unstable: bool = False) -> None:
    """Serve one client until it disconnects, then exit. With `unstable`, also speak what ACP may still change."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="crow: %(message)s")
    try:
        sys.exit(run_to_end(run_agent(model, unstable)))
    except KeyboardInterrupt:
        sys.exit(130)


async def run_agent(model: str, unstable: bool) -> int:
    audio = announces_audio(model)
    agent = Agent(await stdio(), make_source(model), stored=True, unstable=unstable, methods=METHODS, audio=audio)
    try:
        await agent.serve()
    finally:
        if isinstance(agent.source, Crow):
            await agent.source.shut_down()
    return 0


def announces_audio(model: str) -> bool:
    """Tell whether a configured model takes audio. Return False for settings that cannot be used: the first session
    reports them."""
    try:
        home = Home.find(os.environ)
        return any_takes_audio(load(home, os.environ), variables(home, os.environ), model)
    except (ConfigError, ValueError, OSError):
        return False


def make_source(model: str) -> Callable[..., Awaitable[Crow]]:
    """Return the function that makes the app when the first session needs it, after `initialize` was answered."""

    async def make(models: Mapping[str, Model] | None = None) -> Crow:
        from crow_cli.app import build  # imported here so that `initialize` is answered without it

        return await build(os.environ, model=model, models=models)

    return make
