"""A file stands in for a prompt of its name."""

from collections.abc import Callable, Mapping
from pathlib import Path

from crow_core.app import Crow
from crow_core.errors import ConfigError
from crow_core.prompts import Prompt
from crow_core.session import Session


def templates(crow: Crow, *, files: Callable[[Session], Mapping[str, Path]]) -> None:
    """Take a session's prompts from `files` (name to path) where it names them: an edited file counts from the next
    session on."""

    @crow.session_start
    def replace(session: Session) -> None:
        for name, path in files(session).items():
            try:
                session.prompts.templates[name] = Prompt.from_file(name, path)
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"The prompt {name!r}: {path} cannot be read: {error}.") from error
