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
from crow_core.settings.config import Home, load_config, load_environment
from crow_core.settings.discovery import takes_audio as any_takes_audio

from crow_cli.ending import complete

METHODS = ("_crow/search", "_crow/usage", "_crow/undo")
"""What the app will answer beyond ACP, said before it is made."""


def serve(model: str = "", *, unstable: bool = False) -> None:
    """Serve one client until it hangs up; `unstable` also speaks what ACP may still change."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="crow: %(message)s")
    try:
        sys.exit(complete(talk(model, unstable)))
    except KeyboardInterrupt:
        sys.exit(130)


async def talk(model: str, unstable: bool) -> int:
    audio = takes_audio(model)
    agent = Agent(await stdio(), maker(model), stored=True, unstable=unstable, methods=METHODS, audio=audio)
    try:
        await agent.serve()
    finally:
        if isinstance(agent.source, Crow):
            await agent.source.shut_down()
    return 0


def takes_audio(model: str) -> bool:
    """Whether a prompt may hold audio. Settings that cannot be used are complained of when they are needed."""
    try:
        home = Home.find(os.environ)
        return any_takes_audio(load_config(home, os.environ), load_environment(home, os.environ), model)
    except (ConfigError, ValueError, OSError):
        return False


def maker(model: str) -> Callable[..., Awaitable[Crow]]:
    """What makes the app when the first session asks for it: by then the client has its answer to `initialize`."""

    async def make(models: Mapping[str, Model] | None = None) -> Crow:
        from crow_cli.house import build  # not above, for the reason just given

        return await build(os.environ, model=model, models=models)

    return make
