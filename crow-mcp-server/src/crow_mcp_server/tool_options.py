"""The options that all tools share, and helpers to read a tool call's `_meta` and to define parameters."""

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastmcp import Context
from mcp_types import ToolAnnotations
from pydantic import Field

from crow_mcp_server.roots import request_roots
from crow_mcp_server.workspace import Workspace, local_workspace

READ_ONLY = ToolAnnotations(read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False)


@dataclass(frozen=True)
class ToolOptions:
    """The options of a server; every tool is registered with them."""

    workspace_for: Callable[[dict[str, Any]], Workspace] = local_workspace
    """Converts the `_meta` of a tool call to its workspace."""
    hidden_env: Collection[str] = ()
    """Names of environment variables that commands never see."""
    allow_hosts: Collection[str] = ()
    """Hosts, as `HOST` or `HOST:PORT`, that `fetch` may reach although they are not public."""
    ignore_robots: bool = False
    """True if `fetch` ignores robots.txt."""
    stay_on_host: bool = False
    """True if `fetch` refuses redirects to another host, for programs that ask the user's permission for each host."""
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    """The variables with the addresses and keys of the providers of `web_search`."""
    state: Path | None = None
    """Folder that keeps the undo history of edits beyond the process; None keeps it in memory only."""

    async def find_workspace(self, context: Context) -> Workspace:
        """Return the workspace of a tool call.

        The client's roots bound it unless the call's `_meta` or `workspace_for` does.
        """
        meta = get_meta(context)
        if self.workspace_for is local_workspace and "crow/roots" not in meta and "crow/cwd" not in meta:
            meta["crow/roots"] = await request_roots(context)
        return self.workspace_for(meta)


def get_meta(context: Context) -> dict[str, Any]:
    """Return a copy of the `_meta` of a tool call."""
    request = context.request_context
    return dict(request.meta or {}) if request else {}


def is_dry_run(context: Context) -> bool:
    """Return whether a tool call shall change nothing and only report what it would do."""
    return bool(get_meta(context).get("crow/dry_run"))


def optional_field(description: str | None = None) -> Any:
    """Return a field for a parameter that may be omitted or null.

    The schema describes only the other values, which keeps it short.
    """
    return Field(description=description, default_factory=lambda: None)
