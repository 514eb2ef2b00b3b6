"""`crow acp`: the agent on standard input and output, for an editor."""

import asyncio
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from crow_agent.settings.config import load_config, load_environment
from crow_agent.settings.discovery import search_models, takes_audio
from crow_agent.settings.home import Home
from crow_agent.settings.login_path import complete_path, lacks_login_path
from crow_core.acp.complete_method import COMPLETE_METHOD
from crow_core.acp.shared_methods import (
    APP_METHOD,
    APP_REQUEST_METHOD,
    BACKGROUND_METHOD,
    REWIND_METHOD,
    REWIND_POINTS_METHOD,
    STEERING_METHOD,
)
from crow_core.acp.transports import stdio
from crow_core.agent.acp_agent import AcpAgent
from crow_core.agent.agent_capabilities import TERMINAL_LOGIN
from crow_core.agent.app_source import Announced, LazyApp, announce
from crow_core.app import Crow
from crow_core.errors import ConfigError, ModelError
from crow_core.models.model_call import Model

from crow_cli.process import find_command, hide_memory, log_to_stderr, run_to_end

METHODS = (
    *(
        "_crow/search",
        STEERING_METHOD,
        APP_METHOD,
        APP_REQUEST_METHOD,
        COMPLETE_METHOD,
        "_crow/usage",
        BACKGROUND_METHOD,
    ),
    *(REWIND_POINTS_METHOD, REWIND_METHOD),
)
"""The methods beyond ACP of crow's own extensions."""


def serve(model: str = "", *, unstable: bool = False) -> None:
    """Serve one client until it disconnects, then exit. With `unstable`, also speak what ACP may still change."""
    log_to_stderr()
    try:
        sys.exit(run_to_end(run_agent(model, unstable)))
    except KeyboardInterrupt:
        sys.exit(130)


async def run_agent(model: str, unstable: bool) -> int:
    source = ConfiguredApp(model)
    try:
        await AcpAgent(await stdio(), source, unstable=unstable).serve()
    finally:
        if source.made:
            await source.made.shut_down()
    return 0


class ConfiguredApp(LazyApp):
    """The app of the configuration, made when the first session needs it, so that `initialize` is answered at once."""

    def __init__(self, model: str) -> None:
        login = (*find_command(sys.argv[0], sys.executable), TERMINAL_LOGIN)
        announced = Announced(stored=True, methods=METHODS, output_schema=True, permission_answers=True, login=login)
        super().__init__(self.build, announced)
        self._model = model
        self._settings: object = None
        """The state of the files with settings when the models were found."""

    async def prepare(self) -> None:
        """Read the settings. If they name an extension that is not crow's own, make the app: it may add methods."""
        try:
            home = Home.find(os.environ)
            config, env = load_config(home, os.environ), load_environment(home, os.environ)
            self.announced = replace(
                self.announced,
                audio=takes_audio(config, env, self._model),
                output_schema=config.extensions.get("structured_output") is not False,
            )
            if config.extensions:
                from crow_agent.app import BUILT_IN  # imported here because most users name no extension

                if config.extensions.keys() - BUILT_IN.keys():
                    self.announced = replace(announce(await self.get()), login=self.announced.login)
        except (ConfigError, ModelError, ValueError, OSError):
            pass  # reported when the first session is opened

    async def build(self, models: Mapping[str, Model] | None = None) -> Crow:
        from crow_agent.app import build  # imported here so that `initialize` is answered without it

        hide_memory()
        if lacks_login_path(os.environ):
            await asyncio.to_thread(complete_path, os.environ, Home.find(os.environ).data)
        self._settings = None if models is not None else stat_settings(Home.find(os.environ))
        return await build(os.environ, model=self._model, models=models)

    async def get(self, models: Mapping[str, Model] | None = None) -> Crow:
        if self.made is not None and models is None and self._settings != stat_settings(Home.find(os.environ)):
            with suppress(ConfigError, ModelError):  # the app goes on with the models that it has
                await self.reload()
        return await super().get(models)

    async def reload(self) -> None:
        if self.made is None:
            return
        home = Home.find(os.environ)
        self._settings = stat_settings(home)
        config, env = load_config(home, os.environ), load_environment(home, os.environ)
        found = await search_models(config, env, self._model)
        self.made.models = found.models


def stat_settings(home: Home) -> object:
    """Return a value that differs when a file that names models or keys has been written."""
    states: list[tuple[int, int] | None] = []
    for name in ("config.toml", ".env"):
        try:
            status = os.stat(home.config / name)
            states.append((status.st_mtime_ns, status.st_size))
        except OSError:
            states.append(None)
    return states
