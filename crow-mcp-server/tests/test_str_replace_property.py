"""In a file with any bytes, an edit makes exactly the requested change or none."""

import asyncio
import codecs
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from crow_mcp_server import create_server
from fastmcp import Client
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.timeout(300)

MARKS = ["", "utf-8-sig", "utf-16-le", "utf-16-be"]
PIECES = st.sampled_from(["a", "b", "ab", "é", "日", "\n", "\r\n", "\r", " ", "\t", "\x0c", "\u2028", "\0", "x = 1"])
TEXTS = st.lists(PIECES, max_size=12).map("".join)
NEEDLES = st.lists(PIECES, min_size=1, max_size=4).map("".join)


def encode(text: str, mark: str) -> bytes:
    prefix = {"utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE}.get(mark, b"")
    return prefix + text.encode(mark or "utf-8")


FILES = st.one_of(st.binary(max_size=60), st.builds(encode, TEXTS, st.sampled_from(MARKS)))


def to_line_feeds(text: str) -> str:
    return text.replace("\r\n", "\n")


@pytest.fixture
def edit() -> Iterator[Callable[..., Any]]:
    """`file_editor` on one server for all examples."""
    client = Client(create_server())
    with asyncio.Runner() as runner:
        runner.run(client.__aenter__())

        def call(path: Path, **arguments: Any) -> Any:
            meta = {"crow/session": path.name, "crow/cwd": str(path.parent)}
            given = {"command": "str_replace", "path": str(path)} | arguments
            return runner.run(client.call_tool_mcp("file_editor", given, meta=meta))

        yield call
        runner.run(client.__aexit__(None, None, None))


def differ_only_in_white_space(one: str, other: str) -> bool:
    """Return whether two texts differ only in white space."""
    return one.split() == other.split()


def check_replaced(before: str, after: str, old: str, new: str, *, tolerant: bool) -> None:
    """Check that the only occurrence of `old` was replaced by `new`, and that nothing else changed."""
    flat, needle = to_line_feeds(before), to_line_feeds(old)
    exact = sum(flat.startswith(needle, at) for at in range(len(flat)))
    assert exact == (0 if tolerant else 1)
    fits = differ_only_in_white_space if tolerant else str.__eq__
    spellings = {to_line_feeds(new), to_line_feeds(new).replace("\n", "\r\n")}
    places = [
        (start, end)
        for start in range(len(before) + 1)
        for end in range(start, len(before) + 1)
        if fits(to_line_feeds(before[start:end]), needle)
    ]
    assert any(
        after.startswith(before[:start])
        and after.endswith(before[end:])
        and (
            (there := after[start : len(after) - len(before) + end]) in spellings
            or (tolerant and differ_only_in_white_space(there, new))
        )
        for start, end in places
        if len(after) - len(before) + end >= start
    )


@given(data=FILES, old=NEEDLES, new=TEXTS)
@example(data=b"a\r\nb\r\nc", old="b\n", new="x\ny\n")
@example(data=b"a\nb", old="a\nb", new="")
@example(data=b"\xff\xfea\0", old="a", new="b")
@example(data=b"b", old="b", new="\r\r\n")
@example(data=b"caf\xe9", old="caf", new="\u65e5")
@example(data="Привет, мир!\n".encode("cp1251"), old="мир", new="друг")
@example(data="你好，世界\n".encode("gb18030"), old="世界", new="é")
@example(data=b"x\n\ta\r\n\tb", old=" a\n b\n", new=" ab\n")
@settings(
    max_examples=3 * settings.default.max_examples,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_file_gets_exactly_the_change_or_none(tmp_path, edit, data, old, new):
    path = tmp_path / uuid.uuid4().hex  # a new file for each example
    path.write_bytes(data)
    result = edit(path, old_str=old, new_str=new)
    after = path.read_bytes()
    if result.is_error:
        assert after == data
        return
    [change] = result.meta["crow/changes"]
    # The reported texts are exactly those of the file.
    assert (bytes_of(change, "old"), bytes_of(change, "new")) == (data, after)
    tolerant = "old_str was found" in result.content[0].text
    check_replaced(change["old"], change["new"], old, new, tolerant=tolerant)


@given(text=TEXTS, edits=st.lists(st.tuples(NEEDLES, TEXTS), max_size=4), mark=st.sampled_from(MARKS))
@settings(
    max_examples=2 * settings.default.max_examples,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_several_edits_equal_single_edits_or_none_is_made(tmp_path, edit, text, edits, mark):
    together, apart = (tmp_path / f"{uuid.uuid4().hex}" for _ in range(2))
    for path in (together, apart):
        path.write_bytes(encode(text, mark))
    result = edit(together, edits=[{"old_str": old, "new_str": new} for old, new in edits])
    single = [edit(apart, old_str=old, new_str=new) for old, new in edits]
    if result.is_error:
        assert together.read_bytes() == encode(text, mark)
        assert not edits or any(each.is_error for each in single)
    else:
        assert not any(each.is_error for each in single)
        assert together.read_bytes() == apart.read_bytes()


@given(data=FILES, line=st.integers(-1, 6), new=TEXTS)
@settings(
    max_examples=2 * settings.default.max_examples,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_insert_removes_nothing_and_undo_restores_every_byte(tmp_path, edit, data, line, new):
    path = tmp_path / uuid.uuid4().hex
    path.write_bytes(data)
    result = edit(path, command="insert", insert_line=line, new_str=new)
    if result.is_error:
        assert path.read_bytes() == data
        return
    [change] = result.meta["crow/changes"]
    kept, added = change["old"], len(change["new"]) - len(change["old"])
    assert any(change["new"] == kept[:at] + change["new"][at : at + added] + kept[at:] for at in range(len(kept) + 1))
    assert not edit(path, command="undo_edit").is_error
    assert path.read_bytes() == data


def bytes_of(change: dict[str, Any], which: str) -> bytes:
    """Return a file's bytes before or after a change, computed from the reported change."""
    mark = "\ufeff" if change.get("mark") else ""
    return (mark + change[which]).encode(change.get("encoding", "utf-8"))
