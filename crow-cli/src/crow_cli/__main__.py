"""The door of the command `crow`. An editor's `crow acp` goes straight through; all else is Click's."""

import os
import sys


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 130 interrupted."""
    try:
        if sys.argv[1:] in (["acp"], ["acp", "--unstable"]):
            from crow_cli.acp import serve  # not above: an editor waits for this process to answer

            serve(unstable="--unstable" in sys.argv)
        else:
            from crow_cli.commands import cli

            cli(prog_name="crow")
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if os.environ.get("CROW_DEBUG"):
            raise
        sys.exit(f"crow: {type(error).__name__}: {error}. This is a fault in crow; CROW_DEBUG=1 shows where.")


if __name__ == "__main__":
    main()
