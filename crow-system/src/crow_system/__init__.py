"""Differences between operating systems: each function has one meaning, and the system chooses its code at import.

`posix` and `windows` have the same names; so have `procfs`, which reads /proc on Linux, and `trees`, which uses psutil
elsewhere. With the variable CROW_TEST_SYSTEM, a test run uses the ways of other systems. `psutil` replaces /proc,
`threads` pipes that the event loop polls, `paths` open folders.
"""

# pyright: reportWildcardImportFromLibrary=false

import os
import sys

from crow_system.held import replace_file as replace_file

if sys.platform == "win32":
    from crow_system.windows import *  # noqa: F403  # every name of theirs is one of `posix`, too
else:
    from crow_system.posix import *  # noqa: F403

CHOSEN = os.environ.get("CROW_TEST_SYSTEM", "").split(",")
"""The ways that a test run asks for."""
POLLS_PIPES = sys.platform != "win32" and "threads" not in CHOSEN
"""True if the event loop can wait for pipes and terminals; else threads read and write them."""
HAS_DESCRIPTORS = sys.platform != "win32" and "paths" not in CHOSEN
"""True if a folder can be opened, and files be named from there."""
WINDOWS = sys.platform == "win32"
HAS_CHANGE_TIMES = sys.platform != "win32"
"""True if `st_ctime` of a file is the time of its last change, which no program can set. On Windows, `st_ctime` is the
time of its creation."""
IGNORES_CASE = sys.platform in ("win32", "darwin")
"""True if two spellings of a path that differ in case usually name one file."""
HAS_PROC = sys.platform == "linux" and "psutil" not in CHOSEN
"""True if /proc tells about processes and their open files."""

if sys.platform != "win32" and HAS_DESCRIPTORS:
    from crow_system.posix import Folder as Folder
    from crow_system.posix import walk as walk
else:
    from crow_system.paths import Folder as Folder
    from crow_system.paths import walk as walk

if sys.platform == "linux" and HAS_PROC:
    from crow_system.procfs import *  # noqa: F403
else:
    from crow_system.trees import *  # noqa: F403
