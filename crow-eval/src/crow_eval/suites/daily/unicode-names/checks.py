import os
import subprocess
import sys
from pathlib import Path

CODE = r"""
import tempfile
from pathlib import Path
from people import find, load

path = Path(tempfile.mkdtemp()) / "names.txt"
for content, names in (
    (b"Ann\nBob\n", ["Ann", "Bob"]),
    (b"\xef\xbb\xbfAnn\r\nJos\xc3\xa9\r\n\r\n", ["Ann", "Jos\u00e9"]),
    ("Zo\u00eb Stra\u00dfer\n\n \u0141ukasz \n".encode(), ["Zo\u00eb Stra\u00dfer", "\u0141ukasz"]),
    ("Jose\u0301\n".encode(), ["Jose\u0301"]),
):
    path.write_bytes(content)
    found = load(path)
    assert found == names, ascii(found)
    assert find(found, names[0][:2]) == names[:1], ascii(found)
path.unlink()
path.parent.rmdir()
"""

NAMES = r"""
from people import find

sisyphos = "\u03a3\u03af\u03c3\u03c5\u03c6\u03bf\u03c2"
names = ["Ann Stra\u00dfer", "Bob STRASSER", "Jos\u00e9", "Jose\u0301 Luis", "Joseph", "Zo\u00eb", sisyphos]


def check(query, *wanted):
    found = find(names, query)
    assert found == list(wanted), (ascii(query), ascii(found))


check("STRASSER", names[0], names[1])
check("stra\u00dfer", names[0], names[1])
check("jos\u00e9", names[2], names[3])
check("JOSE\u0301", names[2], names[3])
check("Jos", names[2], names[3], names[4])
check("luis", names[3])
check("\u03c3\u03af\u03c3\u03c5\u03c6\u03bf\u03c3", names[6])
check("\u03a3\u0399\u0301\u03a3\u03a5\u03a6\u039f\u03a3", names[6])
check("zoe")
check("", *names)
check("ph", names[4])
"""


def file_is_read_everywhere(workspace: Path, answer: str) -> None:
    """Read files where ASCII is the encoding of the machine."""
    run_code(workspace, CODE, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")


def names_are_found(workspace: Path, answer: str) -> None:
    run_code(workspace, NAMES)


def run_code(workspace: Path, code: str, **variables: str) -> None:
    """Run code in the workspace, in a process of its own, with more environment variables; raise AssertionError
    unless it reaches its end."""
    command = [sys.executable, "-BS", "-c", code + "\nprint('reached the end')"]
    try:
        env = os.environ | variables
        done = subprocess.run(
            command, cwd=workspace, env=env, capture_output=True, encoding="utf-8", errors="replace", timeout=60
        )
    except subprocess.TimeoutExpired:
        raise AssertionError("the code did not end within 60 seconds") from None
    assert done.stdout.endswith("reached the end\n"), done.stderr[-2000:]
