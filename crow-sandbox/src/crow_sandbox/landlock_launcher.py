"""Runs a program that writes only to some folders: `python -I -S landlock_launcher.py ORDER PROGRAM ARGUMENT…`.

ORDER is a file of JSON with what `landlock.py` writes into it. This program imports nothing of crow, as it starts
without packages; the system's C library makes the calls.
"""

import ctypes
import json
import os
import struct
import sys

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""The system calls of Landlock, with the same number on every machine (landlock(7))."""
SET_SECCOMP, DROP_BOUNDING, SET_NO_NEW_PRIVILEGES, AMBIENT, CLEAR_ALL = 22, 24, 38, 47, 4
"""The calls of prctl(2)."""
FILTER = 2
CAPABILITIES = 64
"""More than there are."""
PATH_BENEATH = 1

WRITES = (0x1FF2, 0x3FF2, 0x7FF2, 0x7FF2, 0xFFF2)
"""The rights to write that each version of Landlock knows, the last one all later ones. They are writing and removing
files, making each kind of file, then moving between folders, truncating, and requests to devices."""
OF_FILES = 0xC002
"""Those of them that a rule about a file may give: writing, truncating, requests."""
TCP = 0x3
"""Binding and connecting, from version 4 on."""
SCOPES = 0x3
"""Abstract sockets and signals outside, from version 6 on."""

libc = ctypes.CDLL(None, use_errno=True)


def call(number: int, *arguments: object) -> int:
    """Make a system call. Raises OSError."""
    done: int = libc.syscall(number, *arguments)
    if done < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return done


def control(*arguments: int) -> None:
    """Call prctl(2). Raises OSError."""
    if libc.prctl(*(ctypes.c_ulong(each) for each in arguments)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def restrict(writable: list[str], *, has_network: bool, filter: bytes) -> None:
    """Limit this process, and all that it starts, for good. Raises OSError."""
    version = call(CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    writes = WRITES[min(version, len(WRITES)) - 1]
    fields = [writes]
    if version >= 4:
        fields.append(0 if has_network else TCP)
    if version >= 6:
        fields.append(SCOPES)
    rules = struct.pack(f"{len(fields)}Q", *fields)
    ruleset = call(CREATE_RULESET, rules, ctypes.c_size_t(len(rules)), 0)
    for path in writable:
        allow(ruleset, path, writes)
    for capability in range(CAPABILITIES):
        libc.prctl(DROP_BOUNDING, capability, 0, 0, 0)  # fails for another user than root, who has none
    libc.prctl(AMBIENT, CLEAR_ALL, 0, 0, 0)
    control(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    call(RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    if filter:
        steps = ctypes.create_string_buffer(filter, len(filter))
        program = ctypes.create_string_buffer(struct.pack("HP", len(filter) // 8, ctypes.addressof(steps)))
        control(SET_SECCOMP, FILTER, ctypes.addressof(program), 0, 0)


def allow(ruleset: int, path: str, writes: int) -> None:
    """Allow writing to a file or in a folder; one that is not there is left out."""
    assert sys.platform == "linux"
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    rights = writes if os.path.isdir(path) else writes & OF_FILES
    call(ADD_RULE, ruleset, PATH_BENEATH, struct.pack("=Qi", rights, place), 0)
    os.close(place)


def main() -> None:
    with open(sys.argv[1], encoding="utf-8", errors="surrogateescape") as file:
        order = json.load(file)
    os.unlink(sys.argv[1])
    try:
        restrict(order["writable"], has_network=order["network"], filter=bytes.fromhex(order["filter"]))
    except OSError as error:
        sys.exit(f"Landlock cannot limit this program: {error.strerror}.")
    arguments, env = sys.argv[2:], order["env"]
    try:
        os.execvpe(arguments[0], arguments, env)
    except OSError as error:
        sys.exit(f"{arguments[0]} cannot be started: {error.strerror}.")


if __name__ == "__main__":
    main()
