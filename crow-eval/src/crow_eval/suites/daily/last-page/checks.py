import subprocess
import sys
from pathlib import Path

CODE = """
from pages import page, page_count

for size in range(1, 8):
    for count in range(30):
        items = list(range(count))
        number_of_pages = page_count(items, size)
        assert number_of_pages == -(-count // size), (count, size, number_of_pages)
        pages = [page(items, number, size) for number in range(1, number_of_pages + 1)]
        assert [item for one in pages for item in one] == items, (count, size, pages)
        assert all(len(one) == size for one in pages[:-1]), (count, size, pages)
        for number in (0, -1, number_of_pages + 1):
            try:
                page(items, number, size)
            except IndexError:
                continue
            raise AssertionError(f"page {number} of {number_of_pages} does not exist")
assert page("abcde", 2, 3) == "de"
"""


def every_item_is_on_one_page(workspace: Path, answer: str) -> None:
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
