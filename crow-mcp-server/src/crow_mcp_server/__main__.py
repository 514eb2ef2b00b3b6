"""`crow-mcp-server` and `python -m crow_mcp_server`: the server over standard input and output."""

import argparse
import os
from functools import partial
from importlib.metadata import version
from pathlib import Path

from platformdirs import user_state_dir

from crow_mcp_server.processes import SWITCHES
from crow_mcp_server.workspace import local_workspace


def main() -> None:
    """Serve until the client closes our input."""
    parser = argparse.ArgumentParser(
        prog="crow-mcp-server", description="Tools for an agent as an MCP server over stdio, in your files and shell."
    )
    parser.add_argument(
        "--root",
        metavar="DIR",
        action="append",
        type=os.path.expanduser,
        help="open files only below DIR, and start there; may be given again "
        "(default: the client's roots, or else this folder)",
    )
    parser.add_argument("--allow-outside", action="store_true", help="open files anywhere")
    parser.add_argument("--version", action="version", version=version("crow-mcp-server"))
    given = parser.parse_args()
    roots = [os.path.abspath(root) for root in given.root or ()]
    for root in roots:
        try:
            os.scandir(root).close()
        except OSError as error:
            parser.error(f"--root {root}: {error.strerror}")
    bounds = [*(roots or [os.getcwd()]), "/"] if given.allow_outside else roots
    os.environ.update(SWITCHES)
    from crow_mcp_server.server import create_server  # not at the top: the switches must be set before

    workspace_for = partial(local_workspace, bounds=bounds) if bounds else local_workspace
    server = create_server(workspace_for, state=Path(user_state_dir("crow-mcp-server", appauthor=False), "edits"))
    server.run(transport="stdio", show_banner=False)


if __name__ == "__main__":
    main()
