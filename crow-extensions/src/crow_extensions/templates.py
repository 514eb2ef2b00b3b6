"""Replace prompts by files of the user."""

from collections.abc import Callable, Mapping
from pathlib import Path

from crow_core.app import Crow
from crow_core.errors import ConfigError
from crow_core.session.prompts import Prompt
from crow_core.session.session import Session


def templates(crow: Crow, *, files: Callable[[Session], Mapping[str, Path]]) -> None:
    """Take the prompts of a session from files.

    `files` is called when a session opens, and returns a path for each prompt to replace, by the prompt's name. Raises
    ConfigError, from the hook, for a file that cannot be read.
    """

    @crow.session_start
    def replace(session: Session) -> None:
        for name, path in files(session).items():
            try:
                session.prompts.templates[name] = Prompt.from_file(name, path)
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"The prompt {name!r}: {path} cannot be read: {error}.") from error
