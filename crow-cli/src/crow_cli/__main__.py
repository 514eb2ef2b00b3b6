"""The entry point of the command `crow`. `crow acp`, `crow` and `crow --version` start without Click, and so sooner."""

import gc
import logging
import os
import sys
from io import TextIOWrapper


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 130 interrupted."""
    os.environ["PY_KEY_VALUE_DISABLE_BEARTYPE"] = "true"  # FastMCP's token stores are imported faster without checks
    for name in ("client", "mcp"):  # the MCP SDK logs what servers send, with tracebacks
        logging.getLogger(name).setLevel(logging.CRITICAL)
    output: object = sys.stdout
    if isinstance(output, TextIOWrapper) and output.encoding.lower() != "utf-8":
        output.reconfigure(errors="backslashreplace")  # such as code page 437 of a Windows console
    try:
        if sys.argv[1:] in (["acp"], ["acp", "--unstable"]):
            from crow_cli.acp import serve  # not above: an editor waits for this process to answer

            serve(unstable="--unstable" in sys.argv)
        elif not sys.argv[1:] and sys.stdin and sys.stdin.isatty() and sys.stdout.isatty():
            gc.disable()  # until the first frame is shown, which comes a quarter sooner
            from crow_cli.start_chat import chat  # not above: the other commands do not need it

            sys.exit(chat())
        elif sys.argv[1:] == ["--version"]:
            from crow_core import __version__  # and not the commands, which take ten times as long

            sys.stdout.write(f"crow {__version__}\n")
        else:
            from crow_cli.cli import cli

            cli(prog_name="crow")
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if os.environ.get("CROW_DEBUG"):
            raise
        from crow_core.text import to_line  # not above: an editor waits for this process to answer

        reason = to_line(f"{type(error).__name__}: {error}")
        sys.exit(f"crow: {reason}. This is a fault in crow; CROW_DEBUG=1 shows where.")


if __name__ == "__main__":
    main()
