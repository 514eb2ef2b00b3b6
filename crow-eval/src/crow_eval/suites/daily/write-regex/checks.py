import subprocess
import sys
from pathlib import Path

CODE = """
import re
from pathlib import Path

pattern = Path("pattern.txt").read_text("utf-8").removesuffix("\\n")
assert "\\n" not in pattern.replace("\\r", "\\n"), "pattern.txt has several lines"
tags = '''
v0.0.0 v1.4.0 v10.20.30 v0.0.1 v1.0.0-alpha.1 v1.0.0-beta.10 v2.0.0-rc.1 v100.0.9-rc.205 v1.4.0+0a1b2c3
v2.0.0-rc.1+0a1b2c3 v0.1.0-alpha.9+abcdef123456 v1.2.3+1234567890
'''.split()
others = '''
1.4.0 V1.4.0 v1.4 v1.4.0.0 v01.4.0 v1.04.0 v1.4.00 v1.4.0-rc v1.4.0-rc.0 v1.4.0-rc.01 v1.4.0-rc1 v1.4.0-gamma.1
v1.4.0rc.1 v1.4.0-RC.1 v1.4.0-alpha.1-beta.1 v1.4.0+abc v1.4.0+0a1b2c v1.4.0+0a1b2c3d4e5f6 v1.4.0+0A1B2C3
v1.4.0+0a1b2cg v1.4.0+0a1b2c3-rc.1 v1.4.0+ v1.4.0- v v.. v1..0 xv1.4.0 v1.4.0x v1x4x0 v-1.0.0 v1.4.0-rc.1.2
v1.4.0-rcx1 v1.4.0-rc.
'''.split() + ["", " v1.4.0", "v1.4.0 ", "v1.4.0\\n", "v1.4.0\\nv1.4.0"]
for tag in tags:
    assert re.fullmatch(pattern, tag), f"{tag} is a tag"
for other in others:
    assert not re.fullmatch(pattern, other), f"{other!r} is not a tag"
"""


def pattern_matches_tags_only(workspace: Path, answer: str) -> None:
    run_code(workspace, CODE)


def run_code(workspace: Path, code: str) -> None:
    """Run code in the workspace, in a process of its own; raise AssertionError unless it reaches its end."""
    command = [sys.executable, "-BS", "-c", code + "\nprint('reached the end')"]
    try:
        done = subprocess.run(
            command, cwd=workspace, capture_output=True, encoding="utf-8", errors="replace", timeout=60
        )
    except subprocess.TimeoutExpired:
        raise AssertionError("the code did not end within 60 seconds") from None
    assert done.stdout.endswith("reached the end\n"), done.stderr[-2000:]
