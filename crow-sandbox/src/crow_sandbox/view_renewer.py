"""Run by `lasting.py` in addition to a sandbox: lets the kernel forget the names that it has looked up in views.

The kernel remembers whether a name exists in the folder below a view, whatever happens there. It forgets unused names
when a file system is mounted anew. The arguments are the id of a process in the sandbox and the folders. For each byte
that it reads, it does this once, and writes a byte. It runs no program of the sandbox: it has entered it when all that
it needs is loaded.
"""

import ctypes
import fcntl
import os
import sys

NS_GET_USERNS, CLONE_NEWUSER, CLONE_NEWNS = 0xB701, 0x10000000, 0x20000
FSCONFIG, FSPICK, AT_FDCWD, RECONFIGURE = 431, 433, -100, 7  # linux/mount.h; the numbers are those of all machines


def check(result: int) -> int:
    """Return the result of a call of the system. Raises OSError."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def main() -> None:
    """Enter the namespaces, and wait for bytes."""
    assert sys.platform == "linux"
    pid, *folders = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    mounts = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
    owner = fcntl.ioctl(mounts, NS_GET_USERNS)
    check(libc.setns(owner, CLONE_NEWUSER))
    check(libc.setns(mounts, CLONE_NEWNS))
    while os.read(0, 1):
        for folder in folders:
            view = check(libc.syscall(FSPICK, AT_FDCWD, os.fsencode(folder), 0))
            check(libc.syscall(FSCONFIG, view, RECONFIGURE, None, None, 0))
            os.close(view)
        os.write(1, b"\n")


if __name__ == "__main__":
    main()
