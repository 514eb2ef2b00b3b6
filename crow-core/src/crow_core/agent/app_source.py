"""The source of an agent's app: one that exists, or one that is made when the first session needs it."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from crow_core.app import Crow
from crow_core.models.chat_model import ChatModel
from crow_core.models.model_call import Model


@dataclass(frozen=True)
class Announced:
    """Abilities of an app that depend on its models and extensions, as `initialize` announces them."""

    stored: bool = False
    """True if sessions are stored."""
    methods: Sequence[str] = ()
    """The methods beyond ACP that it answers."""
    audio: bool = False
    """True if one of its models takes audio."""
    output_schema: bool = False
    """True if a turn can end with a result that fits a JSON schema."""
    login: Sequence[str] = ()
    """The command line that logs the user in on a terminal; the client adds its last item to its own command line for
    the agent. Empty for none."""
    permission_answers: bool = False
    """True if an answer to a permission question may hold a reason, or another command."""


class AppSource(Protocol):
    """Gives an agent its app, perhaps not before the first session needs it."""

    made: Crow | None
    """The app; None until it is made."""
    announced: Announced
    """The abilities to announce. `stored` must be right from the start, the rest once `prepare` has returned."""

    async def prepare(self) -> None:
        """Make `announced` exact; called before `initialize` is answered, so it should be quick."""
        ...

    async def get(self, models: Mapping[str, Model] | None = None) -> Crow:
        """Return the app, made if need be, with these models in place of the configured ones.

        Raises ModelError if there is no model, ConfigError for a setting that cannot be used.
        """
        ...

    async def reload(self) -> None:
        """Use models that were configured since the app was made, in the sessions that are opened from now on.

        Raises what `get` raises.
        """
        ...


class MadeApp:
    """The source of an app that exists already."""

    def __init__(self, crow: Crow) -> None:
        self.made: Crow | None = crow
        self.announced = announce(crow)
        self._crow = crow

    async def prepare(self) -> None: ...

    async def get(self, models: Mapping[str, Model] | None = None) -> Crow:
        return self._crow

    async def reload(self) -> None: ...


class LazyApp:
    """The source of an app that is made when the first session needs it.

    `make` takes `models`, with models in place of the configured ones.
    """

    def __init__(self, make: Callable[..., Awaitable[Crow]], announced: Announced | None = None) -> None:
        self.made: Crow | None = None
        self.announced = announced or Announced()
        self._make = make

    async def prepare(self) -> None: ...

    async def get(self, models: Mapping[str, Model] | None = None) -> Crow:
        if self.made is None:
            self.made = await (self._make() if models is None else self._make(models=models))
        return self.made

    async def reload(self) -> None: ...


def announce(crow: Crow) -> Announced:
    """Find out what an app has to announce."""
    audio = any(isinstance(model, ChatModel) and model.quirks.audio for model in crow.models.values())
    return Announced(
        crow.store is not None,
        list(crow.methods),
        audio,
        crow.takes_output_schema,
        permission_answers=crow.takes_permission_answers,
    )
