"""The command `crow-mcp-server`, also `python -m crow_mcp_server`: serve over standard input and output, or HTTP."""

import argparse
import os
from functools import partial
from importlib.metadata import version
from pathlib import Path

from platformdirs import user_state_dir

from crow_mcp_server import tools
from crow_mcp_server.terminal.processes import SERVER_ENVIRONMENT
from crow_mcp_server.workspace import local_workspace


def main() -> None:
    """Parse the command line and serve until the client closes standard input or the process is told to end."""
    known = [tool["name"] for tool in tools()]
    parser = argparse.ArgumentParser(
        prog="crow-mcp-server",
        description=f"Tools for an agent, as an MCP server over standard input and output: {', '.join(known)}.",
    )
    parser.add_argument(
        "--root",
        metavar="DIR",
        action="append",
        default=[],
        type=os.path.expanduser,
        help="open files only below DIR, and start there; may be given again "
        "(default: the client's roots, or else this folder)",
    )
    parser.add_argument("--allow-outside", action="store_true", help="open files anywhere")
    parser.add_argument(
        "--skills",
        metavar="DIR",
        action="append",
        default=[],
        type=os.path.expanduser,
        help="serve the skills in DIR, each a folder with a SKILL.md, to clients with the skills extension of MCP; "
        "may be given again",
    )
    parser.add_argument("--tools", metavar="A,B", help="offer only these tools")
    parser.add_argument(
        "--allow-host",
        metavar="HOST[:PORT]",
        action="append",
        default=[],
        help="let fetch reach this host, such as localhost:8000, although it is not public; may be given again",
    )
    parser.add_argument("--ignore-robots-txt", action="store_true", help="let fetch ignore robots.txt")
    parser.add_argument(
        "--http", metavar="HOST:PORT", help="serve over HTTP instead, to clients with the token (HOST: 127.0.0.1)"
    )
    parser.add_argument(
        "--token-file", metavar="FILE", help="file with the token (default: a new token, printed on standard error)"
    )
    parser.add_argument("--version", action="version", version=version("crow-mcp-server"))
    options = parser.parse_args()
    only = options.tools.split(",") if options.tools else None
    if unknown := set(only or ()) - set(known):
        parser.error(f"--tools {','.join(sorted(unknown))}: no such tool; there are {', '.join(known)}")
    if options.token_file and not options.http:
        parser.error("--token-file is for --http; over standard input and output nobody else can connect")
    roots = [os.path.abspath(root) for root in options.root]
    skills = [os.path.abspath(folder) for folder in options.skills]
    for option, folder in [*(("--root", each) for each in roots), *(("--skills", each) for each in skills)]:
        try:
            os.scandir(folder).close()
        except OSError as error:
            parser.error(f"{option} {folder}: {error.strerror}")
    bounds = [*(roots or [os.getcwd()]), "/"] if options.allow_outside else roots
    os.environ.update(SERVER_ENVIRONMENT)
    from crow_mcp_server.server import create_server  # not at the top: FastMCP reads the variables

    workspace_for = partial(local_workspace, bounds=bounds) if bounds else local_workspace
    server = create_server(
        workspace_for,
        only=only,
        allow_hosts=options.allow_host,
        ignore_robots=options.ignore_robots_txt,
        state=Path(user_state_dir("crow-mcp-server", appauthor=False), "edits"),
        skills=[Path(folder) for folder in skills],
    )
    if not options.http:
        try:
            server.run(transport="stdio", show_banner=False)
        except* ConnectionError:  # the client has died
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else the flush at exit fails
        return
    from crow_mcp_server.http import load_token, open_listener, serve  # not at the top: as above

    try:
        token = load_token(options.token_file)
    except (OSError, ValueError) as error:
        parser.error(f"--token-file {options.token_file}: {error.strerror if isinstance(error, OSError) else error}")
    try:
        listener = open_listener(options.http)
    except (OSError, ValueError) as error:
        parser.error(f"--http {options.http}: {error.strerror if isinstance(error, OSError) else error}")
    serve(server, listener, token)


if __name__ == "__main__":
    main()
