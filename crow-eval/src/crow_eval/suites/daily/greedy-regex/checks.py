import subprocess
import sys
from pathlib import Path

LINKS = r"""
from strip import find_links

assert find_links("") == []
assert find_links("See [one](http://a).") == [("one", "http://a")]
assert find_links("[one](a) and [two](b), [three](c)") == [("one", "a"), ("two", "b"), ("three", "c")]
assert find_links("[a](b)[c](d)") == [("a", "b"), ("c", "d")]
assert find_links("a [note] and [one](a)") == [("one", "a")], "brackets alone are no link"
assert find_links("[one](a) (see below)") == [("one", "a")]
assert find_links("[one](a)\n[two](b)") == [("one", "a"), ("two", "b")]
assert find_links("[one\ntwo](a) [two](b\nc)") == [], "a link does not go over several lines"
assert find_links("[two words, and more: *so*](path/to%20it?x=1&y=2#z)") == [
    ("two words, and more: *so*", "path/to%20it?x=1&y=2#z")
]
"""

COMMENTS = r"""
from strip import remove_comments

assert remove_comments("a /* b */ c") == "a  c"
assert remove_comments("a /* b */ c /* d */ e") == "a  c  e"
assert remove_comments("a /* b\n * c\n */ d\ne /* f */") == "a  d\ne "
assert remove_comments("/**/a/***/b/* * / **/c") == "abc"
assert remove_comments("x = a * b / c;") == "x = a * b / c;"
assert remove_comments("a /* b /* c */ d */") == "a  d */"
assert remove_comments("a /* no end") == "a /* no end"
"""


def links_are_found(workspace: Path, answer: str) -> None:
    run_code(workspace, LINKS)


def comments_are_removed(workspace: Path, answer: str) -> None:
    run_code(workspace, COMMENTS)


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
