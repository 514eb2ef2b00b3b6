"""Landlock: Linux keeps a program from writing outside of some folders, where namespaces are forbidden.

Three system calls do it, which `landlock_launcher.py` makes with ctypes in a process of its own; a package for them
would be one more to install, and would load more. The rules hold for all that the program starts.
"""

import ctypes
import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from crow_sandbox import bubblewrap, hidden
from crow_sandbox.policy import Policy, SandboxError

LAUNCHER = Path(__file__).with_name("landlock_launcher.py")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
"""Devices that a program may write."""
CREATE_RULESET = 444
NETLINK, INTERNET = 16, (2, 10)
"""Families of sockets: questions to the kernel; the network. Sockets of Unix are refused: they lead to services of the
machine, such as docker, and Landlock does not limit them."""
TIMEOUT = 10.0
"""Seconds that a proof may take."""
VERSION_OF_TCP, VERSION_OF_SIGNALS = 4, 6


def read_version() -> int:
    """Return the version of Landlock in this kernel; 0 if there is none."""
    if sys.platform != "linux":
        return 0
    return max(0, ctypes.CDLL(None, use_errno=True).syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1))


def limit(
    policy: Policy, arguments: Sequence[str], env: Mapping[str, str], temporary: Path
) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and the environment that start a program which writes only to its folders.

    `temporary` is an empty folder for its temporary files and its caches; the order for the launcher lies next to it.
    Raises SandboxError if the network cannot be limited.
    """
    filter = bubblewrap.make_filter((*(INTERNET if policy.hosts is None else ()), NETLINK))
    if policy.hosts:
        raise SandboxError("Without namespaces, the network cannot be limited to some hosts.")
    if policy.hosts is not None and not filter and read_version() < VERSION_OF_TCP:
        raise SandboxError(f"The network cannot be closed here: Landlock has version {read_version()}.")
    roots = policy.roots if policy.level == "workspace" else ()
    caches = {"TMPDIR": str(temporary), "XDG_CACHE_HOME": str(temporary / "cache")}
    order = {
        "writable": [*roots, *policy.writable, str(temporary), *DEVICES],
        "network": policy.hosts is None,
        "filter": filter.hex(),
        "env": {**hidden.remove_variables(env, policy.exposed), **caches},
    }
    file = temporary.with_name("order")
    file.touch(mode=0o600)
    file.write_text(json.dumps(order), encoding="utf-8", errors="surrogateescape")
    # The launcher gets no variable of the program, which could make its loader or Python run something else.
    return [sys.executable, "-I", "-S", str(LAUNCHER), str(file), *arguments], {"PATH": os.defpath}


def prove(folder: Path) -> tuple[bool, str]:
    """Find whether Landlock holds here, by a program that tries to write outside its folder; `folder` is empty.

    Return it with a sentence for a person.
    """
    version = read_version()
    if not version:
        return False, "The kernel has no Landlock, or it is switched off."
    root, temporary = folder / "root", folder / "temporary"
    for each in (root, temporary):
        each.mkdir(mode=0o700)
    try:
        wrapped, env = limit(Policy("workspace", (str(root),)), ["/bin/sh", "-c", PROOF, str(folder)], {}, temporary)
        done = subprocess.run(
            wrapped, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired, SandboxError) as error:
        return False, f"Landlock cannot be tried: {error}."
    if (root / "made").exists() and not (folder / "made").exists():
        return True, describe(version)
    return False, f"Landlock does not hold here: {done.stderr.strip() or f'exit status {done.returncode}'}."


PROOF = 'echo > "$0/root/made"; echo > "$0/made"'


@functools.cache
def describe(version: int) -> str:
    """Say what holds with this version of Landlock, and what does not."""
    filtered = bool(bubblewrap.make_filter())
    network = (
        "a program without network opens no sockets"
        if filtered
        else "a program without network makes no TCP connections, but UDP leaves"
        if version >= VERSION_OF_TCP
        else "the network cannot be closed"
    )
    signals = "" if version >= VERSION_OF_SIGNALS else " It can end other programs of the user."
    return (
        f"Programs write only to their folders, by Landlock {version}; {network}. They can read credentials, change "
        "permissions and times of the user's files, and change every file in their folders. /tmp is read-only: TMPDIR "
        f"names their own folder.{signals}"
    )
