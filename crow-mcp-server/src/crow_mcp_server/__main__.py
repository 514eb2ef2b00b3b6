"""`crow-mcp-server` and `python -m crow_mcp_server`: the server over standard input and output."""

import argparse
import os
from importlib.metadata import version

from crow_mcp_server.processes import SWITCHES


def main() -> None:
    """Serve until the client closes our input."""
    parser = argparse.ArgumentParser(
        prog="crow-mcp-server", description="The tools file_editor and terminal as an MCP server over stdio."
    )
    parser.add_argument("--root", metavar="DIR", help="work in DIR, and open files only there (default: this folder)")
    parser.add_argument("--version", action="version", version=version("crow-mcp-server"))
    root = parser.parse_args().root
    if root:
        try:
            os.chdir(os.path.expanduser(root))
        except OSError as error:
            parser.error(f"--root {root}: {error.strerror}")
    os.environ.update(SWITCHES)
    from crow_mcp_server.server import create_server  # not at the top: the switches must be set before

    create_server().run(transport="stdio", show_banner=False)


if __name__ == "__main__":
    main()
