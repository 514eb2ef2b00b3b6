"""The state of a process that is not a child of the test."""

from pathlib import Path


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not. It may end, and be reaped, while its state is read."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
