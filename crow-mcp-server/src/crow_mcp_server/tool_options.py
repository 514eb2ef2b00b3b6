"""What the tools share: whose workspace a call works on, and the words their definitions are made of."""

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
    """The program that a server runs for; every tool is added with it."""

    workspace_for: Callable[[dict[str, Any]], Workspace] = local_workspace
    """Turns the `_meta` of a call into the workspace it works on."""
    hidden_env: Collection[str] = ()
    """Names of environment variables that commands never see."""
    allow_hosts: Collection[str] = ()
    """Hosts, as `HOST` or `HOST:PORT`, that may be fetched from though they are not public."""
    ignore_robots: bool = False
    """Whether `fetch` asks no robots.txt."""
    stay_on_host: bool = False
    """Whether `fetch` follows no redirect to another host: where people are asked about each host."""
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    """Where `web_search` finds its providers' addresses and keys."""
    state: Path | None = None
    """Folder for what shall outlive the process, the way back from edits; None: nothing does."""

    async def find_workspace(self, context: Context) -> Workspace:
        """The workspace that a call works on; where nobody else bounds it, the client's roots do."""
        meta = get_meta(context)
        if self.workspace_for is local_workspace and "crow/roots" not in meta and "crow/cwd" not in meta:
            meta["crow/roots"] = await request_roots(context)
        return self.workspace_for(meta)


def get_meta(context: Context) -> dict[str, Any]:
    """The `_meta` of a call."""
    request = context.request_context
    return dict(request.meta or {}) if request else {}


def is_dry_run(context: Context) -> bool:
    """Whether a call shall only tell what it would do."""
    return bool(get_meta(context).get("crow/dry_run"))


def optional_field(description: str | None = None) -> Any:
    """A parameter that may be left out or null; its schema, shorter for it, tells only what it is when given."""
    return Field(description=description, default_factory=lambda: None)
