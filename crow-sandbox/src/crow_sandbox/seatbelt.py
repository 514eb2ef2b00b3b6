"""Seatbelt: macOS limits a program by a profile, which `sandbox-exec` applies.

The profile was never tried on macOS: the tests compare it as text.
"""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from crow_sandbox import hidden
from crow_sandbox.policy import Policy, SandboxError

PROGRAM = "/usr/bin/sandbox-exec"

SERVICES = (
    "com.apple.bsd.dirhelper", "com.apple.logd", "com.apple.system.logger", "com.apple.system.notification_center",
    "com.apple.system.opendirectoryd.libinfo", "com.apple.system.opendirectoryd.membership",
    "com.apple.trustd.agent", "com.apple.SystemConfiguration.configd",
)  # fmt: skip
"""Services that ordinary programs ask: users, names of folders, logs, certificates. Not among them are those that start
programs or send events to them, and the keychain."""
NAMES = "/private/var/run/mDNSResponder"
"""The socket of the service that resolves names of hosts."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/dtracehelper")

BASE = """\
(version 1)
(deny default)
(allow process-exec)
(allow process-fork)
(allow process-info* (target same-sandbox))
(allow signal (target same-sandbox))
(allow sysctl-read)
(allow ipc-posix-sem)
(allow pseudo-tty)
(allow system-socket)
(allow file-read*)
(allow file-ioctl (subpath "/dev"))
"""


def make_profile(policy: Policy, hidden_paths: Iterable[str], temporary: str) -> str:
    """Return the profile of a policy, in which a later rule counts more than an earlier one."""
    roots = policy.roots if policy.level == "workspace" else ()
    lines = [f"(allow mach-lookup{''.join(f' (global-name {quote(name)})' for name in SERVICES)})"]
    lines += [f"(deny file-read* (subpath {quote(path)}))" for path in hidden_paths]
    lines += [f"(allow file-read* (subpath {quote(path)}))" for path in (*policy.roots, *policy.writable, temporary)]
    lines += [f"(deny file-read* (subpath {quote(path)}))" for path in policy.hidden]
    lines += [f"(allow file-write* (subpath {quote(path)}))" for path in (*roots, *policy.writable, temporary)]
    lines += [f"(allow file-write* (literal {quote(path)}))" for path in DEVICES]
    if policy.hosts is None:
        lines += ['(allow network* (local ip "*:*"))', '(allow network-outbound (remote ip "*:*"))']
        lines += [f"(allow network-outbound (literal {quote(NAMES)}))"]
    return BASE + "\n".join(lines) + "\n"


def quote(text: str) -> str:
    """Write a text as a string of a profile. Raises SandboxError for one with a line break, which it cannot hold."""
    if not text.isprintable():
        raise SandboxError(f"A profile of the sandbox cannot name the path {text!r}.")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def limit(
    policy: Policy, arguments: Sequence[str], env: Mapping[str, str], temporary: Path
) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and the environment that start a program by a profile. Raises SandboxError."""
    if policy.hosts:
        raise SandboxError("On macOS, the network cannot be limited to some hosts.")
    around = hidden.find_surroundings(env, (), policy.exposed, policy.roots)
    profile = make_profile(policy, (*around.hidden, *around.texts), os.path.realpath(temporary))
    variables = hidden.remove_variables(env, policy.exposed)
    return [PROGRAM, "-p", profile, *arguments], {**variables, "TMPDIR": str(temporary)}


def prove() -> tuple[bool, str]:
    """Find whether this is macOS with its program; return it with a sentence for a person."""
    if sys.platform != "darwin" or not os.access(PROGRAM, os.X_OK):
        return False, "There is a sandbox only on Linux and macOS."
    return True, f"Programs write only to their folders, by {PROGRAM}. This was not tested on macOS."
