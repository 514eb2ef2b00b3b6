"""The scenes of the terminal look as stored."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "gallery.py"


@pytest.mark.slow
@pytest.mark.posix("it opens a pseudo-terminal")
@pytest.mark.parametrize("size", ["80x24", "100x30", "40x20", "160x45"])
def test_scenes_of_the_terminal_are_those_of_the_gallery(size: str):
    done = subprocess.run([sys.executable, SCRIPT, size, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (
        f"{done.stdout}{done.stderr}\nIf it should be so: just gallery, and look at the pictures."
    )
