"""What differs between operating systems: each function has one meaning, and the system chooses its code at import.

`posix` and `windows` have the same names; so have `procfs`, which reads /proc on Linux, and `trees`, which uses psutil
elsewhere. The variable CROW_TEST_SYSTEM makes a test run take here what other systems take: `psutil` instead of /proc,
`threads` instead of pipes that the event loop polls, `paths` instead of folders that are open.
"""

import os
import sys

CHOSEN = os.environ.get("CROW_TEST_SYSTEM", "").split(",")
"""What a test run asks for."""
POLLS_PIPES = sys.platform != "win32" and "threads" not in CHOSEN
"""Whether the event loop can wait for a pipe; else a thread reads it."""
HAS_DESCRIPTORS = sys.platform != "win32" and "paths" not in CHOSEN
"""Whether a folder can be opened, and files be named from there."""
HAS_PROC = sys.platform == "linux" and "psutil" not in CHOSEN
"""Whether /proc tells about processes and their open files."""

if sys.platform == "win32":
    from crow_mcp_server.system.windows import (
        HAS_TERMINALS,
        KILL,
        NEW_GROUP,
        STOP_STATUS,
        find_shell,
        get_process_limit,
        has_group,
        keep_owner,
        limit_memory,
        open_terminal,
        reads_lines,
        set_nonblocking,
        shell_options,
        signal_group,
    )
else:
    from crow_mcp_server.system.posix import (
        HAS_TERMINALS,
        KILL,
        NEW_GROUP,
        STOP_STATUS,
        find_shell,
        get_process_limit,
        has_group,
        keep_owner,
        limit_memory,
        open_terminal,
        reads_lines,
        set_nonblocking,
        shell_options,
        signal_group,
    )

if sys.platform != "win32" and HAS_DESCRIPTORS:
    from crow_mcp_server.system.posix import Folder, walk
else:
    from crow_mcp_server.system.paths import PathFolder as Folder
    from crow_mcp_server.system.paths import walk

if sys.platform == "linux" and "psutil" not in CHOSEN:
    from crow_mcp_server.system.procfs import count_processes, list_members, make_watchdog_command
else:
    from crow_mcp_server.system.trees import count_processes, list_members, make_watchdog_command

__all__ = [
    "CHOSEN",
    "HAS_DESCRIPTORS",
    "HAS_PROC",
    "HAS_TERMINALS",
    "KILL",
    "NEW_GROUP",
    "POLLS_PIPES",
    "STOP_STATUS",
    "Folder",
    "count_processes",
    "find_shell",
    "get_process_limit",
    "has_group",
    "keep_owner",
    "limit_memory",
    "list_members",
    "make_watchdog_command",
    "open_terminal",
    "reads_lines",
    "set_nonblocking",
    "shell_options",
    "signal_group",
    "walk",
]
