"""Agents inside Python programs: crow's own in this process, or any other that speaks the Agent Client Protocol.

`crow_agent.api` lists the public names. It is imported when the first of them is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crow_agent.api import *  # noqa: F403 # pyright: ignore[reportWildcardImportFromLibrary]


def __dir__() -> list[str]:
    return [name for name in vars(import_module("crow_agent.api")) if not name.startswith("_")]


def __getattr__(name: str) -> object:
    if name == "__all__":  # for `import *`
        return __dir__()
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module("crow_agent.api"), name)
    globals()[name] = value
    return value
