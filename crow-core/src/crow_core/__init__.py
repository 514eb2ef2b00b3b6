"""The core of crow: an agent between two protocols, ACP outside and MCP inside.

`crow_core.api` lists the public names. It is imported when the first of them is used, so that importing a single module
of the package loads only that module and what it needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from crow_core.version import __version__ as __version__

if TYPE_CHECKING:
    from crow_core.api import *  # noqa: F403 # pyright: ignore[reportWildcardImportFromLibrary]


def __getattr__(name: str) -> object:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module("crow_core.api"), name)
    globals()[name] = value
    return value
