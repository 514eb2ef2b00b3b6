"""The command `crow-acp-tools`, for anyone who writes an ACP agent or client."""

import click

from crow_acp_tools.check.check_command import check
from crow_acp_tools.recording.recording_commands import record, replay


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Check, record and replay any agent that speaks the Agent Client Protocol."""


main.add_command(check)
main.add_command(record)
main.add_command(replay)

if __name__ == "__main__":
    main()
