"""What a command changed: the upper folder of a layer, as a list of changes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from crow_sandbox.layers import Layer

Kind = Literal["added", "changed", "removed"]


@dataclass(frozen=True)
class LayerChange:
    """One change of a command: of a file, a link, or a folder that is new or gone as a whole."""

    layer: Layer
    path: str
    """The path from the layer's root; bytes that are not UTF-8 as os.fsdecode gives them."""
    kind: Kind
    type: Literal["file", "folder", "link", "other"]
    """What it is afterwards, or was if it is removed. `other` is a device, socket or pipe, which is never applied."""
    files: int = 1
    """For a new folder: the number of files in it, counted up to COUNT_LIMIT."""
    conflicts: bool = False
    """True if somebody else has changed, made or removed the real file since the command started."""
    mode_only: bool = False
    """True if only permissions or times differ."""


def read_changes(layer: Layer) -> Sequence[LayerChange]:
    """List what differs between the root and its layer, in the order of the paths.

    It takes as long as there are changes, whatever the size of the root. A file that the kernel copied up with the
    same bytes and permissions is not listed, nor is a folder for its times alone. A new folder is one change.
    Raises SandboxError for a layer that cannot be read.
    """
    raise NotImplementedError
