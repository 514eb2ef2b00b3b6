"""Runs a program as a container does that forbids namespaces: `python confined.py [--no-landlock] PROGRAM ARGUMENT…`.

A filter of seccomp(2) answers "Operation not permitted" to the calls that make namespaces and mounts. With
`--no-landlock`, it answers so to those of Landlock, too, as an older kernel does.
"""

import ctypes
import os
import platform
import struct
import sys

CALLS = {"x86_64": (56, 435, 272, 165), "aarch64": (220, 435, 97, 40)}
"""For each machine: clone, clone3, unshare and mount."""
CREATE_RULESET = 444
NAMESPACES = 0x7E020080
"""The flags of clone(2) that make namespaces."""
SET_NO_NEW_PRIVILEGES, SET_SECCOMP, FILTER = 38, 22, 2
LOAD, EQUAL, ANY_BIT, GIVE = 0x20, 0x15, 0x45, 0x06  # linux/bpf_common.h
ALLOW, DENIED, UNKNOWN = 0x7FFF0000, 0x50001, 0x50026  # EPERM, ENOSYS


def make_filter(*, has_landlock: bool) -> bytes:
    clone, clone3, unshare, mount = CALLS[platform.machine()]
    refused = [(clone3, UNKNOWN), (unshare, DENIED), (mount, DENIED)]
    refused += [] if has_landlock else [(CREATE_RULESET, UNKNOWN)]
    steps = [(LOAD, 0, 0, 0)]
    for call, answer in refused:
        steps += [(EQUAL, 0, 1, call), (GIVE, 0, 0, answer)]
    steps += [(EQUAL, 0, 3, clone), (LOAD, 0, 0, 16), (ANY_BIT, 0, 1, NAMESPACES), (GIVE, 0, 0, DENIED)]
    return b"".join(struct.pack("HBBI", *step) for step in [*steps, (GIVE, 0, 0, ALLOW)])


def main() -> None:
    arguments = sys.argv[1:]
    has_landlock = arguments[0] != "--no-landlock"
    arguments = arguments if has_landlock else arguments[1:]
    filter = make_filter(has_landlock=has_landlock)
    steps = ctypes.create_string_buffer(filter, len(filter))
    program = ctypes.create_string_buffer(struct.pack("HP", len(filter) // 8, ctypes.addressof(steps)))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in ((SET_NO_NEW_PRIVILEGES, 1, 0), (SET_SECCOMP, FILTER, ctypes.addressof(program))):
        if libc.prctl(*(ctypes.c_ulong(each) for each in (*call, 0, 0))):
            sys.exit(f"The filter cannot be set: {os.strerror(ctypes.get_errno())}.")
    os.execvp(arguments[0], arguments)


if __name__ == "__main__":
    main()
