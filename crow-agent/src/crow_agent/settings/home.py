"""The folders of crow's own files."""

import re
from collections.abc import Mapping
from pathlib import Path

from crow_core.errors import ConfigError
from msgspec import Struct

PLUGIN_FOLDERS = (".crow/plugins", ".agents/plugins")
"""Folders of a project, or of the user's home, whose folders are Agent Plugins."""


class Home(Struct, frozen=True):
    """The folders of crow's own files."""

    config: Path
    data: Path

    @classmethod
    def find(cls, env: Mapping[str, str]) -> "Home":
        """Return `$CROW_HOME` for both, else the XDG folders (XDG Base Directory Specification), if absolute.

        Raises ConfigError where none of them is set and the user has no home folder.
        """
        try:
            user = Path(env.get("HOME") or Path.home())
        except RuntimeError as error:
            if not env.get("CROW_HOME"):
                raise ConfigError("crow finds no home folder for its files. Set HOME, or CROW_HOME.") from error
            user = Path(env["CROW_HOME"])

        def get_path(variable: str) -> Path:
            return Path(re.sub("^~(?=/|$)", lambda _: str(user), env.get(variable, "")))

        def get_xdg_path(variable: str, default: str) -> Path:
            return get_path(variable) if get_path(variable).is_absolute() else user / default

        if env.get("CROW_HOME"):
            home = get_path("CROW_HOME").absolute()
            return cls(home, home)
        config = get_xdg_path("XDG_CONFIG_HOME", ".config")
        return cls(config / "crow", get_xdg_path("XDG_DATA_HOME", ".local/share") / "crow")

    def list_plugin_folders(self, env: Mapping[str, str]) -> list[Path]:
        """List the folders that may hold plugins of the user."""
        return [self.config / "plugins", *(Path(env.get("HOME") or Path.home()) / name for name in PLUGIN_FOLDERS)]

    def has_plugins(self, env: Mapping[str, str], project: Path) -> bool:
        """Return whether the user or a project has a folder of plugins. Import `plugins` only then."""
        return any(each.is_dir() for each in [*self.list_plugin_folders(env), *map(project.joinpath, PLUGIN_FOLDERS)])
