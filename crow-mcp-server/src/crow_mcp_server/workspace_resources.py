"""The workspace's files as MCP resources, for clients in which the user chooses what the model reads."""

import logging
import mimetypes
import os
from pathlib import Path
from urllib.parse import quote

from anyio import to_thread
from fastmcp import Context, FastMCP
from fastmcp.exceptions import ResourceError
from fastmcp.resources import ResourceContent, ResourceResult, ResourceSecurity

from crow_mcp_server.files import disk
from crow_mcp_server.files.document import decode
from crow_mcp_server.refusal import ToolRefusal
from crow_mcp_server.tool_options import ToolOptions
from crow_mcp_server.workspace import Workspace


def register(server: FastMCP, options: ToolOptions) -> None:
    """Add the resource template to a server."""

    @server.resource(
        "file:///{path*}",
        name="file",
        description="A file of the workspace by its absolute path; for a folder, the URIs of what it contains.",
        security=ResourceSecurity(reject_absolute_paths=False),  # C:/… is one; the workspace bounds all paths
    )
    async def file(path: str, context: Context) -> ResourceResult:
        workspace = await options.find_workspace(context)
        path = path if os.path.splitdrive(path)[0] else f"/{path}"  # a drive of Windows begins the path
        try:
            return ResourceResult([await to_thread.run_sync(read_resource, path, workspace)])
        except (ToolRefusal, OSError) as error:
            raise ResourceError(str(error), log_level=logging.DEBUG) from None


def read_resource(path: str, workspace: Workspace) -> ResourceContent:
    """Return a file as text or bytes, or a folder as a list of URIs. Raises ToolRefusal and OSError."""
    target = disk.resolve_path(path, workspace)
    try:
        content = disk.read_file(target)
    except IsADirectoryError:
        folder = Path(target.path).as_uri().rstrip("/")
        uris = [f"{folder}/{quote(name)}" for name in disk.list_names(target)]
        return ResourceContent("\n".join(uris), "text/uri-list")
    if content is None:
        raise ToolRefusal(f"{target.path} does not exist.")
    kind, _ = mimetypes.guess_type(target.path)
    document = decode(content.data)
    if document is None:
        return ResourceContent(content.data, kind or "application/octet-stream")
    return ResourceContent(document.text, kind or "text/plain")
