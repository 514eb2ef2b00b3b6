"""What differs between operating systems: each function has one meaning, and the system chooses its code at import.

`posix` and `windows` have the same names; so have `procfs`, which reads /proc on Linux, and `trees`, which uses psutil
elsewhere. The variable CROW_TEST_SYSTEM makes a test run take here what other systems take: `psutil` instead of /proc,
`threads` instead of pipes that the event loop polls.
"""

import os
import sys

from crow_system.held import replace_file

if sys.platform == "win32":
    from crow_system.windows import (
        BINARY,
        END_SIGNALS,
        NEW_GROUP,
        NO_LINKS,
        NO_TERMINAL,
        NO_WAIT,
        create_locked,
        end_group,
        find_login_shell,
        find_program,
        get_groups,
        get_mode,
        get_user,
        join_command,
        keep_owner,
        kill_group,
        lock,
        lock_byte,
        make_shell_command,
        make_terminal_command,
        make_user_command,
        on_signal,
        open_folder_lock,
        open_terminal,
        read_start,
        restore_blocking,
        set_mode,
        split_command,
        stop_signal,
        sync_folder,
        unlock_byte,
        write_start,
    )
else:
    from crow_system.posix import (
        BINARY,
        END_SIGNALS,
        NEW_GROUP,
        NO_LINKS,
        NO_TERMINAL,
        NO_WAIT,
        create_locked,
        end_group,
        find_login_shell,
        find_program,
        get_groups,
        get_mode,
        get_user,
        join_command,
        keep_owner,
        kill_group,
        lock,
        lock_byte,
        make_shell_command,
        make_terminal_command,
        make_user_command,
        on_signal,
        open_folder_lock,
        open_terminal,
        read_start,
        restore_blocking,
        set_mode,
        split_command,
        stop_signal,
        sync_folder,
        unlock_byte,
        write_start,
    )

CHOSEN = os.environ.get("CROW_TEST_SYSTEM", "").split(",")
"""What a test run asks for."""
POLLS_PIPES = sys.platform != "win32" and "threads" not in CHOSEN
"""Whether the event loop can wait for pipes and terminals; else threads read and write them."""
WINDOWS = sys.platform == "win32"
HAS_CHANGE_TIMES = sys.platform != "win32"
"""Whether `st_ctime` of a file is the time of its last change, which no program can set. On Windows, `st_ctime` is the
time of its creation."""
IGNORES_CASE = sys.platform in ("win32", "darwin")
"""Whether two spellings of a path that differ in case usually name one file."""

if sys.platform == "linux" and "psutil" not in CHOSEN:
    from crow_system.procfs import (
        find_descendants,
        has_variable,
        kill_all,
        make_child_setup,
        make_sweep_command,
        read_name,
        read_parent,
        read_start_time,
    )
else:
    from crow_system.trees import (
        find_descendants,
        has_variable,
        kill_all,
        make_child_setup,
        make_sweep_command,
        read_name,
        read_parent,
        read_start_time,
    )

__all__ = [
    "BINARY",
    "CHOSEN",
    "END_SIGNALS",
    "HAS_CHANGE_TIMES",
    "IGNORES_CASE",
    "NEW_GROUP",
    "NO_LINKS",
    "NO_TERMINAL",
    "NO_WAIT",
    "POLLS_PIPES",
    "WINDOWS",
    "create_locked",
    "end_group",
    "find_descendants",
    "find_login_shell",
    "find_program",
    "get_groups",
    "get_mode",
    "get_user",
    "has_variable",
    "join_command",
    "keep_owner",
    "kill_all",
    "kill_group",
    "lock",
    "lock_byte",
    "make_child_setup",
    "make_shell_command",
    "make_sweep_command",
    "make_terminal_command",
    "make_user_command",
    "on_signal",
    "open_folder_lock",
    "open_terminal",
    "read_name",
    "read_parent",
    "read_start",
    "read_start_time",
    "replace_file",
    "restore_blocking",
    "set_mode",
    "split_command",
    "stop_signal",
    "sync_folder",
    "unlock_byte",
    "write_start",
]
