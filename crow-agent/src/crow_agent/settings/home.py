"""The folders of crow's own files."""

import re
from collections.abc import Mapping
from pathlib import Path

from crow_core.errors import ConfigError
from msgspec import Struct


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
